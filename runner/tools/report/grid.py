"""Values of named rows over time, in a bounded number of columns that keep the extremes."""

from __future__ import annotations

import math
from collections.abc import Mapping

_MOST_NAMES = 4096


class Grid:
    """Values of named rows, added one inspection at a time; too many columns are merged in pairs.

    Args:
        most_columns: the most columns that are kept.
    """

    def __init__(self, *, most_columns: int = 200) -> None:
        self._most_columns = max(2, most_columns)
        self.names: list[str] = []
        self._places: dict[str, int] = {}
        self.width = 1  # inspections per column
        self._in_last = 0
        self.steps: list[int] = []  # of each column's first inspection
        # By row: lowest value, highest value, sum and count.
        self._columns: list[dict[int, tuple[float, float, float, int]]] = []
        self.num_inspections = 0
        self.last_step = 0

    def add(self, step: int, values: Mapping[str, float | None]) -> None:
        """Add the next inspection. A value that is not finite leaves its cell empty."""
        if not self._columns or self._in_last >= self.width:
            if len(self._columns) >= self._most_columns:
                self._double()
            if self._in_last >= self.width or not self._columns:
                self._columns.append({})
                self.steps.append(step)
                self._in_last = 0
        self._in_last += 1
        self.num_inspections += 1
        self.last_step = step
        column = self._columns[-1]
        for name, value in values.items():
            row = self._row(name)
            if row is None or value is None or not math.isfinite(value):
                continue
            low, high, total, count = column.get(row, (value, value, 0.0, 0))
            column[row] = min(low, value), max(high, value), total + value, count + 1

    def cells(self) -> list[list[float]]:
        """By row and column, the value of each cell that is farthest from the row's median.

        NaN for an empty cell. The distance is a ratio where all values are positive.
        """
        rows = []
        for row, means in enumerate(self.means()):
            known = sorted(mean for mean in means if math.isfinite(mean))
            usual = known[(len(known) - 1) // 2] if known else math.nan
            cells = (column.get(row) for column in self._columns)
            rows.append([math.nan if cell is None else _extreme(cell, usual) for cell in cells])
        return rows

    def means(self) -> list[list[float]]:
        """By row and column, the mean of each cell; NaN for an empty cell."""
        return [
            [
                math.nan if cell is None else cell[2] / cell[3]
                for cell in (column.get(row) for column in self._columns)
            ]
            for row in range(len(self.names))
        ]

    def _row(self, name: str) -> int | None:
        row = self._places.get(name)
        if row is None and len(self.names) < _MOST_NAMES:
            row = self._places[name] = len(self.names)
            self.names.append(name[:200])
        return row

    def _double(self) -> None:
        columns = []
        for at in range(0, len(self._columns), 2):
            column = self._columns[at]
            later = self._columns[at + 1] if at + 1 < len(self._columns) else {}
            for row, (low, high, total, count) in later.items():
                known = column.get(row, (low, high, 0.0, 0))
                column[row] = (
                    min(low, known[0]),
                    max(high, known[1]),
                    total + known[2],
                    count + known[3],
                )
            columns.append(column)
        if len(self._columns) % 2 == 0:
            self._in_last += self.width
        self._columns, self.steps = columns, self.steps[::2]
        self.width *= 2


def _extreme(cell: tuple[float, float, float, int], usual: float) -> float:
    low, high = cell[:2]
    if low > 0 and usual > 0:
        return high if high / usual >= usual / low else low
    return high if high - usual >= usual - low else low
