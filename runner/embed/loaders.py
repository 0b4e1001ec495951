"""The three kinds of loaders, read by the number of a batch.

What a loader can do decides what happens after a rollback: with ``[i]`` and ``len``, or with
``state_dict`` and ``load_state_dict``, what was read since the checkpoint is read again but for
the batches to skip; of any other iterable the data goes on, and all that was read since is skipped.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from runner.embed.randomness import Randomness, generators_of
from runner.embed.sampler import Sampler, tells_its_state
from runner.system.error import ConfigError

# By these the wrappers of Accelerate and of Lightning Fabric count their passes, and shuffle each
# pass in an order of its own. Pinned by tests/mechanism/test_integrations.py.
_PASSES = ("iteration", "_num_iter_calls")


class Exhausted(Exception):
    """The loader has no such batch; ``count`` is how many it had."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count


class Source(Protocol):
    """One pass over a loader. ``drawn`` batches have been taken from it."""

    is_over: bool  # there was no further one
    rereads: bool  # what was read can be read again
    reads_by_number: bool  # and nothing is drawn to pass a batch over

    @property
    def drawn(self) -> int: ...
    def begin(self) -> Any:
        """Before the first batch. Returns what :meth:`resume` needs to do the same again."""
        ...

    def read(self, number: int) -> Any:
        """Batch ``number`` of this pass; those before it that were not taken are passed over.

        Raises:
            Exhausted: there is none.
        """
        ...

    def state(self) -> Any:
        """What :meth:`resume` needs to go on from here."""
        ...

    def resume(self, begun: Any, state: Any, drawn: int, *, is_over: bool) -> None:
        """Make :meth:`read` go on behind ``drawn`` batches; nowhere if they were all."""
        ...


def source_of(loader: Any) -> Source:
    """How this loader is read.

    Raises:
        ConfigError: it cannot be.
    """
    kind = type(loader)
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(sampler, Sampler) and not tells_its_state(loader):
        return Sampled(loader, sampler)
    if isinstance(loader, Mapping):
        raise ConfigError(
            f"guard.over({kind.__name__}): is a mapping; give its values, a list or a loader"
        )
    if hasattr(kind, "__getitem__") and hasattr(kind, "__len__"):
        return Indexed(loader)
    if tells_its_state(loader):
        return Resumable(loader)
    if hasattr(kind, "__iter__"):
        return Plain(loader)
    raise ConfigError(
        f"guard.over({kind.__name__}): cannot be read; needs [i] and len, or to be iterable"
    )


class Indexed:
    """``[i]`` and ``len``: any batch at any time. It must give the same batch each time."""

    is_over = False  # its length says so
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


class _Drawn:
    """What batches are drawn from, one after the other."""

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


class Plain(_Drawn):
    """Any iterable. A restart reads it from the beginning, as far as the run had come."""

    def begin(self) -> dict[str, Any]:
        """The state of all that may shuffle: DataLoader draws its seeds when it begins."""
        made = {
            "random": Randomness().to_json(),
            "generators": [g.get_state() for g in generators_of(self._loader)],
            "passes": {name: getattr(self._loader, name) for name in self._counters()},
        }
        self._begin(iter(self._loader), drawn=0)
        return made

    def state(self) -> None:
        return None

    def resume(self, begun: Any, state: Any, drawn: int, *, is_over: bool) -> None:
        Randomness.from_json(begun["random"]).put_back()
        for generator, old in zip(generators_of(self._loader), begun["generators"], strict=True):
            generator.set_state(old)
        passes = begun.get("passes", {})  # none in a checkpoint of an older version
        for name in set(passes) & set(self._counters()):
            setattr(self._loader, name, passes[name])
        self._begin(iter(self._loader), drawn=0)
        if drawn:
            self.read(drawn - 1)

    def _counters(self) -> list[str]:
        return [name for name in _PASSES if type(getattr(self._loader, name, None)) is int]


class Sampled(_Drawn):
    """A DataLoader with our sampler, which can begin at any batch."""

    rereads = True

    def __init__(self, loader: Any, sampler: Sampler) -> None:
        super().__init__(loader)
        self._sampler = sampler

    def begin(self) -> None:
        self._begin(self._sampler.over(self._loader), drawn=0)

    def read(self, number: int) -> Any:
        if number > self.drawn:
            left = len(self._sampler) - self.drawn
            self._sampler.pass_over(number - self.drawn)
            self.drawn += min(left, number - self.drawn)
        return super().read(number)

    def state(self) -> Any:
        return self._sampler.state_dict()

    def resume(self, begun: Any, state: Any, drawn: int, *, is_over: bool) -> None:
        self._sampler.load_state_dict(state)
        left = iter(()) if is_over else self._sampler.over(self._loader)
        self._begin(left, drawn=drawn, is_over=is_over)


class Resumable(_Drawn):
    """``state_dict`` and ``load_state_dict``: torchdata, MosaicML Streaming, litdata."""

    rereads = True

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._held: Any = None  # its state, while a batch is read ahead

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
        self._held = None
        # Of a pass that is over, the next one begins with iter: it may draw an order.
        left = iter(()) if is_over else iter(self._loader)
        if inspect.isgenerator(left) and drawn:
            # Nothing of it has run yet. It draws seeds with its first batch (litdata, MosaicML):
            # that is to be over when the random generators are put back, as it was then.
            self._held = state
            left = itertools.chain(list(itertools.islice(left, 1)), left)
        self._begin(left, drawn=drawn, is_over=is_over)
