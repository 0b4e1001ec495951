"""The watchdog's thread: what a look raises stops nothing, and a rank that is to end does."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from runner.config.schema import WatchdogConfig
from runner.distributed.env import JobEnv, RankEnv
from runner.distributed.rendezvous import Facts
from runner.health import cause_reporter, rank_monitor
from runner.health.preemption import StopRequest
from runner.health.rank_monitor import RankMonitor, Watchdog
from runner.run_dir.lease import acquire
from runner.run_dir.paths import RunDir
from tests import warm
from tests.waiting import until


@pytest.fixture(autouse=True)
def _settles_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cause_reporter, "SETTLE_SECONDS", 0.2)


# The thread


@pytest.mark.parametrize("error", [OSError("stale handle"), RuntimeError("odd"), KeyError("x")])
def test_a_look_that_raises_stops_no_other_and_not_itself(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        "runner.health.rank_monitor._log.error", lambda words, *values: said.append(words % values)
    )
    calls = {"before": 0, "raises": 0, "after": 0, "added": 0}

    def called(name: str) -> Callable[[], None]:
        def look() -> None:
            calls[name] += 1
            if name == "raises":
                raise error

        look.__name__ = name
        return look

    watchdog = Watchdog([called("before"), called("raises"), called("after")], tick_seconds=0.01)
    watchdog.start()
    watchdog.add([called("added")])
    until(lambda: min(calls.values()) >= 5)
    watchdog.stop()
    told = 0 if isinstance(error, OSError) else 1
    assert ["watchdog: raises raised" in words for words in said] == [True] * told, "once"


def test_a_look_that_hangs_does_not_keep_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.health.rank_monitor._LAST_LOOK_SECONDS", 0.1)
    began, gate = threading.Event(), threading.Event()

    def look() -> None:
        began.set()
        gate.wait()

    watchdog = Watchdog([look], tick_seconds=0.01)
    watchdog.start()
    assert began.wait(30)
    watchdog.stop()
    gate.set()


# The rank


def watched(
    out: Path,
    *,
    world_size: int = 2,
    rank: int = 0,
    per_node: int = 0,
    limit: float = 1000.0,
    has_agent: bool = True,
    stop: StopRequest | None = None,
) -> RankMonitor:
    """A rank's witness; nobody is ended for standing still. ``per_node`` of 0: all on one."""
    per_node = per_node or world_size
    watchdog = WatchdogConfig(enabled=False, floor_seconds=limit, slow_seconds=limit)
    return RankMonitor(
        place=RankEnv(
            rank=rank, world_size=world_size, local_rank=rank % per_node, local_world_size=per_node
        ),
        launch=JobEnv(job=None, order=(0, 0), step="", end_time=None, has_agent=has_agent),
        run_dir=RunDir(out),
        watchdog=watchdog,
        stop=stop or StopRequest(grace_seconds=5),
    )


def endings(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[str]]:
    """Exit codes with which monitors end this process from now on, and their last messages."""
    codes: list[int] = []
    messages: list[str] = []

    def leave(code: int) -> None:
        codes.append(code)
        raise SystemExit(code)

    def error(text: str, *values: object) -> None:
        messages.append(text % values)

    monkeypatch.setattr(cause_reporter, "leave", leave)
    monkeypatch.setattr(cause_reporter, "end_within", lambda *_: lambda: None)
    monkeypatch.setattr(rank_monitor, "_TICK_SECONDS", 0.02)
    monkeypatch.setattr(cause_reporter._log, "error", error)
    return codes, messages


def take_run(out: Path, one: RankMonitor, peers: Sequence[Facts] = ()) -> None:
    alone = JobEnv(job=None, order=(0, 0), step="", end_time=None, has_agent=False)
    made = acquire(
        RunDir(out).incarnation, alone, stale_seconds=1, take_over=True, say=lambda _: None
    )
    one.begin(made, peers)


def test_a_run_that_stands_still_shows_no_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeat went on, and every later launch was refused for it."""
    monkeypatch.setattr(rank_monitor, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(rank_monitor, "_TICK_SECONDS", 0.02)
    beat = RunDir(tmp_path).incarnation / "beat"
    one = watched(tmp_path, world_size=1, limit=1.0, has_agent=False)  # else it ends us
    one.start()
    take_run(tmp_path, one)

    def moved() -> str:
        before = beat.read_text() if beat.exists() else ""
        time.sleep(0.3)
        return "" if not beat.exists() or beat.read_text() == before else "moved"

    one.heart.enter("fetch", step=1)
    until(lambda: bool(moved()))
    until(lambda: not moved())
    assert one.heart.seconds > 1.0
    one.heart.enter("fetch", step=2)
    until(lambda: bool(moved()))
    one.end()


RANK = """
import sys, threading, time
from pathlib import Path
from runner.health import cause_reporter as module
from tests.mechanism.test_witness import take_run, watched

class Broken:
    def write(self, text): raise BrokenPipeError(32, "Broken pipe")
    def flush(self): raise BrokenPipeError(32, "Broken pipe")

class Full:
    def write(self, text): time.sleep(1000)
    def flush(self): time.sleep(1000)

module.TELL_SECONDS, module.SETTLE_SECONDS = 1.0, 0.5
LOST = RuntimeError("[/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:2")
out = Path(sys.argv[1])
one = watched(out)
one.start()
take_run(out, one)
"""
GONE = "one._parent = -1\n"  # as when it is another process than the one that started this one
ENDINGS = {
    "nobody reads": "sys.stderr = Broken()\n" + GONE + "time.sleep(1000)",
    "the reader sleeps": "sys.stderr = Full()\n" + GONE + "time.sleep(1000)",
    "the training thread has an error to tell as well": (
        "sys.stderr = Broken()\n" + GONE + "time.sleep(0.6)\n"
        "one.causes.failed(RuntimeError('mine'))\ntime.sleep(1000)"
    ),
    "the training thread lost contact": ("sys.stderr = Full()\none.causes.failed(LOST)"),
    "another thread tells and never ends": (
        "one.causes.turn.acquire()\none.causes.failed(RuntimeError('mine'))"
    ),
    "telling raises": ("module.find_root_cause = lambda *_: 1 / 0\none.causes.failed(LOST)"),
    "the evidence cannot be had": ("module.collectives = lambda: 1 / 0\none.causes.failed(LOST)"),
    "the evidence hangs": (
        "module.collectives = lambda: time.sleep(1000)\n" + GONE + "time.sleep(1000)"
    ),
    "the run was taken over": (
        "from runner.system.error import Superseded\n"
        "sys.stderr = Full()\none.causes.failed(Superseded('incarnation 2'))"
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_rank_that_is_given_up_ends(ending: str, tmp_path: Path) -> None:
    """Whoever notices, whatever becomes of what it has to say."""
    program = tmp_path / "rank.py"
    program.write_text(RANK + ENDINGS[ending])
    ended = warm.finished([sys.executable, str(program), str(tmp_path / "run")], timeout=60)
    assert ended.returncode == (2 if ending == "the run was taken over" else 1)
