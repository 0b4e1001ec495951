"""When Python looks for garbage: at steps that all ranks agree on, not when one rank has enough.

A collection over millions of objects takes a second, in which all other ranks wait; on each at
another step, unless they are told when.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

EVERY = 50  # applied updates


@contextmanager
def collected_at_boundaries() -> Iterator[None]:
    """Inside, only :func:`collect` does. What is there at the begin is never looked at again."""
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
    """At a step's end; in a program of somebody else's nothing is done."""
    if updates % EVERY == 0 and not gc.isenabled():
        gc.collect()
