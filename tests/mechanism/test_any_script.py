"""holdfast run: somebody's own script is restarted, and it is told who died first and why."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.health.trace_dump import read_dumps
from runner.launch.said import PROGRESS, Said, failures, tracebacks
from tests.run import read_lines

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "tests" / "their_script.py")


def run(out: Path, *words: str, ranks: int, quiet: int = 60) -> tuple[int, str]:
    out.mkdir(exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    told = [sys.executable, *(launcher if ranks else []), SCRIPT, *words, str(out / "state")]
    options = ["--out", str(out / "run"), "--quiet", str(quiet), "--pause", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "runner", "run", *options, "--", *told],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return done.returncode, done.stdout + done.stderr


def attempts(out: Path) -> list[dict[str, Any]]:
    return read_lines(out / "run" / "attempts.jsonl")


def test_an_exception_is_told_and_the_script_started_again(tmp_path: Path) -> None:
    code, text = run(tmp_path, "raise", ranks=0)
    assert code == 0, text
    assert "step 11 loss 0.5" in text  # passed on
    first, second, last = attempts(tmp_path)
    assert [one["code"] for one in (first, second, last)] == [1, 1, 0]
    assert (first["step"], second["step"], last["step"]) == (3, 7, 11)
    assert first["cause"] == "exception" and "ValueError: boom N" in first["signature"]
    assert "rank 0: ValueError: boom 17 in training of step 3 at" in text
    assert "broken_step" in text.partition("in training of step 3 at")[2].splitlines()[0]
    evidence = tmp_path / "run" / "attempt-0001" / "output.txt"
    assert "ValueError: boom 17" in evidence.read_text()


@pytest.mark.full
def test_under_torchrun_the_rank_that_was_killed_is_named(tmp_path: Path) -> None:
    """The other rank's broken collective is what followed."""
    code, text = run(tmp_path, "kill", ranks=2)
    assert code == 0, text
    first, second, last = attempts(tmp_path)
    assert first["cause"] == second["cause"] == "signal" and last["code"] == 0
    assert "rank 1: killed by signal 9 (SIGKILL)" in text


@pytest.mark.full
def test_one_that_hangs_is_asked_where_and_started_again(tmp_path: Path) -> None:
    code, text = run(tmp_path, "hang", ranks=2, quiet=25)
    assert code == 0, text
    first, *_, last = attempts(tmp_path)
    assert first["cause"] == "hang" and last["code"] == 0
    assert "broken_step" in text.partition("rank 1 is at")[2].splitlines()[0]
    assert "rank 0 waits for others" in text


@pytest.mark.full
def test_the_same_failure_again_and_again_ends_it(tmp_path: Path) -> None:
    script = tmp_path / "always.py"
    script.write_text("print('step 3')\nraise KeyError('x')\n")
    done = subprocess.run(
        [sys.executable, "-m", "runner", "run", "--out", str(tmp_path / "run"), "--pause", "0",
         "--", sys.executable, str(script)],
        capture_output=True, text=True, timeout=100, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 3 and "deterministic: 3 attempts" in done.stderr


def said(tmp_path: Path, text: str) -> Said:
    reading, writing = os.pipe()
    made = Said(reading, PROGRESS)
    os.write(writing, text.encode())
    os.close(writing)
    made.finish()
    return made


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("step 12 loss 3.1", 12),
        ("{'loss': 2.0, 'global_step': 40}", 40),
        ("iter 7: loss 2.0", 7),
        ("Epoch 3:  15%|## | 15/100 [00:10<00:50]", 15),
        ("Step: 3/10", 3),
        ("nothing of the kind: 44", -1),
    ],
)
def test_how_far_it_is(tmp_path: Path, line: str, step: int) -> None:
    assert said(tmp_path, f"{line}\n").step == step


SUMMARY = """\
Failures:
[1]:
  time      : 2026-11-22_14:54:48
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 14246)
  error_file: <N/A>
------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_14:54:40
  host      : localhost
  rank      : 3 (local_rank: 3)
  exitcode  : -11 (pid: 14245)
"""


def test_torchruns_summary() -> None:
    assert failures(SUMMARY.splitlines()) == [(3, -11), (0, -15)]
    assert failures(["nothing"]) == []


def test_printed_exceptions_by_rank() -> None:
    text = """\
[rank1]: Traceback (most recent call last):
[rank0]: Traceback (most recent call last):
[rank1]:   File "train.py", line 3, in step
[rank0]:   File "train.py", line 9, in loop
[rank1]:     boom()
[rank1]: ValueError: boom
[rank0]: RuntimeError: [/gloo/pair.cc:1] Connection closed by peer
"""
    one, other = tracebacks(text.splitlines())
    assert (one.rank, one.kind, one.message) == (1, "ValueError", "boom")
    assert one.frames == (("train.py", 3, "step"),)
    assert other.rank == 0 and "closed by peer" in other.message


def test_a_dump_that_would_run_code_is_left_out(tmp_path: Path) -> None:
    class Bad:
        def __reduce__(self) -> Any:
            return os.system, ("false",)

    entry = {
        "profiling_name": "nccl:all_reduce", "process_group": ("0", ""), "retired": False,
        "state": "started", "collective_seq_id": 3, "input_sizes": [[4]], "input_dtypes": ["f"],
        "is_p2p": False, "frames": [],
    }  # fmt: skip
    (tmp_path / "rank0").write_bytes(pickle.dumps({"entries": [entry]}))
    (tmp_path / "rank1").write_bytes(pickle.dumps({"entries": [Bad()]}))
    (tmp_path / "rank2").write_bytes(b"torn")
    found = read_dumps(tmp_path, "rank")
    assert list(found) == [0] and found[0][0]["op"] == "all_reduce"
