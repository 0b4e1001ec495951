"""A rank of this machine dies and no collective breaks: who notices, and who left in order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runner.distributed.env import tell_exit
from runner.health import cause_reporter
from runner.health.cause_reporter import IN_ORDER
from runner.health.preemption import StopRequest
from runner.health.rank_report import Report, read_reports
from runner.run_dir.paths import RunDir
from runner.system.process import (
    exit_status,
    exit_status_by_pidfd,
    own_process,
    pid_namespace,
    started_at,
)
from tests.mechanism.test_witness import endings, take_run, watched
from tests.waiting import until

# The watchdog's thread is ended where a rank would be.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
_ENDS_WHEN_TOLD = "import os, sys; os._exit(int(sys.stdin.readline()))"


class Peer:
    """A process in the place of the other rank of this node."""

    def __init__(self) -> None:
        words = [sys.executable, "-S", "-E", "-c", _ENDS_WHEN_TOLD]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, text=True)
        self.facts = {
            "rank": 1,
            "pids": pid_namespace(),
            "process": own_process()
            | {"pid": self.process.pid, "started": started_at(self.process.pid) or ""},
        }

    def end(self, status: int) -> None:
        """With an exit code, or by a signal. A zombie is left, which torchrun would reap soon."""
        if status < 0:
            self.process.send_signal(-status)
            return
        self.process.stdin.write(f"{status}\n")
        self.process.stdin.flush()


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.process.kill()
    made.process.communicate()


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The codes with which this rank would have left; only its watchdog ends."""
    codes, _ = endings(monkeypatch)
    monkeypatch.setattr("runner.health.preemption.leave", cause_reporter.leave)
    return codes


def of(rank: int, out: Path) -> Report:
    by_rank = {report.rank: report for report in read_reports(RunDir(out).incident(1))}
    return by_rank[rank]


@pytest.mark.parametrize("status", [-signal.SIGKILL, -signal.SIGSEGV, 1, 143])
def test_a_death_is_noticed_where_no_collective_breaks(
    status: int, tmp_path: Path, peer: Peer, left: list[int]
) -> None:
    one = watched(tmp_path, has_agent=False)
    one.start()
    take_run(tmp_path, one, [peer.facts])
    peer.end(status)
    until(lambda: bool(left))
    assert left == [1]
    assert of(1, tmp_path).kind == ("signal" if status < 0 else "exit")
    assert of(0, tmp_path).kind == "called"
    assert "rank 1 of this node is dead" in of(0, tmp_path).message


def test_being_asked_to_stop_after_a_death_is_no_preemption(
    tmp_path: Path, peer: Peer, left: list[int]
) -> None:
    """torchrun asks the others to stop as soon as one has died; a step that hangs ends with 75."""
    stop = StopRequest(grace_seconds=-2.0)  # over as soon as it begins
    one = watched(tmp_path, has_agent=False, stop=stop)
    take_run(tmp_path, one, [peer.facts])
    peer.end(-signal.SIGKILL)
    until(lambda: bool(one.dead_peers()))
    stop.ask("SIGTERM")
    one.start()
    until(lambda: bool(left))
    assert left == [1]


@pytest.mark.parametrize("status", [*IN_ORDER, "reaped", "killed after all have met"])
def test_who_left_in_order_is_no_death(
    status: int | str, tmp_path: Path, peer: Peer, left: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = watched(tmp_path, has_agent=False)
    ticks: list[int] = []
    if status == "reaped":  # its supervisor was told, and its parent asked before us
        tell_exit({"HOLDFAST_EXIT_DIR": str(tmp_path)}, "rank-1", 75)
        monkeypatch.setenv("HOLDFAST_EXIT_DIR", str(tmp_path))
        peer.end(75)
        peer.process.wait()
    take_run(tmp_path, one, [peer.facts])
    if status == "killed after all have met":
        one.all_have_met()
        peer.end(-signal.SIGKILL)
    elif isinstance(status, int):
        peer.end(status)
    until(lambda: one.causes.neighbours is not None and 1 in one.causes.neighbours.deaths)
    one._watchdog.add([lambda: ticks.append(1)])
    one.start()
    until(lambda: len(ticks) > 5)
    one.end()
    assert not left and not one.dead_peers()


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_a_death_that_nobody_could_look_at(
    has_pidfd: bool, tmp_path: Path, peer: Peer, left: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent was faster, or the rank was dead before anybody watched."""
    if not has_pidfd:
        monkeypatch.delattr(os, "pidfd_open")
    one = watched(tmp_path, has_agent=False)
    one.start()
    if has_pidfd:
        peer.process.kill()
        peer.process.wait()
    take_run(tmp_path, one, [peer.facts])
    if not has_pidfd:
        peer.process.kill()
        peer.process.wait()
    until(lambda: bool(left))
    assert left == [1] and of(1, tmp_path).kind == "exit"
    assert "gone without a report: SIGKILL" in of(1, tmp_path).message


def test_a_parent_that_asks_between_two_looks(
    tmp_path: Path, peer: Peer, left: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun asks ten times a second: also just after the look that came too early."""

    def reap_after(look: Callable[[int], int | None]) -> Callable[[int], int | None]:
        def looks(of: int) -> int | None:
            seen = look(of)
            peer.process.wait()
            return seen

        return looks

    for name in ("exit_status", "exit_status_by_pidfd"):
        look = getattr(cause_reporter, name)
        monkeypatch.setattr(cause_reporter, name, reap_after(look))
    one = watched(tmp_path, has_agent=False)
    one.start()
    take_run(tmp_path, one, [peer.facts])
    peer.end(-signal.SIGKILL)
    until(lambda: bool(left))
    assert of(1, tmp_path).kind == "signal"


def test_process_numbers_of_another_container_are_not_looked_up(
    tmp_path: Path, peer: Peer, left: list[int]
) -> None:
    one = watched(tmp_path, has_agent=False)
    other = {**peer.facts, "pids": "pid:[1]"}
    peer.end(-signal.SIGKILL)
    peer.process.wait()
    take_run(tmp_path, one, [other])
    assert not one.dead_peers()
    one.start()
    one.end()
    assert not left


@pytest.mark.parametrize("status", [-signal.SIGKILL, 7, 0])
def test_how_a_process_ended_is_told_after_its_parent_has_asked(peer: Peer, status: int) -> None:
    descriptor = os.pidfd_open(peer.process.pid)
    try:
        assert exit_status_by_pidfd(descriptor) is None, "it is alive"
        peer.end(status)
        until(lambda: exit_status(peer.process.pid) == status)
        assert exit_status_by_pidfd(descriptor) is None, "its parent has not asked"
        assert peer.process.wait(20) == status
        known = exit_status_by_pidfd(descriptor)
        if known is None:
            pytest.skip(f"Linux {os.uname().release} does not tell; 6.15 does")
        assert known == status
    finally:
        os.close(descriptor)
