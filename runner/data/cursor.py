"""The data cursor: which samples a step reads, computed from one number and the skip ledger.

Samples form one endless stream: position ``p`` is in epoch ``p // N`` and names the sample
``permute(p % N)`` of that epoch. Held-out samples keep their positions but are skipped.
World size and engine do not matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Protocol

import numpy as np
import numpy.typing as npt

from runner.policy.decision.skip_ledger import Ledger
from runner.system.error import DataError

# The order of samples, computed instead of stored: a keyed bijection on ``[0, size)``.
#
# Owns the arithmetic that turns a stream position into a sample index, and the split of
# samples into training and held out. Must not know datasets, files or ranks: the same
# numbers must come out on every machine, world size and numpy version, so everything here
# is 64-bit integer arithmetic and no library generator is used.

MAX_SIZE = 2**48
# Counts as one more epoch: keeps the evaluation order apart from every training epoch.
EVAL_EPOCH = (1 << 62) - 1

_ROUNDS = 6
_WORD = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_SPLIT = 0x5851F42D4C957F2D

Words = npt.NDArray[np.uint64]


def permute(positions: npt.NDArray[np.int64], *, size: int, key: int) -> npt.NDArray[np.int64]:
    """Map positions to sample indices: a bijection on ``[0, size)`` chosen by ``key``.

    A Feistel network over the smallest power of two that holds ``size``, with cycle
    walking (Black and Rogaway, 2002): a value outside the range is encrypted again.

    Args:
        positions: int64, any shape, each in ``[0, size)``.
        size: number of samples, 1 to 2**48.
        key: any integer; its low 64 bits count. See :func:`epoch_key`.

    Returns:
        int64, the shape of ``positions``.

    Raises:
        ValueError: ``size`` or a position is out of range.
    """
    inputs = np.asarray(positions, dtype=np.int64)
    _check_range(inputs, size)
    values = inputs.reshape(-1).astype(np.uint64)
    bits = (size - 1).bit_length()
    keys = _round_keys(key)
    values = _encrypt(values, bits=bits, keys=keys)
    outside = np.flatnonzero(values >= np.uint64(size))
    while outside.size:
        walked = _encrypt(values[outside], bits=bits, keys=keys)
        values[outside] = walked
        outside = outside[walked >= np.uint64(size)]
    return values.astype(np.int64).reshape(inputs.shape)


def epoch_key(seed: int, epoch: int) -> int:
    """Key of one epoch's order, in ``[0, 2**64)``."""
    return _mix_int(_mix_int(seed + _GOLDEN) + epoch * _GOLDEN)


