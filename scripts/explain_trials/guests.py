"""A guest's data set that can be made to give other samples, for ``data._target_``."""

from __future__ import annotations

from typing import Any

import numpy as np

# Of samples by their index: what their pixels are multiplied by.
CHANGED: dict[int, float] = {}
MISNAMED: set[int] = set()  # samples with the kind of another


class Images:
    """A pattern of each of three kinds, and noise: for the model ``tests.guests.Seeing``."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, i: int) -> dict[str, Any]:
        kind = i % 3
        noise = np.random.default_rng(i).normal(size=(1, 9, 9))
        pattern = np.cos(np.arange(81).reshape(1, 9, 9) * (kind + 1))
        pixels = (noise + pattern) * CHANGED.get(i, 1.0)
        return {"image": pixels.astype(np.float32), "kind": (kind + (i in MISNAMED)) % 3}
