"""Python's garbage collector: held off where a collection costs much or does harm."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager

EVERY = 50  # applied updates


@contextmanager
def no_collection() -> Iterator[None]:
    """Hold collections off."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def import_all(*names: str) -> None:
    """Import modules without a collection, and none later looks at what they hold.

    Hardly anything that an import makes is garbage, and collections take a quarter of its time.
    """
    with no_collection():
        for name in names:
            importlib.import_module(name)
        gc.freeze()


@contextmanager
def collected_at_boundaries() -> Iterator[None]:
    """Allow collection only by :func:`collect`, and only of objects made inside."""
    gc.collect()
    gc.freeze()
    try:
        with no_collection():
            yield
    finally:
        gc.unfreeze()


def collect(updates: int) -> None:
    """Collect at a step's end; does nothing inside another program's loop."""
    if updates % EVERY == 0 and not gc.isenabled():
        gc.collect()