def held_out(
    indices: npt.NDArray[np.int64], *, share: float, seed: int = 0
) -> npt.NDArray[np.bool_]:
    """True for the sample indices that are kept out of training.

    Depends on the index alone, so the split survives a change of the run's seed, of the
    epoch and of the world size; ``seed`` is for a second, unrelated split.

    Args:
        indices: int64, any shape, not negative.
        share: part held out, 0 (none) to 1 (all).
        seed: which split.

    Returns:
        bool, the shape of ``indices``.
    """
    inputs = np.asarray(indices, dtype=np.int64)
    base = np.uint64(_mix_int(seed ^ _SPLIT))
    hashed = _mix(inputs.reshape(-1).astype(np.uint64) + base)
    # 53 bits are exact in a float64, so share 0 and share 1 mean none and all.
    fraction = (hashed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    below: npt.NDArray[np.bool_] = fraction < share
    return below.reshape(inputs.shape)


def _check_range(positions: npt.NDArray[np.int64], size: int) -> None:
    if not 1 <= size <= MAX_SIZE:
        raise ValueError(f"size {size} is not in 1..2**48")
    if positions.size and not 0 <= int(positions.min()) <= int(positions.max()) < size:
        raise ValueError(
            f"positions {int(positions.min())}..{int(positions.max())} are not in 0..{size - 1}"
        )


def _encrypt(values: Words, *, bits: int, keys: tuple[int, ...]) -> Words:
    """One pass of the network over ``[0, 2**bits)``; halves may differ by one bit.

    Each round changes one half by a function of the other, which is undone by doing it
    again: a bijection whatever the round function is and however wide the halves are.
    """
    low_bits = bits - bits // 2
    low_mask, high_mask = np.uint64(2**low_bits - 1), np.uint64(2 ** (bits // 2) - 1)
    low, high = values & low_mask, values >> np.uint64(low_bits)
    for number, key in enumerate(keys):
        if number % 2:
            high = high ^ (_mix(low + np.uint64(key)) & high_mask)
        else:
            low = low ^ (_mix(high + np.uint64(key)) & low_mask)
    return (high << np.uint64(low_bits)) | low


@lru_cache  # the same in each step of an epoch
def _round_keys(key: int) -> tuple[int, ...]:
    return tuple(_mix_int(key + (number + 1) * _GOLDEN) for number in range(_ROUNDS))


def _mix(words: Words) -> Words:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014); arrays wrap modulo 2**64."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_MIX_1)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_MIX_2)
    return words ^ (words >> np.uint64(31))


def _mix_int(word: int) -> int:
    """The same finaliser for one Python integer: numpy scalars would warn on wrapping."""
    return int(_mix(np.array([word & _WORD], dtype=np.uint64))[0])


Indices = npt.NDArray[np.int64]

# Below this size the train/held-out split is counted exactly before training.
_COUNTED_BELOW = 1_000_000
_CHUNK = 1 << 16  # samples looked at together, to find held-out ones
_FIRST_RANGES = 4  # allowed ranges of the ledger: a batch nearly always comes from the first
_PLANS_KEPT = 64  # the loader is at most this many batches ahead, or they are computed again

_Range = tuple[int, int | None]
_Asked = tuple[int, tuple[_Range, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """One global batch: ``positions`` in the stream and ``indices`` in the data set, int64 [G].

    ``start`` is the first position, ``stop`` one past the last: the next cursor.
    """

    positions: Indices
    indices: Indices

    @property
    def start(self) -> int:
        return int(self.positions[0])

    @property
    def stop(self) -> int:
        return int(self.positions[-1]) + 1


class Order(Protocol):
    """Which sample is at each position of the stream, and which are never trained on."""

    def indices(self, positions: Indices) -> Indices:
        """Data set indices of stream positions, int64, same shape."""

    def is_held_out(self, indices: Indices) -> npt.NDArray[np.bool_]:
        """Which data set indices are held out; bool, same shape."""

    def held_out_indices(self, count: int) -> Indices:
        """A fixed set of held-out samples, int64; empty when none is held out."""


class OneSource:
    """The order of one data set: each epoch is a permutation of its own.

    Args:
        num_samples: samples in the data set, N.
        seed: of the order.
        held_out_share: share of samples never trained on, chosen by hash of their index.
        split: which split into training and held out.
    """

    def __init__(
        self, *, num_samples: int, seed: int, held_out_share: float, split: int = 0
    ) -> None:
        self.num_samples = num_samples
        self._seed = seed
        self._share = held_out_share
        self._split = split

    def require_some(self, of: str = "") -> None:
        """
        Raises:
            DataError: nothing is left to train on.
        """
        size = self.num_samples
        if size < _COUNTED_BELOW and self.is_held_out(np.arange(size)).all():
            raise DataError(
                f"data.held_out={self._share}: all {size} samples{of} are held out; use more data, "
                "a shorter data.seq_len or a smaller share"
            )

    def indices(self, positions: Indices) -> Indices:
        epochs, offsets = np.divmod(positions, self.num_samples)
        sample_indices = np.empty_like(positions)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            sample_indices[chosen] = self._permuted(offsets[chosen], int(epoch))
        return sample_indices

    def is_held_out(self, indices: Indices) -> npt.NDArray[np.bool_]:
        return held_out(indices, share=self._share, seed=self._split)

    @property
    def num_trained(self) -> int:
        """Samples of one epoch: those that are not held out."""
        starts = range(0, self.num_samples, _CHUNK)
        chunks = (np.arange(at, min(self.num_samples, at + _CHUNK)) for at in starts)
        return sum(int((~self.is_held_out(chunk)).sum()) for chunk in chunks)

    def held_out_indices(self, count: int) -> Indices:
        chunks: list[Indices] = [np.empty(0, dtype=np.int64)]
        num_found = 0
        for at in range(0, self.num_samples if self._share > 0 else 0, _CHUNK):
            offsets = np.arange(at, min(self.num_samples, at + _CHUNK), dtype=np.int64)
            indices = self._permuted(offsets, EVAL_EPOCH)
            chunks.append(indices[self.is_held_out(indices)])
            num_found += len(chunks[-1])
            if num_found >= count:
                break
        return np.concatenate(chunks)[:count]

    def _permuted(self, offsets: Indices, epoch: int) -> Indices:
        return permute(offsets, size=self.num_samples, key=epoch_key(self._seed, epoch))


class SampleStream:
    """The samples of one run in order, step by step.

    Args:
        global_size: samples per step.
    """

    def __init__(self, order: Order, *, global_size: int) -> None:
        self.order = order
        self.global_size = global_size
        self._made: dict[_Asked, BatchPlan] = {}

    @classmethod
    def of_one(
        cls, *, num_samples: int, seed: int, held_out_share: float, global_size: int
    ) -> SampleStream:
        """The stream of one data set; see :class:`OneSource`.

        Raises:
            DataError: nothing is left to train on.
        """
        order = OneSource(num_samples=num_samples, seed=seed, held_out_share=held_out_share)
        order.require_some()
        return cls(order, global_size=global_size)

    def forget(self) -> None:
        """Drop cached plans, because the order has changed."""
        self._made.clear()

    def plan(self, cursor: int, ledger: Ledger) -> BatchPlan:
        """The next global batch at or after ``cursor`` that the ledger allows."""
        # The loader plans ahead what the loop plans again. What the ledger holds before the
        # cursor, or behind the ranges that the batch came from, changes nothing.
        first = tuple(islice(ledger.allowed(cursor), _FIRST_RANGES))
        known = self._made.get((cursor, first))
        if known is not None:
            return known
        plan, num_ranges = self._plan(ledger.allowed(cursor))
        if num_ranges <= _FIRST_RANGES:
            while len(self._made) >= _PLANS_KEPT:
                del self._made[next(iter(self._made))]
            self._made[cursor, first] = plan
        return plan

    def plan_before(self, cursor: int, ledger: Ledger) -> BatchPlan:
        """The newest global batch that reads nothing from ``cursor`` on, or the first one."""
        count = self.global_size
        while True:
            start = ledger.before(cursor, count)
            plan = self.plan(start, ledger)
            behind = int((plan.positions >= cursor).sum())
            if start == 0 or not behind:
                return plan
            count += behind  # number of held-out samples that it skipped

    def _plan(self, allowed: Iterable[_Range]) -> tuple[BatchPlan, int]:
        """Plan a batch; also returns from how many ranges it came."""
        parts: list[tuple[Indices, Indices]] = []
        missing = self.global_size
        num_ranges = 0
        for start, stop in allowed:
            num_ranges += 1
            while missing and (stop is None or start < stop):
                span = missing + missing // 8 + 8
                end = start + span if stop is None else min(stop, start + span)
                positions = np.arange(start, end, dtype=np.int64)
                indices = self.indices(positions)
                usable = np.flatnonzero(~self.order.is_held_out(indices))[:missing]
                parts.append((positions[usable], indices[usable]))
                missing -= len(usable)
                start = end
            if not missing:
                break
        plan = BatchPlan(
            positions=np.concatenate([positions for positions, _ in parts]),
            indices=np.concatenate([indices for _, indices in parts]),
        )
        return plan, num_ranges

    def indices(self, positions: Indices) -> Indices:
        """Data set indices of stream positions, int64, same shape."""
        return self.order.indices(positions)

    def held_out_indices(self, count: int) -> Indices:
        """A fixed set of held-out samples, int64; empty when none is held out."""
        return self.order.held_out_indices(count)


def shard_batch(
    global_size: int, micro_size: int, world_size: int, rank: int
) -> tuple[tuple[int | None, ...], ...]:
    """Return the slots of the global batch that ``rank`` computes, by micro-batch.

    Every rank gets the same number of micro-batches of the same sizes, because collectives
    run in lockstep; if the world size does not divide the batch, ``None`` marks a padding sequence
    of zero weight. Slots are assigned round robin, so no rank gets only padding.

    Raises:
        ValueError: fewer slots than ranks, or a size below one.
    """
    if min(global_size, micro_size, world_size) < 1 or not 0 <= rank < world_size:
        raise ValueError("sizes must be positive and 0 <= rank < world_size")
    if world_size > global_size:
        raise ValueError(f"{world_size} ranks but only {global_size} sequences")
    return share_out(global_size, micro_size, world_size, rank)


def share_out(
    count: int, micro_size: int, world_size: int, rank: int
) -> tuple[tuple[int | None, ...], ...]:
    """Like :func:`shard_batch`, for any number of slots; with fewer slots than ranks some ranks get
    padding only."""
    per_rank = -(-count // world_size)
    slots = [
        slot if slot < count else None for slot in range(rank, per_rank * world_size, world_size)
    ]
    return tuple(tuple(slots[at : at + micro_size]) for at in range(0, per_rank, micro_size))
