"""Opens the run directory for a user's loop, and resumes the run in it.

It has the same files, lease, journal and ring as ``python -m runner``, but no engine or corpus.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
import torch.distributed as dist

from runner.checkpoint.disk.directory import CheckpointDirectory
from runner.checkpoint.memory.snapshot import read_header
from runner.checkpoint.memory.tier import NO_MEMORY, MemoryParts
from runner.checkpoint.protocol import Identity
from runner.checkpoint.ring import CheckpointRing
from runner.config.compose import digest, flat, type_name
from runner.config.schema import ParallelKind, Precision, RunConfig, ScheduleKind, former_key
from runner.config.unknown_key import suggestion
from runner.config.validate import check
from runner.distributed.agreement import Ranks
from runner.distributed.env import RankEnv, launch_from, place_from
from runner.embed.state.staged_state import StagedState
from runner.health.preemption import StopLook
from runner.observe.console import Console
from runner.observe.metrics import Throughput
from runner.policy.retention.records import FEWEST_SLOTS, Record, Tier, memory_every
from runner.run_dir.paths import ENDLESS, RunDir, keep_for_owner
from runner.session.group import watched
from runner.session.inventory import (
    Inventory,
    acquire_lease,
    backlog_of,
    open_journal,
    start_incident,
    time_before,
)
from runner.startup.resume import RunInventory, last_incarnation, resume_from, scan
from runner.startup.shared_memory import node_folder, open_memory
from runner.system.environment import variables
from runner.system.error import ConfigError, CorruptCheckpoint
from runner.system.process import own_process, pid_namespace
from runner.train.report import Reporter
from runner.train.run import RankGroup, Run, ring_directory
from runner.train.state import Carried, TrainState

# Turns keyword arguments into the settings of a run, checked as on the command line.

# Settings that need our engine, or storage that the embedded guard does not use.
_NOT_HERE = {
    "remote": "copy the clean checkpoints of out/ring yourself",
    "memory_mirror": "snapshots stay on their own node",
    "remedy": "the guard cannot compute a step of your loop again",
    "cooldown_steps": "the learning rate is your schedule's",
}
_RESUME = ("allow_change", "take_over", "stale_seconds")


def run_config(
    out: str | Path, *, every: int | str, accumulate: int, skip: Any, given: dict[str, Any]
) -> RunConfig:
    """The settings of an embedded run; unused ones keep their defaults.

    Args:
        given: of ``guard.*``, ``checkpoint.*``, ``preempt.*`` and ``resume.*``, without the group.

    Raises:
        ConfigError: an unknown key, or a value that cannot be.
    """
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ConfigError(f"accumulate={accumulate!r}: must be an integer of at least 1")
    if isinstance(skip, str) or not isinstance(skip, Iterable):
        raise ConfigError(f"skip={skip!r}: must be ranges of batch numbers, [[400, 432]]")
    config = RunConfig(out=str(out), steps=ENDLESS)
    config.compute.precision = Precision.fp32  # unused: the script chooses it
    config.parallel.kind = ParallelKind.ddp
    config.schedule.kind = ScheduleKind.constant
    config.batch.global_size = config.batch.micro_size = accumulate
    config.data.skip = [list(pair) if isinstance(pair, Iterable) else pair for pair in skip]
    config.watchdog.enabled = False
    config.guard.cooldown_steps = 0
    config.checkpoint.every = every
    if isinstance(every, int):
        config.checkpoint.clean_after = max(1, min(config.checkpoint.clean_after, every))
    for key, value in given.items():
        _set(config, key, value)
    check(config, world_size=1)
    return config


# Settings of checkpoint.*, preempt.* and resume.* that a ring without the guard uses.
_OF_RING = (
    "keep",
    "keep_every",
    "clean_after",
    "write_mib_per_second",
    "memory_slots",
    "memory_limit_gib",
    "grace_seconds",
    "margin_seconds",
    *_RESUME,
)
_RARELY = 1_000_000  # steps; the script decides when to save


def ring_config(out: str | Path, *, memory: bool, given: dict[str, Any]) -> RunConfig:
    """The settings of a ring without the guard.

    Args:
        memory: whether snapshots are kept in memory.
        given: of :data:`_OF_RING`.

    Raises:
        ConfigError: an unknown key, or a value that cannot be.
    """
    for key, value in given.items():
        if key not in _OF_RING:
            hint = suggestion(key, set(_OF_RING))
            raise ConfigError(f"{key}={value!r}: no such setting{hint}; {', '.join(_OF_RING)}")
    settings: dict[str, Any] = {"memory_slots": FEWEST_SLOTS} if memory else {"memory_every": 0}
    # Nothing here looks at a request to stop: it would only end the script when the grace is over.
    settings |= {"clean_after": 1, "notice": "none", **given}
    return run_config(out, every=_RARELY, accumulate=1, skip=[], given=settings)


def _set(config: RunConfig, key: str, value: Any) -> None:
    if key in _NOT_HERE:
        raise ConfigError(
            f"{key}={value!r}: is not available in a loop of your own: {_NOT_HERE[key]}"
        )
    specs = {
        spec.name: (group, spec)
        for group in (config.resume, config.preempt, config.checkpoint, config.guard)
        for spec in dataclasses.fields(group)
        if group is not config.resume or spec.name in _RESUME
    }
    if key not in specs:
        for name in ("guard", "checkpoint", "preempt", "resume"):
            if what := former_key(f"{name}.{key}"):
                raise ConfigError(f"{key}={value!r}: {what}")
        known = specs.keys() - _NOT_HERE.keys()
        raise ConfigError(
            f"{key}={value!r}: no such setting{suggestion(key, known)}; guard.*, checkpoint.* "
            "and preempt.* of docs/configuration.md are taken, without the group"
        )
    group, spec = specs[key]
    hint = get_type_hints(type(group))[key]
    kinds = get_args(hint) or (hint,)
    kinds = (*kinds, int) if float in kinds else kinds
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ConfigError(f"{key}={value!r}: must be {type_name(spec)}")
    setattr(group, key, value)


_FINGERPRINT = "a loop of its own"  # stored in checkpoints; the data has no other name
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class SingleProcessRanks(Ranks):
    """The agreement of a single process without a process group."""

    def __init__(self) -> None:
        self.rank = 0
        self.world_size = 1

    def sum(self, numbers: list[float]) -> list[float]:
        return list(numbers)

    def all_reduce(self, packed: torch.Tensor) -> None:
        """Does nothing: there is no other rank."""

    def gather(self, value: Any) -> list[Any]:
        return [json.loads(json.dumps(value))]

    def from_first(self, value: Any) -> Any:
        return json.loads(json.dumps(value))


def current_ranks(caller: str) -> tuple[Ranks, torch.device, RankEnv]:
    """The ranks of the script's process group, or of this process alone.

    Args:
        caller: the name to print in an error.

    Raises:
        ConfigError: a launcher started several processes, and they have no process group.
    """
    rank_env = place_from(variables())
    if not (dist.is_available() and dist.is_initialized()):
        if rank_env.world_size > 1:
            raise ConfigError(
                f"{caller}: the launcher started {rank_env.world_size} processes, and there is no "
                "process group; call torch.distributed.init_process_group first"
            )
        return SingleProcessRanks(), torch.device("cpu"), rank_env
    world_size = dist.get_world_size()
    if rank_env.world_size != world_size:  # the group was created without a launcher
        rank_env = RankEnv(
            rank=dist.get_rank(),
            world_size=world_size,
            local_rank=dist.get_rank(),
            local_world_size=world_size,
        )
    is_cuda = "nccl" in str(dist.get_backend()) and torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    return Ranks(device), device, rank_env


@contextmanager
def joined(config: RunConfig, caller: str) -> Iterator[RankGroup]:
    """This rank's group, with a monitor that keeps the lease alive; it ends if opening fails.

    Args:
        caller: the name to print in an error.
    """
    ranks, device, rank_env = current_ranks(caller)
    # Absolute: the script may change its working directory.
    run_dir, launch = RunDir(Path(config.out).absolute()), launch_from(variables())
    stop, monitor = watched(config.preempt, config.watchdog, rank_env, launch, run_dir)
    _clear_shared_store(ranks)
    monitor.start()
    group = RankGroup(
        place=rank_env,
        launch=launch,
        device=device,
        run_dir=run_dir,
        stop=stop,
        stop_look=StopLook(lambda: stop.is_set, ranks),
        monitor=monitor,
        # Log records only: the live line would mix with the script's output.
        console=Console(silent=not rank_env.is_first, every=sys.maxsize, as_json=True),
        ranks=ranks,
        # So that a rank's death is noticed and its signal known.
        peers=ranks.gather(
            {"rank": rank_env.rank, "process": own_process(), "pids": pid_namespace()}
        ),
    )
    try:
        yield group
    except BaseException:
        monitor.end()
        raise


def _clear_shared_store(ranks: Ranks) -> None:
    """Delete the keys that this attempt's process groups have left. Collective.

    The agent's store may outlive torchrun's restarts (torch 2.13: with a static rendezvous always).
    gloo of the next attempt would then connect to addresses of dead processes, or wait for them.
    Groups that exist are connected and no longer need their keys.
    """
    if variables().get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not dist.is_initialized():
        return
    store = dist.distributed_c10d._get_default_store()
    ranks.gather(None)  # nobody is still about to connect
    if ranks.rank == 0 and hasattr(store, "list_keys"):
        for key in store.list_keys():
            store.delete_key(key)
    ranks.gather(None)


def handle_signals(group: RankGroup) -> None:
    """Let SIGTERM and SIGUSR1 request a stop, unless the script handles them."""
    owner = os.getpid()

    def ask(number: int, frame: object) -> None:
        if os.getpid() == owner:
            group.stop.ask(signal.Signals(number).name)
            return
        signal.signal(number, signal.SIG_DFL)  # a process that the script forked dies of it
        os.kill(os.getpid(), number)

    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, ask)


class PendingTensors:
    """Tells the state which tensors a checkpoint holds, before they are loaded.

    Args:
        slots: makes slots in memory for the state's current tensors. Collective.
    """

    def __init__(
        self,
        directory: CheckpointDirectory,
        ranks: Ranks,
        sharded: StagedState,
        slots: Callable[[], MemoryParts],
    ) -> None:
        self._directory, self._ranks, self._sharded = directory, ranks, sharded
        self.slots = slots
        self.in_memory: Mapping[str, Any] = {}

    def announce(self, record: Record) -> Mapping[str, Any]:
        """Prepare the state for a checkpoint's tensors, which are returned. Collective.

        Raises:
            CorruptCheckpoint: the manifest cannot be read.
            CheckpointError: the checkpoint is of another model.
        """
        ranks, tensors = self._ranks, self.in_memory
        if record.tier is Tier.disk:
            tensors = ranks.of_first("reading what a checkpoint holds", lambda: self._read(record))
        ranks.all_or_none("making room for a checkpoint", lambda: self._sharded.expect(tensors))
        return tensors

    def _read(self, record: Record) -> Mapping[str, Any]:
        folder = self._directory.folder_of(record)
        stored = self._directory.read(folder).manifest.train_state
        tensors = stored.get("loop", {}).get("tensors")
        if not isinstance(tensors, dict):
            raise ConfigError(
                "out holds a run of `python -m runner`, not of a loop of your own; choose another "
                "out"
            )
        self._sharded.require_fit(stored["loop"])
        return tensors

    def slots_for(self, records: Sequence[Record], left: Record | None) -> MemoryParts:
        """Slots in memory for the tensors of the newest checkpoint, if there is one.

        Args:
            left: the snapshot that the last start left, whose tensors are :attr:`in_memory`.
        """
        newest = max([*records, *([left] if left else [])], key=lambda r: r.serial, default=None)
        if newest is None:
            return NO_MEMORY
        try:
            self.in_memory = self.announce(newest)
        except ConfigError:
            raise
        except Exception:  # the checkpoint is damaged; the ring reports that
            return NO_MEMORY
        self._sharded.expected_in_memory()
        return self.slots()


def newest_snapshot(group: RankGroup, incarnation: int) -> tuple[Record | None, Mapping[str, Any]]:
    """The newest snapshot that ``incarnation`` left on every rank's node, and its tensors, alike on
    all ranks; None without one. Collective."""
    ranks = group.ranks
    node = node_folder(ranks.of_first("naming the run", group.run_dir.identity), group.run_dir.out)
    folder = node.of_rank(incarnation, ranks.rank)
    headers = []
    for path in folder.glob("slot-*.json") if node.is_trusted(folder) else []:
        with suppress(CorruptCheckpoint, OSError):  # the ring reports it
            headers.append(read_header(path))
    own = max(headers, key=lambda header: header.serial, default=None)
    tensors = own.train_state.get("loop", {}).get("tensors", {}) if own else {}
    told = own and [own.serial, own.step, own.cursor, digest(tensors)]
    if any(other != told for other in ranks.gather(told)) or own is None:
        return None, {}
    return own.record(own.serial, Tier.memory), tensors


@dataclass(slots=True, kw_only=True)
class OpenRun(Run):
    """The opened run of a user's loop, before its first step; ``owner``: the process's id."""

    config: RunConfig
    loads: PendingTensors
    has_memory: bool
    owner: int

    def make_memory(self, capture: Callable[[], Mapping[str, Any]]) -> None:
        """Create slots in memory, once. Collective.

        Args:
            capture: takes the state, and returns its tensors.
        """
        if self.has_memory or not memory_every(self.config.checkpoint):
            return
        tensors = capture()  # it may find other tensors than before, and drop the slots
        self.has_memory = True
        slots = self.loads.slots()
        if slots.memory is not None:
            self.ring.drain()
            self.loads.in_memory = tensors
            self.ring.replace_memory(slots)

    def drop_memory(self) -> None:
        """Before a save with other tensors than before. Collective."""
        self.ring.drain()
        self.ring.replace_memory(NO_MEMORY)
        self.has_memory = False


def open_run(
    config: RunConfig, group: RankGroup, sharded: StagedState, carried: Carried, *, command: str
) -> OpenRun:
    """Acquire the run directory, resume the run, and journal this start. Collective.

    Args:
        command: what started this run, for the journal.

    Raises:
        RunnerError: the run cannot start; the same on every rank.
    """
    keep_for_owner()
    ranks = group.ranks
    lease, _ = acquire_lease(group, config)
    inventory = scan(group.run_dir, config, _FINGERPRINT, ranks, lease)
    identity = Identity(config_digest=digest(flat(config)), data_fingerprint=_FINGERPRINT)
    run_journal = open_journal(group, config, lease, identity, Inventory(found=inventory))
    backlog = backlog_of(config.track.unwritten_seconds, group, run_journal)
    directory = ring_directory(group.run_dir, lease)
    slots = partial(
        open_memory,
        config.checkpoint,
        group,
        sharded,
        incarnation=lease.number,
        identity=identity,
        timeout_seconds=config.parallel.timeout_seconds,
    )
    pending = PendingTensors(directory, ranks, sharded, slots)
    left, pending.in_memory = newest_snapshot(group, last_incarnation(inventory.journal))
    memory = pending.slots_for(inventory.records, left)
    ring = CheckpointRing(
        directory,
        sharded=sharded,
        ranks=ranks,
        settings=config.checkpoint,
        identity=identity,
        report=run_journal.report,
        before_write=lambda step: backlog.require_written(),
        memory=memory,
    )
    # The loop may change weights and buffers at any time, without any call of ours.
    ring.overlap = False
    ring.before_load = pending.announce
    run = OpenRun(
        config=config,
        group=group,
        lease=lease,
        identity=identity,
        written=run_journal,
        ring=ring,
        backlog=backlog,
        state=TrainState(config.guard, carried),
        loads=pending,
        has_memory=memory.memory is not None,
        owner=os.getpid(),
    )
    _begin(run, inventory, command)
    return run


def _begin(run: OpenRun, inventory: RunInventory, command: str) -> None:
    """Load the newest checkpoint, and journal this start. Collective."""
    run.resumed = resume_from(inventory, run.group.run_dir, run.ring, run.journal, run.state)
    spent = time_before(run.group, run.resumed, inventory.journal)
    throughput = Throughput(flops_per_token=0.0, peak_flops=None)
    run.reporter = run.ranks.all_or_none(
        "opening the metrics",
        lambda: Reporter(run, total_steps=0, past=spent, throughput=throughput),
    )
    run.backlog.add(run.reporter.metrics_file)
    run.journal.add(start_incident(run, spent, reason=command, parallel=command))
    run.ring.begin()
