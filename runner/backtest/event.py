"""TensorBoard event files as rows of (step, loss, grad norm)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from runner.backtest.table import Names, Row, Table, chosen
from runner.system.error import ConfigError, MissingPackage
from runner.system.extras import lacking


def read_events(paths: Sequence[Path], names: Names, source: str) -> Table:
    """Scalars of one run's event files, oldest file first; a restart writes a new file.

    A loss begins a row; the gradient norm of the same step joins it, whichever came first.
    """
    tags = list(dict.fromkeys(tag for path in paths for tag, _, _ in _scalars(path)))
    if not tags:
        raise ConfigError(f"{source}: no scalars in its {len(paths)} event file(s)")
    _, loss, norm = chosen(["step", *tags], names, source)
    rows: list[list[float | None]] = []
    place: dict[int, int] = {}
    early: dict[int, float] = {}
    for path in paths:
        for tag, step, value in _scalars(path):
            if tag == loss:
                place[step] = len(rows)
                rows.append([float(step), value, early.pop(step, None)])
            elif tag == norm and step in place and rows[place[step]][2] is None:
                rows[place[step]][2] = value
            elif tag == norm:
                early[step] = value
    table: list[Row] = [(row[0], row[1], row[2]) for row in rows]
    return Table(rows=table, has_norms=norm is not None)


def _scalars(path: Path) -> Iterator[tuple[str, int, float]]:
    """(tag, step, value). Parsed from the raw records: the loader's own classes take ten times
    as long and drop what a restart overwrote, which is what we want to see."""
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
    """The event files right in a folder, in order of their names: of the times they began."""
    return sorted(path for path in folder.glob("*tfevents*") if path.is_file())
