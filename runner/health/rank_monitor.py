"""Ends a run that cannot go on, soon and on all ranks.

Each rank has a :class:`RankMonitor`. It watches the heartbeat, the other ranks' reports, the
launcher, the lease and the stop request from a thread of its own. :class:`StartMonitor` watches the
start, :mod:`runner.health.cause_reporter` reports why the run ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import IO

from torch._C._distributed_c10d import PrefixStore, Store

from runner.config.schema import WatchdogConfig
from runner.distributed.env import JobEnv, RankEnv, tell_begun
from runner.distributed.rendezvous import Facts, first_line, without_frames
from runner.health.cause_reporter import TELL_SECONDS, CauseReporter
from runner.health.heartbeat import Heartbeat, hang_message
from runner.health.notice import Notices
from runner.health.preemption import StopRequest
from runner.run_dir.lease import BEAT_SECONDS, RunLease
from runner.run_dir.paths import RunDir
from runner.system.environment import variables
from runner.system.error import Superseded
from runner.system.process import (
    first_parent,
    host_name,
    in_thread,
    own_process,
    wake_without_parent,
)

# A thread that runs checks while the training thread may be stuck.
#
# It does not know the checks: :class:`RankMonitor` has those of a run, and
# :mod:`runner.health.heartbeat` decides that a rank hangs.


Look = Callable[[], None]

_log = logging.getLogger(__name__)

# A tick that comes later than this was not slow: the whole process had been stopped.
_STOPPED_SECONDS = 5.0
_LAST_LOOK_SECONDS = 10.0


class Watchdog:
    """Calls every check once a tick, in a daemon thread. A check may end the process."""

    def __init__(self, looks: Sequence[Look], *, tick_seconds: float) -> None:
        self._looks = list(looks)
        self._tick_seconds = tick_seconds
        self._last_resort: tuple[IO[str], float] | None = None
        self._is_armed = False
        self._said: set[str] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, looks: Sequence[Look]) -> None:
        """Add checks; from any thread."""
        self._looks.extend(looks)

    def resort_to(self, last_resort: tuple[IO[str], float] | None) -> None:
        """Set or remove the last resort, from any thread: the file for the stacks, and the seconds
        after which faulthandler ends the process if not even this thread can run (an extension
        holds the GIL)."""
        self._last_resort = last_resort

    def stop(self) -> None:
        """Stop, and wait for the last check for a limited time."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(_LAST_LOOK_SECONDS)
        if self._is_armed:
            faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._over.wait(self._tick_seconds):
            now = time.monotonic()
            was_stopped = now - last > self._tick_seconds + _STOPPED_SECONDS
            last = now
            self._arm()
            if was_stopped:
                continue  # let the training thread run before it is judged
            for look in list(self._looks):
                self._call(look)

    def _call(self, look: Look) -> None:
        """Call one check; an error in it stops neither the others nor its next turn."""
        try:
            look()
        except OSError:
            return  # a shared file system that stutters
        except Exception as error:
            name = getattr(look, "__name__", "a look")
            if name not in self._said:
                self._said.add(name)
                _log.error("watchdog: %s raised %s: %s", name, type(error).__name__, error)

    def _arm(self) -> None:
        wanted = self._last_resort
        if wanted is not None:
            self._is_armed = True
            faulthandler.dump_traceback_later(wanted[1], exit=True, file=wanted[0])
        elif self._is_armed:
            self._is_armed = False
            faulthandler.cancel_dump_traceback_later()


_TICK_SECONDS = 0.5
_SHARED_SECONDS = 1.0  # between looks at a folder that all ranks share


