"""Which attempted steps are drawn: a million are more than a screen has columns.

Of each column the lowest and the highest value of every curve stay, so no spike is lost, and near
what was not an ordinary step every one stays. Columns double in width as steps come in, so one pass
suffices, and a growing file needs no second look.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from runner.system.parsing import NONFINITE

NAN = math.nan


class Row(NamedTuple):
    """One attempted step. What a line does not have, or was not finite, is NaN.

    ``attempt`` counts the lines of the metrics from 0. Losses are nats per token, ``grad_norm`` is
    before clipping, ``time`` in seconds since the epoch. ``loss_limit`` and ``norm_limit`` are the
    gate's.
    """

    attempt: int
    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_second: float
    eval_loss: float
    loss_limit: float
    norm_limit: float
    action: str
    verdict: str
    time: float

    @property
    def is_applied(self) -> bool:
        return self.action == "apply"


def row_of(attempt: int, line: Mapping[str, Any]) -> Row:
    """The row of a metrics line, whatever the line holds."""
    action, verdict = line.get("action"), line.get("verdict")
    step = line.get("step")
    return Row(
        attempt,
        step if type(step) is int and 0 <= step < 1 << 53 else 0,
        _number(line.get("loss")),
        _number(line.get("grad_norm")),
        _number(line.get("lr")),
        _number(line.get("tokens_per_second")),
        _number(line.get("eval_loss")),
        _number(line.get("loss_limit")),
        _number(line.get("norm_limit")),
        action[:40] if isinstance(action, str) else "",
        verdict[:40] if isinstance(verdict, str) else "",
        _number(line.get("time")),
    )


def is_odd(row: Row, line: Mapping[str, Any]) -> bool:
    """Whether a person wants to see every step around it."""
    return row.action != "apply" or row.verdict != "Clean" or NONFINITE in line


def _number(value: Any) -> float:
    if type(value) is float or type(value) is int:
        try:
            return float(value)
        except OverflowError:
            return NAN
    return NAN


# The curves whose extremes are kept, by place in Row.
_WATCHED = (2, 3, 5, 6)


class Column:
    """Rows of some neighbouring attempts: of each curve the lowest and the highest."""

    __slots__ = ("first", "high", "low")

    def __init__(self, row: Row) -> None:
        self.first = row
        self.low = [row] * len(_WATCHED)
        self.high = [row] * len(_WATCHED)

    def add(self, row: Row) -> None:
        low, high = self.low, self.high
        for place, name in enumerate(_WATCHED):
            value: float = row[name]  # type: ignore[assignment]
            if value < low[place][name] or low[place][name] != low[place][name]:  # type: ignore[operator]
                low[place] = row
            if value > high[place][name] or high[place][name] != high[place][name]:  # type: ignore[operator]
                high[place] = row

    def join(self, later: Column) -> None:
        for row in (*later.low, *later.high):
            self.add(row)

    def rows(self) -> Iterator[Row]:
        yield self.first
        yield from self.low
        yield from self.high


class Thinned:
    """The rows that are drawn, of those that are added in order.

    Args:
        columns: at most twice so many are kept, at least so many once there are as many rows.
        near: this many rows before and after an odd one are kept too.
        most_near: rows kept for being near; beyond it, near means less far.
    """

    def __init__(self, *, columns: int = 1024, near: int = 60, most_near: int = 5000) -> None:
        self._most_columns = 2 * columns
        self._near = near
        self._most_near = most_near
        self._columns: list[Column] = []
        self._width = 1
        self._kept: dict[int, tuple[int, Row]] = {}  # attempt: distance to what is odd, row
        self._before: deque[Row] = deque(maxlen=near)
        self._odd = -(near + 1)
        self.num_rows = 0
        self.last: Row | None = None

    def add(self, row: Row, *, odd: bool) -> None:
        """Take the next row; ``odd``: those around it are to be kept."""
        at = self.num_rows // self._width
        if at < len(self._columns):
            self._columns[at].add(row)
        else:
            self._columns.append(Column(row))
            if len(self._columns) > self._most_columns:
                self._double()
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

    def rows(self) -> list[Row]:
        """In order, each once."""
        found = {row.attempt: row for column in self._columns for row in column.rows()}
        found |= {attempt: row for attempt, (_, row) in self._kept.items()}
        if self.last is not None:
            found[self.last.attempt] = self.last
        return [found[attempt] for attempt in sorted(found)]

    def _double(self) -> None:
        pairs = list(self._columns)
        for at in range(0, len(pairs) - 1, 2):
            pairs[at].join(pairs[at + 1])
        self._columns = pairs[::2]
        self._width *= 2

    def _keep(self, distance: int, row: Row) -> None:
        known = self._kept.get(row.attempt)
        if known is None or distance < known[0]:
            self._kept[row.attempt] = (distance, row)
        while len(self._kept) > self._most_near and self._near > 0:
            self._near //= 2
            near = self._near
            self._kept = {at: one for at, one in self._kept.items() if one[0] <= near}
            self._before = deque(self._before, maxlen=max(1, near))
        while len(self._kept) > self._most_near:  # odd ones alone are too many: every second
            self._kept = dict(list(self._kept.items())[::2])


class Places:
    """Step and time of every attempt: 16 bytes each."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._times = array("d")

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, row: Row) -> None:
        self._steps.append(row.step)
        self._times.append(row.time)

    def attempt_of(self, step: int, *, before: int | None = None) -> int | None:
        """The last attempt at a step, before another attempt; None where there is none."""
        steps = self._steps
        at = (len(steps) if before is None else min(before, len(steps))) - 1
        while at >= 0:
            if steps[at] == step:
                return at
            # Steps rise by one at most: what is further ahead is at least so far back.
            at -= max(1, steps[at] - step) if steps[at] > step else 1
        return None

    def step_of(self, attempt: int) -> int:
        return self._steps[attempt]

    def time_of(self, attempt: int) -> float:
        return self._times[attempt]

    def pace(self, last: int = 200) -> float | None:
        """Seconds per step over the newest attempts, all that is between them included."""
        count = min(last, len(self._steps) - 1)
        if count < 1:
            return None
        seconds = self._times[-1] - self._times[-1 - count]
        steps = self._steps[-1] - self._steps[-1 - count]
        return seconds / steps if steps > 0 and seconds > 0 else None
