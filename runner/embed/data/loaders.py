"""The kinds of loaders, all read by batch number.

A loader's abilities decide what happens after a rollback. With ``[i]`` and ``len``, or with
``state_dict`` and ``load_state_dict``, batches since the checkpoint are read again, except skipped
ones. Any other iterable continues, and everything read since the checkpoint is skipped.
:meth:`runner.embed.loop.guard.Guard._reposition` moves a loader back, by :meth:`Source.resume`.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import IterableDataset

from runner.embed.data.sampler import Sampler, keeps_own_position
from runner.embed.state.randomness import Randomness, generators_of
from runner.system.error import ConfigError

# By these the wrappers of Accelerate and of Lightning Fabric count their passes, and shuffle each
# pass in an order of its own. Pinned by tests/mechanism/test_integrations.py.
_PASSES = ("iteration", "_num_iter_calls")
_GENERATOR = "runner.generator"  # in the state of a loader of torchdata's
_NUM_DRAWS = 4  # a state takes 10 KB in a checkpoint
# Of a batch, for its digest.
_NUM_LEAVES = 32
_NUM_BYTES = 1 << 14  # of a tensor's beginning and of its end


class Exhausted(Exception):
    """The loader has no such batch; ``count`` is how many it has."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count


class Source:
    """One pass over a loader, of which ``drawn`` batches were taken.

    Attributes:
        is_over: there is no further batch.
        rereads: batches can be read again.
        reads_by_number: any batch can be read at any time.
        skips_unread: a batch that is skipped is not read.
    """

    rereads = reads_by_number = skips_unread = False

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._iterator: Iterator[Any] = iter(())
        self.is_over = False
        self.drawn = 0
        self._epochs = [(one, one.epoch) for one in _with_epoch(loader)]

    @property
    def last_draw(self) -> int | None:
        """The newest batch whose reading drew from the global random generators."""
        return None

    @property
    def can_begin_again(self) -> bool:
        """Whether the loader can be read from its beginning once more in this process."""
        return True

    def begin(self) -> Any:
        """Begin the pass. Returns what :meth:`resume` needs to begin it again."""
        raise NotImplementedError

    def _set_epoch(self) -> None:
        """After a rollback to an earlier pass the loop does not call ``set_epoch`` again."""
        for one, epoch in self._epochs:
            if one.epoch != epoch:
                one.set_epoch(epoch)

    def _begin(self, iterator: Iterator[Any], *, drawn: int, is_over: bool = False) -> None:
        self._iterator, self.drawn, self.is_over = iterator, drawn, is_over

    def read(self, number: int) -> Any:
        """Read batch ``number`` of this pass; earlier batches that were not taken are skipped.

        Raises:
            Exhausted: there is no such batch.
        """
        while True:
            try:
                batch = next(self._iterator)
            except StopIteration:
                self.is_over = True
                raise Exhausted(self.drawn) from None
            self.drawn += 1
            if self.drawn > number:
                return batch

    def state(self) -> Any:
        """What :meth:`resume` needs to continue from here."""
        raise NotImplementedError

    def mark(self) -> Any:
        """:meth:`state`, for :meth:`resume` in this process."""
        return copy.deepcopy(self.state())

    def resume(self, begun: Any, state: Any, drawn: int, *, is_over: bool) -> None:
        """Continue after ``drawn`` batches; with no batch if the pass is over."""
        raise NotImplementedError

    def give_back(self, count: int) -> bool:
        """The newest batches count as not taken; False where a later start could not read them."""
        return False


def source_of(loader: Any, *, is_of_a_stage: bool = False) -> Source:
    """The source for a loader, by its abilities.

    Raises:
        ConfigError: the loader cannot be read, or gives the stages of a pipeline different samples.
    """
    kind = type(loader)
    sampler = getattr(loader, "batch_sampler", None)
    if is_of_a_stage and isinstance(sampler, Sampler) and sampler.deals_to_all:
        raise ConfigError(
            f"guard.over({kind.__name__}): its Sampler deals each batch to all ranks, and the "
            "stages of a pipeline read the same; give it rank= and world_size= of the pipelines"
        )
    if isinstance(sampler, Sampler) and not keeps_own_position(loader):
        return Sampled(loader, sampler)
    if isinstance(loader, Mapping):
        raise ConfigError(
            f"guard.over({kind.__name__}): is a mapping; give its values, a list or a loader"
        )
    if hasattr(kind, "__getitem__") and hasattr(kind, "__len__"):
        return Indexed(loader)
    loses_its_place = _loses_a_buffer(loader) or _counts_twice(loader)
    if keeps_own_position(loader) and not loses_its_place:
        return Resumable(loader)
    if hasattr(kind, "__iter__"):
        return Plain(loader)
    raise ConfigError(
        f"guard.over({kind.__name__}): cannot be read; needs [i] and len, or to be iterable"
    )


