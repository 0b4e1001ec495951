"""Reads one recorded curve from a file or folder, with notes about oddities.

CSV, JSONL and TensorBoard event files become rows of (step, loss, grad norm) and the columns that
are requested besides; columns are found by common names, or as configured. A missing value is None;
NaN and Inf stay, because they matter to the judge.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import re
import statistics
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from runner.system.error import ConfigError, MissingPackage, lacking
from runner.system.units import counted, first_few
from runner.tools.backtest.guard_replay import RecordedCurve
from runner.tools.reading.curve import (
    CORPUS_ENTROPY,
    ENTROPY,
    EPOCH,
    HELD_OUT,
    LAYER_RATIO,
    LEARNING_RATE,
    UPDATE_RATIO,
)

_SHOWN = 80  # characters of a name: a file that is not a curve may have one line of a megabyte
STEP, LOSS, GRAD_NORM = ALWAYS = ("step", "loss", "grad_norm")
# By column, best first, as `plain` writes them. "train" and "loss" may come in either order.
_COMMON = {
    STEP: """step global_step iteration iter update updates num_updates batch trainer_global_step
train_global_step train_step iterations steps""",
    LOSS: """loss train_loss training_loss loss_train lm_loss train_lm_loss lm_loss_training
train_ce_loss train_crossentropyloss train_cross_entropy loss_train_total train_loss_step
train_batch_loss train_total_loss loss_metrics_global_avg_loss ce_loss cross_entropy""",
    GRAD_NORM: """grad_norm train_grad_norm gradient_norm train_gradient_norm global_grad_norm
gradnorm grad_norm_training total_grad_norm optim_total_grad_norm train_global_grad_norm
l2_norm_grad_global train_gnorm gnorm norm train_norm""",
    LEARNING_RATE: """lr learning_rate train_lr train_learning_rate lr_0 lr_group0 lr_group_0
learning_rate_0 optim_lr optimizer_lr train_lr_0 optim_learning_rate_group0 lr_adamw lr_adam
lr_sgd""",
    EPOCH: "epoch train_epoch trainer_epoch epochs train_global_epoch",
    HELD_OUT: """eval_loss val_loss validation_loss valid_loss held_out_loss heldout_loss dev_loss
loss_val loss_eval loss_valid loss_validation eval_ce_loss val_ce_loss eval_lm_loss
lm_loss_validation val_loss_epoch eval_cross_entropy eval_crossentropyloss test_loss""",
    UPDATE_RATIO: """update_ratio update_to_weight update_to_weight_ratio update_weight_ratio
update_norm_ratio train_update_ratio""",
    LAYER_RATIO: "layer_ratio layer_norm_ratio first_last_ratio gradient_layer_ratio",
    ENTROPY: "entropy token_entropy batch_entropy batch_token_entropy data_entropy",
    CORPUS_ENTROPY: "corpus_entropy unigram_entropy corpus_token_entropy",
}
# Else the only column that looks like it, apart from held-out losses.
_LOOKS = {
    STEP: re.compile(r"(^|_)(step|iteration|iter|update)s?$"),
    LOSS: re.compile(r"^(?!.*(val|eval|test|held|aux|balanc|z_loss|min|max)).*loss"),
    GRAD_NORM: re.compile(r"^(?!.*(param|weight|clip)).*grad.*norm"),
    LEARNING_RATE: re.compile(r"(^|_)(lr|learning_rate)(_|$)"),
    EPOCH: re.compile(r"(^|_)epoch$"),
    HELD_OUT: re.compile(r"^(?=.*(val|eval|test|held|dev))(?!.*(aux|balanc|z_loss|min|max)).*loss"),
}


def option(column: str) -> str:
    """The option that names a column."""
    return f"--{column.replace('_', '-')}"


def plain(name: str) -> str:
    """Normalise a name: lower case, underscores for other characters, no W&B run name."""
    metric = name.rsplit(" - ", 1)[-1]
    return re.sub(r"[^a-z0-9]+", "_", metric.lower()).strip("_")


def find_column(
    column: str, names: Sequence[str], requested: str | None, source: str
) -> str | None:
    """Find the name among ``names`` for this column; None if no common one is there.

    Raises:
        ConfigError: the configured one is missing, or several fit equally well.
    """
    names = [name for name in names if not name.endswith(("__MIN", "__MAX"))]
    if requested is not None:
        fitting = [name for name in names if name == requested]
        fitting = fitting or [name for name in names if plain(name) == plain(requested)]
        if not fitting:
            listed = _listed(names)
            raise ConfigError(f"{option(column)} {requested}: not in {source}, which has {listed}")
        return _only(fitting, column, source)
    for common in _COMMON[column].split():
        fitting = [name for name in names if plain(name) == common]
        if fitting:
            return _only(fitting, column, source) if column in ALWAYS else fitting[0]
    if column not in _LOOKS:
        return None
    fitting = [name for name in names if _LOOKS[column].search(plain(name))]
    if len(fitting) > 1 and column == LOSS:
        return _only(fitting, column, source)
    return fitting[0] if len(fitting) == 1 else None


def _only(fitting: Sequence[str], column: str, source: str) -> str:
    if len(fitting) > 1:
        listed, named = _listed(fitting), option(column)
        raise ConfigError(f"{source}: {listed} could all be {named}; choose one with {named} NAME")
    return fitting[0]


def _listed(names: Sequence[str]) -> str:
    return first_few(names, 20, name=lambda name: repr(name[:_SHOWN]))


def _no_loss(names: Sequence[str], source: str) -> ConfigError:
    """The error for a file without a column of losses."""
    hint = "name it: --loss NAME"
    if names and all(re.fullmatch(r"[-+0-9.eE ]+", name) for name in names):
        hint = "the first line must name the columns"
    return ConfigError(f"{source}: no loss among {_listed(names)}; {hint}")


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
        notes.append(f"{counted(table.num_unreadable, 'line')} could not be read, and left out")
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
        repeated = counted(len(rows) - len(once), "row")
        notes.append(f"left out: {repeated} with the step and loss of the one before")
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
    return [f"{counted(len(rows), noun)} {words} ({where}{more})"]


# -- files as rows --------------------------------------------------------------------------------


def chosen(fields: list[str], names: Names, source: str) -> list[str | None]:
    """The columns of step, loss (never None), grad norm and the further ones, in their order.

    Raises:
        ConfigError: there is no loss, or a configured column is missing.
    """
    wanted = dict.fromkeys([*ALWAYS, *names])
    columns = [find_column(name, fields, names.get(name), source) for name in wanted]
    if columns[1] is None:
        raise _no_loss(fields, source)
    return columns


def opened(path: Path, newline: str | None = None) -> TextIO:
    """Open a text file, unpacked if its name ends in .gz, without a byte order mark."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", newline=newline, encoding="utf-8-sig", errors="replace")
    return path.open(newline=newline, encoding="utf-8-sig", errors="replace")


