"""The rendezvous of all ranks at the start, within a time limit and naming who is missing; then
the process group, from its start to its end."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed import DistStoreError

from runner.distributed.device import FoundDevice
from runner.distributed.env import RankEnv, is_nccl, rendezvous_endpoint
from runner.system.environment import changeable, variables
from runner.system.error import ConfigError, RunnerError, StartError
from runner.system.process import host_name, in_thread
from runner.system.units import name_ranks

Facts = Mapping[str, Any]

_ROUND = "holdfast/round"  # number of rounds that a rank 0 has opened
_OPEN, _OVER = "open", "over"  # of a round
_WELCOME = "welcome"
_DUMP_REQUEST = "exception_dump"  # the key of torch's ProcessGroupNCCL
_AT_ONCE = 1024  # keys in one message: about a megabyte of facts
_SECONDS_A_RANK = 5e-4  # added for each rank that rank 0 serves
_RETRY_SECONDS = 0.2
_GRACE_SECONDS = 2.0
_FOLLOWER_SECONDS = 10.0  # for rank 0 to find out who is missing
_MESH_RANKS = 64
_OTHER_FILES = 256  # descriptors that a process has open beside its connections
_MOST_NAMED = 16


def connect_store(place: RankEnv, *, seconds: float) -> Store:
    """Connect to the store that all ranks share.

    Raises:
        StartError: it cannot be reached within ``seconds``, or its host may not open that many
            files.
    """
    if place.world_size == 1 and "RANK" not in variables():
        return HashStore()
    if place.is_first:
        # One for each rank, and one for each node while the start is watched.
        num_nodes = -(-place.world_size // place.local_world_size)
        host = os.getpid() if _hosts_store(place) else os.getppid()
        allow_connections(place.world_size + num_nodes, host)
    point = rendezvous_endpoint(variables())
    if point is not None:
        changeable().update(MASTER_ADDR=point[0], MASTER_PORT=str(point[1]))
    _reach(place, seconds)

    def store() -> Store:
        return TCPStore(
            variables()["MASTER_ADDR"],
            int(variables()["MASTER_PORT"]),
            place.world_size,
            _hosts_store(place),
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,  # wait_for_ranks waits, and can name who is missing
            multi_tenant=True,
        )

    try:
        with without_frames():
            # In a thread: torch waits for ever for an answer if the server is not a store.
            return in_thread(store, "rendezvous").result(seconds + _GRACE_SECONDS)
    except TimeoutError:
        silence = TimeoutError("the server there does not answer as a store")
        raise _unreachable(place, seconds, silence) from None
    except (KeyError, RuntimeError, ValueError) as error:
        raise _unreachable(place, seconds, error) from None


def allow_connections(num_connections: int, process: int) -> None:
    """Raise the descriptor limit of the store's process, or this one's launcher.

    Raises:
        StartError: the system's limit is below that.
    """
    needed = num_connections + _OTHER_FILES
    try:
        soft, hard = resource.prlimit(process, resource.RLIMIT_NOFILE)
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise StartError(
                f"process {process} hosts the rendezvous store of all ranks and may have "
                f"{hard} open files; {needed} are needed: raise ulimit -Hn on its node",
                is_local=True,
            )
        if soft != resource.RLIM_INFINITY and soft < needed:
            resource.prlimit(process, resource.RLIMIT_NOFILE, (needed, hard))
    except OSError:  # another user's process: its limit may suffice
        return


def spare_connections(world_size: int) -> None:
    """Let gloo connect ranks on first use where a full mesh would be too large.

    A mesh takes N + 3 descriptors on each rank, N * N calls of the store. A small group keeps it:
    a rank that dies is noticed by every other at once.
    """
    if world_size > _MESH_RANKS:
        changeable().setdefault("TORCH_GLOO_LAZY_INIT", "1")


@contextlib.contextmanager
def without_frames() -> Iterator[None]:
    """Hide descriptor 2: torch writes pages of C++ frames for each failed attempt."""
    sys.stderr.flush()
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def _hosts_store(place: RankEnv) -> bool:
    """Whether this process hosts the store: torchrun's agent may, otherwise rank 0 does."""
    return place.is_first and variables().get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _reach(place: RankEnv, seconds: float) -> None:
    """Wait until the endpoint answers; torch's own attempts fill the screen with frames."""
    host, port = variables().get("MASTER_ADDR", ""), variables().get("MASTER_PORT", "")
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


