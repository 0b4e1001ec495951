"""Random draws in samples: torch's, NumPy's and Python's generators are seeded before each one.

So a sample that is augmented at random is the same on each reading at one position of the stream,
in any process and on any number of ranks, and another at the next. Must not know how samples are
made.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import time
from collections.abc import Callable
from typing import Final, TypeVar

import numpy as np
import torch

from runner.data.dataset import Dataset, Record, Sample
from runner.system.generators import kept_generators


def draws(dataset: Dataset) -> bool:
    """Whether its samples come from code that may draw: no data set of our own does."""
    return bool(getattr(dataset, "draws", False))


def read_sample(dataset: Dataset, index: int, at: tuple[int, int] | None = None) -> Sample | Record:
    """Read a sample as drawn for (seed, position) ``at``, or for its number. Raises as ``[index]``.

    The generators are as before afterwards.
    """
    if not draws(dataset):
        return dataset[index]
    with kept_while_drawing():
        if at is None:
            seed_by_index(index)
        else:
            seed_by_position(*at)
        return dataset[index]


def seed_by_position(seed: int, position: int) -> None:
    """Seed the generators for the sample at a position of a run's stream."""
    _seed(f"{seed} {position}")


def seed_by_index(index: int) -> None:
    """Seed the generators for a sample outside of the stream: held out, inspected, measured."""
    _seed(f"sample {index}")


def kept_while_drawing() -> contextlib.AbstractContextManager[None]:
    """Restore the generators afterwards."""
    # A loading process draws for nothing else, and saving them takes 0.2 ms.
    is_loader = torch.utils.data.get_worker_info() is not None
    return contextlib.nullcontext() if is_loader else kept_generators()


def generators() -> int:
    """A number that changes with the state of the generators."""
    numpy = [np.asarray(part).tobytes() for part in tuple(np.random.get_state())]
    return hash((torch.get_rng_state().numpy().tobytes(), *numpy, random.getstate()))


def _seed(key: str) -> None:
    hashed = hashlib.sha256(key.encode()).digest()
    # Not torch.manual_seed, which seeds every kind of device as well.
    torch.default_generator.manual_seed(int.from_bytes(hashed[:4], "big"))
    np.random.seed(int.from_bytes(hashed[4:8], "big"))
    random.seed(int.from_bytes(hashed[8:16], "big"))


_FIRST_PAUSE_SECONDS: Final = 0.05  # before a read is tried again; doubled each time

Result = TypeVar("Result")


class Retries:
    """Reads again for up to ``seconds`` where an OSError comes.

    After one that never came the next are tried once, until one comes: a storage that is gone must
    not hold a step up for each of its samples.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._is_refused = False

    def __call__(self, read: Callable[[], Result]) -> Result:
        """Call ``read``, more than once if need be; raises what it raises."""
        limit = time.monotonic() + (0.0 if self._is_refused else self._seconds)
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                result = read()
                break
            except OSError:
                if time.monotonic() + pause > limit:
                    self._is_refused = True
                    raise
                time.sleep(pause)
                pause *= 2
        self._is_refused = False
        return result
