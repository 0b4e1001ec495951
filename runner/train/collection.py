"""Runs Python's garbage collection at steps that all ranks agree on, not at each rank's own time.

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
    """Let only :func:`collect` collect inside, and never what existed before."""
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