def _loses_a_buffer(loader: Any) -> bool:
    """Whether it streams a Hugging Face dataset through a shuffle buffer.

    Its ``state_dict`` lacks the samples in the buffer, which are missing after a load. Uses private
    names, which tests/mechanism/test_integrations.py pins.
    """
    for holder in (loader, getattr(loader, "dataset", None)):
        link = getattr(holder, "_ex_iterable", None)
        while link is not None:
            if type(link).__name__ == "BufferShuffledExamplesIterable":
                return True
            link = getattr(link, "ex_iterable", None)
    return False


def _counts_twice(loader: Any) -> bool:
    """Whether torchdata's loader reads a stream that has no state of its own.

    It reads over what a state says was read, and counts that once more (0.11): the state of the
    second start says twice as much.
    """
    data = getattr(loader, "dataset", None)
    is_a_stream = isinstance(data, IterableDataset) and not hasattr(data, "state_dict")
    return is_a_stream and _is_torchdatas(loader)


def _is_torchdatas(loader: Any) -> bool:
    kinds = [kind.__module__.partition(".")[0] for kind in type(loader).__mro__]
    return "torchdata" in kinds


class Indexed(Source):
    """A loader with ``[i]`` and ``len``, which returns the same batch each time."""

    rereads = reads_by_number = skips_unread = True

    def begin(self) -> None:
        self.drawn = 0

    def read(self, number: int) -> Any:
        count = len(self._loader)
        if number >= count:
            raise Exhausted(count)  # the length tells; ``is_over`` stays False
        self.drawn = number + 1
        return self._loader[number]

    def state(self) -> None:
        return None

    def resume(self, begun: Any, state: Any, drawn: int, *, is_over: bool) -> None:
        self.drawn = drawn

    def give_back(self, count: int) -> bool:
        self.drawn -= count
        return True


class OtherBatch(ConfigError):
    """A loader that was read again did not give the batch that it gave before."""