def _say_how_far(file: TextIO, path: Path, count: int, moved: Moved) -> None:
    """Say now and then how far the file is read."""
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
        fields = next(_cells(lines), None) or []
        columns = chosen(fields, names, str(path))
        places = [fields.index(name) if name is not None else None for name in columns]
        table = Table(rows=[], has_steps=columns[0] is not None)
        for count, line in enumerate(_cells(lines)):
            _say_how_far(file, path, count, moved)
            try:
                cells = (None if place is None else (line or [])[place] for place in places)
                table.rows.append(tuple(map(_number, cells)))
            except (ValueError, IndexError):
                table.num_unreadable += 1
                table.unreadable = table.unreadable or separator.join(line or [])[:80]
    return table


def _cells(lines: Iterator[list[str]]) -> Iterator[list[str] | None]:
    """Yield each line's cells; None for one that is not CSV, such as an unclosed quote."""
    while True:
        try:
            yield next(lines)
        except StopIteration:
            return
        except csv.Error:
            yield None


def _number(cell: str | None) -> float | None:
    text = (cell or "").strip()
    return None if text in ("", "null", "None", "-") else float(text)


def read_json(path: Path, names: Names, moved: Moved = nobody) -> Table:
    """Read a JSON object a line, as our ``metrics.jsonl`` or a similar log; or one document.

    A document is a list of objects, or an object whose ``log_history`` is one, as the trainer of
    Hugging Face leaves in ``trainer_state.json``.

    In ours null stands for a value that was not finite; elsewhere null means a missing value.
    """
    sample = islice(objects(path), _LINES_FOR_NAMES)
    fields = list(dict.fromkeys(name for values in sample for name in values or {}))
    if not fields:
        raise ConfigError(
            f"{path}: no line of it is a JSON object, nor is it a list of objects or has one as "
            "its log_history"
        )
    columns = chosen(fields, names, str(path))
    is_ours = {"verdict", "action", "cursor"} <= set(fields)
    table = Table(rows=[], has_steps=columns[0] is not None)
    for values in objects(path, moved):
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


def objects(path: Path, moved: Moved = nobody) -> Iterator[dict[str, Any] | None]:
    """Yield each line's object; None for an invalid line, such as a torn last one."""
    document = _document(path)
    if document is not None:
        yield from (values if isinstance(values, dict) else None for values in document)
        return
    with opened(path) as file:
        for count, line in enumerate(file):
            _say_how_far(file, path, count, moved)
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
        raise ConfigError(f"{source}: no scalars in {counted(len(paths), 'event file')}")
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
    if len(columns) > len(ALWAYS):
        # A row of a step without a loss follows the last row of an earlier step.
        known, lone = sorted(place), []
        for step in early.keys() - place.keys():
            near = bisect_right(known, step)
            lone.append((place[known[near - 1]] + 1 if near else 0, step))
        for at, step in sorted(lone, reverse=True):
            table.insert(at, tuple(early[step]))
    return Table(rows=table)


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
