"""The global random generators of this process: as they are, and put back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from runner.embed.codec import pack, unpack


class Randomness:
    """The states of Python's, NumPy's and torch's generators at one moment. About 50 us to take."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = torch.get_rng_state()
        self._cuda = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._cuda = torch.cuda.get_rng_state()

    def put_back(self) -> None:
        """Make the generators go on from there."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)

    def to_json(self) -> dict[str, Any]:
        """JSON values, exact."""
        version, words, gauss = self._python
        states = {
            "python": (version, np.asarray(words, dtype=np.uint32), gauss),
            "numpy": tuple(self._numpy),
            "torch": self._torch,
            "cuda": self._cuda,
        }
        made: dict[str, Any] = pack(states, "the state of a random generator")
        return made

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Randomness:
        """Inverse of :meth:`to_json`."""
        made, state = cls.__new__(cls), unpack(stored)
        version, words, gauss = state["python"]
        made._python = (version, tuple(int(word) for word in words), gauss)
        made._numpy = state["numpy"]
        made._torch, made._cuda = state["torch"], state["cuda"]
        return made


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators that a DataLoader and its samplers have of their own."""
    found: list[torch.Generator] = []
    batches = getattr(loader, "batch_sampler", None)
    for holder in (loader, getattr(loader, "sampler", None), getattr(batches, "sampler", None)):
        own = getattr(holder, "generator", None)
        if isinstance(own, torch.Generator) and all(own is not one for one in found):
            found.append(own)
    return found
