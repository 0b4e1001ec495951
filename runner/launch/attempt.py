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
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from runner.distributed.env import EXIT_DIR, UNWRITTEN, rank_name, read_begun
from runner.health.rank_report import CAUSE, Report, read_fatal_log, reported, write_report
from runner.launch import process_tree, torchrun
from runner.launch.process_tree import Preparation
from runner.policy.restart import ExitCodes
from runner.system.error import (
    EXIT_CONFIG,
    EXIT_CRASH,
    EXIT_DONE,
    EXIT_HALTED,
    EXIT_NO_CHECKPOINT,
    EXIT_PREEMPTED,
)
from runner.system.process import answer_hangup, exit_status, host_name, is_alive, parent

# The ranks of this node, seen by their supervisor: have they begun, did one die unnoticed.
#
# The other ranks of a node report a rank that dies. If it was alone on its node, or all of them
# died, no other node would notice: over NCCL no collective fails there.


# Seconds: other ranks of the node notice a death at once, and know more about it.
_NEIGHBOURS_SECONDS = 3.0
_SCAN_SECONDS = 1.0  # between looks for processes: every process of the machine is asked


class BegunRanks:
    """The ranks of one attempt.

    Args:
        exits: the folder in which ranks note that they have begun, and how they ended.
        mark: the mark of the attempt's processes.
        limit_seconds: how long ranks may take to begin; None: no limit.
    """

    def __init__(self, exits: Path, mark: str, limit_seconds: float | None) -> None:
        self._exits = exits
        self._mark = mark
        self._limit = limit_seconds
        self._have_begun = limit_seconds is None
        self._there_since: float | None = None
        self._scanned = float("-inf")
        self._dead: dict[tuple[int, str], tuple[float, int | None]] = {}  # since when, and how

    def late(self) -> str:
        """A message when ranks exist and have not begun in time; empty while all is well."""
        if self._have_begun:
            return ""
        # A full disk may have taken the name of what a rank wrote, and nothing else.
        if read_begun(self._exits) or any(self._exits.glob(f"{UNWRITTEN}*")):
            self._have_begun = True
            return ""
        clock = time.monotonic()
        if self._there_since is None and clock > self._scanned + _SCAN_SECONDS:
            self._scanned = clock
            self._there_since = clock if process_tree.ranks(self._mark) else None
        assert self._limit is not None
        if self._there_since is None or clock - self._there_since < self._limit:
            return ""
        return (
            f"{host_name()}: its ranks have existed for {self._limit:g} s and none has begun "
            "(parallel.start_seconds + parallel.timeout_seconds + watchdog.slow_seconds)"
        )

    def look(self, *, is_over: bool = False) -> None:
        """Report dead ranks to the other nodes, unless they or the cause are reported already.

        The other nodes wait some seconds for a report after their collective broke.

        Args:
            is_over: whether what started them has ended, so that nobody else can report them.
        """
        begun = read_begun(self._exits)
        ended = read_exits(self._exits) if begun else {}
        clock = time.monotonic()
        for rank, facts in begun.items():
            name = (rank, str(facts.get("incident")))
            are_all_here = int(facts["world_size"]) <= int(facts["local_world_size"])
            if rank_name(rank) in ended or are_all_here:
                continue
            if name not in self._dead:
                if is_alive(facts["process"]) is not False:
                    continue
                self._dead[name] = clock, exit_status(int(facts["process"]["pid"]))
            since, status = self._dead[name]
            is_due = clock - since > _NEIGHBOURS_SECONDS
            if is_over or is_due or not any(is_alive(one["process"]) for one in begun.values()):
                # The storage may be gone for a while: the next look tells it.
                with contextlib.suppress(OSError):
                    self._tell(rank, facts, status)

    def _tell(self, rank: int, facts: dict[str, Any], status: int | None) -> None:
        folder = Path(facts["incident"])
        if rank in reported(folder) or (folder / CAUSE).exists():
            return
        message = "gone without a report: SIGKILL, out of memory, or ended by its launcher"
        if status is not None:
            message = f"killed by signal {-status}" if status < 0 else f"ended with {status}"
        report = Report(
            rank=rank,
            world_size=int(facts["world_size"]),
            kind="exit" if status is None or status >= 0 else "signal",
            step=0,
            phase="some phase",
            message=f"{message} (seen by the supervisor of {host_name()})",
            host=host_name(),
            time=time.time(),
        )
        # Some signals leave a rank time for a fatal log.
        own = read_fatal_log(Path(facts["fatal"]), report) if facts.get("fatal") else None
        write_report(folder, own or report, for_other=True)


# How a job ended, from the exit codes of its ranks: torchrun itself always ends with 1.
#
# Every rank writes its exit code into the folder that ``HOLDFAST_EXIT_DIR`` names, and a
# supervisor that is itself a part of a larger job (a node of a Slurm job) writes its own there.


