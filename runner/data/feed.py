"""Turns batch plans into this rank's micro-batches, loaded ahead by torch's DataLoader.

The loader runs ahead of training and guesses the plans to come. A guess that differs from
the real plan (after a rollback) is dropped with everything after it, so a stale
batch is never used.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice, tee
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler
from torch.utils.data import Dataset as TorchDataset

from runner.config.schema import DataConfig
from runner.data.cursor import BatchPlan, Indices, SampleStream, shard_batch, share_out
from runner.data.dataset import (
    NOT_COUNTED,
    Dataset,
    Record,
    RecordDataset,
    Sample,
    describe,
    require_ids,
)
from runner.data.draws import Retries, draws, kept_while_drawing, seed_by_index, seed_by_position
from runner.policy.decision.skip_ledger import Ledger, Unreadable
from runner.system.error import DataError
from runner.system.process import die_with_parent

Slots = tuple[tuple[int | None, ...], ...]  # of the global batch, micro-batch by micro-batch
_FIELD = "fields/"  # begins the names of tensors in ``fields``
_LOOKED_AT = 16  # samples tried, to find a few that can be read
_PREFETCH = 2  # micro-batches that each worker keeps ready, as torch has it
_WORDS = 300  # characters of a sample's error
_INLINE_BYTES = 1 << 15  # half of what a pipe holds


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Tensors of one forward/backward on one rank.

    ``tokens`` and ``targets`` are int64 [B, T], targets being -100 where nothing is counted;
    ``segments`` int32 [B, T] or None. ``positions`` are stream positions (in a fixed set: places
    in it), None for padding. Unreadable samples are padding in the tensors.

    Samples without tokens are in ``fields``, tensors by name with first dimension B, and
    ``real`` is bool [B], False for padding: a copy of another sequence, to count for nothing.
    ``tokens`` and ``targets`` are [B, 0] then.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    segments: torch.Tensor | None
    positions: tuple[int | None, ...]
    unreadable: tuple[Unreadable, ...] = ()
    fields: Mapping[str, torch.Tensor] | None = None
    real: torch.Tensor | None = None

    def counts(self) -> list[int]:
        """The number of tokens with a loss in each row."""
        if self.real is not None:
            return [int(real) for real in self.real.tolist()]
        return [int(count) for count in (self.targets != NOT_COUNTED).sum(dim=1).tolist()]

    @property
    def shape(self) -> list[int]:
        """[B, T], equal on all ranks; [B] for samples without tokens."""
        return list(self.tokens.shape) if self.fields is None else [len(self.positions)]

    def inputs(self) -> dict[str, torch.Tensor]:
        """The arguments of a model's own ``losses``.

        ``fields``; for tokens ``input_ids`` and ``labels`` (``labels[b, t]`` is what follows
        ``input_ids[b, t]``, or -100), and ``segments`` where there are any.
        """
        if self.fields is not None:
            return dict(self.fields)
        segments = {} if self.segments is None else {"segments": self.segments}
        return {"input_ids": self.tokens, "labels": self.targets, **segments}

    def pin_memory(self) -> MicroBatch:
        """Called by the DataLoader's pinning thread."""
        return self._map(lambda _, tensor: tensor.pin_memory())

    def to(self, device: torch.device) -> MicroBatch:
        """Copy to another device without waiting."""
        return self._map(lambda _, tensor: tensor.to(device, non_blocking=True))

    def at(self, positions: tuple[int | None, ...]) -> MicroBatch:
        """The same samples with other positions."""
        return replace(self, positions=positions)

    def without(self, positions: Collection[int]) -> MicroBatch:
        """Replace the samples at these positions by padding of the same shapes.

        For samples without tokens that is a copy of a sample that stays, or zeros.
        """
        kept = tuple(None if p in positions else p for p in self.positions)
        gone = [place for place, p in enumerate(self.positions) if p in positions]
        stays = next((place for place, p in enumerate(kept) if p is not None), None)

        def padding(name: str, tensor: torch.Tensor) -> torch.Tensor | int:
            is_field = name.startswith(_FIELD) and stays is not None
            return tensor[stays] if is_field else NOT_COUNTED if name == "targets" else 0

        return self._filled(kept, gone, padding) if gone else self

    def only(self, positions: Collection[int], others: MicroBatch) -> MicroBatch:
        """These samples, and rows of ``others`` in place of all others, of which none is named.

        Padding instead where the shapes of ``others`` differ.
        """
        fill = others._named()
        shapes = [{name: t.shape for name, t in named.items()} for named in (self._named(), fill)]
        if shapes[0] != shapes[1]:
            return self.without([p for p in self.positions if p is not None and p not in positions])
        kept = tuple(p if p in positions else None for p in self.positions)
        gone = [place for place, p in enumerate(kept) if p is None]
        return self._filled(kept, gone, lambda name, _: fill[name][gone])

    def _filled(
        self,
        positions: tuple[int | None, ...],
        gone: list[int],
        rows: Callable[[str, torch.Tensor], torch.Tensor | int],
    ) -> MicroBatch:
        """Replace the rows at the places ``gone``."""

        def filled(name: str, tensor: torch.Tensor) -> torch.Tensor:
            result = tensor.clone()
            result[gone] = rows(name, tensor)  # not of the copy: torch refuses to read and write it
            return result

        return replace(self._map(filled), positions=positions)

    def _named(self) -> dict[str, torch.Tensor]:
        """All tensors by name."""
        own = {name: getattr(self, name) for name in ("tokens", "targets", "segments", "real")}
        given = {_FIELD + name: tensor for name, tensor in (self.fields or {}).items()}
        return {name: tensor for name, tensor in own.items() if tensor is not None} | given

    def _map(self, change: Callable[[str, torch.Tensor], Any]) -> MicroBatch:
        own = {name: change(name, tensor) for name, tensor in self._named().items()}
        given = {name: own.pop(_FIELD + name) for name in self.fields or {}}
        return replace(self, fields=None if self.fields is None else given, **own)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        """As bytes in a loader's pipe where the tensors are small.

        torch hands each tensor over as a descriptor of shared memory, which costs about a
        millisecond however small it is.
        """
        with contextlib.suppress(TypeError, RuntimeError):  # for what numpy lacks
            arrays = self._map(lambda _, tensor: tensor.numpy())
            is_small = sum(array.nbytes for array in arrays._named().values()) <= _INLINE_BYTES
            if is_small and all(type(tensor) is torch.Tensor for tensor in self._named().values()):
                named = {field.name: getattr(arrays, field.name) for field in fields(self)}
                return _from_arrays, (named,)
        return object.__reduce_ex__(self, protocol)


