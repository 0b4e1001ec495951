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
        self._states: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
            "cuda": None,
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._states["cuda"] = torch.cuda.get_rng_state()

    def is_unchanged(self) -> bool:
        """Whether nothing was drawn on the host since."""
        return not self.differing(Randomness()) - {"cuda"}

    def differing(self, other: Randomness) -> set[str]:
        """The generators whose state differs."""
        pairs = {name: (state, other._states[name]) for name, state in self._states.items()}
        return {name for name, (a, b) in pairs.items() if not _equal_states(a, b)}

    def take(self, other: Randomness, names: set[str]) -> None:
        """Take the states of the generators ``names`` from ``other``."""
        self._states |= {name: other._states[name] for name in names}

    def restore(self) -> None:
        """Set the generators to these states."""
        random.setstate(self._states["python"])
        np.random.set_state(self._states["numpy"])
        torch.set_rng_state(self._states["torch"])
        if self._states["cuda"] is not None:
            torch.cuda.set_rng_state(self._states["cuda"])

    def to_json(self) -> dict[str, Any]:
        """The states as exact JSON values."""
        version, python_state, gauss = self._states["python"]
        python = version, np.asarray(python_state, dtype=np.uint32), gauss
        packed: dict[str, Any] = pack(
            {**self._states, "python": python}, "the state of a random generator"
        )
        return packed

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Randomness:
        """Inverse of :meth:`to_json`."""
        randomness, states = cls.__new__(cls), unpack(stored)
        version, python_state, gauss = states["python"]
        states["python"] = version, tuple(int(word) for word in python_state), gauss
        randomness._states = states
        return randomness


def _equal_states(one: Any, other: Any) -> bool:
    """Whether two states of a generator are alike; None, for an unused device, is like any."""
    if one is None or other is None:
        return True
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    # NumPy's state has an array in it.
    pairs = zip(one, other, strict=True)
    return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)


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
        is_entangled: reading drew after computing had drawn, so that :attr:`left` is unknown.
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
