"""Computes a step again, or a variation of it, with the gate closed. Collective.

Shapes stay constant: a sample that is left out becomes padding, whose loss is an empty sum, not a
number times zero (0 * Inf is NaN). Parameters, moments, update counts and random states stay as
they are; gradients are dropped.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from runner.checkpoint.memory.node_dir import free_memory_bytes
from runner.checkpoint.ring import CheckpointRing
from runner.config.schema import GuardConfig
from runner.data.cursor import BatchPlan, Indices
from runner.data.feed import MicroBatch
from runner.distributed.observers import Failure
from runner.engine.modes import drop_gradients, same_bits
from runner.engine.protocol import Engine, LocalSums, MicroStep, Shard
from runner.explain.reading import Reading, SampleRow, Share
from runner.health.rank_checks import differing_copies
from runner.policy.retention.records import Record
from runner.system.error import CheckpointError, RankError, ReadError
from runner.system.generators import kept_generators
from runner.system.process import host_name
from runner.train.run import EngineRun

# The name of each sequence of a micro-batch in a reading; None for padding.
Names = Sequence[int | None]
_DTYPE_NAMES = {torch.float32: "FP32", torch.float64: "FP64"}
# A weight this large, and this much larger than the others, is corrupted.
_STRAY, _STRAY_SIGMAS = 1e4, 1e3


class Bench:
    """Computes variations of one attempt on one rank."""

    def __init__(self, run: EngineRun, *, loss_floor: float, is_compiled: bool) -> None:
        self._run = run
        self._engine, self._feed, self._heart = run.engine, run.feed, run.group.heart
        self._ranks = run.observers.ranks
        self.world_size = self._ranks.world_size
        # Looked at before each reading of samples and each micro-batch.
        self._stop = run.group.stop_look.through(self._ranks)
        self._unit = loss_floor / GuardConfig().loss_floor  # for it a nat
        self._may_watch = not is_compiled  # no hooks in compiled modules
        self._narrow: ModuleWatch | None = None
        self._wide = ModuleWatch()
        self.num_steps = 0  # computed so far
        self._seeds: Sequence[int] = ()

    def begin(
        self, batches: Sequence[MicroBatch], seeds: Sequence[int], sums: LocalSums
    ) -> Reading:
        """Start with a new step; returns its own reading, from all ranks.

        Args:
            seeds: of this rank's micro-batches; ``sums``: what they came to.
        """
        self._stop.now()
        self.num_steps = 0
        self._narrow = None
        self._seeds = seeds
        return self._gather_reading(sums, _positions(batches))

    def compute(
        self,
        batches: Sequence[MicroBatch],
        names: Sequence[Names] | None = None,
        *,
        watched: bool = False,
    ) -> Reading:
        """Forward and backward of a whole step; nothing is applied.

        Args:
            batches: as many as the step has, with the same shapes.
            names: of their sequences; None: use their positions.
            watched: note what every module computes, for :meth:`first_bad_module`.
        """
        self._heart.enter("explain")
        with ExitStack() as stack:
            if watched and self._may_watch:
                self._narrow = ModuleWatch()
                stack.enter_context(self._narrow.over(self._engine.network))
            stack.enter_context(kept_generators(self._engine.device))
            micro_steps = self._micro_steps(batches)
            self._ranks.ready()
            sums = self._engine.accumulate(micro_steps)
            drop_gradients(self._engine)
        self.num_steps += 1
        return self._gather_reading(sums, names or _positions(batches))

    @property
    def wider(self) -> str:
        """The name of the wider precision; empty if there is none."""
        dtype = self._engine.twin.dtype
        return "" if dtype is None else _DTYPE_NAMES[dtype]

    @property
    def applies_wider(self) -> bool:
        """Whether the engine can make an update in the wider precision."""
        return self._engine.applies_wider

    def compute_wider(self, batches: Sequence[MicroBatch]) -> Reading | Failure:
        """A watched :meth:`compute` in the wider precision, if the model can be computed in it."""
        self._stop.now()
        self._heart.enter("explain")
        self.num_steps += 1
        result = self._ranks.attempt(lambda: self._wider_reading(batches))
        if isinstance(result, Failure):
            self._engine.recover()
        return result

    def _wider_reading(self, batches: Sequence[MicroBatch]) -> Reading:
        try:
            self._open_twin()
            with kept_generators(self._engine.device):
                micro_steps = self._micro_steps(batches)
                self._ranks.ready()
                sums = self._engine.accumulate_wider(micro_steps, watch=self._wide.over)
                if self._engine.applies_wider:
                    drop_gradients(self._engine)
        finally:
            self._engine.twin.close()
        return self._gather_reading(sums, _positions(batches))

    def _open_twin(self) -> None:
        """
        Raises:
            RankError: the device may not have the memory. To find out in the middle of a step would
                end the run.
        """
        device = self._engine.device
        if device.type == "cuda":
            # Activations and parameters are twice as wide, in addition to the existing ones.
            needed = 2 * torch.cuda.max_memory_allocated(device)
            total = torch.cuda.get_device_properties(device).total_memory
            if needed > total:
                raise RankError(f"needs about {needed} bytes, the device has {total}")
        self._engine.twin.open()

    def first_bad_module(self) -> tuple[str, dict[str, list[float]]]:
        """Compare the last watched computation with the wider one. Collective.

        Returns:
            The module that computed the first bad number, empty if none can be named; and the
            largest output of each module in both.
        """
        if self._narrow is None:
            return "", {}
        calls, right = self._narrow.calls(), self._wide.calls()
        named = {str(one) for one in self._ranks.gather(first_bad(calls, right)) if one}
        return named.pop() if len(named) == 1 else "", largest_by_module(calls, right)

    def copies_differ(self) -> bool:
        """Whether copies of the same weights differ between ranks. Collective."""
        return bool(differing_copies(self._engine, self._ranks))

    def strayed_weights(self) -> list[str]:
        """Parameters with one element far too large compared with all others. Collective."""
        shards = [s for s in self._engine.shards() if s.name.startswith("param/")]
        by_rank = self._ranks.gather([_extent(shard) for shard in shards])  # in the same order
        strayed = set()
        for rows in zip(*by_rank, strict=True):
            largest = max((row[1] for row in rows), default=0.0)
            mean_square = sum(row[2] for row in rows) / max(1, sum(row[3] for row in rows))
            if largest > max(_STRAY, _STRAY_SIGMAS * math.sqrt(mean_square)):
                strayed.add(str(rows[0][0]))
        return sorted(strayed)

    def _micro_steps(self, batches: Sequence[MicroBatch]) -> Sequence[MicroStep]:
        return self._stop.over(
            [
                MicroStep(batch=batch.to(self._engine.device), seed=seed)
                for batch, seed in zip(batches, self._seeds, strict=True)
            ]
        )

    def known_indices(self) -> Indices:
        """Data set indices of samples that are known to be good, one step's worth.

        Held-out samples, of a mixture as the stream mixes them now; repeated if there are too few.
        If the corpus holds out none (``data.val_path``, ``data.held_out=0``), the samples of the
        newest applied step; none before the first.
        """
        run, stream, order = self._run, self._run.corpus.stream, self._run.corpus.mixture
        state, size = run.state, stream.global_size
        if order is not None:
            held_out = order.held_out_like(size, state.cursor)
        else:
            held_out = stream.held_out_indices(size)
        if len(held_out):
            return np.resize(held_out, size)
        if state.updates:
            return stream.plan_before(state.cursor, run.history.ledger).indices
        return held_out

    def known(self, indices: Indices, *, rank: int | None = None) -> Reading:
        """Compute the step on a fixed set of samples that are known to be good.

        Args:
            rank: all others compute padding, and count as if they had the same level.
        """
        batches = self._fixed_batches(indices)
        if rank not in (None, self._ranks.rank):
            batches = _padding(batches)
        names = [[None if p is None else -1 - p for p in row] for row in _positions(batches)]
        # These are not from the stream.
        strangers = [batch.at((None,) * len(batch.positions)) for batch in batches]
        reading = self.compute(strangers, names)
        whole = 1 if rank is None else self.world_size
        return replace(reading, tokens=reading.tokens * whole)

    def among_known(
        self, batches: Sequence[MicroBatch], positions: Collection[int], indices: Indices
    ) -> Reading:
        """The samples at these positions, with samples known to be good in place of all others."""
        known = self._fixed_batches(indices)
        if len(known) != len(batches):
            return self.compute(without_samples(batches, _in(batches) - set(positions)))
        pairs = zip(batches, known, strict=True)
        return self.compute([batch.only(positions, other) for batch, other in pairs])

    def compute_of(self, batches: Sequence[MicroBatch], rank: int, *, tokens: float) -> Reading:
        """The step, of ``tokens``, with the samples of one rank; all others compute padding.

        They count as if they had the same level as that rank's.
        """
        reading = self.compute(batches if rank == self._ranks.rank else _padding(batches))
        return replace(reading, tokens=tokens, usual_loss=reading.loss)

    def micro_batches(self, batches: Sequence[MicroBatch]) -> list[list[int]]:
        """The positions of each micro-batch of all ranks. Collective."""
        own = [sorted(_in([batch])) for batch in batches]
        return [list(positions) for of_rank in self._ranks.gather(own) for positions in of_rank]

    def _fixed_batches(self, indices: Indices) -> list[MicroBatch]:
        with kept_generators(self._engine.device):
            return self._feed.fixed(indices)

    def read(self, plan: BatchPlan, *, shift: int = 0) -> tuple[MicroBatch, ...]:
        """Read the share of rank ``rank - shift`` from the data set once more. Collective."""
        self._stop.now()
        self._heart.enter("explain")
        source_rank = (self._ranks.rank - shift) % self.world_size
        with kept_generators(self._engine.device):
            return self._feed.read_again(plan, source_rank)

    def replace_read(self, plan: BatchPlan, batches: tuple[MicroBatch, ...]) -> None:
        """Have the loader give these samples for a plan, instead of those that it has read."""
        self._feed.put(plan, batches)

    def rotated(self, plan: BatchPlan, *, without: Collection[int] = ()) -> Reading:
        """Compute the share of each rank r on rank r + 1, with padding at these positions."""
        return self.compute(without_samples(self.read(plan, shift=1), without))

    def differs(
        self, batches: Sequence[MicroBatch], others: Sequence[MicroBatch]
    ) -> list[list[int]]:
        """The positions whose samples differ, by rank. Collective."""
        own = sorted({p for a, b in zip(batches, others, strict=True) for p in _differing(a, b)})
        return [list(positions) for positions in self._ranks.gather(own)]

    def all_readable(self, batches: Sequence[MicroBatch]) -> bool:
        """Whether every rank could read all of its samples. Collective."""
        failed = any(batch.unreadable for batch in batches)
        return self._ranks.sum([float(failed)])[0] == 0

    def hosts(self) -> list[str]:
        """The host names of all ranks. Collective."""
        return [str(host) for host in self._ranks.gather(host_name())]

    def _gather_reading(self, sums: LocalSums, names: Sequence[Names]) -> Reading:
        own_share = _share(sums, names)
        by_rank = self._ranks.gather(own_share)
        rows = {
            int(name): SampleRow(rank, float(loss), float(norm), count)
            for rank, (_, of_rank) in enumerate(by_rank)
            for name, loss, norm, count in of_rank
        }
        shares = [Share(loss=s[0], square=s[1], nonfinite=s[2] > 0, count=s[3]) for s, _ in by_rank]
        tokens = max(1.0, sum(s.count for s in shares))
        return Reading(rows=rows, shares=shares, tokens=tokens, unit=self._unit)


def _extent(shard: Shard) -> tuple[str, float, float, int]:
    """Name, largest magnitude, and the sum of squares and number of all other elements."""
    name = shard.name.partition("/")[2]
    if not len(shard.local):
        return name, 0.0, 0.0, 0
    size = shard.local.detach().double().abs()
    largest, index = size.max(dim=0)
    size[index] = 0.0
    worst, square = float(largest), float(size.square().sum())
    if not (math.isfinite(worst) and math.isfinite(square)):
        worst, square = sys.float_info.max, 0.0
    return name, worst, square, len(size) - 1


def _positions(batches: Sequence[MicroBatch]) -> list[Names]:
    return [batch.positions for batch in batches]


def _in(batches: Sequence[MicroBatch]) -> set[int]:
    """The positions of all samples in them."""
    return {p for batch in batches for p in batch.positions if p is not None}


def _padding(batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    return without_samples(batches, _in(batches))


def without_samples(batches: Sequence[MicroBatch], positions: Collection[int]) -> list[MicroBatch]:
    """The batches with padding instead of the samples at these positions."""
    return [batch.without(positions) for batch in batches]


def _share(sums: LocalSums, names: Sequence[Names]) -> tuple[list[float], list[list[Any]]]:
    """One rank's sums, and name, loss, norm and tokens of each of its samples."""
    host_sums = sums.sequences.to_host()
    norms = host_sums.gradient_norms or [0.0] * len(host_sums.losses)
    counts = [count for of_batch in sums.sequences.counts for count in of_batch.tolist()]
    sample_names = [name for of_batch in names for name in of_batch]
    rows = zip(sample_names, host_sums.losses, norms, counts, strict=True)
    square, count = float(sums.grad_square), float(sums.count)
    own_sums = [float(sums.loss), square, float(sums.nonfinite), count]
    return own_sums, [list(row) for row in rows if row[0] is not None]


