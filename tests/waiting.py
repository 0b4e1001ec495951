"""Waiting for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(seen: Callable[[], object], what: str = "", *, seconds: float = 120.0) -> None:
    """Look again and again; fail after ``seconds``, saying ``what`` was not seen."""
    limit = time.monotonic() + seconds
    while not seen():
        assert time.monotonic() < limit, f"not within {seconds:g} s: {what}"
        time.sleep(0.005)
