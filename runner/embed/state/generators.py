"""Captures and restores the global random generators of this process."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from runner.embed.state.codec import pack, unpack


class Randomness:
    """The states of Python's, NumPy's and torch's generators; capturing takes about 50 us."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = torch.get_rng_state()
        self._cuda = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._cuda = torch.cuda.get_rng_state()

    def is_unchanged(self) -> bool:
        """Whether nothing was drawn on the host since."""
        return not self.differing(Randomness()) - {"_cuda"}

    def differing(self, other: Randomness) -> set[str]:
        """The generators whose state differs."""
        mine: tuple[Any, ...] = tuple(self._numpy)
        theirs: tuple[Any, ...] = tuple(other._numpy)
        are_equal = {
            "_python": self._python == other._python,
            "_numpy": mine[2:] == theirs[2:] and np.array_equal(mine[1], theirs[1]),
            "_torch": torch.equal(self._torch, other._torch),
            "_cuda": self._cuda is None
            or other._cuda is None
            or torch.equal(self._cuda, other._cuda),
        }
        return {name for name, is_equal in are_equal.items() if not is_equal}

    def take(self, other: Randomness, names: set[str]) -> None:
        """Take the states of the generators ``names`` from ``other``."""
        for name in names:
            setattr(self, name, getattr(other, name))

    def restore(self) -> None:
        """Set the generators to these states."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)

    def to_json(self) -> dict[str, Any]:
        """The states as exact JSON values."""
        version, python_state, gauss = self._python
        states = {
            "python": (version, np.asarray(python_state, dtype=np.uint32), gauss),
            "numpy": tuple(self._numpy),
            "torch": self._torch,
            "cuda": self._cuda,
        }
        packed: dict[str, Any] = pack(states, "the state of a random generator")
        return packed

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Randomness:
        """Inverse of :meth:`to_json`."""
        randomness, state = cls.__new__(cls), unpack(stored)
        version, python_state, gauss = state["python"]
        randomness._python = (version, tuple(int(word) for word in python_state), gauss)
        randomness._numpy = state["numpy"]
        randomness._torch, randomness._cuda = state["torch"], state["cuda"]
        return randomness


class StepDraws:
    """What the batches of one step drew from the generators as they were read.

    A loop that accumulates computes between two reads, and its dropout draws as well. If the step
    is discarded, the generators must be as if its batches had been read, one after the other, and
    nothing computed.

    Attributes:
        mark: the loader's position before the step.
        drawn: batches of the pass taken before the step.
        before: the generators before the step.
        has_drawn: reading drew.
        is_entangled: reading drew where computing had drawn, so that :attr:`left` is not known.
        left: the generators after all reads, without what was computed.
    """

    def __init__(self, mark: Any, drawn: int) -> None:
        self.mark, self.drawn = mark, drawn
        self.before = self._before = Randomness()
        self.has_drawn = self.is_entangled = False
        self.left: Randomness | None = None
        self._after = self.before
        self._computed: set[str] = set()

    def begin_read(self) -> None:
        """The next batch is about to be read."""
        self._before = Randomness()
        self._computed |= self._before.differing(self._after)

    def end_read(self) -> Randomness:
        """It was read; returns the generators as they are now."""
        self._after = after = Randomness()
        drew = after.differing(self._before)
        self.has_drawn = self.has_drawn or bool(drew)
        self.is_entangled = self.is_entangled or bool(drew & self._computed)
        if self.left is None:
            self.left = Randomness()
        self.left.take(after, drew)
        return after


class OwnGenerator:
    """A generator that belongs to a loader: torch's, NumPy's or Python's."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def get_state(self) -> Any:
        """Its state, which the codec of checkpoints can save."""
        if isinstance(self.generator, random.Random):
            return self.generator.getstate()
        if isinstance(self.generator, np.random.Generator):
            return dict(self.generator.bit_generator.state)
        return self.generator.get_state()

    def set_state(self, state: Any) -> None:
        """Inverse of :meth:`get_state`."""
        if isinstance(self.generator, random.Random):
            self.generator.setstate(state)
        elif isinstance(self.generator, np.random.Generator):
            self.generator.bit_generator.state = state
        else:
            self.generator.set_state(state)


_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
# Where loaders, and what is wrapped around them (tqdm, Accelerate), keep what they read from.
_PARTS = ("sampler", "batch_sampler", "dataset", "iterable", "loader", "dataloader")
_DEPTH = 4


def generators_of(loader: Any) -> list[OwnGenerator]:
    """The generators that a loader, its samplers and its data set own, in a fixed order."""
    generators: list[OwnGenerator] = []
    seen: set[int] = set()

    def look(holder: Any, depth: int) -> None:
        own = getattr(holder, "__dict__", None)
        if not isinstance(own, dict) or id(holder) in seen:
            return
        seen.add(id(holder))
        for value in own.values():
            if isinstance(value, _GENERATORS) and id(value) not in seen:
                seen.add(id(value))
                generators.append(OwnGenerator(value))
        for name in _PARTS if depth else ():
            look(own.get(name), depth - 1)

    look(loader, _DEPTH)
    return generators