def _differing(batch: MicroBatch, other: MicroBatch) -> list[int]:
    """Positions whose tensors differ in any bit."""
    fields, others = batch.inputs(), other.inputs()
    pairs = [(t, others[name]) for name, t in fields.items() if name in others and t.numel()]
    return [
        position
        for row, position in enumerate(batch.positions)
        if position is not None and not all(same_bits(a[row], b[row]) for a, b in pairs)
    ]


# Finds the module that computes the first bad number, by comparison with a wider precision.
#
# Hooks record for every call of a module the largest magnitude and a few elements of its input, its
# output and their gradients. The same calls in a wider precision show what they should be. A module
# is named if its input was right and its output was not; if a bad number arose between two modules,
# the module around them made it.
#
# Hooks run in the order of their registration: these run last, after the engine's own.


_ELEMENTS = 128  # recorded per tensor
# Relative error of the recorded elements together. Rounding to BF16 caused less than 0.1 at every
# depth that was tried; a broken operation is off by more than the numbers themselves.
_MOST_RELATIVE_ERROR = 0.5
_LEAST = 1e-3  # of the largest element, if all recorded ones are almost zero
_FAR = 4.0  # ratio to the expected largest magnitude, for an element that was not recorded


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """The recorded numbers of one tensor of a call."""

    largest: float
    elements: tuple[float, ...]

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.largest)

    def is_off(self, right: TensorSummary) -> bool:
        """Whether it differs from the right numbers by more than rounding."""
        if not right.is_finite:
            return False  # the right numbers are unknown
        if not self.is_finite:
            return True
        if len(self.elements) != len(right.elements):
            return False
        size = math.hypot(*right.elements)
        distance = math.dist(self.elements, right.elements)
        return (
            distance > _MOST_RELATIVE_ERROR * size + _LEAST * right.largest
            or self.largest > _FAR * right.largest
        )


