"""Reads one recorded curve from a file or folder, with notes about oddities."""

from __future__ import annotations

import gzip
import math
import statistics
import zlib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

from runner.system.error import ConfigError
from runner.tools.backtest.column import ALWAYS
from runner.tools.backtest.guard_replay import RecordedCurve
from runner.tools.backtest.table import (
    Moved,
    Names,
    Row,
    Table,
    event_files,
    nobody,
    opened,
    read_csv,
    read_events,
    read_json,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A curve ready for a replay. ``notes`` are sentences about what was missing or odd."""

    path: str
    curve: RecordedCurve
    notes: tuple[str, ...]


# A first step after this many usual distances: the training began before the recording.
_LATE_BEGINNING = 10


def read_columns(
    path: str, names: Names, *, moved: Moved = nobody
) -> tuple[dict[str, list[float | None]], list[str]]:
    """All rows of a file by column, None for an empty cell, and notes; nothing is dropped.

    Of the further columns of ``names`` those that have a value. Raises as :func:`read_curve`.
    """
    table, notes = _readable(path, names, moved)
    if not any(row[1] is not None for row in table.rows):
        raise ConfigError(f"{path}: no row has a loss; name its column: --loss NAME")
    columns = zip(dict.fromkeys([*ALWAYS, *names]), zip(*table.rows, strict=True), strict=True)
    return {
        name: list(values)
        for name, values in columns
        if name in ALWAYS or any(value is not None for value in values)
    }, notes


def read_curve(
    path: str, names: Names = MappingProxyType({}), *, memory: int = 64, moved: Moved = nobody
) -> RecordedRun:
    """Read one run.

    Args:
        path: CSV, JSONL, a TensorBoard event file, or a folder with ``metrics.jsonl`` or events.
        names: columns, where the common names do not find them.
        memory: the guard's window; after a gap in the steps longer than that many usual
            distances the statistics begin anew.
        moved: told now and then how far a file of lines is read.

    Raises:
        ConfigError: no such file, no loss in it, or nothing readable.
    """
    table, notes = _readable(path, names, moved)
    rows = _once([row for row in table.rows if row[1] is not None], notes)
    if not rows:
        raise ConfigError(f"{path}: no row has a loss; name its column: --loss NAME")
    if not table.has_steps:
        notes.append("no step column: rows are counted")
    steps = _steps([row[0] for row in rows] if table.has_steps else [None] * len(rows))
    norms = _norms([row[2] for row in rows], notes)
    fresh, restarts = _breaks(steps, memory, notes)
    losses = [row[1] if row[1] is not None else math.nan for row in rows]
    broken = sum(not math.isfinite(loss) for loss in losses)
    if broken:
        notes.append(f"{broken} loss(es) not finite")
    curve = RecordedCurve(
        steps=steps, losses=losses, grad_norms=norms, fresh=fresh, restarts=restarts
    )
    return RecordedRun(path=path, curve=curve, notes=tuple(notes))


def _readable(path: str, names: Names, moved: Moved) -> tuple[Table, list[str]]:
    """The rows, with notes; a file with more unreadable than readable lines is refused."""
    table = _read(Path(path), names, moved)
    notes = []
    if table.num_unreadable:
        notes.append(f"{table.num_unreadable} line(s) could not be read and were left out")
    if table.num_unreadable > len(table.rows):
        first = f", the first of them {table.unreadable!r}" if table.unreadable else ""
        raise ConfigError(
            f"{path}: {table.num_unreadable} lines could not be read{first}; is it a curve? "
            "Numbers are written as 3.14, with commas, tabs or semicolons between them"
        )
    return table, notes


def _read(path: Path, names: Names, moved: Moved) -> Table:
    if path.is_dir():
        return _read_folder(path, names, moved)
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; give CSV, JSONL or TensorBoard event files")
    if "tfevents" in path.name:
        return read_events([path], names, str(path))
    try:
        with opened(path) as file:
            first = file.read(256).lstrip()
        read = read_json if first.startswith(("{", "[")) else read_csv
        return read(path, names, moved)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: cannot be unpacked: {error}; is it whole?") from None


def _read_folder(path: Path, names: Names, moved: Moved) -> Table:
    if (path / "metrics.jsonl").is_file():
        return read_json(path / "metrics.jsonl", names, moved)
    events = event_files(path)
    if not events:
        raise ConfigError(f"{path}: neither metrics.jsonl nor TensorBoard event files in it")
    return read_events(events, names, str(path))


def _once(rows: list[Row], notes: list[str]) -> list[Row]:
    """Merge rows that repeat the one before, as several loggers of one run leave them."""
    once = rows[:1]
    for before, row in pairwise(rows):
        # NaN twice is two attempts at one step, of ours, or a run that has ended: never one row.
        if row[0] is None or not math.isfinite(row[1] or 0.0) or row[:2] != before[:2]:
            once.append(row)
        elif once[-1][2] is None:
            once[-1] = row
    if len(once) < len(rows):
        notes.append(f"{len(rows) - len(once)} row(s) repeat the step and loss before: left out")
    return once


def _steps(numbers: list[float | None]) -> list[int]:
    """The steps as whole numbers; a row without one follows the row before."""
    steps: list[int] = []
    for step in numbers:
        usable = step is not None and math.isfinite(step)
        steps.append(int(step) if usable and step is not None else (steps[-1] + 1 if steps else 0))
    return steps


def _norms(norms_read: list[float | None], notes: list[str]) -> list[float]:
    """The norms; a missing one repeats the last known one, so that it never looks bad."""
    num_missing = sum(norm is None for norm in norms_read)
    if num_missing == len(norms_read):
        notes.append("no grad norm: judged on the loss alone")
    elif num_missing:
        notes.append(
            f"no grad norm in {num_missing} of {len(norms_read)} rows: the last one stands in"
        )
    known = next((norm for norm in norms_read if norm is not None and math.isfinite(norm)), 1.0)
    norms = []
    for norm in norms_read:
        if norm is not None and math.isfinite(norm):
            known = norm
        norms.append(known if norm is None else norm)
    return norms


def _breaks(
    steps: list[int], memory: int, notes: list[str]
) -> tuple[frozenset[int], frozenset[int]]:
    """Rows after a gap, and rows that restart at an earlier step."""
    distances = [(row, after - before) for row, (before, after) in enumerate(pairwise(steps), 1)]
    ahead = [distance for _, distance in distances if distance > 0]
    usual = statistics.median(ahead) if ahead else 1
    restarts = frozenset(row for row, distance in distances if distance < 0)
    fresh = {row for row, distance in distances if distance > memory * usual}
    if steps[0] > _LATE_BEGINNING * usual:
        fresh.add(0)
        notes.append(f"begins at step {steps[0]}: what an untrained model loses is not known")
    if usual > 1:
        notes.append(f"a row every {usual:g} steps: what lasted less is not in the file")
    gaps = frozenset(fresh - {0})
    notes += _told("gap", "in the steps: the statistics start over after it", gaps, steps)
    notes += _told("restart", "at an earlier step: judged on from there", restarts, steps)
    return frozenset(fresh), restarts


def _told(noun: str, words: str, rows: frozenset[int], steps: list[int]) -> list[str]:
    if not rows:
        return []
    where = ", ".join(f"{steps[row - 1]} -> {steps[row]}" for row in sorted(rows)[:5])
    more = ", ..." if len(rows) > 5 else ""
    return [f"{len(rows)} {noun}(s) {words} ({where}{more})"]
