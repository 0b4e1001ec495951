"""The files beside metrics and journal: layers, rank times, and the lifetimes of checkpoints.

Also the columns of the metrics with the numbers of each source of a mixture, and the user's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runner.policy.columns import EVALUATED, is_ours, kind_of
from runner.run_dir.time_account import plausible_seconds
from runner.tools.report.follow import number, whole
from runner.tools.report.incident import list_of

# By column of ranks.jsonl: what it is of a rank's GPU, and its unit.
GPU_QUANTITIES = {
    "gpu_gib": ("memory in use", "GiB"),
    "gpu_watts": ("power", "W"),
    "gpu_celsius": ("temperature", "degrees Celsius"),
    "gpu_mhz": ("clock", "MHz"),
}
# The quantities of a layer, in the order in which they are shown; see docs/warnings.md.
LAYER_QUANTITIES = {
    "grad": "gradient norm",
    "update": "update relative to the weights",
    "residual_rms": "residual stream, RMS",
    "attention_logit": "largest attention logit",
    "weight": "weight norm",
    "adam_rms": "RMS of g/sqrt(v), Adam",
}
_MOST_NAMES = 4096
_MOST_QUANTITIES = 10
_MOST_SOURCES = 256
_MOST_METRICS = 256
_SAMPLES, _LOSS, _TRAINED = "samples/", "eval_loss/", "loss/"
_MOST_POSITIONS = 512
_MOST_PROFILES = 64
_MOST_RANKS = 4096
HISTOGRAMS = ("weights", "gradients", "outputs")
_HISTOGRAM, _LEAST = 9, 1e-200  # numbers: see docs/warnings.md; below it all are 0
TIERS = ("memory", "disk", "remote")
_MOST_GONE = 1000  # copies kept per tier; those that lived longest stay


class ValueGrid:
    """Values of named rows over time, in a bounded number of columns that keep the extremes.

    Added one inspection at a time; too many columns are merged in pairs.

    Args:
        most_columns: the most columns that are kept.
    """

    def __init__(self, most_columns: int = 200) -> None:
        self._most_columns = max(2, most_columns)
        self._places: dict[str, int] = {}
        self.width = 1  # inspections per column
        self.steps: list[int] = []  # of each column's first inspection
        # By row: lowest value, highest value, sum and count.
        self._columns: list[dict[int, tuple[float, float, float, int]]] = []
        self.num_inspections = 0
        self.last_step = 0

    @property
    def names(self) -> list[str]:
        return [name[:200] for name in self._places]

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add the next inspection. A value that is not finite leaves its cell empty."""
        if self.num_inspections == self._most_columns * self.width:
            self._double()
        if self.num_inspections % self.width == 0:
            self._columns.append({})
            self.steps.append(step)
        self.num_inspections += 1
        self.last_step = step
        for name, value in values.items():
            if name not in self._places and len(self._places) < _MOST_NAMES:
                self._places[name] = len(self._places)
            if name in self._places and math.isfinite(value):
                _put(self._columns[-1], self._places[name], (value, value, value, 1))

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
        empty = (0.0, 0.0, math.nan, 1)
        rows = range(len(self._places))
        cells = ([column.get(row, empty) for column in self._columns] for row in rows)
        return [[cell[2] / cell[3] for cell in row] for row in cells]

    def _double(self) -> None:
        for column, later in zip(self._columns[::2], self._columns[1::2], strict=False):
            for row, cell in later.items():
                _put(column, row, cell)
        self._columns, self.steps = self._columns[::2], self.steps[::2]
        self.width *= 2


def _put(
    column: dict[int, tuple[float, float, float, int]],
    row: int,
    cell: tuple[float, float, float, int],
) -> None:
    low, high, total, count = column.get(row, (*cell[:2], 0.0, 0))
    column[row] = min(low, cell[0]), max(high, cell[1]), total + cell[2], count + cell[3]


def _extreme(cell: tuple[float, float, float, int], usual: float) -> float:
    low, high = cell[:2]
    if low > 0 and usual > 0:
        return high if high / usual >= usual / low else low
    return high if high - usual >= usual - low else low