# A module's name, and the summaries of its "in", "out", "grad_out" and "grad_in", if recorded.
Calls = Sequence[tuple[str, Mapping[str, TensorSummary]]]


class ModuleWatch:
    """Records all calls of a network's modules, in the order in which they ended."""

    def __init__(self) -> None:
        # By module, the tensors of a call as FP64 [1 + elements]: largest magnitude, elements.
        self._calls: list[tuple[str, dict[str, torch.Tensor]]] = []

    @contextmanager
    def over(self, network: nn.Module) -> Iterator[None]:
        """Record while the network computes inside of this context."""
        self._calls = []
        handles = [
            module.register_forward_hook(partial(self._note, name), with_kwargs=True)
            for name, module in network.named_modules()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def calls(self) -> Calls:
        """The recorded calls; waits for the device."""
        return [
            (name, {kind: _summary(tensor) for kind, tensor in tensors.items()})
            for name, tensors in self._calls
        ]

    def _note(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call: dict[str, torch.Tensor] = {}
        self._calls.append((name, call))

        def note(kind: str, value: torch.Tensor) -> None:
            call[kind] = _summarise(value)

        for kind, value in (("in", (args, kwargs)), ("out", output)):
            tensor = _first_tensor(value)
            if tensor is not None:
                note(kind, tensor)
                if tensor.requires_grad and torch.is_grad_enabled():
                    at_gradient = partial(note, f"grad_{kind}")
                    tensor.register_hook(at_gradient)  # type: ignore[no-untyped-call]


def first_bad(calls: Calls, right: Calls) -> str | None:
    """The module that computed the first bad number; None if none can be named.

    Args:
        right: the same calls in a wider precision.
    """
    if [name for name, _ in calls] != [name for name, _ in right]:
        return None
    off = [
        (name, {what: value.is_off(good[what]) for what, value in tensors.items() if what in good})
        for (name, tensors), (_, good) in zip(calls, right, strict=True)
    ]
    return _first_forward(off) or _first_backward(off)


_OffTensors = list[tuple[str, dict[str, bool]]]


def _first_forward(off: _OffTensors) -> str | None:
    """The first call with a bad output, which is innermost: inner calls end before outer ones."""
    for index, (name, flags) in enumerate(off):
        if not flags.get("out"):
            continue
        if flags.get("in"):
            return _around(name, off[index:])
        return name
    return None


def _around(name: str, later: _OffTensors) -> str | None:
    """The innermost module around ``name`` whose own input was right."""
    while name:
        name = name.rpartition(".")[0]
        tensors_off = next((one for other, one in later if other == name), None)
        if tensors_off is not None and not tensors_off.get("in"):
            return name
    return None


def _first_backward(off: _OffTensors) -> str | None:
    """The innermost module with a right gradient of its output and a bad one of its input."""
    candidates = [
        name for name, flags in off if flags.get("grad_in") and flags.get("grad_out") is False
    ]
    names = {
        name
        for name in candidates
        if not any(o != name and (o.startswith(f"{name}.") or not name) for o in candidates)
    }
    if len(names) > 1:  # they share an input, whose gradient is the sum of theirs
        names = {name.rpartition(".")[0] for name in names}
    return names.pop() if len(names) == 1 else None


def largest_by_module(calls: Calls, right: Calls) -> dict[str, list[float]]:
    """The largest output magnitude of each module, here and in the wider precision."""
    largest: dict[str, list[float]] = {}
    for (name, tensors), (_, good) in zip(calls, right, strict=False):
        if "out" in tensors and "out" in good:
            pair = largest.get(name, [0.0, 0.0])
            now = (tensors["out"].largest, good["out"].largest)
            largest[name] = np.maximum(pair, now).tolist()  # NaN is the largest
    return largest


@torch.no_grad()
def _summarise(tensor: torch.Tensor) -> torch.Tensor:
    """FP64 [1 + n]: the largest magnitude (NaN if there is one), and evenly spread elements."""
    flat = tensor.detach().reshape(-1)
    if not flat.numel():
        return torch.zeros(1, dtype=torch.float64, device=tensor.device)
    step = max(1, flat.numel() // _ELEMENTS)
    return torch.cat([flat.abs().amax().double()[None], flat[::step][:_ELEMENTS].double()])


def _summary(noted: torch.Tensor) -> TensorSummary:
    largest, *elements = noted.tolist()
    return TensorSummary(largest, tuple(elements))


def _first_tensor(value: Any) -> torch.Tensor | None:
    """The first floating-point tensor in a module's arguments or output."""
    if isinstance(value, torch.Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return next((t for t in map(_first_tensor, value) if t is not None), None)
    return None


# Computes something with the weights of a checkpoint, at the present cursor: probe D, and audits.
#
# The state is copied to host memory, and restored bit for bit afterwards.

Result = TypeVar("Result")
_SHARE = 0.5


@contextmanager
def state_restored(engine: Engine, ring: CheckpointRing) -> Iterator[None]:
    """Copy the engine's state to host memory, and put it back at the end."""
    kept = [shard.local.detach().to("cpu", copy=True) for shard in engine.shards()]
    counts = engine.update_counts()
    try:
        yield
    finally:
        ring.before_update()
        with torch.no_grad():
            for shard, copy in zip(engine.shards(), kept, strict=True):
                shard.local.copy_(copy)
            engine.finish_load(counts)


class CleanWeights:
    """Puts the weights of a checkpoint in place for a while, for observers."""

    def __init__(self, run: EngineRun) -> None:
        self._engine, self._ring = run.engine, run.ring
        self._ranks = run.observers.ranks
        self._num_local_ranks = run.group.place.local_world_size  # they share a node's memory
        self._stop = run.group.stop_look.through(self._ranks)

    def compute(self, record: Record, compute: Callable[[], Result]) -> Result | None:
        """Call ``compute`` with the weights of ``record``; None if it cannot be loaded, or if a
        node has no memory for a copy of the state.

        Collective.
        """
        self._stop.now()
        if self._ranks.sum([float(not self._has_room())])[0]:
            return None
        with state_restored(self._engine, self._ring):
            try:
                self._ring.restore([record])
            except (CheckpointError, ReadError):  # the same on all ranks
                return None
            return compute()

    def _has_room(self) -> bool:
        """Whether the copies of this node's ranks take at most half of its free memory."""
        tensors = [shard.local for shard in self._engine.shards()]
        needed = sum(one.numel() * one.element_size() for one in tensors) * self._num_local_ranks
        free = free_memory_bytes()
        return free is None or needed <= _SHARE * free