def _unreachable(place: RankEnv, seconds: float, error: Exception) -> StartError:
    where = f"{variables().get('MASTER_ADDR')}:{variables().get('MASTER_PORT')}"
    if _hosts_store(place):
        problem = f"cannot open the rendezvous store at MASTER_ADDR:MASTER_PORT={where}"
        advice = "another program may have the port: choose another MASTER_PORT on all ranks"
    else:
        problem = (
            f"cannot reach the rendezvous store at MASTER_ADDR:MASTER_PORT={where} within "
            f"parallel.start_seconds={seconds:g}"
        )
        advice = (
            "check the name, that the port is not blocked or another program's, and that rank 0 "
            "has started"
        )
    return StartError(
        f"rank {place.rank}: {problem} ({first_line(error)}); {advice}", is_local=True
    )


def wait_for_ranks(
    store: Store, place: RankEnv, facts: Facts, *, seconds: float
) -> tuple[Store, list[Facts]]:
    """Wait until every rank is there, without polling; see :func:`call_roll`.

    Args:
        facts: JSON; ``versions`` in it must be equal on all ranks.

    Returns:
        A store for this group alone, and the facts of this node's ranks.

    Raises:
        StartError: ranks are absent after ``seconds``, and are named; or versions differ.
    """
    return in_thread(lambda: call_roll(store, place, facts, seconds=seconds), "roll").result()


def call_roll(
    store: Store, place: RankEnv, facts: Facts, *, seconds: float
) -> tuple[Store, list[Facts]]:
    """:func:`wait_for_ranks` with seven calls of the store on each rank, N / 1,024 more on rank 0.

    torchrun keeps one store over its restarts, with all keys that earlier processes have set.
    So each rank 0 opens a new round, by a counter, and no rank goes on before rank 0 has
    answered it by name. A rank in a round that is over, or whose rank 0 is dead, is
    woken by the next rank 0 and joins the next round. No rank polls: N ranks
    that do so every 50 ms are more than a store can answer from about 2,000 on.
    """
    introduction = json.dumps({"name": secrets.token_hex(8), "facts": facts})
    if place.is_first:
        room, verdict = _lead(store, place, introduction, seconds)
    else:
        limit = seconds + _FOLLOWER_SECONDS + _SECONDS_A_RANK * place.world_size
        room, verdict = _follow(store, place, introduction, limit)
    if verdict:
        raise StartError(verdict)
    first = place.rank - place.local_rank
    near = room.multi_get([_here(first + at) for at in range(place.local_world_size)])
    return room, [json.loads(bytes(introduction))["facts"] for introduction in near]


def _room(store: Store, number: int) -> Store:
    return PrefixStore(f"holdfast/{number}", store)


def _here(rank: int) -> str:
    return f"here/{rank}"


def _lead(store: Store, place: RankEnv, introduction: str, seconds: float) -> tuple[Store, str]:
    """On rank 0: open a round, wait for all, compare, answer each."""
    number = store.add(_ROUND, 1)
    _forget_dump_request(store)
    for before in range(1, number):  # their rank 0 is dead
        _set_all(_room(store, before), [_OPEN, _OVER], "")
    room = _room(store, number)
    room.set(_here(0), introduction)
    room.set(_OPEN, "")
    present, missing = _there(room, place.world_size, seconds)
    verdict = _verdict(present, missing, place.world_size, seconds)
    answers = [f"answer/{introduction['name']}" for introduction in present]
    for at in range(0, len(answers), _AT_ONCE):
        _set_all(room, answers[at : at + _AT_ONCE], verdict or _WELCOME)
    room.set(_OVER, "")
    if verdict:
        # Rank 0 may host the store: the others must still read it.
        time.sleep(1.0 + _SECONDS_A_RANK * place.world_size)
    return room, verdict