class LayerFold:
    """The contents of ``layers.jsonl``.

    Attributes:
        grids: by quantity, with one row per layer.
        model: numbers of the whole model, one row each.
        profiles: step and loss by position (nats per token, equal stretches) of some inspections.
        positions: tokens of a sequence.
        histograms: of the newest look that has them its step, and by quantity and layer eight
            quantiles and the largest of the absolute values.
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self.grids: dict[str, ValueGrid] = {}
        self.model = ValueGrid(columns)
        self.profiles: list[tuple[int, list[float]]] = []
        self.positions = 0
        self.histograms: tuple[int, dict[str, dict[str, list[float]]]] = (0, {})
        self._profile_stride = 1
        self._num_profiles = 0

    def add(self, line: Mapping[str, Any]) -> None:
        step = whole(line.get("step"))
        layers, model = line.get("layers"), line.get("model")
        if isinstance(layers, dict):
            self._add_layers(step, layers)
        if isinstance(model, dict):
            self.model.add(step, {name: number(value) for name, value in model.items()})
        profile = line.get("loss_by_position")
        if isinstance(profile, list) and 1 < len(profile) <= _MOST_POSITIONS:
            self.positions = whole(line.get("positions")) or len(profile)
            self._add_profile(step, [number(loss) for loss in profile])
        if isinstance(told := line.get("histograms"), dict):
            self.histograms = step, {name: _histograms(told, name) for name in HISTOGRAMS}

    def _add_layers(self, step: int, layers: Mapping[str, Any]) -> None:
        by_quantity: dict[str, dict[str, float]] = {name: {} for name in self.grids}
        for layer, numbers in layers.items():
            for name, value in numbers.items() if isinstance(numbers, dict) else ():
                if name in by_quantity or len(by_quantity) < _MOST_QUANTITIES:
                    by_quantity.setdefault(name, {})[layer] = number(value)
        for name, values in by_quantity.items():
            self.grids.setdefault(name, ValueGrid(self._columns)).add(step, values)

    def _add_profile(self, step: int, profile: list[float]) -> None:
        """Keep the first profile, the last, and some between."""
        if self.profiles and (self._num_profiles - 1) % self._profile_stride:
            self.profiles.pop()  # it was kept only because it was the last
        self._num_profiles += 1
        self.profiles.append((step, profile))
        if len(self.profiles) > _MOST_PROFILES:
            self.profiles = self.profiles[::2]
            self._profile_stride *= 2


def _histograms(layers: Mapping[str, Any], name: str) -> dict[str, list[float]]:
    """Those of one quantity that are whole."""
    told = {layer: one.get(name) for layer, one in layers.items() if isinstance(one, dict)}
    rows = {layer: [number(value) for value in list_of(row)] for layer, row in told.items()}
    known = {layer: row for layer, row in rows.items() if len(row) == _HISTOGRAM and min(row) >= 0}
    return {layer: row for layer, row in known.items() if _LEAST < sum(row) < 1 / _LEAST}


class SourceFold:
    """Samples and held-out losses by the source's name.

    Attributes:
        samples: how many of the attempted steps came from each.
        losses: the held-out losses, one row per source, one column per evaluation.
        newest: the last held-out loss of each.
        trained: the training losses of applied steps, one row per source, one column per step.
    """

    def __init__(self, columns: int) -> None:
        self.samples: dict[str, int] = {}
        self.losses = ValueGrid(columns)
        self.newest: dict[str, float] = {}
        self.trained = ValueGrid(columns)

    def add(self, line: Mapping[str, Any]) -> None:
        """Take one line of the metrics."""
        for name, value in _of_sources(line, _SAMPLES).items():
            if name in self.samples or len(self.samples) < _MOST_SOURCES:
                self.samples[name] = self.samples.get(name, 0) + whole(value)
        step = whole(line.get("step"))
        trained, losses = _of_sources(line, _TRAINED), _of_sources(line, _LOSS)
        if trained and line.get("action") == "apply":
            self.trained.add(step, {name: number(value) for name, value in trained.items()})
        if losses:
            known = {name: number(value) for name, value in losses.items()}
            self.losses.add(step, known)
            self.newest |= {name: value for name, value in known.items() if value == value}


class MetricFold:
    """The user's own metrics, by name: of applied steps, and of evaluations.

    Attributes:
        evaluated: also by group of samples, as ``NAME/GROUP``.
    """

    def __init__(self, columns: int) -> None:
        self.trained = ValueGrid(columns)
        self.evaluated = ValueGrid(columns)

    def add(self, line: Mapping[str, Any]) -> None:
        """Take one line of the metrics."""
        own = [name for name in line if not is_ours(name)][:_MOST_METRICS]
        values: dict[str, dict[str, float]] = {"train": {}, "eval": {}}
        for name in own:
            kind = kind_of(name)
            column = name.removeprefix(EVALUATED) if kind == "eval" else name
            values[kind][column] = number(line[name])
        for grid, known in ((self.trained, values["train"]), (self.evaluated, values["eval"])):
            if known and line.get("action") == "apply":
                grid.add(whole(line.get("step")), known)


def _of_sources(line: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    keys = [key for key in line if key.startswith(prefix)][:_MOST_SOURCES]
    return {key.removeprefix(prefix): line[key] for key in keys}


class RankFold:
    """The contents of ``ranks.jsonl``: seconds of each rank, and its GPU.

    Attributes:
        grids: by column of the file.
        newest: the last line's, by column and rank.
        own: from a step's begin to its first collective.
        device: for one fixed computation.
    """

    def __init__(self, columns: int) -> None:
        names = ("own_seconds", "device_seconds", *GPU_QUANTITIES)
        self.grids = {name: ValueGrid(columns) for name in names}
        self.newest: dict[str, dict[str, float]] = {}
        self.own, self.device = self.grids["own_seconds"], self.grids["device_seconds"]

    def add(self, line: Mapping[str, Any]) -> None:
        step, size = whole(line.get("step")), max(1, whole(line.get("ranks_a_value")))
        for name, grid in self.grids.items():
            values = line.get(name)
            if isinstance(values, list) and len(values) <= _MOST_RANKS:
                names = (
                    f"rank {at}" if size == 1 else f"ranks {at * size}-{(at + 1) * size - 1}"
                    for at in range(len(values))
                )
                row = dict(zip(names, map(number, values), strict=True))
                if name in GPU_QUANTITIES:  # 0: unknown
                    row = {rank: value or math.nan for rank, value in row.items()}
                self.newest[name] = row
                grid.add(step, row)


@dataclass(slots=True, kw_only=True)
class TierCopy:
    """A checkpoint in one tier; times are seconds since the epoch, None if it has not happened."""

    serial: int
    step: int
    saved: float
    clean: float | None = None
    tainted: float | None = None
    gone: float | None = None

    def lived(self) -> float:
        """Seconds from save to removal; 0 for a copy that still exists."""
        return (self.gone or self.saved) - self.saved


class RingFold:
    """The contents of ``ring.jsonl``: the states of each copy of a checkpoint."""

    def __init__(self) -> None:
        self._live: dict[str, dict[int, TierCopy]] = {tier: {} for tier in TIERS}
        self._gone: dict[str, list[TierCopy]] = {tier: [] for tier in TIERS}

    def add(self, line: Mapping[str, Any]) -> None:
        name, serial, time = (
            line.get("tier"),
            line.get("serial"),
            plausible_seconds(line.get("time")),
        )
        if name not in TIERS or type(serial) is not int or not time:
            return
        live, gone, state = self._live[name], self._gone[name], line.get("state")
        if state == "committed":
            live[serial] = TierCopy(serial=serial, step=whole(line.get("of")), saved=time)
        elif serial in live and state in ("clean", "tainted", "gone"):
            setattr(live[serial], state, time)
            if state == "gone":
                gone.append(live.pop(serial))
        if len(gone) > 2 * _MOST_GONE:
            gone[:] = sorted(gone, key=TierCopy.lived, reverse=True)[:_MOST_GONE]

    def copies(self, tier: str) -> list[TierCopy]:
        """The copies of one tier in the order of their saves; the longest lived if very many."""
        copies = [*self._gone[tier], *self._live[tier].values()]
        return sorted(copies, key=lambda copy: copy.saved)

    def live(self, tier: str) -> list[TierCopy]:
        """The copies that still exist, by serial."""
        return sorted(self._live[tier].values(), key=lambda copy: copy.serial)
