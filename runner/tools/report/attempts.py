"""Chooses the attempted steps that are drawn, because a run has more steps than a screen columns.

Each column keeps the lowest and the highest value of every curve, so no spike is lost. Near an
unusual step every step is kept. Columns double in width as steps come in, so one pass over the file
suffices, also while it grows.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from runner.system.parsing import NONFINITE
from runner.tools.report.follow import number, whole


class AttemptRow(NamedTuple):
    """One attempted step; a value that is missing or not finite is NaN.

    ``attempt`` counts lines of the metrics from 0. Losses are in nats per token, ``grad_norm`` is
    before clipping, ``time`` is in seconds since the epoch. ``loss_limit`` and ``norm_limit`` are
    those of the gate.
    """

    attempt: int
    step: int
    action: str
    verdict: str
    loss: float
    grad_norm: float
    eval_loss: float
    lr: float
    tokens_per_second: float
    loss_limit: float
    norm_limit: float
    time: float

    @property
    def is_applied(self) -> bool:
        return self.action == "apply"


_NUMBERS = AttemptRow._fields[4:]


def row_of(attempt: int, line: Mapping[str, Any]) -> AttemptRow:
    """The row of a metrics line; fields of the wrong type become NaN, 0 or empty."""
    words = (line.get(name) for name in ("action", "verdict"))
    action, verdict = (word[:40] if isinstance(word, str) else "" for word in words)
    numbers = (number(line.get(name)) for name in _NUMBERS)
    return AttemptRow(attempt, whole(line.get("step")), action, verdict, *numbers)


def is_odd(row: AttemptRow, line: Mapping[str, Any]) -> bool:
    """Whether the step is unusual: not applied, not clean, or with a non-finite number."""
    return not row.is_applied or row.verdict != "Clean" or NONFINITE in line


# The curves whose extremes are kept: loss, norm, held-out loss, speed, by index into AttemptRow.
_WATCHED = (4, 5, 6, 8)


def _extremes(rows: Sequence[AttemptRow]) -> list[AttemptRow]:
    """The first of neighbouring attempts, and for each curve its lowest and its highest."""
    kept = {rows[0].attempt: rows[0]}
    for place in _WATCHED:
        known = [row for row in rows if row[place] == row[place]]
        for choose in (min, max) if known else ():
            row = choose(known, key=itemgetter(place))
            kept[row.attempt] = row
    return [kept[attempt] for attempt in sorted(kept)]


class Thinned:
    """The rows to draw, chosen from all rows, which are added in order.

    Args:
        columns: between this many and twice as many are kept, if there are as many rows.
        near: rows kept before and after an odd one.
        most_near: the most rows kept near odd ones; beyond it, ``near`` is halved.
    """

    def __init__(self, *, columns: int = 1024, near: int = 60, most_near: int = 5000) -> None:
        self._most_columns = 2 * columns
        self._near = near
        self._most_near = most_near
        self._columns: list[list[AttemptRow]] = []  # the last one has all of its rows
        self._width = 1
        self._sums: list[list[float]] = []  # of each column: see means()
        # By attempt: the distance to the nearest odd row, and the row.
        self._kept: dict[int, tuple[int, AttemptRow]] = {}
        self._before: deque[AttemptRow] = deque(maxlen=near)
        self._odd = -(near + 1)
        self.num_rows = 0
        self.last: AttemptRow | None = None

    def add(self, row: AttemptRow, *, odd: bool) -> None:
        """Add the next row; if ``odd``, the rows around it are kept."""
        if self.num_rows % self._width == 0:
            self._begin_column()
        self._columns[-1].append(row)
        if row.is_applied and math.isfinite(row.loss + row.grad_norm):
            for place, value in enumerate((1.0, row.attempt, row.loss, row.grad_norm)):
                self._sums[-1][place] += value
        if odd:
            self._odd = row.attempt
            for earlier in self._before:
                self._keep(row.attempt - earlier.attempt, earlier)
            self._before.clear()
        if row.attempt - self._odd <= self._near:
            self._keep(row.attempt - self._odd, row)
        else:
            self._before.append(row)
        self.num_rows += 1
        self.last = row

    def rows(self) -> list[AttemptRow]:
        """The chosen rows in order, without duplicates."""
        columns = [*self._columns[:-1], *map(_extremes, self._columns[-1:])]
        by_attempt = {row.attempt: row for column in columns for row in column}
        by_attempt |= {attempt: row for attempt, (_, row) in self._kept.items()}
        if self.last is not None:
            by_attempt[self.last.attempt] = self.last
        return [by_attempt[attempt] for attempt in sorted(by_attempt)]

    def means(self) -> list[list[float]]:
        """Of each column with applied steps: the mean attempt, loss and gradient norm.

        Empty while a column is one step.
        """
        if self._width == 1:
            return []
        return [[total / count for total in totals] for count, *totals in self._sums if count]

    def _begin_column(self) -> None:
        columns = self._columns
        columns[-1:] = map(_extremes, columns[-1:])
        if len(columns) == self._most_columns:
            pairs = zip(columns[::2], columns[1::2], strict=True)
            self._columns = [_extremes(one + other) for one, other in pairs]
            both = zip(self._sums[::2], self._sums[1::2], strict=True)
            self._sums = [[sum(pair) for pair in zip(*two, strict=True)] for two in both]
            self._width *= 2
        self._columns.append([])
        self._sums.append([0.0] * 4)

    def _keep(self, distance: int, row: AttemptRow) -> None:
        kept = self._kept.get(row.attempt)
        if kept is None or distance < kept[0]:
            self._kept[row.attempt] = (distance, row)
        while len(self._kept) > self._most_near and self._near > 0:
            self._near //= 2
            near = self._near
            self._kept = {attempt: one for attempt, one in self._kept.items() if one[0] <= near}
            self._before = deque(self._before, maxlen=max(1, near))
        while len(self._kept) > self._most_near:  # too many odd rows alone: keep every second one
            self._kept = dict(list(self._kept.items())[::2])


class AttemptIndex:
    """Step and time of every attempt: 16 bytes each."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._times = array("d")

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, row: AttemptRow) -> None:
        self._steps.append(row.step)
        self._times.append(row.time)

    def attempt_of(self, step: int, *, before: int | None = None) -> int | None:
        """The last attempt at a step before the attempt ``before``; None if there is none."""
        steps = self._steps
        index = (len(steps) if before is None else min(before, len(steps))) - 1
        while index >= 0:
            if steps[index] == step:
                return index
            # Steps rise by at most one per attempt, so the wanted step is at least this far back.
            index -= max(1, steps[index] - step) if steps[index] > step else 1
        return None

    def step_of(self, attempt: int) -> int:
        return self._steps[attempt]

    def time_of(self, attempt: int) -> float:
        return self._times[attempt]
