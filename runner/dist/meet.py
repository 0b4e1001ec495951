"""How ranks find each other at the start: within a time limit, and saying who is missing."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from runner.dist.launcher import Place, meeting_point
from runner.error import StartError

Facts = Mapping[str, Any]

_LEADER = "holdfast/leader"
_WELCOME = "welcome"
_POLL_SECONDS = 0.05
_RETRY_SECONDS = 0.2
_GRACE_SECONDS = 2.0
_MOST_NAMED = 16


def meet(place: Place, *, seconds: float) -> Store:
    """The store that all ranks share.

    Raises:
        StartError: it cannot be reached within ``seconds``.
    """
    if place.world_size == 1 and "RANK" not in os.environ:
        return HashStore()
    point = meeting_point(os.environ)
    if point is not None:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = point[0], str(point[1])
    _reach(place, seconds)
    made: list[Store | Exception] = []

    def make() -> None:
        try:
            made.append(_store(place, seconds))
        except (KeyError, RuntimeError, ValueError) as error:
            made.append(error)

    # In a thread: torch waits without end for the answer of a server that is no store.
    maker = threading.Thread(target=make, daemon=True)
    with _without_frames():
        maker.start()
        maker.join(seconds + _GRACE_SECONDS)
    store = made[0] if made else TimeoutError("what listens there does not answer as a store")
    if isinstance(store, Exception):
        raise _unreachable(place, seconds, store)
    return store


def _store(place: Place, seconds: float) -> Store:
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        place.world_size,
        _hosts_store(place),
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,  # the roll call waits, and can say for whom
        multi_tenant=True,
    )


@contextlib.contextmanager
def _without_frames() -> Iterator[None]:
    """torch writes pages of C++ frames to descriptor 2 about each try that fails."""
    sys.stderr.flush()
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def _hosts_store(place: Place) -> bool:
    """torchrun's agent may host it; otherwise rank 0 does."""
    return place.is_first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _reach(place: Place, seconds: float) -> None:
    """Wait until the meeting point answers; torch's own attempts fill the screen with frames."""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if _hosts_store(place) or not port.isdigit():
        return
    limit = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=min(5.0, seconds)).close()
            return
        except OSError as error:
            if time.monotonic() > limit:
                raise _unreachable(place, seconds, error) from None
        time.sleep(_RETRY_SECONDS)


def _unreachable(place: Place, seconds: float, error: Exception) -> StartError:
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if _hosts_store(place):
        words = f"cannot open the meeting point MASTER_ADDR:MASTER_PORT={where}"
        advice = "another program may have the port: choose another MASTER_PORT on all ranks"
    else:
        words = (
            f"cannot reach the meeting point MASTER_ADDR:MASTER_PORT={where} within "
            f"parallel.start_seconds={seconds:g}"
        )
        advice = (
            "check the name, that the port is not blocked or another program's, and that rank 0 "
            "has started"
        )
    return StartError(
        f"rank {place.rank}: {words} ({first_line(error)}); {advice}", is_local=True
    )


def call_roll(
    store: Store, place: Place, facts: Facts, *, seconds: float
) -> tuple[Store, list[Facts]]:
    """Wait until every rank is there.

    torchrun keeps one store over its restarts, with all that earlier processes have set in it.
    So rank 0 opens a room under a name never used before, the others follow whoever is said to
    be rank 0, and nobody goes on before rank 0 has answered to him by name.

    Args:
        facts: JSON; ``versions`` in it must be equal on all ranks.

    Returns:
        The room, a store for this group alone, and the facts of this node's ranks.

    Raises:
        StartError: ranks are absent after ``seconds``, named; or versions differ.
    """
    own_name = secrets.token_hex(8)
    told = json.dumps({"name": own_name, "facts": facts})
    if place.is_first:
        room = _room(store, own_name)
        room.set("here/0", told)
        store.set(_LEADER, own_name)
        verdict = _verdict(room, place.world_size, seconds)
        if verdict:
            time.sleep(1.0)  # rank 0 may host the store: the others must still read it
    else:
        # Rank 0 needs a moment to tell who is missing.
        room, verdict = _follow(store, place, own_name, told, seconds + 10)
    if verdict:
        raise StartError(verdict)
    first = place.rank - place.local_rank
    return room, [_told(room, rank)["facts"] for rank in range(first, first + place.local_world_size)]


def _room(store: Store, leader: str) -> Store:
    return PrefixStore(f"holdfast/{leader}", store)


def _told(room: Store, rank: int) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(room.get(f"here/{rank}"))
    return told


def _verdict(room: Store, world_size: int, seconds: float) -> str:
    """Rank 0's: wait for all, compare, answer each. Empty when all are there and alike."""
    limit = time.monotonic() + seconds
    missing = set(range(world_size))
    while missing and time.monotonic() < limit:
        missing = {rank for rank in missing if not room.check([f"here/{rank}"])}
        time.sleep(_POLL_SECONDS if missing else 0)
    there = {rank: _told(room, rank) for rank in range(world_size) if rank not in missing}
    verdict = ""
    if missing:
        named = ", ".join(map(str, sorted(missing)[:_MOST_NAMED]))
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        verdict = (
            f"{len(missing)} of {world_size} ranks are absent after "
            f"parallel.start_seconds={seconds:g}: rank {named}{more}"
        )
    elif differing := difference([told["facts"]["versions"] for told in there.values()]):
        verdict = f"ranks have different versions: {differing}"
    for told in there.values():
        room.set(f"answer/{told['name']}", verdict or _WELCOME)
    return verdict


def _follow(
    store: Store, place: Place, own_name: str, told: str, seconds: float
) -> tuple[Store, str]:
    """The others': the room of the rank 0 that answered, and its verdict."""
    limit = time.monotonic() + seconds
    leader, room = "", store
    try:
        while time.monotonic() < limit:
            if store.check([_LEADER]):
                named = bytes(store.get(_LEADER)).decode()
                if named != leader:
                    leader, room = named, _room(store, named)
                    room.set(f"here/{place.rank}", told)
                if room.check([f"answer/{own_name}"]):
                    answer = bytes(room.get(f"answer/{own_name}")).decode()
                    return room, "" if answer == _WELCOME else answer
            time.sleep(_POLL_SECONDS)
    except RuntimeError as error:  # the host of the store has gone
        return store, f"rank {place.rank}: lost the meeting point ({first_line(error)})"
    return store, f"rank {place.rank}: rank 0 is absent after {seconds:g} s"


def difference(told: Sequence[Mapping[str, Any]]) -> str:
    """Which field differs on which ranks, in words; empty when all are alike."""
    parts = []
    for field in told[0]:
        values = [str(facts.get(field)) for facts in told]
        usual = max(set(values), key=lambda value: (values.count(value), value == values[0]))
        others = [rank for rank, value in enumerate(values) if value != usual]
        if others:
            seen = ", ".join(f"rank {rank}: {values[rank]}" for rank in others[:_MOST_NAMED])
            parts.append(f"{field}: {seen}; the others: {usual}")
    return "; ".join(parts)


def first_line(error: BaseException) -> str:
    """What an exception says, in one line."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
