"""Turns batch plans into this rank's micro-batches, loaded ahead by torch's DataLoader.

The loader runs ahead of training on its own guess of the plans to come. A guess that is not
the plan asked for (after a rollback) is thrown away with everything behind it, so a stale
batch is never used.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, tee

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler
from torch.utils.data import Dataset as TorchDataset

from runner.data.cursor import BatchPlan, Indices, SampleStream
from runner.data.dataset import Dataset
from runner.linux import die_with_parent
from runner.policy.elastic import deal, share_out
from runner.policy.ledger import Ledger

NOT_COUNTED = -100  # torch's ignore_index: no loss, no gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Tensors of one forward/backward on one rank.

    ``tokens`` and ``targets`` are int64 [B, T], targets being -100 where nothing is counted;
    ``segments`` int32 [B, T] or None. ``positions`` are stream positions, None for padding.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    segments: torch.Tensor | None
    positions: tuple[int | None, ...]

    @property
    def num_counted(self) -> int:
        return int((self.targets != NOT_COUNTED).sum())

    def pin_memory(self) -> MicroBatch:
        """Called by the DataLoader's pinning thread."""
        return self._map(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device, without waiting for the copy."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def _map(self, move) -> MicroBatch:  # type: ignore[no-untyped-def]
        return replace(
            self,
            tokens=move(self.tokens),
            targets=move(self.targets),
            segments=None if self.segments is None else move(self.segments),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroPlan:
    """What one micro-batch reads; -1 marks padding in ``indices``."""

    batch_start: int
    positions: tuple[int | None, ...]
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A rank's share of one global batch. ``failure`` is set when a sample could not be read;

    the micro-batches are then padding only, so that the rank can still take part in the
    collectives that tell the others.
    """

    micro_batches: tuple[MicroBatch, ...]
    wait_seconds: float
    failure: str | None = None


class _Reader(TorchDataset[MicroBatch]):
    """Maps a micro-plan to tensors; runs in the loader's processes."""

    def __init__(self, dataset: Dataset, seq_len: int) -> None:
        self._dataset = dataset
        self._seq_len = seq_len

    def __getitem__(self, plan: MicroPlan) -> MicroBatch:
        shape = (len(plan.indices), self._seq_len)
        tokens = np.zeros(shape, dtype=np.int64)
        targets = np.full(shape, NOT_COUNTED, dtype=np.int64)
        segments: np.ndarray | None = None
        for row, index in enumerate(plan.indices):
            if index < 0:
                continue
            sample = self._dataset[index]
            tokens[row] = sample.tokens[:-1]
            targets[row] = sample.tokens[1:]
            if sample.segments is not None:
                if segments is None:
                    segments = np.zeros(shape, dtype=np.int32)
                segments[row] = sample.segments[:-1]
                # The first token of a document cannot be told from the end of another one.
                targets[row][sample.segments[1:] != sample.segments[:-1]] = NOT_COUNTED
        return MicroBatch(
            tokens=torch.from_numpy(tokens),
            targets=torch.from_numpy(targets),
            segments=None if segments is None else torch.from_numpy(segments),
            positions=plan.positions,
        )


class _PlanSampler(Sampler[MicroPlan]):
    """The endless guess of plans to come, as last set."""

    def __init__(self) -> None:
        self.ahead: Iterator[MicroPlan] = iter(())

    def __iter__(self) -> Iterator[MicroPlan]:
        return self.ahead


class Feed:
    """One rank's loader.

    Args:
        dataset: map-style samples of ``seq_len + 1`` tokens.
        stream: the order.
        global_size, micro_size, rank, world_size: how a batch is dealt.
        workers: loading processes; 0 loads in the calling one.
        prefetch: micro-batches each worker keeps ready.
        pin_memory: page-locked tensors (CUDA only).
    """

    def __init__(
        self,
        dataset: Dataset,
        stream: SampleStream,
        *,
        seq_len: int,
        global_size: int,
        micro_size: int,
        rank: int,
        world_size: int,
        workers: int,
        prefetch: int,
        pin_memory: bool,
    ) -> None:
        self._stream = stream
        self._reader = _Reader(dataset, seq_len)
        self._slots = deal(global_size, micro_size, world_size, rank)
        self._micro_size = micro_size
        self._rank, self._world_size = rank, world_size
        self._sampler = _PlanSampler()
        self._loading: Iterator[MicroBatch] | None = None
        self._expected: Iterator[MicroPlan] = iter(())
        self._newest: tuple[list[MicroPlan], tuple[MicroBatch, ...]] = ([], ())
        self._loader: DataLoader[MicroBatch] = DataLoader(
            self._reader,
            sampler=self._sampler,
            batch_size=None,
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            persistent_workers=workers > 0,
            pin_memory=pin_memory,
            worker_init_fn=_quiet_worker if workers else None,
        )

    @property
    def num_micro_batches(self) -> int:
        return len(self._slots)

    def fetch(self, plan: BatchPlan, ledger: Ledger) -> Fetched:
        """This rank's share of ``plan``. Never raises for a sample that cannot be read."""
        began = time.monotonic()
        wanted = self._micro_plans(plan)
        if wanted == self._newest[0]:  # a step that was launched in vain is launched again
            return Fetched(micro_batches=self._newest[1], wait_seconds=time.monotonic() - began)
        if self._loading is None or self._expect(len(wanted)) != wanted:
            self._restart(plan.start, ledger)
            self._expect(len(wanted))
        try:
            loaded = tuple(self._next_batch(micro_plan) for micro_plan in wanted)
        except Exception as error:  # told to all ranks by the caller, raised on all alike
            self._loading = None
            empty = tuple(self._padding(len(slots)) for slots in self._slots)
            words = f"{type(error).__name__}: {error}"
            return Fetched(
                micro_batches=empty, wait_seconds=time.monotonic() - began, failure=words
            )
        self._newest = wanted, loaded
        return Fetched(micro_batches=loaded, wait_seconds=time.monotonic() - began)

    def fixed(self, indices: Indices) -> list[MicroBatch]:
        """This rank's share of a fixed set of samples, loaded at once (evaluation)."""
        return [
            self._reader[
                MicroPlan(
                    batch_start=-1,
                    positions=tuple(None for _ in slots),
                    indices=tuple(-1 if slot is None else int(indices[slot]) for slot in slots),
                )
            ]
            for slots in share_out(len(indices), self._micro_size, self._world_size, self._rank)
        ]

    def own_positions(self, plan: BatchPlan) -> list[int | None]:
        """Stream positions of this rank's sequences, micro-batch by micro-batch."""
        return [position for micro in self._micro_plans(plan) for position in micro.positions]

    def _plans_ahead(self, cursor: int, ledger: Ledger) -> Iterator[MicroPlan]:
        """Micro-plans from ``cursor`` on, without end."""
        while True:
            plan = self._stream.plan(cursor, ledger)
            yield from self._micro_plans(plan)
            cursor = plan.stop

    def close(self) -> None:
        """End the loading processes; the feed is of no use afterwards."""
        self._loading = None
        del self._loader

    def _restart(self, cursor: int, ledger: Ledger) -> None:
        # Computed once for both: what the loader is given, and what it will deliver.
        self._sampler.ahead, self._expected = tee(self._plans_ahead(cursor, ledger.copy()))
        self._loading = iter(self._loader)

    def _expect(self, number: int) -> list[MicroPlan]:
        """What the loader delivers next."""
        return list(islice(self._expected, number))

    def _next_batch(self, wanted: MicroPlan) -> MicroBatch:
        assert self._loading is not None
        batch = next(self._loading)
        assert batch.positions == wanted.positions, "the loader ran on another plan"
        return batch

    def _micro_plans(self, plan: BatchPlan) -> list[MicroPlan]:
        return [
            MicroPlan(
                batch_start=plan.start,
                positions=tuple(None if s is None else int(plan.positions[s]) for s in slots),
                indices=tuple(-1 if s is None else int(plan.indices[s]) for s in slots),
            )
            for slots in self._slots
        ]

    def _padding(self, size: int) -> MicroBatch:
        nothing = MicroPlan(batch_start=-1, positions=(None,) * size, indices=(-1,) * size)
        return self._reader[nothing]


def _quiet_worker(_: int) -> None:
    """A loading process must not act on the signals meant for the run.

    A scheduler sends them to every process, and the run still needs its batches to get to the
    end of the step. It ends with the process that it loads for, and at once: it has copies of the
    process group's sockets, and while one is open the other ranks wait for a rank that is dead.
    torch's own look after the parent comes every five seconds.
    """
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
