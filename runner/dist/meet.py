"""How ranks find each other at the start: within a time limit, and saying who is missing."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.rendezvous import rendezvous

from runner.dist.launcher import Place, meeting_point
from runner.error import StartError

Facts = Mapping[str, Any]

_POLL_SECONDS = 0.05
_MOST_NAMED = 16


def meet(place: Place, *, seconds: float) -> Store:
    """The store that all ranks share.

    Raises:
        StartError: it cannot be reached within ``seconds``.
    """
    if place.world_size == 1 and "RANK" not in os.environ:
        return HashStore()
    for name, value in zip(
        ("MASTER_ADDR", "MASTER_PORT"), meeting_point(os.environ) or (), strict=False
    ):
        os.environ[name] = str(value)
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    limit = timedelta(seconds=seconds)
    try:
        store, _, _ = next(
            rendezvous(
                "env://", place.rank, place.world_size, timeout=limit
            )
        )
    except (RuntimeError, ValueError) as error:
        raise StartError(
            f"rank {place.rank}: cannot reach the meeting point MASTER_ADDR:MASTER_PORT={where} "
            f"within parallel.start_seconds={seconds:g} ({first_line(error)}); check the name, that the "
            "port is free and not blocked, and that rank 0 has started"
        ) from None
    assert isinstance(store, Store)
    store.set_timeout(limit)
    return store


def call_roll(store: Store, place: Place, facts: Facts, *, seconds: float) -> list[Facts]:
    """Wait until every rank is there; returns the facts of this node's ranks.

    Args:
        facts: JSON; ``versions`` in it must be equal on all ranks.

    Raises:
        StartError: ranks are absent after ``seconds``, named; or versions differ.
    """
    store.set(_key(place.rank), json.dumps(facts))
    if place.is_first:
        verdict = _verdict(store, place.world_size, seconds)
        store.set("holdfast/verdict", verdict)
        if verdict:
            time.sleep(1.0)  # rank 0 may host the store: the others must still read it
    # Rank 0 needs a moment to tell who is missing.
    told = _wait_for(store, "holdfast/verdict", seconds + 10)
    if told is None:
        raise StartError(
            f"rank {place.rank}: rank 0 is absent after parallel.start_seconds={seconds:g}"
        )
    if told:
        raise StartError(told)
    first = place.rank - place.local_rank
    local = range(first, first + place.local_world_size)
    return [json.loads(store.get(_key(rank))) for rank in local]


def _key(rank: int) -> str:
    return f"holdfast/here/{rank}"


def _verdict(store: Store, world_size: int, seconds: float) -> str:
    """Empty when all are there and alike."""
    limit = time.monotonic() + seconds
    missing = set(range(world_size))
    while missing and time.monotonic() < limit:
        missing = {rank for rank in missing if not store.check([_key(rank)])}
        time.sleep(_POLL_SECONDS if missing else 0)
    if missing:
        named = ", ".join(map(str, sorted(missing)[:_MOST_NAMED]))
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        return (
            f"{len(missing)} of {world_size} ranks are absent after "
            f"parallel.start_seconds={seconds:g}: rank {named}{more}"
        )
    told = [json.loads(store.get(_key(rank))) for rank in range(world_size)]
    differing = difference([facts["versions"] for facts in told])
    return f"ranks have different versions: {differing}" if differing else ""


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


def _wait_for(store: Store, key: str, seconds: float) -> str | None:
    limit = time.monotonic() + seconds
    try:
        while not store.check([key]):
            if time.monotonic() > limit:
                return None
            time.sleep(_POLL_SECONDS)
        return bytes(store.get(key)).decode()
    except RuntimeError:  # the host of the store has gone
        return None


def first_line(error: BaseException) -> str:
    """What an exception says, in one line."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
