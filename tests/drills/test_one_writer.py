"""P9: a run directory has one living incarnation, whatever is started, frozen or left over."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.drills.compare import assert_same_run
from tests.run import Result, Started, command, finish, left_behind, metrics_step, start, train
from tests.warm import WarmPopen

pytestmark = pytest.mark.usefixtures("leaves_nothing")
EVENTS = ("track.tensorboard=true",)
SLOWED = "faults=[slow@step=10-60,seconds=0.25]"


def running(out: Path, *overrides: str) -> Started:
    started = start(out, *(overrides or (SLOWED,)))
    started.until(lambda out: metrics_step(out) >= 12)
    return started


def named(out: Path, *overrides: str, restarts: int) -> subprocess.Popen[str]:
    """As a person starts it: torchrun with a name and a port of its own."""
    told = command(out, *overrides, restarts=restarts)
    place = told.index("--standalone")
    told[place : place + 1] = [
        "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=mine"
    ]  # fmt: skip
    return WarmPopen(
        told, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True,
    )  # fmt: skip


@pytest.mark.twin
def test_a_second_launch_is_refused_in_words(tmp_path: Path, clean: Result) -> None:
    """Also one of the same name: each of the two would take what the other has for its own restart,
    and so for ever.
    """
    out = tmp_path / "run"
    # The first restarts its ranks once by itself, which is to be let in.
    faults = "faults=[kill@step=5,rank=1,slow@step=10-40,seconds=0.5]"
    first = Started(out=out, process=named(out, faults, restarts=1))
    try:
        first.until(lambda out: metrics_step(out) >= 12, timeout=120)
        other = named(out, restarts=0)
        second = train(out)
        assert second.code != 0 and "is in use by a living run" in second.text, second.tail
        assert "resume.take_over=true" in second.text, second.tail
        refused = Started(out=out, process=other).wait()
        assert refused.code != 0 and "in use by a living run" in refused.text, refused.tail
        assert "job torchrun mine" in refused.text and "is no restart" in refused.text, refused.tail
        assert re.search(r"exitcode +: 2 ", refused.text), refused.tail
        ended = first.wait()
    finally:
        first.kill()
    assert ended.code == 0 and "has taken this run over" not in ended.text, ended.tail
    assert_same_run(ended, clean)
    starts = [line["detail"]["incarnation"] for line in ended.journal("start")]
    assert starts == [1, 2], "the first and its own restart; the others left no trace"


@pytest.mark.twin
@pytest.mark.full
def test_a_run_is_taken_over(tmp_path: Path, clean: Result) -> None:
    out = tmp_path / "run"
    # Not over before a busy machine has started the second.
    first = running(out, "faults=[slow@step=10-60,seconds=1]")
    second = finish(out, "resume.take_over=true")
    old = first.wait()
    assert old.code != 0 and "has taken this run over" in old.text, old.tail
    assert_same_run(second, clean)


def test_a_frozen_incarnation_publishes_nothing_when_it_wakes(
    tmp_path: Path, clean: Result
) -> None:
    """As after a cut network: it goes on where it was, while another one has gone ahead."""
    out = tmp_path / "run"
    # Many commits, marks and journal lines to come.
    first = running(out, SLOWED, "checkpoint.every=5", "track.tensorboard=true")
    for pid in first.pids():
        os.kill(pid, signal.SIGSTOP)
    second = finish(out, "resume.take_over=true", "checkpoint.every=5", "track.tensorboard=true")
    before = contents(out)
    for pid in first.pids():
        os.kill(pid, signal.SIGCONT)
    woken = time.monotonic()
    old = first.wait()
    print(f"the old incarnation was gone {time.monotonic() - woken:.1f} s after it woke")
    assert old.code != 0 and "has taken this run over" in old.text, old.tail
    assert contents(out) == before, "nothing that counts was touched"
    assert second.digest == clean.digest
    assert not left_behind(out)


@pytest.mark.full
def test_an_incarnation_frozen_while_it_starts_publishes_nothing(
    tmp_path: Path, clean: Result
) -> None:
    """It owns the run, but has not opened its journal, metrics and events yet."""
    out = tmp_path / "run"
    first = start(out, *EVENTS)
    first.until(lambda out: (out / "incarnation" / "000001.json").exists())
    for pid in first.pids():
        os.kill(pid, signal.SIGSTOP)
    assert not (out / "metrics.jsonl").exists(), "too late for this test"
    second = finish(out, "resume.take_over=true", *EVENTS)
    before = contents(out)
    for pid in first.pids():
        os.kill(pid, signal.SIGCONT)
    old = first.wait()
    assert old.code != 0 and "has taken this run over" in old.text, old.tail
    assert contents(out) == before, "nothing that counts was touched"
    assert_same_run(second, clean)
    assert not left_behind(out)


def contents(out: Path) -> dict[str, bytes]:
    """All that a run publishes."""
    files = ("journal.jsonl", "metrics.jsonl", "summary.json", "config.yaml")
    found = {name: (out / name).read_bytes() for name in files}
    for path in sorted((out / "ring").rglob("*")):
        if path.is_file() and "writing-" not in str(path):
            found[str(path.relative_to(out))] = path.read_bytes()
    for path in (out / "tensorboard").glob("*"):
        found[str(path.relative_to(out))] = path.read_bytes()
    return found
