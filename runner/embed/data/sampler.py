"""The order of a run's samples as a batch sampler for any DataLoader."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch.utils.data import Sampler as TorchSampler

from runner.data.cursor import Indices, OneSource, SampleStream
from runner.distributed.env import place_from
from runner.embed.state.randomness import Randomness, generators_of
from runner.policy.decision.skip_ledger import Ledger
from runner.system.environment import variables
from runner.system.error import ConfigError, DataError

# The values that determine the order; a state of another order cannot be loaded.
_ORDER = ("num_samples", "seed", "shuffle")


@dataclass(frozen=True, slots=True)
class _Position:
    """The next position (``cursor``), after ``batches`` batches of pass ``epoch``."""

    cursor: int = 0
    epoch: int = 0
    batches: int = 0


_DrawnBatch = tuple[int, _Position]  # a batch: its first position, and the position after it


@dataclass(frozen=True)
class _InOrder:
    """The unshuffled order: position ``p`` is sample ``p % num_samples``."""

    num_samples: int

    def indices(self, positions: Indices) -> Indices:
        return positions % self.num_samples

    def is_held_out(self, indices: Indices) -> npt.NDArray[np.bool_]:
        return np.zeros(indices.shape, dtype=np.bool_)

    def held_out_indices(self, count: int) -> Indices:
        return np.empty(0, dtype=np.int64)


class Sampler(TorchSampler[list[int]]):
    """A batch sampler whose position is one number, for any world size and number of workers.

    Samples form one stream: position ``p`` is in epoch ``p // N`` and names sample
    ``permute(p % N)`` of it, a permutation that is computed and not stored. A global batch is the
    next ``global_size`` positions that are not skipped, dealt to the ranks in turn. So the batches
    are the same for any world size, also if it changes during the run.

    An iteration is a pass: it ends when the epoch has no whole batch left; the remaining samples
    are in the first batch of the next pass. All ranks have equally many batches, and each sample
    is used once per epoch; none is repeated or dropped.

    Args:
        data: the data set, or its number of samples.
        global_size: samples of a batch, over all ranks.
        seed: of the permutation.
        shuffle: False reads each epoch in the order of the data set.
        skip: half-open ranges of positions that are never read.
        rank, world_size: by default those of the process group, or of one process.

    Raises:
        ConfigError: a value that cannot be.

    How far it is, is counted by batches handed out, where the loop goes over :meth:`over`, or the
    loader keeps its own state (torchdata's StatefulDataLoader), or Guard goes over it. A plain
    loop over a DataLoader with workers is behind :meth:`state_dict` by what the workers prefetch.

    Where ``world_size`` does not divide ``global_size`` some ranks have one sample more in each
    batch; the mean over ranks is exact if each weighs its own by
    ``len(batch) * world_size / global_size``.

    >>> from torch.utils.data import DataLoader
    >>> from runner import Sampler
    >>> data = list(range(10))
    >>> sampler = Sampler(data, global_size=4, seed=1, rank=0, world_size=1)
    >>> loader = DataLoader(data, batch_sampler=sampler)
    >>> batches = [batch.tolist() for batch in sampler.over(loader)]
    >>> state = sampler.state_dict()
    >>> batches += [batch.tolist() for batch in sampler.over(loader)]
    >>> sorted(batches[0] + batches[1] + batches[2][:2])
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    >>> halves = [Sampler(data, global_size=4, seed=1, rank=r, world_size=2) for r in (0, 1)]
    >>> for half in halves:
    ...     half.load_state_dict(state)
    >>> [sorted(a + b) for a, b in zip(*halves)] == [sorted(batch) for batch in batches[2:]]
    True
    """

    def __init__(
        self,
        data: Sized | int,
        *,
        global_size: int,
        seed: int = 0,
        shuffle: bool = True,
        skip: Iterable[tuple[int, int]] = (),
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if not isinstance(data, int) and not hasattr(data, "__len__"):
            raise ConfigError(
                f"Sampler: data is a {type(data).__name__} without len(); give a data set with "
                "[i] and len, or its number of samples"
            )
        self.num_samples = data if isinstance(data, int) else len(data)
        _require_whole(data=self.num_samples, global_size=global_size, seed=seed)
        self.global_size, self.seed, self.shuffle = global_size, seed, shuffle
        if not 1 <= global_size <= self.num_samples:
            raise ConfigError(
                f"Sampler: global_size={global_size}: must be from 1 to the number of samples, "
                f"{self.num_samples}"
            )
        if (rank is None) != (world_size is None):
            raise ConfigError(
                f"Sampler: rank={rank}, world_size={world_size}: give both, or neither"
            )
        self.deals_to_all, self._given_ranks = rank is None, None
        if rank is not None and world_size is not None:
            self._given_ranks = self._checked_ranks(rank, world_size)
        self._ledger = Ledger()
        try:
            order = OneSource(num_samples=self.num_samples, seed=seed, held_out_share=0.0)
        except DataError as error:
            raise ConfigError(f"Sampler: {error}") from None
        self._stream = SampleStream(
            order if shuffle else _InOrder(self.num_samples), global_size=global_size
        )
        self._place = _Position()
        self._num_moved = 0  # how often the position was set from outside
        self._counted_by: deque[_DrawnBatch] | None = None
        self.positions = (0, 0)
        for pair in skip:
            if not isinstance(pair, Sequence) or len(pair) != 2:
                raise ConfigError(f"Sampler: skip={pair!r}: must be ranges of positions, [[a, b]]")
            self._add(*pair)

    positions: tuple[int, int]
    """Half-open range of positions of the last batch, over all ranks."""

    deals_to_all: bool
    """Whether each rank of the process group has a share of its own of each batch."""

    # -- torch's interface ----------------------------------------------------------------

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's indices of each batch to the end of the pass."""
        return self._draw(self._counted_by)

    def __len__(self) -> int:
        """Batches of the pass, including those before the position."""
        return self._place.batches + self._num_left(self._place)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of pass ``epoch``, unless the position is in it already.

        Raises:
            ConfigError: it is no number of a pass.
        """
        _require_whole(epoch=epoch)
        if epoch < 0:
            raise ConfigError(f"Sampler: epoch={epoch}: must be at least 0")
        if epoch != self._place.epoch:
            self._move(_Position(cursor=self._begin_of(epoch), epoch=epoch))

    # -- position -------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The pass that the next batch belongs to, from 0."""
        return self._place.epoch

    @property
    def skipped(self) -> list[tuple[int, int]]:
        """Half-open ranges of positions that are never read."""
        return list(self._ledger)

    def over(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of a DataLoader that has this ``batch_sampler``, to the end of the pass.

        The position counts batches yielded, not those that workers have read ahead. If
        :meth:`skip`, :meth:`load_state_dict` or :meth:`set_epoch` is called during the pass,
        batches read ahead are dropped, and the next batch is that of the new position.

        Raises:
            ConfigError: the loader has another batch sampler, or keeps its own position.
        """
        name = type(loader).__name__
        if getattr(loader, "batch_sampler", None) is not self:
            raise ConfigError(
                f"Sampler.over({name}): give the loader that was made with "
                "DataLoader(data, batch_sampler=sampler)"
            )
        if keeps_own_position(loader):
            raise ConfigError(
                f"Sampler.over({name}): it keeps its own position; iterate over it and save its "
                "state_dict()"
            )
        drawn, batches = self._begin(loader)
        counted: Iterator[Any] = self._counted(loader, drawn, batches, self._num_moved)
        return counted

    def skip(self, start: int, stop: int) -> None:
        """Never read positions ``[start, stop)`` from the next batch on.

        Raises:
            ConfigError: it is not a range.
        """
        self._add(start, stop)
        self._move(self._place)

    def pass_over(self, batches: int) -> None:
        """Skip this many batches of the pass without reading them."""
        place = self._place
        for _ in range(min(batches, self._num_left(place))):
            place = self._after(place)
        self._move(place)

    def state_dict(self) -> dict[str, Any]:
        """Plain values: the position, the skipped ranges, and the order."""
        return {
            **asdict(self._place),
            "skipped": [list(pair) for pair in self._ledger],
            **{name: getattr(self, name) for name in _ORDER},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of ``state``; ranges skipped already stay skipped.

        Raises:
            ConfigError: the state is of another order, or not a state of a Sampler.
        """
        try:
            position = _Position(**{name: int(state[name]) for name in _Position.__slots__})
            if min(asdict(position).values()) < 0:
                raise ValueError(f"negative: {position}")
            skipped = [(int(start), int(stop)) for start, stop in state["skipped"]]
            stored_order = {name: state[name] for name in _ORDER}
        except (LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"Sampler.load_state_dict: not a state of a Sampler ({error!r})"
            ) from None
        for name, stored in stored_order.items():
            if stored != getattr(self, name):
                raise ConfigError(
                    f"Sampler.load_state_dict: {name} was {stored}, now {getattr(self, name)}: "
                    "positions would name other samples"
                )
        for pair in skipped:
            self._add(*pair)
        self._move(position)

    # -- internals ------------------------------------------------------------------------

    def _checked_ranks(self, rank: int, world_size: int) -> tuple[int, int]:
        if not 0 <= rank < world_size <= self.global_size:
            raise ConfigError(
                f"Sampler: rank={rank}, world_size={world_size}: needs 0 <= rank < world_size, and "
                f"at least one sample for each of global_size={self.global_size}"
            )
        return rank, world_size

    def _ranks(self) -> tuple[int, int]:
        if self._given_ranks is not None:
            return self._given_ranks
        if dist.is_available() and dist.is_initialized():
            return self._checked_ranks(dist.get_rank(), dist.get_world_size())
        launched = place_from(variables()).world_size
        if launched > 1:
            raise ConfigError(
                f"Sampler: the launcher started {launched} processes, but there is "
                "no process group; make one first, or give rank and world_size"
            )
        return 0, 1

    def _add(self, start: int, stop: int) -> None:
        _require_whole(skip=start)
        _require_whole(skip=stop)
        try:
            self._ledger.add(start, stop)
        except ValueError as error:
            raise ConfigError(f"Sampler: {error}") from None

    def _move(self, place: _Position) -> None:
        self._place = place
        self._num_moved += 1

    def _usable(self, position: int) -> int:
        """The number of positions before this one that are not skipped."""
        return position - self._ledger.num_skipped(0, position)

    def _num_left(self, place: _Position) -> int:
        """Whole batches to the end of the pass."""
        end = (place.epoch + 1) * self.num_samples
        return max(0, self._usable(end) - self._usable(place.cursor)) // self.global_size

    def _begin_of(self, epoch: int) -> int:
        """The position where a pass begins: after the last whole batch of earlier passes."""
        remaining = self._usable(epoch * self.num_samples)
        remaining -= remaining % self.global_size
        for start, stop in self._ledger.allowed(0):
            if stop is None or remaining < stop - start:
                return start + remaining
            remaining -= stop - start
        raise AssertionError("unreachable: the last range has no end")

    def _after(self, place: _Position) -> _Position:
        """The position after the next batch."""
        stop = self._stream.plan(place.cursor, self._ledger).stop
        return replace(place, cursor=stop, batches=place.batches + 1)

    def _next_pass(self, place: _Position) -> _Position:
        return _Position(cursor=place.cursor, epoch=place.epoch + 1)

    def _draw(self, counted_by: deque[_DrawnBatch] | None) -> Iterator[list[int]]:
        """Yield this rank's batches; without ``counted_by``, drawing a batch moves the position."""
        rank, world_size = self._ranks()
        place = self._place
        while self._num_left(place):
            plan = self._stream.plan(place.cursor, self._ledger)
            place = self._after(place)
            if counted_by is None:
                self._count_batch(plan.start, place)
            else:
                counted_by.append((plan.start, place))
            yield plan.indices[rank::world_size].tolist()
        if counted_by is None:
            self._place = self._next_pass(place)

    def _begin(self, loader: Iterable[Any]) -> tuple[deque[_DrawnBatch], Iterator[Any]]:
        """Begin to read at the position: the batches drawn and not counted yet, and the batches."""
        drawn: deque[_DrawnBatch] = deque()
        self._counted_by = drawn
        try:
            return drawn, iter(loader)
        finally:
            self._counted_by = None

    def _counted(
        self,
        loader: Iterable[Any],
        drawn: deque[_DrawnBatch],
        batches: Iterator[Any],
        num_moved: int,
    ) -> Iterator[Any]:
        """Move the position with each batch; begin again where it was moved from outside."""
        while True:
            if num_moved != self._num_moved:
                num_moved = self._num_moved
                # Without changing random generators, from which a loader draws a seed.
                randomness = Randomness()
                states = [(own, own.get_state()) for own in generators_of(loader)]
                drawn, batches = self._begin(loader)
                randomness.restore()
                for generator, state in states:
                    generator.set_state(state)
            try:
                batch = next(batches)
            except StopIteration:
                self._place = self._next_pass(self._place)
                return
            self._count_batch(*drawn.popleft())
            yield batch

    def _count_batch(self, first: int, place: _Position) -> None:
        self.positions = (first, place.cursor)
        self._place = place


def _require_whole(**values: Any) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise ConfigError(f"Sampler: {name}={value!r}: must be an integer")


def keeps_own_position(loader: Any) -> bool:
    """Whether a loader keeps its own position.

    Accelerate's loaders have the methods even if the wrapped loader has not.
    """
    if not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
        return False
    try:
        loader.state_dict()
    except (AttributeError, NotImplementedError):
        return False
    return True