class Plain(Source):
    """Any iterable. A restart reads it from the beginning up to the run's position.

    Where reading drew from the global random generators (an endless generator over a DataLoader
    that shuffles) their states are kept of the last few times, and set again for these reads.
    """

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        # Number of a batch, and the generators from before it was read.
        self._draws: deque[tuple[int, Randomness]] = deque(maxlen=_NUM_DRAWS)
        # Generators before batches that an earlier start read and gave back: they are read alike.
        self._given_back: dict[int, Randomness] = {}
        self._last = ""  # digest of the last batch
        self._drew_to_begin = False

    def begin(self) -> dict[str, Any]:
        """Return the state of all that may shuffle; DataLoader draws seeds when it begins."""
        self._set_epoch()
        begun = {
            "random": Randomness().to_json(),
            "generators": [g.get_state() for g in generators_of(self._loader)],
            "passes": {name: getattr(self._loader, name) for name in self._counters()},
            "workers": _has_workers(self._loader),
        }
        self._draws.clear()
        before = Randomness()
        self._begin(iter(self._loader), drawn=0)
        self._drew_to_begin = not before.is_unchanged()
        return begun

    @property
    def last_draw(self) -> int | None:
        newest = max((number for number, _ in self._draws), default=None)
        return 0 if newest is None and self._drew_to_begin else newest

    @property
    def can_begin_again(self) -> bool:
        return not isinstance(self._loader, Iterator)

    def read(self, number: int) -> Any:
        while True:
            if self.drawn in self._given_back:
                self._given_back.pop(self.drawn).restore()
            before = Randomness()
            batch = super().read(self.drawn)
            if not before.is_unchanged():
                self._draws.append((self.drawn - 1, before))
            if self.drawn > number:
                self._last = batch_digest(batch)
                return batch

    def state(self) -> Any:
        draws = [[number, randomness.to_json()] for number, randomness in self._draws]
        return {"draws": draws, "last": self._last}

    def mark(self) -> Any:
        return {"draws": list(self._draws), "last": self._last}

    def resume(self, begun: Any, state: Any, drawn: int, *, is_over: bool) -> None:
        self._set_epoch()
        # The first pass of a process draws a seed for workers that stay.
        if begun.get("workers") and not _has_workers(self._loader):
            iter(self._loader)
        elif _has_workers(self._loader) and not begun.get("workers"):
            self._loader._iterator = None
        Randomness.from_json(begun["random"]).restore()
        for generator, old in zip(generators_of(self._loader), begun["generators"], strict=False):
            generator.set_state(old)
        passes = begun["passes"]
        for name in set(passes) & set(self._counters()):
            setattr(self._loader, name, passes[name])
        self._begin(iter(self._loader), drawn=0)
        state = state or {}  # None in a checkpoint of an older version
        draws = {
            number: kept if isinstance(kept, Randomness) else Randomness.from_json(kept)
            for number, kept in state.get("draws", [])
        }
        while self.drawn < drawn:
            if self.drawn in draws:
                draws[self.drawn].restore()
            try:
                batch = super().read(self.drawn)
            except Exhausted as exhausted:
                raise OtherBatch(
                    f"guard.over: the loader has {exhausted.count} batches, and the run has read "
                    f"{drawn} of it"
                ) from None
            if self.drawn == drawn and state.get("last", "") not in ("", batch_digest(batch)):
                raise OtherBatch(
                    f"guard.over: read again from the beginning, the loader does not give the "
                    f"batch {drawn - 1} that it gave before"
                )
        self._draws.clear()
        self._draws.extend((number, kept) for number, kept in draws.items() if number < drawn)
        self._given_back = {number: kept for number, kept in draws.items() if number >= drawn}
        self._last = state.get("last", "")

    def give_back(self, count: int) -> bool:
        self.drawn -= count
        self._last = ""
        return True

    def _counters(self) -> list[str]:
        return [name for name in _PASSES if type(getattr(self._loader, name, None)) is int]


class Sampled(Source):
    """A DataLoader with our sampler, which can start at any batch."""

    rereads = True
    skips_unread = True

    def __init__(self, loader: Any, sampler: Sampler) -> None:
        super().__init__(loader)
        self._sampler = sampler

    def begin(self) -> None:
        self._begin(self._sampler.over(self._loader), drawn=0)

    def read(self, number: int) -> Any:
        if number > self.drawn:
            remaining = len(self._sampler) - self.drawn
            self._sampler.pass_over(number - self.drawn)
            self.drawn += min(remaining, number - self.drawn)
        return super().read(number)

    def state(self) -> Any:
        return self._sampler.state_dict()

    def resume(self, begun: Any, state: Any, drawn: int, *, is_over: bool) -> None:
        self._sampler.load_state_dict(state)
        iterator = iter(()) if is_over else self._sampler.over(self._loader)
        self._begin(iterator, drawn=drawn, is_over=is_over)


class Resumable(Source):
    """A loader with ``state_dict``: torchdata, MosaicML Streaming, litdata."""

    rereads = True

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._held: Any = None  # its state before a batch that was read ahead

    def begin(self) -> None:
        self._held = None
        self._set_epoch()
        self._begin(iter(self._loader), drawn=0)

    def read(self, number: int) -> Any:
        try:
            return super().read(number)
        finally:
            self._held = None

    @property
    def _generator(self) -> torch.Generator | None:
        """The one of a loader of torchdata's whose state lacks what it drew beside an order (0.11,
        without workers: a seed for them): the order of its next pass would be another."""
        generator = getattr(self._loader, "generator", None)
        is_theirs = _is_torchdatas(self._loader) and isinstance(generator, torch.Generator)
        return generator if is_theirs else None

    def state(self) -> Any:
        if self._held is not None:
            return self._held
        state, generator = self._loader.state_dict(), self._generator
        return state if generator is None else {**state, _GENERATOR: generator.get_state()}

    def resume(self, begun: Any, state: Any, drawn: int, *, is_over: bool) -> None:
        self._set_epoch()
        generator, own, left = self._generator, state, None
        if generator is not None:
            own = dict(state)
            left = own.pop(_GENERATOR, None)  # of an older checkpoint: none
        self._loader.load_state_dict(own)
        _let_begin_again(self._loader, state, is_over=is_over)
        if is_over:
            _end_pass(self._loader)
        self._held = None
        # If the pass is over, do not call iter: that begins the next pass, and may draw an order.
        iterator = iter(()) if is_over else iter(self._loader)
        if inspect.isgenerator(iterator) and drawn:
            # A generator has not run yet, and draws seeds with its first batch (litdata, MosaicML).
            # Read that batch now, before the caller restores the random generators.
            self._held = state
            iterator = itertools.chain(list(itertools.islice(iterator, 1)), iterator)
        self._begin(iterator, drawn=drawn, is_over=is_over)
        if generator is not None and left is not None:
            generator.set_state(left)


