"""The supervisor with small real processes: restarts, signals, nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.launch.attempt import outcome
from tests import golden, warm
from tests.run import read_lines
from tests.waiting import until

MARK = "HOLDFAST_TEST_RUN"

# What a rank does, as far as a supervisor can see: it journals, then ends in some way.
FAKE = """
import json, os, pathlib, signal, sys, time
out = pathlib.Path(sys.argv[1])
attempt = int(os.environ["HOLDFAST_ATTEMPT"])
def journal(kind, step, **detail):
    line = {"kind": kind, "step": step, "ranks": [0], "reason": "told", "detail": detail}
    with (out / "journal.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\\n")
def end(code):
    (pathlib.Path(os.environ["HOLDFAST_EXIT_DIR"]) / "rank-0").write_text(str(code))
    sys.exit(1)
with (out / "seen.jsonl").open("a") as file:
    names = ("HOLDFAST_LAUNCH_ID", "HOLDFAST_ATTEMPT")
    file.write(json.dumps({n: os.environ[n] for n in names} | {"argv": sys.argv[2:]}) + "\\n")
"""


class Fake:
    """A supervisor over a fake job, in a session of its own."""

    def __init__(self, folder: Path, body: str, *options: str) -> None:
        self.out = folder
        script = folder / "fake.py"
        script.write_text(FAKE + textwrap.dedent(body))
        self.process = warm.WarmPopen(
            [
                *(sys.executable, "-m", "runner", "supervise", "--out", str(folder)),
                *("--pause", "0.05", *(w for w in options if not w.startswith("debug"))),
                *("--", sys.executable, str(script), str(folder), "-m", "runner", "model=tiny"),
                *(word for word in options if word.startswith("debug")),
            ],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {MARK: str(folder)},
        )

    def wait(self, timeout: float = 30) -> tuple[int, str]:
        _, text = self.process.communicate(timeout=timeout)
        return self.process.returncode, text

    def attempts(self) -> int:
        path = self.out / "seen.jsonl"
        return len(read_lines(path)) if path.exists() else 0

    def seen(self) -> list[dict[str, Any]]:
        return read_lines(self.out / "seen.jsonl")

    def left_behind(self) -> list[int]:
        """:meth:`named`, once those that are ending have had the time to."""
        limit = time.monotonic() + 10
        while (pids := self.named()) and time.monotonic() < limit:
            time.sleep(0.01)
        return pids

    def named(self) -> list[int]:
        """Processes of this test, whatever became of their parents."""
        wanted = f"{MARK}={self.out}".encode()
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    if wanted in (folder / "environ").read_bytes().split(b"\0"):
                        found.append(int(folder.name))
                except OSError:
                    pass
        return found


@pytest.fixture
def fake(tmp_path: Path) -> Callable[..., Fake]:
    return lambda body, *options: Fake(tmp_path, body, *options)


@pytest.mark.parametrize("code", [2, 3, 4])
def test_an_end_on_purpose_is_not_restarted(fake: Callable[..., Fake], code: int) -> None:
    job = fake(f"end({code})")
    assert job.wait()[0] == code, "the rank's own code, though the command said 1"
    assert job.attempts() == 1


def test_a_preempted_job_is_restarted_at_once(fake: Callable[..., Fake]) -> None:
    job = fake("end(75) if attempt < 3 else sys.exit(0)", "--pause", "0.3")
    code, text = job.wait()
    assert code == 0 and job.attempts() == 3
    # A second time without progress it pauses.
    assert "; attempt 2\n" in text and "; attempt 3 in 0.6 s\n" in text, text


def test_one_launch_id_over_all_attempts(fake: Callable[..., Fake]) -> None:
    job = fake("journal('start', 0); journal('crash', attempt); sys.exit(7 if attempt < 3 else 0)")
    code, text = job.wait()
    assert code == 0
    assert re.findall("attempt (.) crashed at step .: told", text) == ["1", "2"], "it was mended"
    assert [line["HOLDFAST_ATTEMPT"] for line in job.seen()] == ["1", "2", "3"]
    assert len({line["HOLDFAST_LAUNCH_ID"] for line in job.seen()}) == 1
    log = read_lines(job.out / "attempts.jsonl")
    assert [line["code"] for line in log] == [7, 7, 0]


def test_an_attempt_that_cannot_be_noted_is_no_last_one(fake: Callable[..., Fake]) -> None:
    """As on a disk that has become read-only; the job itself says what it makes of that."""
    job = fake("(out / 'attempts.jsonl').mkdir() if attempt == 1 else None; exit(attempt == 1)")
    code, text = job.wait()
    assert code == 0 and job.attempts() == 2 and "attempt 1 is not noted: [Errno 21]" in text, text


def test_the_same_failure_three_times_stops_it(fake: Callable[..., Fake]) -> None:
    job = fake("journal('start', 0); journal('crash', 12, signature='rank 0: ValueError in f');"
               "journal('crash', 13, signature='its consequence'); sys.exit(1)",
               "--restarts", "50")  # fmt: skip
    code, text = job.wait()
    assert code == 3 and job.attempts() == 3
    assert "deterministic: 3 attempts in a row failed at step 12 with told; starting" in text


def test_a_crash_that_nobody_explains_is_diagnosed_once(fake: Callable[..., Fake]) -> None:
    job = fake("journal('start', attempt); sys.exit(1 if attempt < 4 else 0)",
               "debug.diagnose_on_crash=true", "debug=nccl")  # fmt: skip
    code, text = job.wait()
    assert code == 0, text
    with_collectives = [line["argv"][-1] == "debug=collectives" for line in job.seen()]
    assert with_collectives == [False, True, False, False]


RANK = """
import subprocess
if "RANK" not in os.environ:  # the part of torchrun: ignores what its ranks are told
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    rank = subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "RANK": "0"},
                            start_new_session=True)
    sys.exit(rank.wait())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_request_to_stop_reaches_the_ranks(fake: Callable[..., Fake], number: int) -> None:
    job = fake(RANK + textwrap.dedent("""
        stop = lambda number, frame: ((out / "told").write_text(str(number)), end(75))
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGUSR1, stop)
        (out / "ready").touch()
        time.sleep(60)
    """))  # fmt: skip
    until((job.out / "ready").exists)
    job.process.send_signal(number)
    code, _ = job.wait()
    assert code == 75 and len(read_lines(job.out / "attempts.jsonl")) == 1
    asked = signal.SIGUSR1 if number == signal.SIGUSR1 else signal.SIGTERM
    assert (job.out / "told").read_text() == str(int(asked))
    assert job.left_behind() == []


