"""Reads CSV, JSONL and TensorBoard event files as rows of (step, loss, grad norm).

Further columns are read on request. A missing value is None; NaN and Inf stay, because they matter
to the judge.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from runner.system.error import ConfigError, MissingPackage, lacking
from runner.tools.backtest import column

Row = tuple[float | None, ...]  # step, loss, grad norm, and further columns
# Lines sampled for column names: the first lines of a log may lack the gradient norm.
_LINES_FOR_NAMES = 1000
Moved = Callable[[int, int], None]  # takes bytes that were read, and those of the file
_ROWS_BETWEEN = 4096


def nobody(done: int, total: int) -> None:
    """For who need not be told how far it is."""


# What columns are called in the file, as the command line says, or None. Step, loss and gradient
# norm are always read, others of :data:`runner.tools.reading.curve.FURTHER` where they are keys.
Names = Mapping[str, str | None]


@dataclass(slots=True, kw_only=True)
class Table:
    """Rows in the order of the file, how many lines could not be read, and the first of those."""

    rows: list[Row]
    num_unreadable: int = 0
    unreadable: str = ""
    has_steps: bool = True
    has_norms: bool = True


def chosen(fields: list[str], names: Names, source: str) -> list[str | None]:
    """The columns of step, loss (never None), grad norm and the further ones, in their order.

    Raises:
        ConfigError: there is no loss, or a configured column is missing.
    """
    wanted = dict.fromkeys([*column.ALWAYS, *names])
    columns = [column.find(name, fields, names.get(name), source) for name in wanted]
    if columns[1] is None:
        raise column.no_loss(fields, source)
    return columns


def opened(path: Path, newline: str | None = None) -> TextIO:
    """Open a text file, unpacked if its name ends in .gz, without a byte order mark."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", newline=newline, encoding="utf-8-sig", errors="replace")
    return path.open(newline=newline, encoding="utf-8-sig", errors="replace")


def _told(file: TextIO, path: Path, count: int, moved: Moved) -> None:
    """Tell now and then how far the file is read."""
    if count % _ROWS_BETWEEN == 0:
        packed = file.buffer  # of a .gz the bytes as they lie on the disk
        moved(getattr(packed, "fileobj", packed).tell(), path.stat().st_size)


def read_csv(path: Path, names: Names, moved: Moved = nobody) -> Table:
    """Read a CSV with a header; detects a tab or semicolon between columns."""
    with opened(path, newline="") as file:
        head = file.readline()
        file.seek(0)
        separator = max(",\t;", key=head.count)
        lines = csv.reader(file, delimiter=separator)
        fields = next(_readable(lines), None) or []
        columns = chosen(fields, names, str(path))
        places = [fields.index(name) if name is not None else None for name in columns]
        table = _table(columns)
        for count, line in enumerate(_readable(lines)):
            _told(file, path, count, moved)
            try:
                table.rows.append(_numbers(line or [], places))
            except (ValueError, IndexError):
                table.num_unreadable += 1
                table.unreadable = table.unreadable or separator.join(line or [])[:80]
    return table


def _readable(lines: Iterator[list[str]]) -> Iterator[list[str] | None]:
    """Yield each line's cells; None for one that is not CSV, such as an unclosed quote."""
    while True:
        try:
            yield next(lines)
        except StopIteration:
            return
        except csv.Error:
            yield None


def _numbers(line: list[str], places: list[int | None]) -> Row:
    return tuple(None if place is None else _number(line[place]) for place in places)


def _table(columns: Sequence[str | None]) -> Table:
    return Table(rows=[], has_steps=columns[0] is not None, has_norms=columns[2] is not None)


def _number(text: str) -> float | None:
    text = text.strip()
    return float(text) if text and text not in ("null", "None", "-") else None


def read_json(path: Path, names: Names, moved: Moved = nobody) -> Table:
    """Read a JSON object a line, as our ``metrics.jsonl`` or a similar log; or one document.

    A document is a list of objects, or an object whose ``log_history`` is one, as the trainer of
    Hugging Face leaves in ``trainer_state.json``.

    In ours null stands for a value that was not finite; elsewhere null means a missing value.
    """
    sample = [values for values, _ in zip(_objects(path), range(_LINES_FOR_NAMES), strict=False)]
    fields = list(dict.fromkeys(name for values in sample for name in values or {}))
    if not fields:
        raise ConfigError(
            f"{path}: no line of it is a JSON object, nor is it a list of objects or has one as "
            "its log_history"
        )
    columns = chosen(fields, names, str(path))
    is_ours = {"verdict", "action", "cursor"} <= set(fields)
    table = _table(columns)
    for values in _objects(path, moved):
        if is_ours and values is not None and values.get("action") == "redo":
            continue  # the redone step follows: this one never happened
        try:
            table.rows.append(_row(values, columns, is_ours))
        except (ValueError, TypeError, OverflowError):
            table.num_unreadable += 1
    return table


def _row(values: dict[str, Any] | None, columns: Sequence[str | None], is_ours: bool) -> Row:
    if values is None:
        raise ValueError("no object")
    numbers: list[float | None] = []
    for place, name in enumerate(columns):
        value = None if name is None else values.get(name)
        if value is None and is_ours and place in (1, 2) and name is not None:
            value = math.nan
        numbers.append(None if value is None else float(value))
    return tuple(numbers)


def _objects(path: Path, moved: Moved = nobody) -> Iterator[dict[str, Any] | None]:
    """Yield each line's object; None for an invalid line, such as a torn last one."""
    document = _document(path)
    if document is not None:
        yield from (values if isinstance(values, dict) else None for values in document)
        return
    with opened(path) as file:
        for count, line in enumerate(file):
            _told(file, path, count, moved)
            if line.strip():
                values = _parsed(line)
                yield values if isinstance(values, dict) else None


def _document(path: Path) -> list[Any] | None:
    """The entries of a file that is one JSON document; None if it has an object a line."""
    with opened(path) as file:
        first = file.readline()
        if isinstance(_parsed(first), dict) and "log_history" not in first:
            return None
        whole = _parsed(first + file.read())
    if isinstance(whole, dict):
        whole = whole.get("log_history")
    return whole if isinstance(whole, list) else None


def _parsed(text: str) -> Any:
    """Parse a JSON value; None for invalid text, such as the torn last line of a crash."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def read_events(paths: Sequence[Path], names: Names, source: str) -> Table:
    """Scalars of one run's event files, oldest file first; a restart writes a new file.

    A loss begins a row; the other columns of the same step join it, whichever came first. What
    ``names`` requests besides has a row of its own if its step has no loss.
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
    if len(columns) > len(column.ALWAYS):
        # A row of a step without a loss follows the last row of an earlier step.
        known, lone = sorted(place), []
        for step in early.keys() - place.keys():
            near = bisect_right(known, step)
            lone.append((place[known[near - 1]] + 1 if near else 0, step))
        for at, step in sorted(lone, reverse=True):
            table.insert(at, tuple(early[step]))
    return Table(rows=table, has_norms=columns[2] is not None)


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