def _forget_dump_request(store: Store) -> None:
    """Delete what asks the NCCL monitors of all ranks to dump their recorders, and to end.

    It is from before a restart: torchrun keeps its store, and the monitors read it unprefixed.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    with contextlib.suppress(RuntimeError, NotImplementedError):  # of a kind that deletes nothing
        store.delete_key(_DUMP_REQUEST)


def _set_all(store: Store, keys: Sequence[str], value: str) -> None:
    """Set all keys in one message."""
    store.multi_set(keys, [value] * len(keys))  # type: ignore[attr-defined]


def _there(room: Store, world_size: int, seconds: float) -> tuple[list[dict[str, Any]], list[int]]:
    """The introductions of the ranks that came in time, and the ranks that did not come."""
    ranks, missing = range(world_size), list[int]()
    try:
        room.wait([_here(rank) for rank in ranks], timedelta(seconds=seconds))
    except DistStoreError:  # the time is over
        missing = _absent(room, ranks)
    came = sorted(set(ranks) - set(missing))
    introductions: list[bytes] = []
    for at in range(0, len(came), _AT_ONCE):
        introductions += room.multi_get([_here(rank) for rank in came[at : at + _AT_ONCE]])
    return [json.loads(bytes(known)) for known in introductions], missing


def _absent(room: Store, ranks: Sequence[int]) -> list[int]:
    """Find the absent ranks by bisection: the store says whether many keys are all set."""
    if room.check([_here(rank) for rank in ranks]):
        return []
    if len(ranks) == 1:
        return list(ranks)
    half = len(ranks) // 2
    return [*_absent(room, ranks[:half]), *_absent(room, ranks[half:])]


def _verdict(
    present: Sequence[Mapping[str, Any]], missing: Sequence[int], world_size: int, seconds: float
) -> str:
    """The problem of this group; empty when all ranks are there and alike."""
    if missing:
        return (
            f"{len(missing)} of {world_size} ranks are absent after "
            f"parallel.start_seconds={seconds:g}: {name_ranks(missing)}"
        )
    differing = difference([introduction["facts"]["versions"] for introduction in present])
    return f"ranks have different versions: {differing}" if differing else ""


def _follow(store: Store, place: RankEnv, introduction: str, seconds: float) -> tuple[Store, str]:
    """On other ranks: the group's store of the rank 0 that answered, and its verdict."""
    limit = time.monotonic() + seconds

    def left() -> timedelta:
        return timedelta(seconds=max(0.001, limit - time.monotonic()))

    own = f"answer/{json.loads(introduction)['name']}"
    try:
        number = max(1, store.add(_ROUND, 0))
        while True:
            room = _room(store, number)
            room.wait([_OPEN], left())
            room.set(_here(place.rank), introduction)
            room.wait([_OVER], left())
            if room.check([own]):
                answer = bytes(room.get(own)).decode()
                return room, "" if answer == _WELCOME else answer
            number += 1
    except DistStoreError:
        return store, f"rank {place.rank}: rank 0 is absent after {seconds:g} s"
    except RuntimeError as error:  # the store's host is gone
        return store, f"rank {place.rank}: lost the rendezvous store ({first_line(error)})"


def difference(versions: Sequence[Mapping[str, Any]]) -> str:
    """A sentence that says which field differs on which ranks; empty when all are equal."""
    parts = []
    for field in versions[0]:
        values = [str(facts.get(field)) for facts in versions]
        usual = max(set(values), key=lambda value: (values.count(value), value == values[0]))
        others = [rank for rank, value in enumerate(values) if value != usual]
        if others:
            shown = ", ".join(f"rank {rank}: {values[rank]}" for rank in others[:_MOST_NAMED])
            parts.append(f"{field}: {shown}; the others: {usual}")
    return "; ".join(parts)


def first_line(error: BaseException) -> str:
    """The first line of an exception's message."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def take_device(device: FoundDevice) -> torch.device:
    """Make the device this process's own, and return it."""
    if device.device.type == "cuda":
        torch.cuda.set_device(device.device)
    return device.device


