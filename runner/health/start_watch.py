"""Watches the start: its limit, and deaths, which are announced through the store.

Between the rendezvous and the start of the run the ranks make their communicators and acquire the
run directory. NCCL does not return from that when a peer is gone, and there is no folder yet for
the ranks' reports. Processes of the same node are watched directly (:mod:`.peer_processes`). On
each node one rank, the leader, is the node's heartbeat: about once a second it changes a key in
the store, and reads the key of the next node (the last node reads the first's). A leader that finds
a death sets one key, which all leaders read. That costs three calls of the store a second for each
node, and one more connection.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from concurrent.futures import wait
from functools import partial

from torch._C._distributed_c10d import PrefixStore, Store

from runner.distributed.env import RankEnv
from runner.distributed.rendezvous import first_line, without_frames
from runner.health.cause_reporter import CauseReporter
from runner.system.process import host_name, in_thread

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
