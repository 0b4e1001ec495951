"""Announces deaths between the rendezvous and the start of the run through the store.

In this phase the ranks make their communicators and acquire the run directory. NCCL does not
return from that when a peer is gone, and there is no folder yet for the ranks'
reports. Processes of the same node are watched directly (:mod:`.peer_processes`). Of the other
nodes one rank each, the leader, shows that it is alive: it changes a key of the store about once a
second, and watches the key of the next node, the last node that of the first. Whoever finds a
death sets one key that all leaders look at. That is three calls of the store a second for each
node, and one more connection.
"""

from __future__ import annotations

import contextlib
import threading

from torch._C._distributed_c10d import PrefixStore, Store

from runner.distributed.env import RankEnv
from runner.distributed.rendezvous import first_line, without_frames
from runner.system.process import host_name

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
        room: the store of this group alone, from the rendezvous.
        place: this rank's place. Ranks of a node have consecutive numbers.
    """

    def __init__(self, room: Store, place: RankEnv) -> None:
        self.problem = ""
        self._room = room
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
        teller = threading.Thread(target=set_it, daemon=True)
        teller.start()
        teller.join(_TELL_SECONDS)

    def _connect(self) -> Store:
        # A connection of its own: the training thread keeps the other one while it waits.
        store: Store = PrefixStore("start", self._room).clone()  # type: ignore[attr-defined]
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
