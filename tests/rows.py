"""Rows of parametrized tests that ``--full`` alone runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def full(*values: Any, id: str | None = None) -> Any:
    """One such row."""
    return pytest.param(*values, marks=pytest.mark.full, id=id)


def full_but(always: Collection[Any], rows: Iterable[Any]) -> list[Any]:
    """All rows, of which those in ``always`` are always run; a tuple is a row's values."""
    spread = [row if isinstance(row, tuple) else (row,) for row in rows]
    chosen = [row if isinstance(row, tuple) else (row,) for row in always]
    return [pytest.param(*row) if row in chosen else full(*row) for row in spread]
