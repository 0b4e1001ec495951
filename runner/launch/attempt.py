"""Runs one attempt: starts its command, forwards stop requests, waits, leaves no process."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FrameType

from runner.distributed.env import EXIT_DIR
from runner.launch import process_tree, torchrun
from runner.launch.local_ranks import BegunRanks
from runner.launch.outcome import final_code, outcome, read_exits
from runner.launch.prepared import Preparation
from runner.system.process import answer_hangup, parent

_POLL_SECONDS = 0.1
# From the first process that reported how it ended: when the others are asked to stop, when they
# must end at once, and when those that still report nothing are taken for dead.
_ASK_SECONDS, _INSIST_SECONDS, _DEAD_SECONDS = 3.0, 4.5, 9.0
_SRUN_SECONDS = 3.0
# A final exit code is the whole group's; the others get this long to end by themselves.
_LEAVE_SECONDS = 5.0
# How long torchrun may outlive the ranks that were told to stop.
_TORCHRUN_SECONDS = 1.0
# One request may arrive twice, from a scheduler and through a shell.
_SAME_REQUEST_SECONDS = 1.0
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# A file of this name in a job's folder of exit codes stops its nodes: a signal to an srun that has
# not yet started its tasks is lost.
_STOP_FILE = ".stop"


class StopTarget(Enum):
    """Who gets the signal when the supervisor is asked to stop."""

    ranks = "ranks"  # each rank, once it listens; torchrun itself would end them after 30 s
    srun = "srun"  # srun forwards SIGUSR1 to every process; Slurm's SIGTERM reaches them directly
    step = "step"  # ranks that did not handle signals yet; Slurm signalled the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One attempt's command.

    Args:
        expected: names of the processes that will report how they ended, as far as known.
        exits: folder for those reports; None: a new one.
        part_of: the same folder of the larger job, where this is one of its nodes.
        shielded: the command ignores SIGTERM and SIGUSR1; its ranks get the signals directly.
        begin_seconds: how long its ranks may take to begin; None: no limit.
        output: descriptor for its output; None: this process's own.
        late: takes the mark of its processes and returns why they must be ended; "" if not.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    forward: StopTarget = StopTarget.ranks
    expected: frozenset[str] = frozenset()
    exits: Path | None = None
    part_of: Path | None = None
    shielded: bool = False
    begin_seconds: float | None = None
    output: int | None = None
    late: Callable[[str], str] = lambda mark: ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How one attempt ended.

    ``missing``: those of ``expected`` that never reported; ``reason``: why it was ended
    from here, if it was; ``stuck``: processes that survive SIGKILL.
    """

    code: int
    missing: frozenset[str]
    left_behind: Sequence[int]
    reason: str = ""
    stuck: Sequence[int] = ()


class Stop:
    """The request to stop: the first signal asks, the second insists."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.is_repeated = False
        self._since = 0.0

    def listen(self) -> None:
        """Take this process's signals; main thread only."""
        for number in _STOPS:
            signal.signal(number, self.ask)
        answer_hangup(self.ask, always=False)

    @property
    def is_set(self) -> bool:
        return self.number is not None

    @property
    def is_for_a_restart(self) -> bool:
        """Whether the signal warns of a limit; SIGTERM and Ctrl-C mean the end."""
        return self.number == signal.SIGUSR1

    def sleep(self, seconds: float) -> bool:
        """Sleep; False when the request to stop interrupted it."""
        limit = time.monotonic() + seconds
        while not self.is_set and (left := limit - time.monotonic()) > 0:
            time.sleep(min(left, _POLL_SECONDS))
        return not self.is_set

    def ask(self, number: int, _: FrameType | None = None) -> None:
        """Note a request."""
        if self.number is None:
            self.number, self._since = number, time.monotonic()
        elif time.monotonic() - self._since > _SAME_REQUEST_SECONDS:
            self.is_repeated = True


def run_once(job: Job, stop: Stop) -> Ended:
    """Run the command until it ends, or end it if that is necessary."""
    mark = secrets.token_hex(8)
    with tempfile.TemporaryDirectory(prefix="holdfast-exits-") as own:
        exits = job.exits or Path(own)
        exits.mkdir(parents=True, exist_ok=True)
        prepared = Preparation(
            parent=os.getpid(),
            shielded=job.shielded,
            is_torchrun=torchrun.is_started_by(job.command),
        )
        with prepared.beginning():
            # A session of its own: a terminal's Ctrl-C is for the supervisor to pass on.
            child = subprocess.Popen(
                prepared.command(job.command),
                env=dict(job.environment) | {EXIT_DIR: str(exits), process_tree.MARK: mark},
                start_new_session=True,
                stdout=job.output,
                stderr=job.output,
            )
        missing = frozenset[str]()
        begun = BegunRanks(exits, mark, job.begin_seconds)
        watch = _Watch(job, child, mark, exits, stop, begun)
        try:
            if not watch.wait():
                missing = job.expected - read_exits(exits).keys()
            was_killed = (child.poll() or 0) < 0
            _end_step(job, child)
        finally:
            left = process_tree.end_all(mark)
            child.wait()
        code = outcome(read_exits(exits), child.returncode, was_killed=was_killed)
        return Ended(
            code=code,
            missing=missing,
            left_behind=left,
            reason=watch.reason,
            stuck=process_tree.marked(mark),
        )


