"""holdfast run: somebody's own script is restarted, and it is told who died first and why."""

from __future__ import annotations

import os
import pickle
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from runner.launch.script import (
    PROGRESS,
    Said,
    Watched,
    _Watchdog,
    at_work,
    failures,
    read_dumps,
    tracebacks,
)
from tests import warm
from tests.programs import python
from tests.run import read_lines
from tests.waiting import until

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "tests" / "their_script.py")


def run(out: Path, *words: str, ranks: int, quiet: int = 60) -> tuple[int, str]:
    out.mkdir(exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    told = [sys.executable, *(launcher if ranks else []), SCRIPT, *words, str(out / "state")]
    options = ["--out", str(out / "run"), "--quiet", str(quiet), "--pause", "0"]
    words = [sys.executable, "-m", "runner", "run", *options, "--", *told]
    done = warm.finished(words, timeout=300)
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
    assert "run: attempt 1: rank 0" in text
    assert "run: failed at step 3, newest step 3; attempt 2" in text, "no signature with N in it"
    evidence = tmp_path / "run" / "attempt-0001" / "output.txt"
    assert "ValueError: boom 17" in evidence.read_text()


# A script with @record, whose exception torch writes to this file; then one that just dies.
DIES = """\
import json, os, signal, sys
if sys.argv[1] == "record":
    trace = "Traceback (most recent call last):\\nValueError: of before"
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": {"extraInfo": {"py_callstack": trace}}}, file)
    sys.exit(1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_later_launch_is_not_told_the_cause_of_an_earlier_one(tmp_path: Path) -> None:
    """Both in the same folder, where each launch counts its attempts from 1."""
    script = tmp_path / "dies.py"
    script.write_text(DIES)
    options = ["--out", str(tmp_path / "run"), "--restarts", "0"]
    for how in ("record", "die"):
        command = [sys.executable, str(script), how]
        told = [sys.executable, "-m", "runner", "run", *options, "--", *command]
        assert warm.finished(told, timeout=300).returncode == 1
    first, second = attempts(tmp_path)
    assert "ValueError: of before" in first["reason"]
    assert second["cause"] == "exit" and second["reason"] == "ended with 137"


SAVES = """\
import pathlib, signal, sys, time
here = pathlib.Path(sys.argv[1])
def save(*_):
    print("saving", flush=True)
    (here / "saved").touch()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
(here / "ready").touch()
time.sleep(60)
"""


@pytest.mark.parametrize("more", ["exit $?", "| cat"])
def test_a_script_under_a_shell_is_asked_to_stop(tmp_path: Path, more: str) -> None:
    """The shell would die of the signal, and the script be killed before it has saved."""
    (tmp_path / "train.py").write_text(SAVES)
    words = shlex.join([sys.executable, str(tmp_path / "train.py"), str(tmp_path)])
    options = ["--out", str(tmp_path / "run"), "--pause", "0"]
    shell = ["sh", "-c", f"{words} {more}" if more[0] == "|" else f"{words}; {more}"]
    with warm.WarmPopen([sys.executable, "-m", "runner", "run", *options, "--", *shell]) as run:
        until((tmp_path / "ready").exists)
        run.terminate()
        assert run.wait(60) == (0 if more[0] == "|" else 75)
    assert (tmp_path / "saved").exists()


NO_SCRIPT = """\
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : 2 (pid: 31930)
"""


def test_a_wrong_path_under_torchrun_is_not_tried_again(tmp_path: Path) -> None:
    """torchrun ends with 1, whatever its ranks ended with; Python ends with 2 without a script."""
    torchrun = tmp_path / "like_torchrun.py"
    torchrun.write_text(f"import sys\nprint({NO_SCRIPT!r})\nsys.exit(1)\n")
    words = [sys.executable, "-m", "runner", "run", "--out", str(tmp_path / "run"), "--pause", "0"]
    done = warm.finished([*words, "--", sys.executable, str(torchrun)], timeout=300)
    assert done.returncode == 2, done.stderr
    assert "attempt 1: rank 0: ended with 2 in start of step 0" in done.stderr
    assert "settings or data: a restart would not help" in done.stderr


def test_a_slow_start_is_no_hang(tmp_path: Path) -> None:
    """Imports take longer than a step may; and one that hangs names the script's line."""
    script = tmp_path / "slow.py"
    (tmp_path / "heavy.py").write_text(
        "import time\ntime.sleep(float(__import__('sys').argv[1]))\n"
    )
    script.write_text("import heavy\nfor step in range(3):\n    print('step', step)\n")
    options = ["--out", str(tmp_path / "run"), "--quiet", "1", "--restarts", "0"]
    words = [sys.executable, "-m", "runner", "run", *options]

    def slow(seconds: int, *more: str) -> subprocess.CompletedProcess[str]:
        command = [*words, *more, "--", sys.executable, str(script), str(seconds)]
        return warm.finished(command, timeout=300)

    done = slow(3)
    assert done.returncode == 0 and "step 2" in done.stdout, done.stderr
    done = slow(100, "--quiet-start", "2")
    assert (
        done.returncode == 1 and "had printed nothing yet: a larger --quiet-start?" in done.stderr
    )
    assert "rank 0 is at" in done.stderr and "importlib" not in done.stderr, done.stderr
    assert f"{tmp_path / 'heavy.py'}:2" in done.stderr


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


RECORDED = """\
import sys
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise LookupError("lost 7")
    dist.barrier()

main()
"""


@pytest.mark.full
def test_where_output_goes_to_files_the_error_file_tells(tmp_path: Path) -> None:
    script = tmp_path / "recorded.py"
    script.write_text(RECORDED)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    launcher += ["--redirects=3", f"--log-dir={tmp_path / 'logs'}"]
    told = ["--out", str(tmp_path / "run"), "--pause", "0", "--restarts", "0", "--", sys.executable]
    done = python("-m", "runner", "run", *told, *launcher, str(script))
    assert "rank 1: LookupError: lost 7" in done.stderr, done.stderr


@pytest.mark.full
def test_on_two_nodes_each_starts_its_own_again(tmp_path: Path) -> None:
    """Two launchers on this machine, which meet at an address, and again after a death."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = []
    for number in range(2):
        launcher = ["-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={number}"]
        launcher += ["--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
        options = ["--out", str(tmp_path / f"node{number}" / "run"), "--pause", "0"]
        (tmp_path / f"node{number}").mkdir()
        words = [*launcher, SCRIPT, "kill", str(tmp_path / "state")]
        nodes.append(
            subprocess.Popen(
                [sys.executable, "-m", "runner", "run", *options, "--", sys.executable, *words],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        )  # fmt: skip
    texts = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], texts
    assert [one["cause"] for one in attempts(tmp_path / "node1")[:2]] == ["signal", "signal"]
    assert "rank 1: killed by signal 9 (SIGKILL)" in texts[1]
    assert [one["code"] == 0 for one in attempts(tmp_path / "node0")] == [False, False, True]


class Gpus:
    """A stub of NVIDIA's library: one GPU that is idle, one with so much work."""

    NVMLError = OSError
    nvmlInit = nvmlShutdown = staticmethod(lambda: None)
    nvmlDeviceGetCount = staticmethod(lambda: 2)
    nvmlDeviceGetHandleByIndex = staticmethod(lambda number: number)
    nvmlDeviceGetHandleByUUID = staticmethod(lambda name: int(name[-1]))

    def __init__(self, percent: int) -> None:
        self._percent = (0, percent)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        if handle > 1:
            raise OSError("no such GPU")
        return SimpleNamespace(gpu=self._percent[handle])


@pytest.mark.parametrize(
    ("visible", "percent", "is_at_work"),
    [
        (None, 90, True),
        (None, 2, False),
        ("0", 90, False),
        ("0,1", 90, True),
        ("GPU-1", 90, True),
        ("", 90, False),
        ("7", 90, False),
    ],
)
def test_whether_its_gpus_are_at_work(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, percent: int, is_at_work: bool
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Gpus(percent))
    assert at_work(visible) is is_at_work


EARLY = " (it had printed nothing yet: a larger --quiet-start?)"


@pytest.mark.parametrize(
    ("step", "silent", "worked_ago", "words"),
    [
        (3, 9, None, ""),
        (3, 11, None, "no output for 10 s"),
        (3, 29, 0, ""),
        (3, 29, 12, "no output for 10 s"),
        (3, 31, 0, "no output for 30 s, though its GPUs are at work"),
        (3, 5, 500, ""),
        # Before its first step: it imports, reads weights, compiles.
        (-1, 31, None, ""),
        (-1, 61, None, f"no output for 60 s{EARLY}"),
        (-1, 61, 0, f"no output for 60 s, though its GPUs are at work{EARLY}"),
    ],
)
def test_when_a_script_is_taken_for_hung(
    monkeypatch: pytest.MonkeyPatch, step: int, silent: float, worked_ago: float | None, words: str
) -> None:
    now = 1000.0
    monkeypatch.setattr("runner.launch.script.time.monotonic", lambda: now)
    heard = SimpleNamespace(heard=now - (worked_ago or 0.0), step=step, num_lines=0)
    watched = Watched(
        quiet_seconds=10, busy_seconds=30, start_seconds=60, progress="", folder=Path()
    )
    watchdog = _Watchdog(cast(Said, heard), watched, Path(), lambda: worked_ago is not None)
    if worked_ago:
        now -= worked_ago
        watchdog._why()
        watchdog.gpus_work = lambda: False
        now += worked_ago
    heard.heard = now - silent
    assert watchdog._why() == words


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


@pytest.mark.parametrize("command", [["run"], ["supervise", "--out", "r"]])
def test_a_runner_py_of_the_users_own_does_not_hide_what_starts_the_script(
    command: list[str], tmp_path: Path
) -> None:
    (tmp_path / "runner.py").write_text("print('mine')")
    (tmp_path / "train.py").write_text("import runner")
    given = [*command, "--", sys.executable, "train.py"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "runner", *given],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "mine" in done.stdout + done.stderr, "the script imports its own"
