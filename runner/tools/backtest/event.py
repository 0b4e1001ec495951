"""TensorBoard event files as rows of (step, loss, grad norm), and further columns."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from runner.system.error import ConfigError, MissingPackage
from runner.system.extras import lacking
from runner.tools.backtest.table import Names, Row, Table, chosen


def read_events(paths: Sequence[Path], names: Names, source: str) -> Table:
    """Scalars of one run's event files, oldest file first; a restart writes a new file.

    A loss begins a row; the other columns of the same step join it, whichever came first. What
    :attr:`Names.further` requests has a row of its own if its step has no loss.
    """
    tags = list(dict.fromkeys(tag for path in paths for tag, _, _ in _scalars(path)))
    if not tags:
        raise ConfigError(f"{source}: no scalars in its {len(paths)} event file(s)")
    columns = chosen(["step", *tags], names, source)
    cell = {tag: at for at, tag in enumerate(columns) if at > 1 and tag is not None}
    rows: list[list[float | None]] = []
    place: dict[int, int] = {}
    early: dict[int, list[float | None]] = {}
    for path in paths:
        for tag, step, value in _scalars(path):
            at = cell.get(tag)
            if tag == columns[1]:
                place[step] = len(rows)
                rows.append(early.pop(step, [None] * len(columns)))
                rows[-1][:2] = [float(step), value]
            elif at is not None and step in place and rows[place[step]][at] is None:
                rows[place[step]][at] = value
            elif at is not None:
                early.setdefault(step, [float(step), *[None] * (len(columns) - 1)])[at] = value
    table: list[Row] = [tuple(row) for row in rows]
    if names.further:
        table = _with_lone_rows(table, early, place)
    return Table(rows=table, has_norms=columns[2] is not None)


def _with_lone_rows(
    table: list[Row], early: dict[int, list[float | None]], place: dict[int, int]
) -> list[Row]:
    """Insert rows of steps without a loss after the last row of an earlier step."""
    unplaced = sorted(step for step in early if step not in place)
    known_steps = sorted(place)
    after: dict[int, list[Row]] = {}
    for step in unplaced:
        near = bisect_right(known_steps, step)
        after.setdefault(place[known_steps[near - 1]] if near else -1, []).append(
            tuple(early[step])
        )
    rows = after.get(-1, [])
    for at, row in enumerate(table):
        rows += [row, *after.get(at, ())]
    return rows


def _scalars(path: Path) -> Iterator[tuple[str, int, float]]:
    """Yield (tag, step, value) from the raw records: the loader's own classes take ten times
    as long, and drop what a restart overwrote, which is needed here."""
    try:
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        from tensorboard.compat.proto.event_pb2 import Event
    except ImportError as error:
        raise MissingPackage(lacking(str(path), "tensorboard")) from error
    for record in RawEventFileLoader(str(path)).Load():
        event = Event.FromString(record)
        for value in event.summary.value:
            number = _scalar(value)
            if number is not None:
                yield value.tag, event.step, number


def _scalar(value: Any) -> float | None:
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return float(value.simple_value)
    if kind != "tensor" or value.tensor.tensor_shape.dim:
        return None
    from tensorboard.util.tensor_util import make_ndarray

    array = make_ndarray(value.tensor)
    return float(array) if array.dtype.kind == "f" else None


def event_files(folder: Path) -> list[Path]:
    """The event files directly in a folder, in order of their names, which is that of time."""
    return sorted(path for path in folder.glob("*tfevents*") if path.is_file())