def _end_step(job: Job, child: subprocess.Popen[bytes]) -> None:
    """Let srun end its step on all nodes before it is killed."""
    if job.forward is StopTarget.srun and child.poll() is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_SRUN_SECONDS)


class _Watch:
    """Waits for a command and forwards requests to it."""

    def __init__(
        self,
        job: Job,
        child: subprocess.Popen[bytes],
        mark: str,
        exits: Path,
        stop: Stop,
        begun: BegunRanks,
    ) -> None:
        self.reason = ""
        self._begun = begun
        self._job = job
        self._child = child
        self._mark = mark
        self._exits = exits
        self._stop = stop
        self._told: set[int] | None = None
        self._alive = time.monotonic()
        self._patience = _Patience(exits, job.expected)

    def wait(self) -> bool:
        """Wait until the command ends or must be ended; False when some are taken for dead."""
        while self._child.poll() is None:
            self.reason = self._begun.late() or self._job.late(self._mark)
            if self.reason:
                return True
            self._look_for_deaths(is_over=False)
            requests = self._patience.requests(time.monotonic())
            if requests is None:
                return False
            if self._stop.is_repeated or self._patience.is_final or self._is_over():
                return True
            for _ in range(requests):
                process_tree.send(self._child.pid, signal.SIGUSR1)
            if self._is_told_by_file():
                self._told = set()
                self._stop.ask(signal.SIGUSR1)
            if self._stop.number is not None:
                self._tell(self._stop.number)
            time.sleep(_POLL_SECONDS)
        self._look_for_deaths(is_over=True)
        return True

    def _look_for_deaths(self, *, is_over: bool) -> None:
        """Note dead ranks. Of a Slurm step the supervisor of each node does that."""
        if not self._stop.is_set and self._job.forward is not StopTarget.srun:
            self._begun.look(is_over=is_over)

    def _is_over(self) -> bool:
        """Whether the ranks that were told to stop did: torchrun with restarts left would go on."""
        if self._job.forward is StopTarget.srun or not self._told or self._child.pid in self._told:
            return False
        if any(parent(pid) is not None for pid in self._told):
            self._alive = time.monotonic()
        return time.monotonic() - self._alive > _TORCHRUN_SECONDS

    def _is_told_by_file(self) -> bool:
        if self._stop.is_set or self._job.part_of is None:
            return False
        return (self._job.part_of / _STOP_FILE).exists()

    def _tell(self, number: int) -> None:
        number = signal.SIGTERM if number in (signal.SIGINT, signal.SIGHUP) else number
        if self._told is None:
            self._told = self._told_already(number)
        for pid in self._whom(number):
            if pid not in self._told:
                self._told.add(pid)
                process_tree.send(pid, number)

    def _told_already(self, number: int) -> set[int]:
        if self._job.forward is StopTarget.srun and number == signal.SIGUSR1:
            (self._exits / _STOP_FILE).touch()
        return set(self._listening(number)) if self._job.forward is StopTarget.step else set()

    def _whom(self, number: int) -> Sequence[int]:
        if self._job.forward is StopTarget.srun:
            return [self._child.pid] if number == signal.SIGUSR1 else []
        if not self._told and not self._job.shielded and not process_tree.ranks(self._mark):
            return [self._child.pid]  # it has no ranks, and may be one itself
        return self._listening(number)

    def _listening(self, number: int) -> list[int]:
        """Ranks that already handle the signal; one that is still starting would die of it."""
        return [pid for pid in process_tree.ranks(self._mark) if process_tree.catches(pid, number)]


class _Patience:
    """When to end processes that have not reported how they ended, while others have."""

    def __init__(self, exits: Path, expected: frozenset[str]) -> None:
        self._exits = exits
        self._expected = expected
        self._first_told: float | None = None
        self._final_told: float | None = None
        self._requests = 0
        self.is_final = False

    def requests(self, now: float) -> int | None:
        """How many stop requests are due by now; None: some processes are taken for dead."""
        exits = read_exits(self._exits)
        # A torchrun that has restarts left would start a finished group again.
        if final_code(exits) is not None and self._final_told is None:
            self._final_told = now
        self.is_final = self._final_told is not None and now - self._final_told > _LEAVE_SECONDS
        if not exits or not self._expected - exits.keys():
            return 0
        self._first_told = now if self._first_told is None else self._first_told
        waited = now - self._first_told
        if waited > _DEAD_SECONDS:
            return None
        due = (waited > _ASK_SECONDS) + (waited > _INSIST_SECONDS) - self._requests
        self._requests += due
        return due
