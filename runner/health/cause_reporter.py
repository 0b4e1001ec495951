"""Reports why a run ends: writes this rank's report, and one rank reports the cause from all.

What counts as the cause is decided in :mod:`runner.health.root_cause`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

from runner.distributed.env import RankEnv, rank_name, recorded_exit
from runner.distributed.rendezvous import Facts
from runner.health.collective_trace import collectives, has_nccl
from runner.health.heartbeat import Heartbeat
from runner.health.leave import end_within, leave
from runner.health.rank_report import (
    CAUSE,
    FROM_RANKS,
    Report,
    merge_node,
    node_folder,
    read_all_reports,
    read_fatal_log,
    read_reports,
    reported,
    reported_nodes,
    stack_of,
    stacks,
    write_report,
)
from runner.health.root_cause import (
    MEMORY,
    OWN,
    RootCause,
    find_root_cause,
    message_of,
    whose_fault,
)
from runner.policy.decision.history import Incident
from runner.run_dir.lease import RunLease, has_ended, oldest_number
from runner.run_dir.paths import RunDir
from runner.system.environment import variables
from runner.system.error import (
    EXIT_CONFIG,
    EXIT_CRASH,
    EXIT_DONE,
    EXIT_HALTED,
    EXIT_NO_CHECKPOINT,
    EXIT_PREEMPTED,
    Superseded,
)
from runner.system.files import write_json
from runner.system.json_lines import last_line, step_of
from runner.system.process import (
    exit_status,
    exit_status_by_pidfd,
    host_name,
    in_thread,
    is_alive,
    num_oom_kills,
    pid_namespace,
    signal_name,
)

# Watches the processes of the other ranks of this machine: which died, and how.
#
# Only a parent learns how a process ended; but until the parent has asked, ``/proc`` shows it to
# every process, and newer kernels tell whoever has a pidfd at any time. torchrun asks ten times a
# second, so a thread here waits for the deaths themselves.
# Over NCCL this is how a death is noticed, because no collective fails when a peer is gone.

# With these codes a rank has reported its error, and the others end in the same way.
IN_ORDER = (EXIT_DONE, EXIT_CONFIG, EXIT_HALTED, EXIT_NO_CHECKPOINT, EXIT_PREEMPTED)
_LOOK_MILLISECONDS = 200  # where the kernel cannot notify of a death


class PeerProcesses:
    """Watches processes by rank.

    ``deaths`` maps a dead rank to its exit code or minus the signal; to None where the parent asked
    for it first and the rank left no code for a supervisor.

    Args:
        processes: by rank, as :func:`runner.system.process.own_process` returns them.
    """

    def __init__(self, processes: Mapping[int, Mapping[str, str | int]]) -> None:
        self.deaths: dict[int, int | None] = {}
        self._processes = dict(processes)
        self._open: dict[int, int] = {}  # pidfd to rank
        self._looked_at: set[int] = set()  # ranks without one: a kernel before 5.3
        self._thread = threading.Thread(target=self._run, name="neighbours", daemon=True)

    def start(self) -> None:
        """Start to watch; processes that are gone already count as dead."""
        for rank, process in self._processes.items():
            try:
                self._open[os.pidfd_open(int(process["pid"]))] = rank
            except ProcessLookupError:
                self._note(rank, self._exit_status(rank))
            except (OSError, AttributeError):
                self._looked_at.add(rank)
        if self._open or self._looked_at:
            self._thread.start()

    def ended_badly(self) -> list[int]:
        """Ranks that are known to have died without leaving in order."""
        return [rank for rank, status in list(self.deaths.items()) if status not in IN_ORDER]

    def _run(self) -> None:
        poll = select.poll()
        for descriptor in self._open:
            poll.register(descriptor, select.POLLIN)
        left = len(self._open)
        while left or self._looked_at:
            for descriptor, _ in poll.poll(_LOOK_MILLISECONDS if self._looked_at else None):
                rank = self._open[descriptor]
                # /proc has the status until the parent reaps the process, the pidfd from then on.
                # If it is reaped between the two reads, the pidfd, which is read last, has it.
                status = self._exit_status(rank)
                self._note(rank, exit_status_by_pidfd(descriptor) if status is None else status)
                poll.unregister(descriptor)
                os.close(descriptor)
                left -= 1
            for rank in sorted(self._looked_at):
                if not is_alive(self._processes[rank]):
                    self._note(rank, self._exit_status(rank))
                    self._looked_at.discard(rank)

    def _exit_status(self, rank: int) -> int | None:
        return exit_status(int(self._processes[rank]["pid"]))

    def _note(self, rank: int, status: int | None) -> None:
        # The parent may have reaped it first; the rank leaves its code for a supervisor.
        self.deaths[rank] = (
            recorded_exit(variables(), rank_name(rank)) if status is None else status
        )


_log = logging.getLogger(__name__)

_JOURNAL_SECONDS = 5.0
_SECONDS_A_RANK = 3e-4  # added to the wait for evidence, for each rank of a large job
# A rank waits this long for the others' evidence before it ends: their reports are files.
SETTLE_SECONDS = 3.0
# To write and report the cause, beyond that: a disk may not answer.
TELL_SECONDS = 10.0


class CauseReporter:
    """One rank's reports. One thread reports, the one that gets :attr:`turn`; it never returns it.

    Args:

    Attributes:
        run_lease: of this start; nothing is reported before there is one.
        neighbours: the processes of this node's other ranks.
        journal: takes the cause and the start's number, on the rank that journals.
    """

    def __init__(self, place: RankEnv, run_dir: RunDir, heart: Heartbeat) -> None:
        self._place = place
        self._dir = run_dir
        self._heart = heart
        self._oom_kills = num_oom_kills()
        self._peers: Sequence[Facts] = ()
        self.turn = threading.Lock()
        self.run_lease: RunLease | None = None
        self.neighbours: PeerProcesses | None = None
        self.journal: Callable[[RootCause, int], None] | None = None

    def has_turn(self) -> bool:
        """Whether this thread is the one to report, asked without waiting."""
        return self.turn.acquire(blocking=False)

    def waits_for_turn(self) -> bool:
        """The same for a thread that must report, so it waits; False: another one hangs in it."""
        return self.turn.acquire(timeout=self.settle_seconds + TELL_SECONDS)

    def watch_peers(self, peers: Sequence[Facts]) -> None:
        here = pid_namespace()
        self._peers = [peer for peer in peers if peer["pids"] == here]
        others = {int(peer["rank"]): peer["process"] for peer in self._peers}
        others.pop(self._place.rank, None)
        self.neighbours = PeerProcesses(others)
        self.neighbours.start()

    def failed(self, error: Exception) -> None:
        """Report that the training thread ends with an error that the other ranks do not share.

        Returns when the error is this rank's own. When it says that others are gone, or does not
        say whose fault it is, the cause comes from all ranks' reports and the process ends.
        """
        if self.run_lease is None:
            return
        code = error.exit_code if isinstance(error, Superseded) else EXIT_CRASH
        cancel = self.end_soon(code)
        # The turn is kept, because the watchdog has nothing to add. If the watchdog has it, the
        # watchdog ends this process; if that takes too long, this thread does.
        if not self.waits_for_turn():
            leave(code)
        if isinstance(error, Superseded):
            self.give_way(error)
        kind = whose_fault(error)
        if kind != OWN:
            self.conclude(kind, message_of(error), error)
        try:
            self._tell_own(error)
        except Exception as failure:  # the caller's error matters more
            _log.error("reporting an error failed: %s", failure)
        finally:
            cancel()

    def uncaught(self, error: Exception) -> None:
        """Report an uncaught error of a user's script.

        Always returns, because the script decides what it does at its end.
        """
        if self.run_lease is None:
            return
        if not self.waits_for_turn():
            return  # the watchdog has it, and ends this process
        try:
            kind = whose_fault(error)
            if kind == OWN:
                try:  # torchrun's error file takes the exception that is being handled
                    raise error
                except Exception:
                    self._tell_own(error)
            else:
                self.write(self.report(kind, message_of(error), error))
                self.tell_cause()
        except Exception as failure:  # the script's error matters more
            _log.error("reporting an error failed: %s", failure)

    def give_way(self, error: Superseded) -> NoReturn:
        """End: a newer incarnation has the run."""
        self.leave_saying(str(error), error.exit_code)

    def leave_saying(
        self,
        message: str,
        code: int = EXIT_CRASH,
        *,
        is_own_fault: bool = False,
        also: Callable[[], None] | None = None,
    ) -> NoReturn:
        """Log a message and end.

        Args:
            is_own_fault: this rank's report says it, too.
            also: called last.
        """
        self.end_soon(code)
        try:
            if is_own_fault and self.run_lease is not None:
                self.write(self.report("exception", message))
            _log.error("%s", message)
            if also is not None:
                also()
        finally:
            leave(code)

    def are_others_there(self) -> bool:
        """Whether another rank has reported."""
        # With many ranks the folder is not listed: the first rank that reports creates it.
        folder = self.folder()
        return folder.exists() if self._is_by_node else any(folder.glob("rank-*.json"))

    def end_soon(self, code: int) -> Callable[[], None]:
        """End this process within a limit, even if its last report is blocked."""
        return end_within(self.settle_seconds + TELL_SECONDS, code)

    def conclude(self, kind: str, message: str, error: Exception | None = None) -> NoReturn:
        """Write this rank's report, wait for the others', report the cause once, and end."""
        self.end_soon(EXIT_CRASH)
        try:
            self.write(self.report(kind, message, error))
            self.tell_cause()
        except Exception as failure:
            _log.error("%s: %s; reporting it failed: %s", kind, message, failure)
        finally:
            leave(EXIT_CRASH)

    def _tell_own(self, error: Exception) -> None:
        """Report this rank's own error, which the caller then raises."""
        message = f"{type(error).__name__}: {message_of(error)}"
        report = self.report("exception", message, error)
        cause = find_root_cause([report], self._place.world_size)
        # First: the others announce a cause when they see a report without one.
        self._say_cause(cause)
        self.write(report)
        self._write_down(cause)
        _tell_torchrun(error)

    def tell_cause(self) -> None:
        """Report the cause from all ranks' reports, unless another rank does."""
        if self._is_by_node:
            self._tell_cause_of_many()
            return
        by_rank = self._wait_for_reports(self._place.world_size, self.settle_seconds)
        own = self._place.rank
        is_teller = own == min((rank for rank, is_own in by_rank.items() if is_own), default=own)
        # A rank with an exception of its own has reported it already.
        is_teller = is_teller and not (self.folder() / CAUSE).exists()
        self._tell(read_reports, is_teller=is_teller)
        self._end_silent_peers()

    def _tell(self, read: Callable[[Path], list[Report]], *, is_teller: bool) -> None:
        """Find the cause; the teller prints it, the first rank journals it."""
        if is_teller or self._place.is_first:
            cause = find_root_cause(read(self.folder()), self._place.world_size)
            if is_teller:
                self._say_cause(cause)
            self._write_down(cause)

    def _tell_cause_of_many(self) -> None:
        """Merge each node's reports into one file; the lowest leader reports the cause."""
        limit = time.monotonic() + self.settle_seconds
        arrived = self._wait_for_reports(self._place.local_world_size, self.settle_seconds / 2)
        leader = min((rank for rank, is_own in arrived.items() if is_own), default=self._place.rank)
        folder, first = self.folder(), self._place.rank - self._place.local_rank
        if leader == self._place.rank:
            with contextlib.suppress(OSError):
                merge_node(folder, first)
            num_nodes = -(-self._place.world_size // self._place.local_world_size)
            while time.monotonic() < limit:
                is_over = (folder / CAUSE).exists() and not self._place.is_first
                if is_over or (first == 0 and len(reported_nodes(folder)) >= num_nodes):
                    break
                time.sleep(0.1 + 1e-4 * num_nodes)
            is_told = (folder / CAUSE).exists()
            is_teller = not is_told and first == min(reported_nodes(folder), default=first)
            self._tell(read_all_reports, is_teller=is_teller)
        self._end_silent_peers()

    def report(self, kind: str, message: str, error: BaseException | None = None) -> Report:
        """Make a whole report, with collectives; write an early one first where NCCL must be asked.

        The thread that asks may never release the interpreter's lock.
        """
        early = replace(
            self._about(self._place.rank, kind, message),
            seconds=round(self._heart.seconds, 3),
            traceback="".join(traceback.format_exception(error)) if error else "",
            pid=os.getpid(),
            stacks=[stack_of(error)] if error is not None else stacks(),
        )
        if self.run_lease is not None and has_nccl():
            with contextlib.suppress(OSError):
                write_report(self._own_folder(), early, early=True)
        entries, untold = collectives()
        return replace(early, collectives=entries, untold=untold)

    def _about(self, rank: int, kind: str, message: str) -> Report:
        """What this rank knows of itself or of another one."""
        return Report(
            rank=rank,
            world_size=self._place.world_size,
            kind=kind,
            step=self._heart.step,
            phase=self._heart.phase,
            message=message,
            host=host_name(),
            time=time.time(),
        )

    def write(self, report: Report, *, for_other: bool = False) -> None:
        # Ending in time matters more than evidence: a full disk must not keep this process.
        with contextlib.suppress(OSError):
            write_report(self._own_folder(), report, for_other=for_other)

    def _wait_for_reports(self, num_ranks: int, seconds: float) -> dict[int, bool]:
        """Ranks with a report, and whether it is their own."""
        limit = time.monotonic() + seconds
        while True:
            self._write_for_the_dead()
            by_rank = reported(self._own_folder())
            if len(by_rank) == num_ranks or time.monotonic() > limit:
                return by_rank
            time.sleep(0.02 + 1e-4 * num_ranks)

    def _write_for_the_dead(self) -> None:
        """Write a report about each dead rank of this node, on behalf of that rank."""
        assert self.neighbours is not None and self.run_lease is not None
        by_rank = reported(self._own_folder())
        for rank, status in list(self.neighbours.deaths.items()):
            if rank in by_rank:
                continue
            kind = "signal" if status is not None and status < 0 else "exit"
            report = self._about(rank, kind, self.death(status))
            # Some signals leave a rank time for a fatal log.
            fatal = self._dir.fatal(self.run_lease.number, rank)
            self.write(read_fatal_log(fatal, report) or report, for_other=True)

    def death(self, status: int | None) -> str:
        """The kind and message of a peer's status (see :class:`PeerProcesses`)."""
        if status is None:
            return "gone without a report: SIGKILL, out of memory, or ended by its launcher"
        if status == EXIT_PREEMPTED:
            return "asked to stop, and did not end within preempt.grace_seconds"
        if status >= 0:
            return f"ended with exit code {status} and without a report"
        oom = -status == signal.SIGKILL and num_oom_kills() > self._oom_kills
        return f"killed by {signal_name(-status)}" + (
            " by the kernel, out of memory" if oom else ""
        )

    def _say_cause(self, cause: RootCause) -> None:
        """Print the cause."""
        folder = self.folder()
        about = {"step": cause.step, "ranks": list(cause.ranks), "reason": cause.reason}
        extra = {"incident": "crash", "fields": about}
        _log.error("! step %d crash: %s", cause.step, cause.reason, extra=extra)
        if cause.kind == MEMORY:
            _log.info(
                "out of memory: lower batch.micro_size (the next start halves it); in a loop of "
                "your own, take smaller batches. If much is reserved and not allocated: "
                "PYTORCH_ALLOC_CONF=expandable_segments:True"
            )
        _log.info("evidence of each rank: %s", folder)
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            known = asdict(replace(cause, first=None))
            del known["first"]  # has a file of its own
            write_json(folder / CAUSE, known)

    def _write_down(self, cause: RootCause) -> None:
        journal, run_lease = self.journal, self.run_lease
        if journal is None or run_lease is None:
            return

        def write() -> None:
            with contextlib.suppress(OSError, Superseded):
                journal(cause, run_lease.number)

        # The training thread may be stuck in this very file: the next start can write it too.
        wait([in_thread(write, "journal")], _JOURNAL_SECONDS)

    def _end_silent_peers(self) -> None:
        """End stopped peers: each would hold the launcher up for half a minute."""
        by_rank = reported(self._own_folder())
        for peer in self._peers:
            rank, process = int(peer["rank"]), peer["process"]
            if rank != self._place.rank and rank not in by_rank and is_alive(process):
                with contextlib.suppress(OSError):
                    os.kill(int(process["pid"]), signal.SIGKILL)

    def folder(self) -> Path:
        assert self.run_lease is not None
        return self._dir.incident(self.run_lease.number)

    def _own_folder(self) -> Path:
        """The folder for this rank's report."""
        first = self._place.rank - self._place.local_rank
        return node_folder(self.folder(), first) if self._is_by_node else self.folder()

    @property
    def _is_by_node(self) -> bool:
        return self._place.world_size >= FROM_RANKS

    @property
    def settle_seconds(self) -> float:
        """How long to wait for the others' reports; longer with more ranks."""
        more = _SECONDS_A_RANK * self._place.world_size if self._is_by_node else 0.0
        return SETTLE_SECONDS + more


def _tell_torchrun(error: Exception) -> None:
    """Write the file from which torchrun's table of failures takes the traceback."""
    if "TORCHELASTIC_ERROR_FILE" in variables():
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        with contextlib.suppress(OSError):
            get_error_handler().record_exception(error)


# Journal lines for crashes, written by a survivor at once or by the next start from the disk.


def crash_incident(cause: RootCause, number: int) -> Incident:
    """The journal line for the crash of incarnation ``number``."""
    first = cause.first
    return Incident(
        kind="crash",
        step=cause.step,
        decision="restart from the ring",
        reason=cause.reason,
        ranks=cause.ranks,
        detail={
            "incarnation": number,
            "cause": cause.kind,
            "signature": cause.signature,
            "host": first.host if first else "",
            "traceback": first.traceback if first else "",
        },
    )


def unexplained(run_dir: RunDir, lines: list[dict[str, Any]], number: int) -> list[Incident]:
    """Lines for incarnations before ``number`` that crashed and have no line yet."""
    journalled = {line["detail"].get("incarnation") for line in lines if line["kind"] == "crash"}
    starts = {line["detail"].get("incarnation"): line for line in lines if line["kind"] == "start"}
    incidents = []
    # Incarnations before the oldest claim wrote to another directory, which was lost.
    for earlier in range(oldest_number(run_dir.incarnation), number):
        if earlier in journalled or has_ended(run_dir.incarnation, earlier):
            continue
        start = starts.get(earlier)
        world_size = int(start["detail"].get("world_size", 1)) if start else 1
        reports = read_all_reports(run_dir.incident(earlier))
        by_rank = {report.rank: report for report in reports}
        # It died in the step after the last one journalled.
        next_step = step_of(last_line(run_dir.metrics) or {}) + 1
        for report in _fatal_reports(run_dir, earlier, world_size, next_step):
            by_rank.setdefault(report.rank, report)
        cause = find_root_cause(list(by_rank.values()), world_size)
        incidents.append(crash_incident(replace(cause, step=cause.step or next_step), earlier))
    return incidents


def clear_fatal_logs(run_dir: RunDir, number: int) -> None:
    """Remove the fatal logs of incarnations before ``number``: the journal has them by now."""
    for path in run_dir.debug.glob("fatal-*.txt"):
        if not path.name.startswith(f"fatal-{number:06d}-"):
            path.unlink(missing_ok=True)


def _fatal_reports(run_dir: RunDir, number: int, world_size: int, step: int) -> Iterable[Report]:
    for path in sorted(run_dir.debug.glob(f"fatal-{number:06d}-rank-*.txt")):
        rank = path.stem.rpartition("-")[2]
        if not (rank.isascii() and rank.isdecimal()) or int(rank) >= world_size:
            continue
        seen = Report(
            rank=int(rank), world_size=world_size, kind="fatal", step=step, phase="some phase"
        )
        report = read_fatal_log(path, seen)
        if report is not None:
            yield report
