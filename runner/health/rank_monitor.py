"""Ends a run that cannot go on, soon and on all ranks, and reports why.

Each rank has one. It watches the heartbeat, the other ranks' reports, the launcher, the lease and
the stop request from a thread of its own, writes this rank's report when something is wrong,
and lets one rank report the cause. What counts as the cause is decided in
:mod:`runner.health.root_cause`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, NoReturn

from torch._C._distributed_c10d import Store

from runner.distributed.env import JobEnv, RankEnv, tell_begun
from runner.distributed.rendezvous import Facts
from runner.health.collective_trace import collectives, has_nccl
from runner.health.hang import HangTimeouts, hang_message, is_moving
from runner.health.heartbeat import Heartbeat
from runner.health.leave import end_within, leave
from runner.health.lost_peer import OWN, message_of, whose_fault
from runner.health.node_reports import (
    FROM_RANKS,
    merge_node,
    node_folder,
    read_all_reports,
    reported_nodes,
)
from runner.health.peer_processes import PeerProcesses
from runner.health.preemption import StopRequest
from runner.health.rank_report import (
    CAUSE,
    Report,
    has_reports,
    now,
    read_fatal_log,
    read_reports,
    reported,
    stack_of,
    stacks,
    write_report,
)
from runner.health.root_cause import MEMORY, RootCause, find_root_cause
from runner.health.start_watch import StartWatch
from runner.health.watchdog import Watchdog
from runner.run_dir.lease import BEAT_SECONDS, RunLease
from runner.run_dir.paths import RunDir
from runner.system.environment import variables
from runner.system.error import Superseded
from runner.system.exit_codes import EXIT_CRASH
from runner.system.files import write_json
from runner.system.process import (
    first_parent,
    host_name,
    is_alive,
    num_oom_kills,
    own_process,
    pid_namespace,
)

_log = logging.getLogger(__name__)

_TICK_SECONDS = 0.5
_JOURNAL_SECONDS = 5.0
_SHARED_SECONDS = 1.0  # between looks at a folder that all ranks share
_SECONDS_A_RANK = 3e-4  # added to the wait for evidence, for each rank of a large job
# To write and report the cause, beyond watchdog.settle_seconds: a disk may not answer.
_TELL_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchRules:
    """``watchdog.*``; ``enabled`` False leaves the heartbeat unwatched."""

    enabled: bool
    patience: HangTimeouts
    settle_seconds: float


class RankMonitor:
    """See the module's docstring.

    Args:
        stop: the request to stop, whose grace period is watched too.
    """

    def __init__(
        self,
        *,
        place: RankEnv,
        launch: JobEnv,
        run_dir: RunDir,
        rules: WatchRules,
        stop: StopRequest,
    ) -> None:
        self.heart = Heartbeat()
        self._journal: Callable[[RootCause, int], None] | None = None
        self._place = place
        self._launch = launch
        self._dir = run_dir
        self._rules = rules
        self._stop = stop
        self._parent = first_parent()
        self._oom_kills = num_oom_kills()
        self._peers: Sequence[Facts] = ()
        self._run_lease: RunLease | None = None
        # Failures of the others are checked before the request to stop: torchrun makes one
        # when a rank has died, which is not a preemption.
        looks = [self._look_at_launcher, self._look_at_start]
        looks += [self._look_at_deaths_in_start, self._look_at_peers, self._look_at_others]
        looks.append(self._look_at_stop)
        self._watchdog = Watchdog(looks, tick_seconds=_TICK_SECONDS)
        self._neighbours: PeerProcesses | None = None
        self._fatal: tuple[Path, IO[str]] | None = None
        self._telling = threading.Lock()
        self._have_met = False
        self._was_uncaught = False
        self._expected: tuple[str, float, float] | None = None  # what, seconds, until when
        self._looked: dict[str, float] = {}
        self._start_watch: StartWatch | None = None

    def start(self) -> None:
        """Watch the launcher and requests to stop, while ranks wait for each other."""
        self._watchdog.start()

    def _look_at_stop(self) -> None:
        self._stop.look(f"{self.heart.phase} of step {self.heart.step}")

    def expect(self, what: str, seconds: float) -> None:
        """End this rank if the present stage of the start takes longer than this.

        NCCL's initialisation has no limit of its own, and a wrong interface or a blocked port
        would hold the job until its time is over.
        """
        self._expected = (what, seconds, time.monotonic() + seconds)
        if sys.__stderr__ is not None:
            self._watchdog.resort_to((sys.__stderr__, seconds + _TELL_SECONDS))

    def watch_start(self, room: Store, peers: Sequence[Facts]) -> None:
        """Watch for deaths from the rendezvous on, until :meth:`begin`.

        Args:
            room: the store of this group alone.
            peers: facts of this node's ranks.
        """
        self._watch_peers(peers)
        watch = StartWatch(room, self._place)
        watch.start()
        self._start_watch = watch

    def _watch_peers(self, peers: Sequence[Facts]) -> None:
        here = pid_namespace()
        self._peers = [peer for peer in peers if peer["pids"] == here]
        others = {int(peer["rank"]): peer["process"] for peer in self._peers}
        others.pop(self._place.rank, None)
        self._neighbours = PeerProcesses(others)
        self._neighbours.start()

    def begin(self, run_lease: RunLease, peers: Sequence[Facts]) -> None:
        """Watch the rest as well. ``peers``: facts of this node's ranks, from the rendezvous."""
        if self._neighbours is None:
            self._watch_peers(peers)
        self._run_lease = run_lease
        if self._start_watch is not None:
            self._start_watch.stop()
        if self._place.world_size > 1:  # a single rank reports to its terminal
            path = self._dir.fatal(run_lease.number, self._place.rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fatal = (path, path.open("w"))
            faulthandler.enable(self._fatal[1])
        looks: list[Callable[[], None]] = [self._check_lease]
        last_resort = None
        if self._rules.enabled:
            looks.append(self._look_at_heart)
            if self._fatal is not None:
                last_resort = (self._fatal[1], 2 * self._rules.patience.slow_seconds + 60)
        self._expected = None
        self._watchdog.resort_to(None)
        self._watchdog.add(looks, last_resort=last_resort)
        facts = {
            "process": own_process(),
            "world_size": self._place.world_size,
            "local_world_size": self._place.local_world_size,
            "incident": str(self._folder().absolute()),
            "fatal": str(self._dir.fatal(run_lease.number, self._place.rank).absolute()),
        }
        tell_begun(variables(), self._place.rank, facts)

    def write_causes_to(self, journal: Callable[[RootCause, int], None]) -> None:
        """Let this rank journal what ends the run from now on."""
        self._journal = journal

    def all_have_met(self) -> None:
        """Note that every rank has reached the end; from now on each may end its process."""
        self._have_met = True

    def dead_peers(self) -> list[int]:
        """Ranks of this node that died before all ranks reached the end."""
        if self._have_met or self._neighbours is None:
            return []
        return sorted(self._neighbours.ended_badly())

    def end(self) -> None:
        """Stop watching: the run has come to an end that all ranks know of."""
        self._watchdog.stop()
        if self._start_watch is not None:
            self._start_watch.stop()
        if self._fatal is not None:
            faulthandler.disable()
            self._fatal[1].close()
            self._fatal[0].unlink(missing_ok=True)
        if self._run_lease is not None and self._place.is_first and not self._was_uncaught:
            self._run_lease.release()

    def uncaught(self, error: Exception) -> None:
        """Report an uncaught error of a user's script.

        Always returns, because the script decides what it does at its end. The lease is not
        released, so that the next start writes a journal line if this rank could not.
        """
        if self._run_lease is None:
            return
        self._was_uncaught = True
        if not self._telling.acquire(timeout=self._settle_seconds + _TELL_SECONDS):
            return  # the watchdog has it, and ends this process
        try:
            kind = whose_fault(error)
            if kind == OWN:
                self._tell_own_again(error)
            else:
                self._write(self._report(kind, message_of(error), error))
                self._tell_cause()
        except Exception as failure:  # the script's error matters more
            _log.error("reporting an error failed: %s", failure)

    def failed(self, error: Exception) -> None:
        """Report that the training thread ends with an error that the other ranks do not share.

        Returns when the error is this rank's own. When it says that others are gone, or does not
        say whose fault it is, the cause comes from all ranks' reports and the process ends.
        """
        if self._run_lease is None:
            return
        code = error.exit_code if isinstance(error, Superseded) else EXIT_CRASH
        cancel = self._end_soon(code)
        # The lock is never released, because the watchdog has nothing to add. If the watchdog holds
        # it, the watchdog ends this process; if that takes too long, this thread does.
        if not self._telling.acquire(timeout=self._settle_seconds + _TELL_SECONDS):
            leave(code)
        if isinstance(error, Superseded):
            self._give_way(error)
        kind = whose_fault(error)
        if kind != OWN:
            self._conclude(kind, message_of(error), error)
        try:
            self._tell_own(error)
        except Exception as failure:  # the caller's error matters more
            _log.error("reporting an error failed: %s", failure)
        finally:
            cancel()

    def _tell_own_again(self, error: Exception) -> None:
        """:meth:`_tell_own` within the handling of ``error``, which torchrun's error file needs."""
        try:
            raise error
        except Exception:
            self._tell_own(error)

    def _tell_own(self, error: Exception) -> None:
        """Report this rank's own error, which the caller then raises."""
        message = f"{type(error).__name__}: {message_of(error)}"
        report = self._report("exception", message, error)
        cause = find_root_cause([report], self._place.world_size)
        self._say_cause(
            cause
        )  # first: the others announce a cause when they see a report without one
        self._write(report)
        self._write_down(cause)
        _tell_torchrun(error)

    # -- looks of the watchdog ------------------------------------------------------------

    def _look_at_heart(self) -> None:
        message = hang_message(self.heart, self._rules.patience)
        if message is not None and self._telling.acquire(blocking=False):
            self._conclude("hang", message)

    def _look_at_peers(self) -> None:
        """End when a rank of this node has died: over NCCL no collective fails because of it."""
        dead = self.dead_peers() if self._run_lease is not None else []
        if dead and self._telling.acquire(blocking=False):
            named = ", ".join(map(str, dead))
            self._conclude("called", f"rank {named} of this node is dead")

    def _look_at_deaths_in_start(self) -> None:
        """End when a rank of any node has died before the run directory was taken."""
        watch = self._start_watch
        if watch is None or self._run_lease is not None:
            return
        dead = self.dead_peers()
        if not (watch.problem or dead) or not self._telling.acquire(blocking=False):
            return
        self._end_soon(EXIT_CRASH)
        try:
            problem = watch.problem or self._death_in_start(dead[0])
            _log.error("the start has failed: %s", problem)
            if dead:
                watch.tell(problem)
        finally:
            leave(EXIT_CRASH)

    def _death_in_start(self, rank: int) -> str:
        assert self._neighbours is not None
        death = self._death(self._neighbours.deaths[rank])
        return f"rank {rank} on {host_name()}: {death}, after the rendezvous"

    def _look_at_others(self) -> None:
        """When another rank has reported, add this rank's report and end."""
        if self._have_met or self._run_lease is None or not self._is_due("others", _SHARED_SECONDS):
            return
        # With many ranks the folder is not listed: the first rank that reports creates it.
        folder = self._folder()
        if not (folder.exists() if self._is_by_node else has_reports(folder)):
            return
        if self._telling.acquire(blocking=False):
            self._conclude("called", "called by another rank's report")

    def _look_at_launcher(self) -> None:
        if not self._launch.has_agent or os.getppid() == self._parent:
            return
        if self._telling.acquire(blocking=False):
            self._end_soon(EXIT_CRASH)
            try:
                message = (
                    f"the launcher (process {self._parent}) is gone; nothing would stop this rank"
                )
                if self._run_lease is not None:
                    self._write(self._report("exception", message))
                _log.error("%s", message)
            finally:
                leave(EXIT_CRASH)

    def _look_at_start(self) -> None:
        """End a rank whose start takes longer than :meth:`expect` allows."""
        expected = self._expected
        if expected is None or time.monotonic() < expected[2]:
            return
        if self._telling.acquire(blocking=False):
            self._end_soon(EXIT_CRASH)
            try:
                what, seconds, _ = expected
                _log.error(
                    "rank %d on %s: %s did not end within %g s",
                    *(self._place.rank, host_name(), what, seconds),
                )
            finally:
                leave(EXIT_CRASH)

    def _check_lease(self) -> None:
        """Check the lease, on one rank of each node; rank 0 also shows that the run is alive."""
        if self._run_lease is None or self._place.local_rank != 0:
            return
        if not self._is_due("run_lease", BEAT_SECONDS):
            return
        try:
            self._run_lease.check()
            if self._place.is_first and self._moves():
                self._run_lease.beat()
        except Superseded as error:
            self._give_way(error)

    def _moves(self) -> bool:
        """Whether the training thread makes progress; without progress a run must not look alive.

        The watchdog's limits count even where the watchdog is disabled.
        """
        return is_moving(self.heart, self._rules.patience)

    def _is_due(self, what: str, seconds: float) -> bool:
        """Whether to look again: at most once in so many seconds, as all ranks share the disk."""
        now = time.monotonic()
        if now < self._looked.get(what, 0.0) + seconds:
            return False
        self._looked[what] = now
        return True

    def _give_way(self, error: Superseded) -> NoReturn:
        self._end_soon(error.exit_code)
        try:
            _log.error("%s", error)
        finally:
            leave(error.exit_code)

    def _end_soon(self, code: int) -> Callable[[], None]:
        """End this process within a limit, even if its last report is blocked."""
        return end_within(self._settle_seconds + _TELL_SECONDS, code)

    # -- telling --------------------------------------------------------------------------

    def _folder(self) -> Path:
        assert self._run_lease is not None
        return self._dir.incident(self._run_lease.number)

    @property
    def _is_by_node(self) -> bool:
        return self._place.world_size >= FROM_RANKS

    @property
    def _settle_seconds(self) -> float:
        """How long to wait for the others' reports; longer with more ranks."""
        more = _SECONDS_A_RANK * self._place.world_size if self._is_by_node else 0.0
        return self._rules.settle_seconds + more

    def _own_folder(self) -> Path:
        """The folder for this rank's report."""
        first = self._place.rank - self._place.local_rank
        return node_folder(self._folder(), first) if self._is_by_node else self._folder()

    def _report(self, kind: str, message: str, error: BaseException | None = None) -> Report:
        """Make a whole report, with collectives; write an early one first where NCCL must be asked.

        The thread that asks may never release the interpreter's lock.
        """
        early = self._without_collectives(kind, message, error)
        if self._run_lease is not None and has_nccl():
            with contextlib.suppress(OSError):
                write_report(self._own_folder(), early, early=True)
        entries, untold = collectives()
        return replace(early, collectives=entries, untold=untold)

    def _without_collectives(self, kind: str, message: str, error: BaseException | None) -> Report:
        heart = self.heart
        return Report(
            rank=self._place.rank,
            world_size=self._place.world_size,
            kind=kind,
            step=heart.step,
            phase=heart.phase,
            seconds=round(heart.seconds, 3),
            message=message,
            traceback="".join(traceback.format_exception(error)) if error else "",
            host=host_name(),
            pid=os.getpid(),
            time=now(),
            stacks=[stack_of(error)] if error is not None else stacks(),
        )

    def _write(self, report: Report, *, for_other: bool = False) -> None:
        # Ending in time matters more than evidence: a full disk must not keep this process.
        with contextlib.suppress(OSError):
            write_report(self._own_folder(), report, for_other=for_other)

    def _conclude(self, kind: str, message: str, error: Exception | None = None) -> NoReturn:
        """Write this rank's report, wait for the others', report the cause once, and end."""
        self._end_soon(EXIT_CRASH)
        try:
            self._write(self._report(kind, message, error))
            self._tell_cause()
        except Exception as failure:
            _log.error("%s: %s; reporting it failed: %s", kind, message, failure)
        finally:
            leave(EXIT_CRASH)

    def _tell_cause(self) -> None:
        """Report the cause from all ranks' reports, unless another rank does."""
        if self._is_by_node:
            self._tell_cause_of_many()
            return
        by_rank = self._wait_for_reports(self._place.world_size, self._settle_seconds)
        own = self._place.rank
        is_teller = own == min((rank for rank, is_own in by_rank.items() if is_own), default=own)
        # A rank with an exception of its own has reported it already.
        is_teller = is_teller and not (self._folder() / CAUSE).exists()
        if is_teller or self._place.is_first:
            cause = find_root_cause(read_reports(self._folder()), self._place.world_size)
            if is_teller:
                self._say_cause(cause)
            self._write_down(cause)
        self._end_silent_peers()

    def _tell_cause_of_many(self) -> None:
        """Merge each node's reports into one file; the lowest leader reports the cause."""
        limit = time.monotonic() + self._settle_seconds
        arrived = self._wait_for_reports(self._place.local_world_size, self._settle_seconds / 2)
        leader = min((rank for rank, is_own in arrived.items() if is_own), default=self._place.rank)
        folder, first = self._folder(), self._place.rank - self._place.local_rank
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
            if is_teller or self._place.is_first:
                cause = find_root_cause(read_all_reports(folder), self._place.world_size)
                if is_teller:
                    self._say_cause(cause)
                self._write_down(cause)
        self._end_silent_peers()

    def _say_cause(self, cause: RootCause) -> None:
        """Print the cause."""
        folder = self._folder()
        about = {"step": cause.step, "ranks": list(cause.ranks), "reason": cause.reason}
        extra = {"incident": "crash", "fields": about}
        _log.error("! step %d crash: %s", cause.step, cause.reason, extra=extra)
        if cause.kind == MEMORY:
            _log.info(
                "out of memory: lower batch.micro_size (the next start halves it); in a loop of "
                "your own, take smaller batches"
            )
        _log.info("evidence of each rank: %s", folder)
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / CAUSE, to_json(cause))

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
        assert self._neighbours is not None and self._run_lease is not None
        by_rank = reported(self._own_folder())
        for rank, status in list(self._neighbours.deaths.items()):
            if rank in by_rank:
                continue
            report = Report(
                rank=rank,
                world_size=self._place.world_size,
                kind="signal" if status is not None and status < 0 else "exit",
                step=self.heart.step,
                phase=self.heart.phase,
                message=self._death(status),
                host=host_name(),
                time=now(),
            )
            # Some signals leave a rank time for a fatal log.
            fatal = self._dir.fatal(self._run_lease.number, rank)
            self._write(read_fatal_log(fatal, report) or report, for_other=True)

    def _death(self, status: int | None) -> str:
        """The kind and message of a peer's status (see :class:`PeerProcesses`)."""
        if status is None:
            return "gone without a report: SIGKILL, out of memory, or ended by its launcher"
        if status >= 0:
            return f"ended with exit code {status} and without a report"
        oom = -status == signal.SIGKILL and num_oom_kills() > self._oom_kills
        return f"killed by {_signal_name(-status)}" + (
            " by the kernel, out of memory" if oom else ""
        )

    def _write_down(self, cause: RootCause) -> None:
        journal, run_lease = self._journal, self._run_lease
        if journal is None or run_lease is None:
            return

        def write() -> None:
            with contextlib.suppress(OSError, Superseded):
                journal(cause, run_lease.number)

        # The training thread may be stuck in this very file: the next start can write it too.
        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        writer.join(_JOURNAL_SECONDS)

    def _end_silent_peers(self) -> None:
        """End stopped peers: each would hold the launcher up for half a minute."""
        by_rank = reported(self._own_folder())
        for peer in self._peers:
            rank, process = int(peer["rank"]), peer["process"]
            if rank != self._place.rank and rank not in by_rank and is_alive(process):
                with contextlib.suppress(OSError):
                    os.kill(int(process["pid"]), signal.SIGKILL)


def to_json(cause: RootCause) -> dict[str, object]:
    """The cause as JSON, without the report, which has a file of its own."""
    return {
        "kind": cause.kind,
        "ranks": list(cause.ranks),
        "step": cause.step,
        "reason": cause.reason,
        "signature": cause.signature,
    }


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tell_torchrun(error: Exception) -> None:
    """Write the file from which torchrun's table of failures takes the traceback."""
    if "TORCHELASTIC_ERROR_FILE" in variables():
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        with contextlib.suppress(OSError):
            get_error_handler().record_exception(error)
