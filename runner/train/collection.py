"""Runs Python's garbage collection at the same steps on all ranks.

A collection over millions of objects takes a second, during which all other ranks wait; and
without agreement each rank collects at another step.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

EVERY = 50  # applied updates


@contextmanager
def collected_at_boundaries() -> Iterator[None]:
    """Allow collection only by :func:`collect`, and only of objects made inside."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def collect(updates: int) -> None:
    """Collect at a step's end; does nothing inside another program's loop."""
    if updates % EVERY == 0 and not gc.isenabled():
        gc.collect()
