"""The kinds of loaders, all read by batch number.

A loader's abilities decide what happens after a rollback. With ``[i]`` and ``len``, or with
``state_dict`` and ``load_state_dict``, batches since the checkpoint are read again, except skipped
ones. Any other iterable continues, and everything read since the checkpoint is skipped.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from runner.embed.randomness import Randomness, generators_of
from runner.embed.sampler import Sampler, keeps_own_position
from runner.system.error import ConfigError

# By these the wrappers of Accelerate and of Lightning Fabric count their passes, and shuffle each
# pass in an order of its own. Pinned by tests/mechanism/test_integrations.py.
_PASSES = ("iteration", "_num_iter_calls")


class Exhausted(Exception):
    """The loader has no such batch; ``count`` is how many it has."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count


class Source(Protocol):
    """One pass over a loader, of which ``drawn`` batches were taken."""

    is_over: bool  # there is no further batch
    rereads: bool  # batches can be read again
    reads_by_number: bool  # skipping a batch reads nothing

    @property
    def drawn(self) -> int: ...
    def begin(self) -> Any:
        """Begin the pass. Returns what :meth:`resume` needs to begin it again."""
        ...

    def read(self, number: int) -> Any:
        """Read batch ``number`` of this pass; earlier batches that were not taken are skipped.

        Raises:
            Exhausted: there is no such batch.
        """
        ...

    def state(self) -> Any:
        """What :meth:`resume` needs to continue from here."""
        ...

    def resume(self, begun: Any, state: Any, drawn: int, *, is_over: bool) -> None:
        """Continue after ``drawn`` batches; with no batch if the pass is over."""
        ...

    def give_back(self, count: int) -> bool:
        """The newest batches count as not taken; False where a later start could not read them."""
        ...


def source_of(loader: Any) -> Source:
    """The source for a loader, by its abilities.

    Raises:
        ConfigError: the loader cannot be read.
    """
    kind = type(loader)
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(sampler, Sampler) and not keeps_own_position(loader):
        return Sampled(loader, sampler)
    if isinstance(loader, Mapping):
        raise ConfigError(
            f"guard.over({kind.__name__}): is a mapping; give its values, a list or a loader"
        )
    if hasattr(kind, "__getitem__") and hasattr(kind, "__len__"):
        return Indexed(loader)
    if keeps_own_position(loader):
        return Resumable(loader)
    if hasattr(kind, "__iter__"):
        return Plain(loader)
    raise ConfigError(
        f"guard.over({kind.__name__}): cannot be read; needs [i] and len, or to be iterable"
    )


class Indexed:
    """A loader with ``[i]`` and ``len``, which returns the same batch each time."""

    is_over = False  # its length tells
    rereads = True
    reads_by_number = True

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.drawn = 0

    def begin(self) -> None:
        self.drawn = 0

    def read(self, number: int) -> Any:
        count = len(self._loader)
        if number >= count:
            raise Exhausted(count)
        self.drawn = number + 1
        return self._loader[number]

    def state(self) -> None:
        return None

    def resume(self, begun: Any, state: Any, drawn: int, *, is_over: bool) -> None:
        self.drawn = drawn

    def give_back(self, count: int) -> bool:
        self.drawn -= count
        return True


class _Sequential:
    """A source whose batches are read in sequence."""

    rereads = False
    reads_by_number = False

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._iterator: Iterator[Any] = iter(())
        self.is_over = False
        self.drawn = 0

    def _begin(self, iterator: Iterator[Any], *, drawn: int, is_over: bool = False) -> None:
        self._iterator, self.drawn, self.is_over = iterator, drawn, is_over

    def read(self, number: int) -> Any:
        while True:
            try:
                batch = next(self._iterator)
            except StopIteration:
                self.is_over = True
                raise Exhausted(self.drawn) from None
            self.drawn += 1
            if self.drawn > number:
                return batch

    def give_back(self, count: int) -> bool:
        return False


class Plain(_Sequential):
    """Any iterable. A restart reads it from the beginning up to the run's position."""

    def begin(self) -> dict[str, Any]:
        """Return the state of all that may shuffle; DataLoader draws seeds when it begins."""
        begun = {
            "random": Randomness().to_json(),
            "generators": [g.get_state() for g in generators_of(self._loader)],
            "passes": {name: getattr(self._loader, name) for name in self._counters()},
        }
        self._begin(iter(self._loader), drawn=0)
        return begun

    def state(self) -> None:
        return None

    def resume(self, begun: Any, state: Any, drawn: int, *, is_over: bool) -> None:
        Randomness.from_json(begun["random"]).restore()
        for generator, old in zip(generators_of(self._loader), begun["generators"], strict=True):
            generator.set_state(old)
        passes = begun.get("passes", {})  # none in a checkpoint of an older version
        for name in set(passes) & set(self._counters()):
            setattr(self._loader, name, passes[name])
        self._begin(iter(self._loader), drawn=0)
        if drawn:
            self.read(drawn - 1)

    def give_back(self, count: int) -> bool:
        self.drawn -= count
        return True

    def _counters(self) -> list[str]:
        return [name for name in _PASSES if type(getattr(self._loader, name, None)) is int]


class Sampled(_Sequential):
    """A DataLoader with our sampler, which can start at any batch."""

    rereads = True

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


class Resumable(_Sequential):
    """A loader with ``state_dict``: torchdata, MosaicML Streaming, litdata."""

    rereads = True

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._held: Any = None  # its state before a batch that was read ahead

    def begin(self) -> None:
        self._held = None
        self._begin(iter(self._loader), drawn=0)

    def read(self, number: int) -> Any:
        try:
            return super().read(number)
        finally:
            self._held = None

    def state(self) -> Any:
        return self._loader.state_dict() if self._held is None else self._held

    def resume(self, begun: Any, state: Any, drawn: int, *, is_over: bool) -> None:
        self._loader.load_state_dict(state)
        _let_begin_again(self._loader, state, is_over=is_over)
        self._held = None
        # If the pass is over, do not call iter: that begins the next pass, and may draw an order.
        iterator = iter(()) if is_over else iter(self._loader)
        if inspect.isgenerator(iterator) and drawn:
            # A generator has not run yet, and draws seeds with its first batch (litdata, MosaicML).
            # Read that batch now, before the caller restores the random generators.
            self._held = state
            iterator = itertools.chain(list(itertools.islice(iterator, 1)), iterator)
        self._begin(iterator, drawn=drawn, is_over=is_over)


def _let_begin_again(loader: Any, state: Any, *, is_over: bool) -> None:
    """MosaicML Streaming ignores a state of an epoch that this process has begun already.

    And from a state of an epoch's end it would make a pass without batches.
    """
    data: Any = getattr(loader, "dataset", None)
    is_mosaics = data is not None and hasattr(type(data), "next_epoch")
    if is_mosaics and isinstance(state, Mapping) and "epoch" in state:
        data.next_epoch = max(0, int(state["epoch"])) + int(is_over)