def _with_epoch(loader: Any) -> Iterator[Any]:
    """What of a loader orders each pass by an epoch that the loop sets, as DistributedSampler."""
    batches = getattr(loader, "batch_sampler", None)
    parts = ("sampler", "dataset")
    for one in (
        loader,
        *(getattr(loader, part, None) for part in parts),
        batches,
        getattr(batches, "sampler", None),
    ):
        if callable(getattr(one, "set_epoch", None)) and type(getattr(one, "epoch", None)) is int:
            yield one


def _end_pass(loader: Any) -> None:
    """Have torchdata's loader take the state of a pass's end now.

    Else it does so when the next pass begins, and draws a seed twice then. By names of its own,
    which tests/mechanism/test_strange_loops.py pins.
    """
    if getattr(loader, "next_iter_state", None) is not None and hasattr(loader, "_get_iterator"):
        loader._get_iterator()
        loader.next_iter_state = None


def _has_workers(loader: Any) -> bool:
    """Whether an earlier pass of this process has left it workers (``persistent_workers``)."""
    return getattr(loader, "_iterator", None) is not None


def _let_begin_again(loader: Any, state: Any, *, is_over: bool) -> None:
    """MosaicML Streaming ignores a state of an epoch that this process has begun already.

    And from a state of an epoch's end it would make a pass without batches.
    """
    data: Any = getattr(loader, "dataset", None)
    is_mosaics = data is not None and hasattr(type(data), "next_epoch")
    if is_mosaics and isinstance(state, Mapping) and "epoch" in state:
        data.next_epoch = max(0, int(state["epoch"])) + int(is_over)


def batch_digest(batch: Any) -> str:
    """64 bits over the batch's structure and the ends of its tensors on the CPU.

    To recognise it when a loader is read again.
    """
    digest = xxhash.xxh3_64()
    for leaf in itertools.islice(_leaves(batch, 0), _NUM_LEAVES):
        digest.update(_content(leaf))
    return digest.hexdigest()


def _leaves(value: Any, depth: int) -> Iterator[Any]:
    if depth < 4 and isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _leaves(item, depth + 1)
    elif depth < 4 and isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item, depth + 1)
    else:
        yield value


def _content(leaf: Any) -> bytes:
    if isinstance(leaf, torch.Tensor):
        if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided:
            return type(leaf).__name__.encode()
        text = f"{leaf.dtype}{tuple(leaf.shape)}".encode()
        return text if leaf.device.type != "cpu" or leaf.is_quantized else text + _ends(leaf)
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        flat = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
        return f"{leaf.dtype}{leaf.shape}".encode() + _both_ends(flat.data)
    if leaf is None or isinstance(leaf, bool | int | float | str | bytes):
        return repr(leaf)[:_NUM_BYTES].encode(errors="surrogatepass")
    return type(leaf).__name__.encode()


def _ends(tensor: torch.Tensor) -> bytes:
    """The bytes at both ends; only these are copied of a tensor that is not contiguous."""
    flat = tensor.detach().resolve_conj().resolve_neg()
    count = max(1, _NUM_BYTES // max(1, flat.element_size()))
    if not flat.is_contiguous():
        flat = flat.contiguous() if flat.numel() <= 2 * count else flat[:1].contiguous()
    flat = flat.reshape(-1)
    ends = flat if len(flat) <= 2 * count else torch.cat([flat[:count], flat[-count:]])
    return ends.contiguous().view(torch.uint8).numpy().tobytes() if len(ends) else b""


def _both_ends(data: memoryview) -> bytes:
    if len(data) <= 2 * _NUM_BYTES:
        return bytes(data)
    return bytes(data[:_NUM_BYTES]) + bytes(data[-_NUM_BYTES:])
