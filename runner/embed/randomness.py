"""Captures and restores the global random generators of this process."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from runner.embed.codec import pack, unpack


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
        was: tuple[Any, ...] = tuple(self._numpy)
        now: tuple[Any, ...] = tuple(np.random.get_state())
        return (
            torch.equal(self._torch, torch.get_rng_state())
            and self._python == random.getstate()
            and was[2:] == now[2:]
            and np.array_equal(was[1], now[1])
        )

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


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators that a DataLoader and its samplers own."""
    generators: list[torch.Generator] = []
    batch_sampler = getattr(loader, "batch_sampler", None)
    for holder in (
        loader,
        getattr(loader, "sampler", None),
        getattr(batch_sampler, "sampler", None),
    ):
        own = getattr(holder, "generator", None)
        if isinstance(own, torch.Generator) and all(own is not one for one in generators):
            generators.append(own)
    return generators