def _from_arrays(named: Mapping[str, Any]) -> MicroBatch:
    return MicroBatch(**named)._map(lambda _, array: torch.from_numpy(array))


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroPlan:
    """What one micro-batch reads; -1 marks padding in ``indices``.

    ``batch_start`` is -1 where ``positions`` are not those of the stream.
    """

    batch_start: int
    positions: tuple[int | None, ...]
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBatch:
    """A rank's share of one global batch.

    ``failure`` is set when the loader itself failed; the micro-batches are then padding only, so
    that the rank can still take part in the collectives that tell the others.
    """

    micro_batches: tuple[MicroBatch, ...]
    wait_seconds: float
    failure: str | None = None

    @property
    def unreadable(self) -> tuple[Unreadable, ...]:
        """The samples that could not be read."""
        return tuple(sample for batch in self.micro_batches for sample in batch.unreadable)

    @property
    def num_samples(self) -> int:
        """Number of samples without padding."""
        return sum(p is not None for batch in self.micro_batches for p in batch.positions)


class _Reader(TorchDataset[MicroBatch]):
    """Maps a micro-plan to tensors; runs in the loader's processes.

    Args:
        retry_seconds: how long to retry a sample that the system refuses.
        seed: of what samples draw.
    """

    def __init__(
        self,
        dataset: Dataset,
        seq_len: int,
        *,
        rank: int = 0,
        retry_seconds: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._dataset = dataset
        self._seq_len = seq_len
        self._seed = seed
        self._draws = draws(dataset)
        self._rank = rank
        self._retries = Retries(retry_seconds)
        self._records = dataset if isinstance(dataset, RecordDataset) else None

    def __getitem__(self, plan: MicroPlan) -> MicroBatch:
        with kept_while_drawing() if self._draws else contextlib.nullcontext():
            return self._batch(plan)

    def _batch(self, plan: MicroPlan) -> MicroBatch:
        rows: list[Sample | Record | None] = []
        unreadable = []
        for position, index in zip(plan.positions, plan.indices, strict=True):
            rows.append(None)
            if position is None:
                continue
            try:
                rows[-1] = self._read(plan, position, index)
            except Exception as error:  # any error: the ranks decide on it together
                unreadable.append(
                    Unreadable(
                        rank=self._rank,
                        position=position,
                        index=index,
                        name=describe(self._dataset, index),
                        error=f"{type(error).__name__}: {error}"[:_WORDS],
                        refused=isinstance(error, OSError),
                    )
                )
        self._seed_draws(plan, plan.positions[0], plan.indices[0])  # for a collate that draws
        batch = self._tensors(rows) if self._records is None else _fields(rows, self._records)
        return replace(batch, positions=plan.positions, unreadable=tuple(unreadable))

    def _tensors(self, rows: Sequence[Sample | Record | None]) -> MicroBatch:
        """Tensors from windows of tokens; padding where there is no sample."""
        shape = (len(rows), self._seq_len)
        tokens = np.zeros(shape, dtype=np.int64)
        targets = np.full(shape, NOT_COUNTED, dtype=np.int64)
        segments: np.ndarray | None = None
        for row, sample in enumerate(rows):
            if not isinstance(sample, Sample):
                continue
            tokens[row] = sample.tokens[:-1]
            targets[row] = (sample.tokens if sample.labels is None else sample.labels)[1:]
            if sample.segments is not None:
                if segments is None:
                    segments = np.zeros(shape, dtype=np.int32)
                segments[row] = sample.segments[:-1]
                # A document's first token cannot be predicted from the end of another one.
                targets[row][sample.segments[1:] != sample.segments[:-1]] = NOT_COUNTED
        return MicroBatch(
            tokens=torch.from_numpy(tokens),
            targets=torch.from_numpy(targets),
            segments=None if segments is None else torch.from_numpy(segments),
            positions=(),
        )

    def _read(self, plan: MicroPlan, position: int, index: int) -> Sample | Record:
        """
        Raises:
            Exception: any error of the data set.
            DataError: it does not return one of our samples.
        """

        def checked() -> Sample | Record:
            self._seed_draws(plan, position, index)
            sample = self._dataset[index]
            if isinstance(sample, Sample):
                self._check(sample)
            return sample

        try:
            return self._retries(checked)
        except OSError:
            raise
        except Exception:  # it may have been garbled once, whatever the data set says of it
            return self._retries(checked)

    def _seed_draws(self, plan: MicroPlan, position: int | None, index: int) -> None:
        if not self._draws:
            return
        if plan.batch_start < 0 or position is None:
            seed_by_index(index)
        else:
            seed_by_position(self._seed, position)

    def _check(self, sample: Sample) -> None:
        for values in (sample.tokens, sample.segments, sample.labels):
            if values is not None and values.shape != (self._seq_len + 1,):
                raise DataError(f"is of shape {values.shape}, not ({self._seq_len + 1},)")
        require_ids(sample.tokens, self._dataset.vocab_size, "the sample")


def _fields(rows: Sequence[Sample | Record | None], dataset: RecordDataset) -> MicroBatch:
    """Tensors from samples without tokens. Padding is a copy: zeros may not be a valid sample."""
    records = [row for row in rows if isinstance(row, Record)]
    filler = records[0] if records else dataset.example
    fields = dataset.collate([row if isinstance(row, Record) else filler for row in rows])
    nothing = torch.zeros((len(rows), 0), dtype=torch.int64)
    return MicroBatch(
        tokens=nothing,
        targets=nothing,
        segments=None,
        positions=(),
        fields=fields,
        real=torch.tensor([row is not None for row in rows]),
    )


def few(dataset: Dataset, seq_len: int, number: int) -> MicroBatch:
    """The first readable samples, as a micro-batch outside of the stream.

    Raises:
        DataError: none of the tried samples can be read.
    """
    looked_at = -(-min(len(dataset), _LOOKED_AT) // number) * number
    indices = [min(index, len(dataset) - 1) for index in range(looked_at)]
    return next(few_of(dataset, seq_len, indices, number))


def few_of(
    dataset: Dataset, seq_len: int, indices: Sequence[int], rows: int
) -> Iterator[MicroBatch]:
    """Micro-batches of these samples; those with an unreadable sample are left out.

    Raises:
        DataError: none of them can be read.
    """
    reader = _Reader(dataset, seq_len)
    unreadable: list[Unreadable] = []
    num_read = 0
    for begin in range(0, len(indices), rows):
        some = tuple(indices[begin : begin + rows])
        batch = reader[MicroPlan(batch_start=-1, positions=tuple(range(len(some))), indices=some)]
        unreadable += batch.unreadable
        if not batch.unreadable:
            num_read += 1
            yield batch.at((None,) * len(some))
    if not num_read:
        first = unreadable[0]
        raise DataError(f"none of {len(indices)} samples can be read; {first.name}: {first.error}")


def named_samples(dataset: Dataset, plan: BatchPlan, positions: Sequence[int]) -> tuple[str, ...]:
    """The data set's names for the samples at these positions of a plan."""
    where = dict(zip(plan.positions.tolist(), plan.indices.tolist(), strict=True))
    return tuple(describe(dataset, where[position]) for position in positions)


class _PlanSampler(Sampler[MicroPlan]):
    """The endless guess of the plans to come, from the last cursor that was set."""

    def __init__(self) -> None:
        self.ahead: Iterator[MicroPlan] = iter(())

    def __iter__(self) -> Iterator[MicroPlan]:
        return self.ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """Which part of a global batch belongs to one rank, in micro-batches of which size."""

    global_size: int
    micro_size: int
    rank: int
    world_size: int


class Feed:
    """One rank's loader.

    Args:
        dataset: map-style samples of ``seq_len + 1`` tokens.
        stream: the order.
        share: this rank's part of a batch.
        settings: the length of samples, which processes read them, and how far ahead.
        pin_memory: page-locked tensors.
        seed: of what samples draw.
    """

    def __init__(
        self,
        dataset: Dataset,
        stream: SampleStream,
        *,
        settings: DataConfig,
        share: RankShare,
        pin_memory: bool = False,
        seed: int = 0,
    ) -> None:
        self._stream = stream
        self._reader = _Reader(
            dataset,
            settings.seq_len,
            rank=share.rank,
            retry_seconds=settings.retry_seconds,
            seed=seed,
        )
        workers = settings.workers
        self._share = share
        self._slots = shard_batch(share.global_size, share.micro_size, share.world_size, share.rank)
        self._sampler = _PlanSampler()
        self._loading: Iterator[MicroBatch] | None = None
        self._expected: Iterator[MicroPlan] = iter(())
        self._newest: tuple[list[MicroPlan], tuple[MicroBatch, ...]] = ([], ())
        reader, writer = multiprocessing.Pipe(duplex=False)
        # Its priority runs it before multiprocessing joins its processes, even without close().
        self._end_workers = Finalize(self, _tell_workers, args=(writer,), exitpriority=100)
        self._loader: DataLoader[MicroBatch] = DataLoader(
            self._reader,
            sampler=self._sampler,
            batch_size=None,
            num_workers=workers,
            prefetch_factor=_PREFETCH if workers else None,
            persistent_workers=workers > 0,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # else each start of it moves the model's
            worker_init_fn=partial(_begin_worker, reader, writer) if workers else None,
        )

    @property
    def num_micro_batches(self) -> int:
        return len(self._slots)

    def fetch(self, plan: BatchPlan, ledger: Ledger) -> RankBatch:
        """Load this rank's share of ``plan``. Never raises for an unreadable sample."""
        began = time.monotonic()
        plans = self._micro_plans(plan)
        if plans == self._newest[0]:  # a speculative step was discarded and is launched again
            return RankBatch(micro_batches=self._newest[1], wait_seconds=time.monotonic() - began)
        if self._loading is None or self._expect(len(plans)) != plans:
            # Computed once for both: what the loader gets, and what it will deliver.
            ahead = self._plans_ahead(plan.start, ledger.copy())
            self._sampler.ahead, self._expected = tee(ahead)
            self._loading = iter(self._loader)
            self._expect(len(plans))
        try:
            loaded = tuple(islice(self._loading, len(plans)))
            assert [batch.positions for batch in loaded] == [micro.positions for micro in plans], (
                "the loader ran on another plan"
            )
        except Exception as error:  # the caller tells all ranks, and all raise alike
            self._loading = None
            empty = tuple(
                self._reader[replace(micro, positions=(None,) * len(micro.positions))]
                for micro in plans
            )
            return RankBatch(
                micro_batches=empty,
                wait_seconds=time.monotonic() - began,
                failure=f"{type(error).__name__}: {error}",
            )
        self._newest = plans, loaded
        return RankBatch(micro_batches=loaded, wait_seconds=time.monotonic() - began)

    def fixed(self, indices: Indices) -> list[MicroBatch]:
        """Load this rank's share of a fixed set of samples at once (evaluation).

        Never raises for a sample that cannot be read.
        """
        share = self._share
        dealt = share_out(len(indices), share.micro_size, share.world_size, share.rank)
        plan = BatchPlan(positions=np.arange(len(indices)), indices=indices)
        return [self._reader[replace(m, batch_start=-1)] for m in self._micro_plans(plan, dealt)]

    def read_again(self, plan: BatchPlan, rank: int) -> tuple[MicroBatch, ...]:
        """Read the share of ``rank`` in ``plan`` at once, in this process.

        Never raises for a sample that cannot be read. The loader goes on where it was.
        """
        share = self._share
        slots = shard_batch(share.global_size, share.micro_size, share.world_size, rank)
        return tuple(self._reader[micro] for micro in self._micro_plans(plan, slots))

    def put(self, plan: BatchPlan, batches: tuple[MicroBatch, ...]) -> None:
        """Set what the next :meth:`fetch` of ``plan`` returns."""
        self._newest = self._micro_plans(plan), batches

    def own_positions(self, plan: BatchPlan) -> list[int | None]:
        """Stream positions of this rank's sequences, micro-batch by micro-batch."""
        return [position for micro in self._micro_plans(plan) for position in micro.positions]

    def _plans_ahead(self, cursor: int, ledger: Ledger) -> Iterator[MicroPlan]:
        """Yield micro-plans from ``cursor`` on, endlessly."""
        while True:
            plan = self._stream.plan(cursor, ledger)
            yield from self._micro_plans(plan)
            cursor = plan.stop

    def close(self) -> None:
        """End the loading processes; the feed cannot be used afterwards."""
        self._loading = None
        del self._loader  # this ends them in order, unless an error's traceback still holds it
        self._end_workers()

    def _expect(self, number: int) -> list[MicroPlan]:
        """The micro-plans that the loader delivers next."""
        return list(islice(self._expected, number))

    def _micro_plans(self, plan: BatchPlan, dealt: Slots | None = None) -> list[MicroPlan]:
        """Micro-plans of this rank's slots, or of the ``dealt`` ones."""
        return [
            MicroPlan(
                batch_start=plan.start,
                positions=tuple(None if s is None else int(plan.positions[s]) for s in slots),
                indices=tuple(-1 if s is None else int(plan.indices[s]) for s in slots),
            )
            for slots in (self._slots if dealt is None else dealt)
        ]


def _begin_worker(reader: Connection, writer: Connection, _: int) -> None:
    """In a loading process: make it live exactly as long as it is wanted.

    Since it ignores SIGTERM nothing else would end it: not DataLoader, nor multiprocessing at the
    end of the interpreter, which sends that signal to its processes and joins them without
    limit. It ends when anything, or the end of file, can be read from ``reader``.
    """
    writer.close()
    _quiet_worker()

    def end_when_told() -> None:
        reader.poll(None)
        os._exit(0)  # torch's SIGCHLD handler would take any other exit code for a crash

    threading.Thread(target=end_when_told, name="lifeline", daemon=True).start()


def _tell_workers(writer: Connection) -> None:
    """Tell all loading processes to end: they wait until the pipe becomes readable."""
    with contextlib.suppress(OSError):
        writer.send_bytes(b"end")
    writer.close()


def _quiet_worker() -> None:
    """A loading process must not act on the signals meant for the run.

    A scheduler or a terminal sends them to every process, and the run still needs its batches to
    reach the end of the step. It ends with the process that it loads for, and at once: it has
    copies of the process group's sockets, and while one is open the other ranks wait for a rank
    that is dead. torch itself checks the parent only every five seconds.
    """
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