class RankMonitor:
    """See the module's docstring.

    Args:
        stop: the request to stop, whose grace period is watched too.
        notices: what asks whether this machine is taken back, on one rank of each node.
    """

    def __init__(
        self,
        *,
        place: RankEnv,
        launch: JobEnv,
        run_dir: RunDir,
        watchdog: WatchdogConfig,
        stop: StopRequest,
        notices: Notices | None = None,
    ) -> None:
        self._notices = notices
        self.heart = Heartbeat()
        self._place = place
        self._launch = launch
        self._dir = run_dir
        self._settings = watchdog
        self._stop = stop
        self._parent = first_parent()
        self.causes = CauseReporter(place, run_dir, self.heart)
        self._start = StartMonitor(place, self.causes)
        # Failures of the others are checked before the request to stop: torchrun makes one
        # when a rank has died, which is not a preemption.
        looks = [self._look_at_launcher, self._start.look_at_limit, self._look_at_deaths_in_start]
        looks += [self._look_at_peers, self._look_at_others]
        looks.append(self._look_at_stop)
        self._watchdog = Watchdog(looks, tick_seconds=_TICK_SECONDS)
        self._fatal: tuple[Path, IO[str]] | None = None
        self._have_met = False
        self._was_uncaught = False
        self._looked: dict[str, float] = {}

    @property
    def hears_notices(self) -> bool:
        """Whether it asks if this machine is taken back."""
        return self._notices is not None

    def start(self) -> None:
        """Watch the launcher and requests to stop, while ranks wait for each other."""
        if self._launch.has_agent:
            wake_without_parent()
        self._watchdog.start()
        if self._notices is not None:
            self._notices.begin()

    def _look_at_stop(self) -> None:
        self._stop.look(f"{self.heart.phase} of step {self.heart.step}")

    def expect(self, what: str, seconds: float) -> None:
        """End this rank if the present stage of the start takes longer than this."""
        self._start.expect(what, seconds)
        if sys.__stderr__ is not None:
            self._watchdog.resort_to((sys.__stderr__, seconds + TELL_SECONDS))

    def watch_start(self, store: Store, peers: Sequence[Facts]) -> None:
        """Watch for deaths from the rendezvous on, until :meth:`begin`.

        Args:
            store: that of this group alone.
            peers: facts of this node's ranks.
        """
        self.causes.watch_peers(peers)
        self._start.watch(store)

    def begin(self, run_lease: RunLease, peers: Sequence[Facts]) -> None:
        """Watch the rest as well. ``peers``: facts of this node's ranks, from the rendezvous."""
        if self.causes.neighbours is None:
            self.causes.watch_peers(peers)
        self.causes.run_lease = run_lease
        self._start.stop()
        if self._place.world_size > 1:  # a single rank reports to its terminal
            path = self._dir.fatal(run_lease.number, self._place.rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fatal = (path, path.open("w"))
            faulthandler.enable(self._fatal[1])
        looks: list[Callable[[], None]] = [self._check_lease]
        last_resort = None
        if self._settings.enabled:
            looks.append(self._look_at_heart)
            if self._fatal is not None:
                last_resort = (self._fatal[1], 2 * self._settings.slow_seconds + 60)
        self._watchdog.resort_to(last_resort)
        self._watchdog.add(looks)
        facts = {
            "process": own_process(),
            "world_size": self._place.world_size,
            "local_world_size": self._place.local_world_size,
            "incident": str(self.causes.folder().absolute()),
            "fatal": str(self._dir.fatal(run_lease.number, self._place.rank).absolute()),
        }
        tell_begun(variables(), self._place.rank, facts)

    def uncaught(self, error: Exception) -> None:
        """Report an uncaught error of a user's script; see :meth:`CauseReporter.uncaught`.

        The lease is not released, so that the next start writes a journal line if this rank could
        not.
        """
        self._was_uncaught = self.causes.run_lease is not None
        self.causes.uncaught(error)

    def all_have_met(self) -> None:
        """Note that every rank has reached the end; from now on each may end its process."""
        self._have_met = True

    def dead_peers(self) -> list[int]:
        """Ranks of this node that died before all ranks reached the end."""
        neighbours = self.causes.neighbours
        return [] if self._have_met or neighbours is None else sorted(neighbours.ended_badly())

    def end(self) -> None:
        """Stop watching: the run has come to an end that all ranks know of."""
        self._watchdog.stop()
        self._start.stop()
        if self._notices is not None:
            self._notices.end()
        if self._fatal is not None:
            faulthandler.disable()
            with contextlib.suppress(OSError):  # the run is done: no error of the disk may fail it
                self._fatal[1].close()
                self._fatal[0].unlink(missing_ok=True)
        if self.causes.run_lease is not None and self._place.is_first and not self._was_uncaught:
            self.causes.run_lease.release()

    # -- looks of the watchdog ------------------------------------------------------------

    def _look_at_heart(self) -> None:
        message = hang_message(self.heart, self._settings)
        if message is not None and self.causes.has_turn():
            self.causes.conclude("hang", message)

    def _look_at_peers(self) -> None:
        """End when a rank of this node has died: over NCCL no collective fails because of it."""
        dead = self.dead_peers() if self.causes.run_lease is not None else []
        if dead and self.causes.has_turn():
            named = ", ".join(map(str, dead))
            self.causes.conclude("called", f"rank {named} of this node is dead")

    def _look_at_deaths_in_start(self) -> None:
        if self.causes.run_lease is None:
            self._start.look_at_deaths(self.dead_peers())

    def _look_at_others(self) -> None:
        """When another rank has reported, add this rank's report and end."""
        if self._have_met or self.causes.run_lease is None:
            return
        is_due = self._is_due("others", _SHARED_SECONDS)
        if is_due and self.causes.are_others_there() and self.causes.has_turn():
            self.causes.conclude("called", "called by another rank's report")

    def _look_at_launcher(self) -> None:
        if not self._launch.has_agent or os.getppid() == self._parent:
            return
        if self.causes.has_turn():
            gone = f"the launcher (process {self._parent}) is gone; nothing would stop this rank"
            self.causes.leave_saying(gone, is_own_fault=True)

    def _check_lease(self) -> None:
        """Check the lease, on one rank of each node; rank 0 also shows that the run is alive."""
        if self.causes.run_lease is None or self._place.local_rank != 0:
            return
        if not self._is_due("run_lease", BEAT_SECONDS):
            return
        try:
            self.causes.run_lease.check()
            # Without progress a run must not look alive, also where the watchdog is disabled.
            if self._place.is_first and not hang_message(self.heart, self._settings):
                self.causes.run_lease.beat()
        except Superseded as error:
            self.causes.give_way(error)

    def _is_due(self, what: str, seconds: float) -> bool:
        """Whether to look again: at most once in so many seconds, as all ranks share the disk."""
        now = time.monotonic()
        if now < self._looked.get(what, 0.0) + seconds:
            return False
        self._looked[what] = now
        return True


# Watches the start: its limit, and deaths, which are announced through the store.
#
# Between the rendezvous and the start of the run the ranks make their communicators and acquire the
# run directory. NCCL does not return from that when a peer is gone, and there is no folder yet for
# the ranks' reports. Processes of the same node are watched directly. On each node one rank, the
# leader, is the node's heartbeat: about once a second it changes a key in the store, and reads the
# key of the next node (the last node reads the first's). A leader that finds a death sets one key,
# which all leaders read. That costs three calls of the store a second for each node, and one more
# connection.

_DEAD = "dead"
_OVER = "over"
_BEAT_SECONDS = 1.0
# Heartbeats missed in a row. There are many, because a false alarm costs a whole start. Looks are
# counted, not seconds: a process that was stopped itself must not take others for dead.
_SILENT_LOOKS = 60
_TELL_SECONDS = 5.0


class StartWatch:
    """One rank's part of the watch; the first rank of a node, its leader, has a thread.

    Attributes:
        problem: a sentence that says why this start ends; empty while nothing is known.

    Args:
        store: that of this group alone, from the rendezvous.
        place: this rank's place. Ranks of a node have consecutive numbers.
    """

    def __init__(self, store: Store, place: RankEnv) -> None:
        self.problem = ""
        self._group_store = store
        self._first = place.rank - place.local_rank
        self._next = (self._first + place.local_world_size) % place.world_size
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="start watch", daemon=True)
        self._is_leader = place.local_rank == 0 and self._next != self._first
        self._is_alone = place.local_world_size == place.world_size

    def start(self) -> None:
        """Begin to show that this node is alive, and to watch the next node."""
        if self._is_leader:
            self._thread.start()

    def stop(self) -> None:
        """End the watch: the start is over for this rank, and its silence means nothing."""
        self._is_over.set()

    def tell(self, problem: str) -> None:
        """Tell the leaders of all nodes why this start ends, if the store still answers."""
        if self._is_alone:
            return

        def set_it() -> None:
            with contextlib.suppress(RuntimeError), without_frames():
                _announce(self._connect(), problem)

        # In a thread: a store that is gone does not answer.
        wait([in_thread(set_it, "start problem")], _TELL_SECONDS)

    def _connect(self) -> Store:
        # A connection of its own: the training thread keeps the other one while it waits.
        store: Store = PrefixStore("start", self._group_store).clone()  # type: ignore[attr-defined]
        return store

    def _run(self) -> None:
        try:
            self._watch(self._connect())
        except RuntimeError as error:  # DistStoreError as well: the store's host is gone
            if not self._is_over.is_set():
                self.problem = f"lost the rendezvous store ({first_line(error)})"

    def _watch(self, store: Store) -> None:
        beats, missed, seen = 0, 0, b""
        while not self._is_over.wait(_BEAT_SECONDS):
            beats += 1
            store.set(_beat(self._first), str(beats))
            if store.check([_DEAD]):
                self.problem = bytes(store.get(_DEAD)).decode()
                return
            is_there = seen or store.check([_beat(self._next)])
            now = bytes(store.get(_beat(self._next))) if is_there else b""
            missed = 0 if now != seen or now == _OVER.encode() else missed + 1
            seen = now
            if missed >= _SILENT_LOOKS:
                self.problem = (
                    f"the node of rank {self._next} has been silent for "
                    f"{_SILENT_LOOKS * _BEAT_SECONDS:g} s since the rendezvous: it is gone, its "
                    f"network is, or its first rank has died (noticed on {host_name()})"
                )
                _announce(store, self.problem)
                return
        store.set(_beat(self._first), _OVER)