def test_a_second_request_ends_it_at_once(fake: Callable[..., Fake]) -> None:
    job = fake(RANK + textwrap.dedent("""
        signal.signal(signal.SIGTERM, lambda number, frame: (out / "told").touch())
        (out / "ready").touch()
        while True:
            time.sleep(60)
    """))  # fmt: skip
    until((job.out / "ready").exists)
    job.process.terminate()
    until((job.out / "told").exists)
    job.process.terminate()  # at once: the same request, told twice
    time.sleep(1.2)
    assert job.process.poll() is None
    job.process.terminate()
    code, _ = job.wait(timeout=5)
    assert code == 137 and job.left_behind() == []


def test_a_requeued_job_knows_its_earlier_attempts(fake: Callable[..., Fake]) -> None:
    """Slurm starts the supervisor anew; the log in ``out`` carries the count over."""
    os.environ["HOLDFAST_LAUNCH_ID"] = "job-7"
    try:
        body = "journal('start', 0); journal('crash', 5, signature='x'); sys.exit(1)"
        first = fake(body, "--restarts", "0")
        assert first.wait()[0] == 1
        again = fake(body, "--restarts", "9")
        code, text = again.wait()
    finally:
        del os.environ["HOLDFAST_LAUNCH_ID"]
    assert code == 3 and again.attempts() == 3, text
    assert [line["HOLDFAST_ATTEMPT"] for line in again.seen()] == ["1", "2", "3"]


def test_a_command_that_only_names_the_runner_is_supervised(tmp_path: Path) -> None:
    words = ["supervise", "--out", str(tmp_path), "--", sys.executable, "-c", "", "runner"]
    done = warm.finished([sys.executable, "-m", "runner", *words], timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("told", "returncode", "code"),
    [
        ({}, 0, 0),
        ({}, 5, 5),
        ({}, -9, 137),
        ({"rank-0": 0, "rank-1": 0}, 0, 0),
        ({"rank-0": 3, "rank-1": 3}, 1, 3),
        ({"rank-0": 2, "rank-1": 1}, 1, 2),
        ({"rank-0": 75}, 1, 75),
        ({"rank-0": 75, "rank-1": 1}, 1, 1),
        ({"rank-0": 1}, 1, 1),
        ({"rank-0": 1, "rank-1": 0}, 0, 0),
        ({"rank-0": 0}, 1, 1),
    ],
)
def test_how_a_job_ended(told: dict[str, int], returncode: int, code: int) -> None:
    assert outcome(told, returncode) == code


@pytest.mark.parametrize(("was_killed", "code"), [(True, 137), (False, 1)])
def test_a_killed_torchrun_is_the_cause_of_its_ranks_ends(was_killed: bool, code: int) -> None:
    assert outcome({"rank-0": 1, "rank-1": 1}, -9, was_killed=was_killed) == code
    assert outcome({"rank-0": 3, "rank-1": 1}, -9, was_killed=was_killed) == 3


@pytest.mark.parametrize(
    "words",
    [
        "supervise", "supervise -- true", "supervise --restarts -1 --out . -- true",
        "launch --nodes 3:2", "launch --nodes 2 --nproc 1", "launch --nproc none",
        "launch --nproc 2 modell=tiny",
    ],
)  # fmt: skip
def test_mistakes_are_told(words: str) -> None:
    done = warm.finished([sys.executable, "-m", "runner", *words.split()], timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    golden.same(done.stderr)
