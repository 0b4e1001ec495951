"""Sees to it that a run which cannot go on ends soon, on all ranks, and says why.

One per rank. It watches the heartbeat, the other ranks' reports, the launcher, the fence and
the stop request from a thread of its own, writes this rank's report when something is wrong,
and lets one rank tell the cause. What counts as cause is decided in :mod:`runner.dist.blame`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

from runner.dist.blame import Blame, blame
from runner.dist.evidence import (
    Report,
    collectives,
    is_lost_contact,
    last_words,
    now,
    read_reports,
    reported,
    stack_of,
    stacks,
    write_report,
)
from runner.dist.group import leave
from runner.dist.heartbeat import Heartbeat, Patience
from runner.dist.launcher import Launch, Place
from runner.dist.meet import Facts, first_line
from runner.dist.neighbours import Neighbours
from runner.dist.proc import host_name, is_alive, num_oom_kills
from runner.dist.watchdog import Watchdog
from runner.error import EXIT_CRASH, Superseded
from runner.files import write_json
from runner.rundir import RunDir
from runner.watch.fence import BEAT_SECONDS, Fence
from runner.watch.stop import StopRequest

_TICK_SECONDS = 0.5
_CAUSE = "cause.json"
_JOURNAL_SECONDS = 5.0
_SHARED_SECONDS = 1.0  # between looks at a folder that all ranks look at


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchRules:
    """``watchdog.*``; ``enabled`` False leaves the heartbeat unwatched."""

    enabled: bool
    patience: Patience
    settle_seconds: float


class Witness:
    """See the module's docstring.

    Args:
        stop: its grace is watched too.
        journal: set later, on rank 0: writes the cause down.
    """

    def __init__(
        self, *, place: Place, launch: Launch, run_dir: RunDir, rules: WatchRules, stop: StopRequest
    ) -> None:
        self.heart = Heartbeat()
        self.journal: Callable[[Blame, int], None] | None = None
        self._place = place
        self._launch = launch
        self._dir = run_dir
        self._rules = rules
        self._stop = stop
        self._parent = os.getppid()
        self._oom_kills = num_oom_kills()
        self._peers: Sequence[Facts] = ()
        self._fence: Fence | None = None
        self._watchdog: Watchdog | None = None
        self._neighbours: Neighbours | None = None
        self._fatal: tuple[Path, IO[str]] | None = None
        self._telling = threading.Lock()
        self._looked: dict[str, float] = {}

    def begin(self, fence: Fence, peers: Sequence[Facts]) -> None:
        """Watch from now on. ``peers``: what this node's ranks told at the roll call."""
        self._fence, self._peers = fence, peers
        others = {int(p["rank"]): int(p["process"]["pid"]) for p in peers}
        others.pop(self._place.rank, None)
        self._neighbours = Neighbours(others)
        self._neighbours.start()
        if self._place.world_size > 1:  # alone, the terminal is the better place
            path = self._dir.fatal(fence.number, self._place.rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fatal = (path, path.open("w"))
            faulthandler.enable(self._fatal[1])
        looks: list[Callable[[], None]] = [self._look_at_fence, self._look_at_launcher]
        looks += [self._stop.look, self._look_at_others]
        last_resort = None
        if self._rules.enabled:
            looks.append(self._look_at_heart)
            if self._fatal is not None:
                last_resort = (self._fatal[1], 2 * self._rules.patience.slow_seconds + 60)
        self._watchdog = Watchdog(looks, tick_seconds=_TICK_SECONDS, last_resort=last_resort)
        self._watchdog.start()

    def end(self) -> None:
        """The run has come to an end that all ranks know of."""
        if self._watchdog is not None:
            self._watchdog.stop()
        if self._fatal is not None:
            faulthandler.disable()
            self._fatal[1].close()
            self._fatal[0].unlink(missing_ok=True)
        if self._fence is not None and self._place.is_first:
            self._fence.release()

    def failed(self, error: Exception) -> None:
        """The training thread ends with an error that the other ranks do not share.

        Returns when the error is this rank's own. When it only says that others are gone, their
        cause is told in its place and the process ends.
        """
        if self._fence is None:
            return
        self._telling.acquire()  # for good: the watchdog has nothing to add
        if isinstance(error, Superseded):
            self._give_way(error)
        if not is_lost_contact(error):
            words = f"{type(error).__name__}: {first_line(error)}"
            report = self._report("exception", words, error)
            cause = blame([report], self._place.world_size)
            self._say_cause(cause)  # first: the others say it when they see a report without
            self._write(report)
            self._write_down(cause)
            _tell_torchrun(error)
            return
        self._write(self._report("lost_contact", first_line(error), error))
        self._conclude()

    # -- looks of the watchdog ------------------------------------------------------------

    def _look_at_heart(self) -> None:
        heart, limit = self.heart, self.heart.limit(self._rules.patience)
        if heart.seconds > limit and self._telling.acquire(blocking=False):
            words = f"no progress for {heart.seconds:.1f} s (limit {limit:.1f} s)"
            self._write(self._report("hang", words))
            self._conclude()

    def _look_at_others(self) -> None:
        """Another rank has something to tell: add this rank's part, and end."""
        if not self._is_due("others", _SHARED_SECONDS) or not reported(self._folder()):
            return
        if self._telling.acquire(blocking=False):
            self._write(self._report("called", "called by another rank's report"))
            self._conclude()

    def _look_at_launcher(self) -> None:
        if self._launch.has_agent and os.getppid() != self._parent:
            words = f"the launcher (process {self._parent}) is gone; nobody would stop this rank"
            if self._telling.acquire(blocking=False):
                self._write(self._report("exception", words))
                _say(f"rank {self._place.rank}: {words}")
                leave(EXIT_CRASH)

    def _look_at_fence(self) -> None:
        """One rank a node looks; rank 0 also shows that the run is alive."""
        if self._fence is None or self._place.local_rank != 0:
            return
        if not self._is_due("fence", BEAT_SECONDS):
            return
        try:
            self._fence.check()
            if self._place.is_first:
                self._fence.beat()
        except Superseded as error:
            self._give_way(error)

    def _is_due(self, what: str, seconds: float) -> bool:
        """At most once in so many seconds: the file system is shared by all ranks."""
        now = time.monotonic()
        if now < self._looked.get(what, 0.0) + seconds:
            return False
        self._looked[what] = now
        return True

    def _give_way(self, error: Superseded) -> NoReturn:
        _say(f"rank {self._place.rank}: {error}")
        leave(error.exit_code)

    # -- telling --------------------------------------------------------------------------

    def _folder(self) -> Path:
        assert self._fence is not None
        return self._dir.incident(self._fence.number)

    def _report(self, kind: str, message: str, error: BaseException | None = None) -> Report:
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
            collectives=collectives(),
        )

    def _write(self, report: Report, *, for_other: bool = False) -> None:
        # Evidence is worth having, ending in time is worth more: a full disk is no reason to stay.
        with contextlib.suppress(OSError):
            write_report(self._folder(), report, for_other=for_other)

    def _conclude(self) -> NoReturn:
        """Wait for the others' reports, say the cause once, end this process."""
        told = self._wait_for_reports()
        own = self._place.rank
        is_teller = own == min((rank for rank, is_own in told.items() if is_own), default=own)
        # A rank with an exception of its own has told it already.
        is_teller = is_teller and not (self._folder() / _CAUSE).exists()
        if is_teller or self._place.is_first:
            cause = blame(read_reports(self._folder()), self._place.world_size)
            if is_teller:
                self._say_cause(cause)
            self._write_down(cause)
        self._end_silent_peers()
        leave(EXIT_CRASH)

    def _say_cause(self, cause: Blame) -> None:
        """To the person watching."""
        folder = self._folder()
        _say(f"! step {cause.step} crash: {cause.reason}")
        _say(f"evidence of each rank: {folder}")
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / _CAUSE, to_json(cause))

    def _wait_for_reports(self) -> dict[int, bool]:
        """Ranks that have told, or that somebody has told of; and whether they did it."""
        limit = time.monotonic() + self._rules.settle_seconds
        while True:
            self._write_for_the_dead()
            told = reported(self._folder())
            if len(told) == self._place.world_size or time.monotonic() > limit:
                return told
            time.sleep(0.02 + 1e-4 * self._place.world_size)

    def _write_for_the_dead(self) -> None:
        """A dead neighbour cannot write itself."""
        assert self._neighbours is not None and self._fence is not None
        told = reported(self._folder())
        for rank, status in list(self._neighbours.deaths.items()):
            if rank in told:
                continue
            report = Report(
                rank=rank,
                world_size=self._place.world_size,
                kind="signal" if status < 0 else "exit",
                step=self.heart.step,
                phase=self.heart.phase,
                message=self._death(status),
                host=host_name(),
                time=now(),
            )
            # Some signals leave a rank the time for its last words.
            fatal = self._dir.fatal(self._fence.number, rank)
            self._write(last_words(fatal, report) or report, for_other=True)

    def _death(self, status: int) -> str:
        """What a neighbour's status (see :func:`runner.dist.proc.exit_status`) means."""
        if status >= 0:
            return f"ended with exit code {status} and without a word"
        oom = -status == signal.SIGKILL and num_oom_kills() > self._oom_kills
        return f"killed by {_signal_name(-status)}" + (
            " by the kernel, out of memory" if oom else ""
        )

    def _write_down(self, cause: Blame) -> None:
        journal, fence = self.journal, self._fence
        if journal is None or fence is None:
            return

        def write() -> None:
            with contextlib.suppress(OSError, Superseded):
                journal(cause, fence.number)

        # The training thread may be stuck in the very file: the next start can write it too.
        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        writer.join(_JOURNAL_SECONDS)

    def _end_silent_peers(self) -> None:
        """A stopped neighbour would hold the launcher up for its own half minute."""
        told = reported(self._folder())
        for peer in self._peers:
            rank, process = int(peer["rank"]), peer["process"]
            if rank != self._place.rank and rank not in told and is_alive(process):
                with contextlib.suppress(OSError):
                    os.kill(int(process["pid"]), signal.SIGKILL)


def to_json(cause: Blame) -> dict[str, object]:
    """Without the report, which has a file of its own."""
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
    """So that its own table of failures shows the traceback."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        with contextlib.suppress(OSError):
            get_error_handler().record_exception(error)


def _say(words: str) -> None:
    sys.stderr.write(words + "\n")
    sys.stderr.flush()