def _beat(first_rank: int) -> str:
    return f"beat/{first_rank}"


def _announce(store: Store, problem: str) -> None:
    """Set the key that ends the start, unless it is set: the first death is the cause."""
    store.compare_set(_DEAD, "", problem)


class StartMonitor:
    """Ends this rank if its start takes too long, or another rank dies in it.

    Args:
        causes: says why, and has the processes of this node's other ranks.
    """

    def __init__(self, place: RankEnv, causes: CauseReporter) -> None:
        self._place = place
        self._causes = causes
        self._limit: tuple[str, float, float] | None = None  # what, seconds, until when
        self._watch: StartWatch | None = None

    def expect(self, what: str, seconds: float) -> None:
        """Limit the present stage.

        NCCL's initialisation has no limit of its own, and a wrong interface or a blocked port
        would hold the job until its time is over.
        """
        self._limit = (what, seconds, time.monotonic() + seconds)

    def watch(self, store: Store) -> None:
        """Watch for deaths on all nodes. ``store``: that of this group alone."""
        watch = StartWatch(store, self._place)
        watch.start()
        self._watch = watch

    def stop(self) -> None:
        """The start is over for this rank."""
        self._limit = None
        if self._watch is not None:
            self._watch.stop()

    def look_at_limit(self) -> None:
        """End a rank whose start takes longer than :meth:`expect` allows."""
        limit = self._limit
        if limit is None or time.monotonic() < limit[2] or not self._causes.has_turn():
            return
        what, seconds, _ = limit
        self._causes.leave_saying(
            f"rank {self._place.rank} on {host_name()}: {what} did not end within {seconds:g} s"
        )

    def look_at_deaths(self, dead: Sequence[int]) -> None:
        """End when a rank of any node has died. ``dead``: those of this node."""
        watch = self._watch
        if watch is None or not (watch.problem or dead) or not self._causes.has_turn():
            return
        problem = watch.problem or self._death(dead[0])
        tell = partial(watch.tell, problem) if dead else None
        self._causes.leave_saying(f"the start has failed: {problem}", also=tell)

    def _death(self, rank: int) -> str:
        neighbours = self._causes.neighbours
        assert neighbours is not None
        death = self._causes.death(neighbours.deaths[rank])
        return f"rank {rank} on {host_name()}: {death}, after the rendezvous"