def start_group(
    place: RankEnv,
    device: torch.device,
    *,
    timeout_seconds: float,
    start_seconds: float = 120.0,
    facts: Facts | None = None,
    problem: str = "",
    have_met: Callable[[Store, Sequence[Facts]], None] = lambda room, facts: None,
) -> tuple[list[Facts], Departure]:
    """Make the default group: gloo on CPU, NCCL (and gloo) on CUDA.

    Args:
        facts: JSON about this rank, with ``versions`` that must be equal on all ranks, and
            ``gpu``, which must not be.
        problem: of this rank's device; it is in ``versions`` too, so that all ranks raise.
        have_met: called after the rendezvous, before the ranks connect, with the store of this
            group and the facts of this node's ranks.

    Returns:
        The facts of the ranks of this node, and what tells whether all ranks leave together.

    Raises:
        StartError: ranks are absent, and are named; or two ranks share one GPU.
        ConfigError: every rank has this ``problem``.
    """
    # torch read TORCH_DISTRIBUTED_DEBUG when it was imported; debug=collectives came later.
    dist.set_debug_level_from_env()
    store = connect_store(place, seconds=start_seconds)
    room, facts_by_rank = wait_for_ranks(
        store, place, facts or {"versions": {}}, seconds=start_seconds
    )
    if problem:
        raise ConfigError(problem)
    _require_own_gpus(facts_by_rank)
    have_met(room, facts_by_rank)
    spare_connections(place.world_size)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=room,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout_seconds),
        # Make the communicator now, while the monitor watches, not in the first collective.
        device_id=device if device.type == "cuda" else None,
    )
    if device.type == "cuda":
        dist.all_reduce(torch.zeros(1, device=device))
        torch.cuda.synchronize(device)
    return facts_by_rank, Departure(room, place.world_size)


def _require_own_gpus(facts_by_rank: Sequence[Facts]) -> None:
    """Refuse two ranks on one GPU: NCCL's own error names neither."""
    by_gpu: dict[str, list[int]] = {}
    for facts in facts_by_rank:
        if facts.get("gpu"):
            by_gpu.setdefault(str(facts["gpu"]), []).append(int(facts["rank"]))
    shared = {gpu: ranks for gpu, ranks in by_gpu.items() if len(ranks) > 1}
    if shared:
        pairs = "; ".join(f"{name_ranks(r)}: {gpu}" for gpu, r in shared.items())
        raise StartError(
            f"{host_name()}: ranks share a GPU ({pairs}); start one rank a GPU (each task may see "
            "one of its own), or use parallel.device=cpu",
            is_local=True,
        )


def limit_groups(seconds: float) -> None:
    """Let no collective of any group of this process wait longer.

    Device meshes and DeepSpeed make groups with torch's own limit, which is half an hour.
    """
    distributed: Any = dist.distributed_c10d
    # Public from torch 2.14 on.
    set_timeout = getattr(dist, "set_timeout", None) or distributed._set_pg_timeout
    for group in list(distributed._world.pg_map):
        set_timeout(timedelta(seconds=seconds), group)


class Departure:
    """Tells whether an error that ends this rank ends every rank.

    By the store: others may wait in a collective, and one of this rank would be taken for it.

    Args:
        store: of this group alone.
    """

    def __init__(self, store: Store, world_size: int) -> None:
        self._store = PrefixStore("departure", store)
        self._world_size = world_size

    def announce(self) -> None:
        """Announce that this rank leaves, for a rank that waits in :meth:`is_common`."""
        with contextlib.suppress(RuntimeError):  # DistStoreError as well: the host is gone
            if self._store.add("ranks", 1) == self._world_size:
                self._store.set("all", "1")

    def is_common(self, seconds: float) -> bool:
        """Announce that this rank leaves, and whether all ranks do so within ``seconds``."""
        self.announce()
        try:
            self._store.wait(["all"], timedelta(seconds=seconds))
        except RuntimeError:
            return False
        return True


def end_group(have_met: Callable[[], None] = lambda: None) -> None:
    """End the group together, unless this rank leaves alone with an error of its own.

    Args:
        have_met: called when all ranks have arrived; from then on ranks may leave one by one.
    """
    error = sys.exc_info()[1]
    if error is not None and not isinstance(error, RunnerError):
        return
    # Without the barrier about half of 3-rank gloo runs died in destroy with SIGABRT.
    if is_nccl(dist.get_backend_config()):
        dist.all_reduce(torch.zeros(1))  # over gloo: a barrier would use NCCL, without a time limit
    else:
        dist.barrier()
    have_met()
    dist.destroy_process_group()
