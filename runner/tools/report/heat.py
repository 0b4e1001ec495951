"""Heat maps of named rows over time: a grid that keeps extremes, and its picture.

The picture is a PNG with one pixel per cell. It is made here, so that the page needs no request.
Its colours can be distinguished with red-green blindness, and on light and dark backgrounds.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_MOST_NAMES = 4096
# The quantiles at which the scale starts and ends; values far above have a colour of their own.
_LOW_SHARE, _HIGH_SHARE = 0.01, 0.98
_FAR = 0.35  # share of the scale's length above its end
NONE, ABOVE = 0, 255
# From dark to light through blue, grey and yellow, like cividis (Nunez, Anderton, Renslow, 2018).
_ANCHORS = (
    (0, 32, 77), (31, 57, 109), (66, 78, 108), (92, 99, 111), (118, 118, 120),
    (149, 142, 118), (182, 168, 106), (216, 196, 83), (255, 233, 69),
)  # fmt: skip
ABOVE_COLOUR = (230, 0, 110)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A grid in colours: ``places`` holds the colour index of each cell, row by row.

    A column stands for ``width`` inspections. An index is :data:`NONE`, :data:`ABOVE`, or from 1 at
    ``low`` to 254 at ``high``, linear in the logarithm if ``is_log``.
    """

    names: tuple[str, ...]
    steps: tuple[int, ...]
    last_step: int
    width: int
    low: float
    high: float
    is_log: bool
    places: bytes

    @property
    def has_above(self) -> bool:
        return ABOVE in self.places

    def png(self) -> str:
        """The picture as a ``data:`` URL."""
        return data_address(self.places, len(self.steps), len(self.names))


def picture(grid: Grid, *, most_rows: int = 128) -> Picture | None:
    """The picture of a grid; None if it holds no finite value."""
    names, cells = _join_rows(grid.names, grid.cells(), most_rows)
    known = sorted(value for row in cells for value in row if math.isfinite(value))
    if not known:
        return None
    is_log = known[0] >= 0 and known[len(known) // 2] > 0
    placed = [math.log(value) for value in known if value > 0] if is_log else known
    low, high = (
        placed[int(_LOW_SHARE * (len(placed) - 1))],
        placed[int(_HIGH_SHARE * (len(placed) - 1))],
    )
    if placed[-1] <= high + _FAR * (high - low):
        high = placed[-1]
    if high - low < 1e-6:
        low, high = low - 0.05, high + 0.05
    places = bytearray()
    for row in cells:
        for value in row:
            places.append(_place(value, low, high, is_log=is_log))
    ends = (math.exp(low), math.exp(high)) if is_log else (low, high)
    return Picture(
        names=tuple(names),
        steps=tuple(grid.steps),
        last_step=grid.last_step,
        width=grid.width,
        low=ends[0],
        high=ends[1],
        is_log=is_log,
        places=bytes(places),
    )


def _place(value: float, low: float, high: float, *, is_log: bool) -> int:
    if not math.isfinite(value):
        return NONE
    placed = (math.log(value) if value > 0 else low) if is_log else value
    share = (placed - low) / (high - low)
    if share > 1 + _FAR:
        return ABOVE
    return 1 + round(253 * min(1.0, max(0.0, share)))


def _join_rows(
    names: Sequence[str], cells: Sequence[Sequence[float]], most_rows: int
) -> tuple[list[str], list[list[float]]]:
    """Merge neighbouring rows into at most ``most_rows``, keeping the highest value."""
    size = math.ceil(len(names) / most_rows) if names else 1
    if size == 1:
        return list(names), [list(row) for row in cells]
    labels, joined = [], []
    for at in range(0, len(names), size):
        group = list(names[at : at + size])
        labels.append(group[0] if len(group) == 1 else f"{group[0]} to {group[-1]}")
        joined.append([_highest(column) for column in zip(*cells[at : at + size], strict=True)])
    return labels, joined


def _highest(values: Sequence[float]) -> float:
    return max((value for value in values if math.isfinite(value)), default=math.nan)


def _extreme(cell: tuple[float, float, float, int], usual: float) -> float:
    low, high = cell[:2]
    if low > 0 and usual > 0:
        return high if high / usual >= usual / low else low
    return high if high - usual >= usual - low else low


def palette() -> list[tuple[int, int, int]]:
    """256 colours: index 0 for no value, then the scale, then one for values above it."""
    colours = [(0, 0, 0)]
    for index in range(254):
        at = index / 253 * (len(_ANCHORS) - 1)
        below = min(len(_ANCHORS) - 2, int(at))
        share = at - below
        first, second = _ANCHORS[below], _ANCHORS[below + 1]
        red, green, blue = (
            round(one + (two - one) * share) for one, two in zip(first, second, strict=True)
        )
        colours.append((red, green, blue))
    return [*colours, ABOVE_COLOUR]


def data_address(places: bytes, width: int, height: int) -> str:
    """A PNG with one pixel per index, as a ``data:`` URL; :data:`NONE` is transparent."""
    rows = b"".join(
        b"\0" + places[at : at + width] for at in range(0, width * height, max(1, width))
    )
    colours = b"".join(bytes(colour) for colour in palette())
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", colours),
        (b"tRNS", b"\0"),
        (b"IDAT", zlib.compress(rows, 9)),
        (b"IEND", b""),
    ]
    data = b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*part) for part in parts)
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