# A restart would not help after these. The first of them that a process ended with is the job's.
FINAL = {
    EXIT_HALTED: "halted by the guard",
    EXIT_CONFIG: "settings or data",
    EXIT_NO_CHECKPOINT: "no loadable checkpoint",
}
EXIT_CODES = ExitCodes(
    done=EXIT_DONE, crash=EXIT_CRASH, halted=EXIT_HALTED, preempted=EXIT_PREEMPTED, final=FINAL
)


def read_exits(folder: Path) -> dict[str, int]:
    """Read the exit code of each process that ended by itself, by its name."""
    exits: dict[str, int] = {}
    with contextlib.suppress(OSError):  # of a job on several nodes it is on their shared storage
        for path in sorted(folder.iterdir()):
            with contextlib.suppress(OSError, ValueError):
                if not path.name.startswith("."):
                    exits[path.name] = int(path.read_text())
    return exits


def final_code(exits: Mapping[str, int]) -> int | None:
    """The exit code that forbids a restart, if any process ended with one."""
    return next((code for code in FINAL if code in exits.values()), None)


def outcome(exits: Mapping[str, int], returncode: int, *, was_killed: bool = False) -> int:
    """The job's exit code.

    Args:
        exits: as :func:`read_exits` gives them.
        returncode: exit code of the started command; negative for a signal.
        was_killed: the command died of a signal that was not ours, and its ranks ended after it.
    """
    codes = set(exits.values())
    final = final_code(exits)
    if returncode == EXIT_DONE and final is None:
        return EXIT_DONE  # ranks that crashed before torchrun started them again count no more
    if final is not None:
        return final
    if codes == {EXIT_PREEMPTED}:
        return EXIT_PREEMPTED
    if codes and not was_killed:
        return EXIT_CRASH
    return 128 - returncode if returncode < 0 else returncode


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
        popen: ``subprocess.Popen`` of whoever starts its command from attempt to attempt; it also
            takes ``is_asked_to_stop``. None: it is started as any other.
        stays: the command outlives an attempt in which all of ``expected`` have reported.
        mark: of its processes; "": a new one.
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
    popen: Callable[..., subprocess.Popen[Any]] | None = None
    stays: bool = False
    mark: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How one attempt ended.

    ``missing``: those of ``expected`` that never reported; ``reason``: why it was ended
    from here, if it was; ``stuck``: processes that survive SIGKILL; ``is_told``: whether any
    process told its exit code.
    """

    code: int
    missing: frozenset[str]
    reason: str = ""
    stuck: Sequence[int] = ()
    is_told: bool = False


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
    mark = job.mark or secrets.token_hex(8)
    with tempfile.TemporaryDirectory(prefix="holdfast-exits-") as own:
        exits = job.exits or Path(own)
        exits.mkdir(parents=True, exist_ok=True)
        prepared = Preparation(
            parent=os.getpid(),
            shielded=job.shielded,
            is_torchrun=torchrun.is_started_by(job.command),
        )
        begin: Callable[..., subprocess.Popen[Any]] = subprocess.Popen
        if job.popen is not None:
            begin = partial(job.popen, is_asked_to_stop=lambda: stop.is_set)
        with prepared.beginning():
            # A session of its own: a terminal's Ctrl-C is for the supervisor to pass on.
            child = begin(
                prepared.command(job.command),
                env=dict(job.environment) | {EXIT_DIR: str(exits), process_tree.MARK: mark},
                start_new_session=True,
                stdout=job.output,
                stderr=job.output,
            )
        missing = frozenset[str]()
        watch = _Watch(job, child, mark, exits, stop)
        try:
            if not watch.wait():
                missing = job.expected - read_exits(exits).keys()
            was_killed = (child.poll() or 0) < 0
            if watch.is_reported:
                told = read_exits(exits)
                code = outcome(told, max(told.values()))
                return Ended(code=code, missing=frozenset(), is_told=True)
            if job.forward is StopTarget.srun and child.poll() is None:
                child.terminate()  # srun ends its step on all nodes before it is killed
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_SRUN_SECONDS)
        finally:
            if not watch.is_reported:
                process_tree.end_all(mark)
                child.wait()
        code, told = EXIT_PREEMPTED, read_exits(exits)
        if not watch.is_idle:
            code = outcome(told, child.returncode, was_killed=was_killed)
        stuck = process_tree.marked(mark)
        return Ended(
            code=code, missing=missing, reason=watch.reason, stuck=stuck, is_told=bool(told)
        )


@dataclass(eq=False)
class _Watch:
    """Waits for a command and forwards requests to it."""

    job: Job
    child: subprocess.Popen[bytes]
    mark: str
    exits: Path
    stop: Stop
    reason: str = ""
    is_idle: bool = False  # asked to stop while there was no rank
    is_reported: bool = False  # by all of those expected, of a command that stays
    _told: set[int] | None = None
    _alive: float = field(default_factory=time.monotonic)
    _first_exit: float | None = None
    _final_exit: float | None = None
    _num_requests: int = 0

    def __post_init__(self) -> None:
        self._begun = BegunRanks(self.exits, self.mark, self.job.begin_seconds)

    def wait(self) -> bool:
        """Wait until the command ends or must be ended; False when some are taken for dead."""
        while self.child.poll() is None:
            self.reason = self._begun.late() or self.job.late(self.mark)
            if self.reason:
                return True
            self._look_for_deaths(is_over=False)
            exits, now = read_exits(self.exits), time.monotonic()
            self.is_reported = self.job.stays and self.job.expected <= exits.keys()
            if self.is_reported:
                return True
            requests = self._requests_due(exits, now)
            if requests is None:
                return False
            if self.stop.is_repeated or self._has_final_code(exits, now) or self._is_over():
                return True
            for _ in range(requests):
                process_tree.send(self.child.pid, signal.SIGUSR1)
            part_of = self.job.part_of
            if not self.stop.is_set and part_of and os.path.exists(part_of / _STOP_FILE):
                self._told = set()
                self.stop.ask(signal.SIGUSR1)
            if self.stop.number is not None:
                self._tell(self.stop.number)
            time.sleep(_POLL_SECONDS)
        self._look_for_deaths(is_over=True)
        return True

    def _has_final_code(self, exits: Mapping[str, int], now: float) -> bool:
        """Whether a process has for some time ended with a code that forbids a restart.

        A torchrun that has restarts left would start a finished group again.
        """
        if self._final_exit is None and final_code(exits) is not None:
            self._final_exit = now
        return self._final_exit is not None and now - self._final_exit > _LEAVE_SECONDS

    def _requests_due(self, exits: Mapping[str, int], now: float) -> int | None:
        """How many stop requests are due to processes that have not reported how they ended.

        None: while others have reported, they are taken for dead.
        """
        if not exits or not self.job.expected - exits.keys():
            return 0
        self._first_exit = now if self._first_exit is None else self._first_exit
        waited = now - self._first_exit
        if waited > _DEAD_SECONDS:
            return None
        due = (waited > _ASK_SECONDS) + (waited > _INSIST_SECONDS) - self._num_requests
        self._num_requests += due
        return due

    def _look_for_deaths(self, *, is_over: bool) -> None:
        """Note dead ranks. Of a Slurm step the supervisor of each node does that."""
        if not self.stop.is_set and self.job.forward is not StopTarget.srun:
            self._begun.look(is_over=is_over)

    def _is_over(self) -> bool:
        """Whether the ranks that were told to stop did: torchrun with restarts left would go on.

        Also if there are none to tell: a torchrun that waits for other nodes would wait on.
        """
        if self.stop.is_set and self.job.shielded and not self._told:
            if process_tree.ranks(self.mark):
                self._alive = time.monotonic()
            self.is_idle = time.monotonic() - self._alive > _TORCHRUN_SECONDS
            return self.is_idle
        if self.job.forward is StopTarget.srun or not self._told or self.child.pid in self._told:
            return False
        if any(parent(pid) is not None for pid in self._told):
            self._alive = time.monotonic()
        return time.monotonic() - self._alive > _TORCHRUN_SECONDS

    def _tell(self, number: int) -> None:
        number = signal.SIGTERM if number in (signal.SIGINT, signal.SIGHUP) else number
        if self._told is None:
            if self.job.forward is StopTarget.srun and number == signal.SIGUSR1:
                with contextlib.suppress(OSError):  # it is on the job's storage
                    (self.exits / _STOP_FILE).touch()
            by_slurm = self.job.forward is StopTarget.step
            self._told = set(self._listening(number)) if by_slurm else set()
        for pid in self._whom(number):
            if pid not in self._told:
                self._told.add(pid)
                process_tree.send(pid, number)

    def _whom(self, number: int) -> Sequence[int]:
        if self.job.forward is StopTarget.srun:
            return [self.child.pid] if number == signal.SIGUSR1 else []
        if not self._told and not self.job.shielded and not process_tree.ranks(self.mark):
            # It has no ranks, and may be one itself, or a shell around one.
            pid = self.child.pid
            return process_tree.beneath_shells(pid, self.mark, number) or [pid]
        return self._listening(number)

    def _listening(self, number: int) -> list[int]:
        """Ranks that already handle the signal; one that is still starting would die of it."""
        return [pid for pid in process_tree.ranks(self.mark) if process_tree.catches(pid, number)]
