"""holdfast watch beside real runs: a run that is killed whole, and one that halts."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.run import finish, metrics_step, start, train
from tests.waiting import until


def told(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@contextmanager
def watching(folder: Path, kept: Path, *, silent: int) -> Iterator[None]:
    """A watcher of a folder of runs, whose messages are kept."""
    words = [
        *(sys.executable, "-m", "runner", "watch", str(folder), "--poll", "1", "--every", "0"),
        *("--silent", str(silent), "--state", str(kept.with_suffix(".state"))),
        *("--command", f"cat >> {shlex.quote(str(kept))}"),
    ]
    with warm.WarmPopen(words) as watcher:
        try:
            yield
        finally:
            watcher.terminate()
        assert watcher.wait(30) == 0


def test_killed_at_once_is_told_and_so_is_its_recovery_and_its_end(tmp_path: Path) -> None:
    kept, out = tmp_path / "told", tmp_path / "runs" / "a"
    with watching(out.parent, kept, silent=8):
        slow = "faults=[slow@step=31-60,seconds=5]"
        begun = start(out, slow, ranks=0)
        begun.until(lambda out: metrics_step(out) >= 30)
        begun.kill()
        begun.process.wait(30)
        until(lambda: len(told(kept)) == 1)
        finish(out, "faults=[]", ranks=0)
        until(lambda: len(told(kept)) >= 3)
    silent, over, done = told(kept)
    assert [one["kind"] for one in (silent, over, done)] == ["silent", "recovered", "done"]
    assert silent["level"] == "error" and "no sign of life for" in silent["text"]
    assert (silent["event"], over["event"]) == ("trigger", "resolve")
    assert silent["key"] == over["key"] and "silent" in over["reason"]


@pytest.mark.full
def test_one_cause_that_ends_in_a_halt_makes_two_messages(tmp_path: Path) -> None:
    """The reviewer's run, of which track.command told 26 times within 46 seconds."""
    kept = tmp_path / "told"
    alert = f"track.command={json.dumps(f'cat >> {shlex.quote(str(kept))}')}"
    faults = "faults=[poison@samples=1400-900000]"
    halted = train(tmp_path / "run", faults, "steps=120", "guard.remedy=verdict", alert, ranks=0)
    assert halted.code == 3, halted.tail
    lines = halted.journal()
    assert sum(line["kind"] in ("discard", "redo", "rollback", "halt") for line in lines) > 10
    first, last = told(kept)
    assert (first["level"], last["level"]) == ("warning", "error") and last["kind"] == "halt"
    assert first["key"] == last["key"]
