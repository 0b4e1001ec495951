"""Rows over time as colours: a fold that keeps the extremes, and the picture of it.

The picture is a PNG of a pixel a cell, made here, so that the page holds it without asking anybody
for it; its colours are told apart without red and green, and on light and dark paper.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_MOST_NAMES = 4096
# Of the known values so many lie within the scale; what is far above it has a colour of its own.
_LOW_SHARE, _HIGH_SHARE = 0.01, 0.98
_FAR = 0.35  # of the scale's length, above its end
NONE, ABOVE = 0, 255
# From dark to light through blue, grey and yellow: as cividis (Nunez, Anderton and Renslow, 2018).
_ANCHORS = (
    (0, 32, 77), (31, 57, 109), (66, 78, 108), (92, 99, 111), (118, 118, 120),
    (149, 142, 118), (182, 168, 106), (216, 196, 83), (255, 233, 69),
)  # fmt: skip
ABOVE_COLOUR = (230, 0, 110)


class Grid:
    """Values of named rows, added look by look; two columns become one when there are too many.

    Args:
        most_columns: at most so many are kept.
    """

    def __init__(self, *, most_columns: int = 200) -> None:
        self._most_columns = max(2, most_columns)
        self.names: list[str] = []
        self._places: dict[str, int] = {}
        self.width = 1  # looks of a column
        self._in_last = 0
        self.steps: list[int] = []  # of each column's first look
        # By row: the lowest and the highest value, their sum and their number.
        self._columns: list[dict[int, tuple[float, float, float, int]]] = []
        self.num_looks = 0
        self.last_step = 0

    def add(self, step: int, values: Mapping[str, float | None]) -> None:
        """The next look. What is not finite leaves its cell empty."""
        if not self._columns or self._in_last >= self.width:
            if len(self._columns) >= self._most_columns:
                self._double()
            if self._in_last >= self.width or not self._columns:
                self._columns.append({})
                self.steps.append(step)
                self._in_last = 0
        self._in_last += 1
        self.num_looks += 1
        self.last_step = step
        column = self._columns[-1]
        for name, value in values.items():
            row = self._row(name)
            if row is None or value is None or not math.isfinite(value):
                continue
            low, high, total, count = column.get(row, (value, value, 0.0, 0))
            column[row] = min(low, value), max(high, value), total + value, count + 1

    def cells(self) -> list[list[float]]:
        """By row and column, of each cell the value that is farther from the row's usual one.

        NaN where there is none. "Far" is a factor where all values are positive.
        """
        made = []
        for row, means in enumerate(self.means()):
            known = sorted(mean for mean in means if math.isfinite(mean))
            usual = known[(len(known) - 1) // 2] if known else math.nan
            cells = (column.get(row) for column in self._columns)
            made.append([math.nan if cell is None else _far(cell, usual) for cell in cells])
        return made

    def means(self) -> list[list[float]]:
        """By row and column, the mean of each cell; NaN where there is none."""
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
        joined = []
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
            joined.append(column)
        if len(self._columns) % 2 == 0:
            self._in_last += self.width
        self._columns, self.steps = joined, self.steps[::2]
        self.width *= 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A grid in colours: ``places`` has for each cell its place on the scale, row by row.

    A column stands for ``width`` looks. A place is :data:`NONE`, :data:`ABOVE`, or 1 at ``low`` to
    254 at ``high``, evenly in the logarithm where ``is_log``.
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
        """As a ``data:`` address."""
        return data_address(self.places, len(self.steps), len(self.names))


def picture(grid: Grid, *, most_rows: int = 128) -> Picture | None:
    """Of a grid; None where it holds no number."""
    names, cells = _joined(grid.names, grid.cells(), most_rows)
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


def _joined(
    names: Sequence[str], cells: Sequence[Sequence[float]], most_rows: int
) -> tuple[list[str], list[list[float]]]:
    """At most so many rows: of neighbours the highest."""
    size = math.ceil(len(names) / most_rows) if names else 1
    if size == 1:
        return list(names), [list(row) for row in cells]
    labels, made = [], []
    for at in range(0, len(names), size):
        several = list(names[at : at + size])
        labels.append(several[0] if len(several) == 1 else f"{several[0]} to {several[-1]}")
        made.append([_highest(column) for column in zip(*cells[at : at + size], strict=True)])
    return labels, made


def _highest(values: Sequence[float]) -> float:
    return max((value for value in values if math.isfinite(value)), default=math.nan)


def _far(cell: tuple[float, float, float, int], usual: float) -> float:
    low, high = cell[:2]
    if low > 0 and usual > 0:
        return high if high / usual >= usual / low else low
    return high if high - usual >= usual - low else low


def palette() -> list[tuple[int, int, int]]:
    """256 colours: of nothing, of the scale, of what lies above it."""
    made = [(0, 0, 0)]
    for place in range(254):
        at = place / 253 * (len(_ANCHORS) - 1)
        below = min(len(_ANCHORS) - 2, int(at))
        share = at - below
        first, second = _ANCHORS[below], _ANCHORS[below + 1]
        red, green, blue = (
            round(one + (two - one) * share) for one, two in zip(first, second, strict=True)
        )
        made.append((red, green, blue))
    return [*made, ABOVE_COLOUR]


def data_address(places: bytes, width: int, height: int) -> str:
    """A picture of a pixel a place, as a ``data:`` address; :data:`NONE` is transparent."""
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
