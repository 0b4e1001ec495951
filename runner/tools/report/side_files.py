"""The files beside metrics and journal: layers, rank times, and the lifetimes of checkpoints.

Also the columns of the metrics with the numbers of each source of a mixture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from runner.run_dir.paths import RunDir
from runner.tools.report.follow import Follower
from runner.tools.report.grid import Grid

# The quantities of a layer, in the order in which they are shown; see docs/warnings.md.
LAYER_QUANTITIES = {
    "grad": "gradient norm",
    "update": "update relative to the weights",
    "residual_rms": "residual stream, RMS",
    "attention_logit": "largest attention logit",
    "weight": "weight norm",
    "adam_rms": "RMS of g/sqrt(v), Adam",
}
_MOST_QUANTITIES = 10
_MOST_SOURCES = 256
_SAMPLES, _LOSS, _TRAINED = "samples/", "eval_loss/", "loss/"
_MOST_POSITIONS = 512
_MOST_PROFILES = 64
_MOST_RANKS = 4096
TIERS = ("memory", "disk", "remote")
_MOST_GONE = 1000  # copies kept per tier; those that lived longest stay


class Fold(Protocol):
    """Consumes the lines of one file; ignores fields that it cannot parse."""

    def add(self, line: Mapping[str, Any]) -> None: ...


class LayerFold:
    """The contents of ``layers.jsonl``.

    Attributes:
        grids: by quantity, with one row per layer.
        model: numbers of the whole model, one row each.
        profiles: step and loss by position (nats per token, equal stretches) of some inspections.
        positions: tokens of a sequence.
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self.grids: dict[str, Grid] = {}
        self.model = Grid(most_columns=columns)
        self.profiles: list[tuple[int, tuple[float, ...]]] = []
        self.positions = 0
        self._profile_stride = 1
        self._num_profiles = 0

    def add(self, line: Mapping[str, Any]) -> None:
        step = whole(line.get("step"))
        layers, model = line.get("layers"), line.get("model")
        if isinstance(layers, dict):
            self._add_layers(step, layers)
        if isinstance(model, dict):
            self.model.add(step, {str(name): number(one) for name, one in model.items()})
        profile = line.get("loss_by_position")
        if isinstance(profile, list) and 1 < len(profile) <= _MOST_POSITIONS:
            self.positions = whole(line.get("positions")) or len(profile)
            self._add_profile(step, tuple(_or_nan(number(one)) for one in profile))

    def _add_layers(self, step: int, layers: Mapping[str, Any]) -> None:
        by_quantity: dict[str, dict[str, float | None]] = {name: {} for name in self.grids}
        for layer, numbers in layers.items():
            for name, value in numbers.items() if isinstance(numbers, dict) else ():
                if name in by_quantity or len(by_quantity) < _MOST_QUANTITIES:
                    by_quantity.setdefault(name, {})[layer] = number(value)
        for name, values in by_quantity.items():
            if name not in self.grids:
                self.grids[name] = Grid(most_columns=self._columns)
            self.grids[name].add(step, values)

    def _add_profile(self, step: int, profile: tuple[float, ...]) -> None:
        """Keep the first profile, the last, and some between."""
        if self.profiles and (self._num_profiles - 1) % self._profile_stride:
            self.profiles.pop()  # it was kept only because it was the last
        self._num_profiles += 1
        self.profiles.append((step, profile))
        if len(self.profiles) > _MOST_PROFILES:
            self.profiles = self.profiles[::2]
            self._profile_stride *= 2


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
        self.losses = Grid(most_columns=columns)
        self.newest: dict[str, float] = {}
        self.trained = Grid(most_columns=columns)

    def add(self, line: Mapping[str, Any]) -> None:
        """Take one line of the metrics."""
        losses: dict[str, float | None] = {}
        trained: dict[str, float | None] = {}
        for key, value in line.items():
            if key.startswith(_SAMPLES):
                name = key[len(_SAMPLES) :]
                if name in self.samples or len(self.samples) < _MOST_SOURCES:
                    self.samples[name] = self.samples.get(name, 0) + whole(value)
            elif key.startswith(_LOSS) and len(losses) < _MOST_SOURCES:
                losses[key[len(_LOSS) :]] = number(value)
            elif key.startswith(_TRAINED) and len(trained) < _MOST_SOURCES:
                trained[key[len(_TRAINED) :]] = number(value)
        if trained and line.get("action") == "apply":
            self.trained.add(whole(line.get("step")), trained)
        if losses:
            self.losses.add(whole(line.get("step")), losses)
            self.newest |= {name: one for name, one in losses.items() if one is not None}


class RankFold:
    """The contents of ``ranks.jsonl``: seconds of each rank.

    Attributes:
        own: from a step's begin to its first collective.
        device: for one fixed computation.
    """

    def __init__(self, columns: int) -> None:
        self.own = Grid(most_columns=columns)
        self.device = Grid(most_columns=columns)

    def add(self, line: Mapping[str, Any]) -> None:
        step, size = whole(line.get("step")), max(1, whole(line.get("ranks_a_value")))
        for grid, name in ((self.own, "own_seconds"), (self.device, "device_seconds")):
            values = line.get(name)
            if isinstance(values, list) and len(values) <= _MOST_RANKS:
                grid.add(step, {_rank_name(at, size): number(one) for at, one in enumerate(values)})


@dataclass(slots=True, kw_only=True)
class TierCopy:
    """A checkpoint in one tier; times are seconds since the epoch, None if it has not happened."""

    serial: int
    step: int
    saved: float
    proven: float | None = None
    tainted: float | None = None
    gone: float | None = None

    def lived(self) -> float:
        """Seconds from save to removal; 0 for a copy that still exists."""
        return (self.gone or self.saved) - self.saved


@dataclass(slots=True)
class _Tier:
    live: dict[int, TierCopy] = field(default_factory=dict)
    gone: list[TierCopy] = field(default_factory=list)


class RingFold:
    """The contents of ``ring.jsonl``: the states of each copy of a checkpoint."""

    def __init__(self) -> None:
        self._tiers = {tier: _Tier() for tier in TIERS}

    def add(self, line: Mapping[str, Any]) -> None:
        name, serial, time = line.get("tier"), line.get("serial"), number(line.get("time"))
        tier_state = self._tiers.get(name) if isinstance(name, str) else None
        if tier_state is None or type(serial) is not int or time is None:
            return
        state, copy = line.get("state"), tier_state.live.get(serial)
        if state == "committed":
            tier_state.live[serial] = TierCopy(
                serial=serial, step=whole(line.get("of")), saved=time
            )
        elif copy is None:
            return
        elif state == "clean":
            copy.proven = time
        elif state == "tainted":
            copy.tainted = time
        elif state == "gone":
            copy.gone = time
            tier_state.gone.append(tier_state.live.pop(serial))
            if len(tier_state.gone) > 2 * _MOST_GONE:
                longest = sorted(tier_state.gone, key=TierCopy.lived, reverse=True)[:_MOST_GONE]
                tier_state.gone = sorted(longest, key=lambda one: one.saved)

    def copies(self, tier: str) -> list[TierCopy]:
        """The copies of one tier in the order of their saves; the longest lived if very many."""
        tier_state = self._tiers[tier]
        return sorted([*tier_state.gone, *tier_state.live.values()], key=lambda one: one.saved)

    def live(self, tier: str) -> list[TierCopy]:
        """The copies that still exist, by serial."""
        return sorted(self._tiers[tier].live.values(), key=lambda one: one.serial)


T = TypeVar("T", bound=Fold)


class _FollowedFile(Generic[T]):
    """One file that is followed, with what was gathered from it."""

    def __init__(self, follower: Follower, make: Callable[[], T]) -> None:
        self._follower = follower
        self._make = make
        self.fold = make()
        self.version = 0

    def update(self) -> None:
        if self._follower.was_replaced():
            self._follower.restart()
            self.fold = self._make()
            self.version += 1
        before = self._follower.offset
        for line in self._follower.lines():
            self.fold.add(line)
        self.version += self._follower.offset != before

    @property
    def num_damaged(self) -> int:
        return self._follower.num_damaged


class SideFiles:
    """The three side files of one run.

    Args:
        columns: about how many columns a picture has.
    """

    def __init__(self, run_dir: RunDir, *, columns: int) -> None:
        self._layers = _FollowedFile(Follower(run_dir.layers), lambda: LayerFold(columns))
        self._ranks = _FollowedFile(Follower(run_dir.rank_times), lambda: RankFold(columns))
        self._ring = _FollowedFile(Follower(run_dir.ring_lines), RingFold)

    def update(self) -> None:
        """Read what is new.

        Raises:
            OSError: a file cannot be read.
        """
        self._layers.update()
        self._ranks.update()
        self._ring.update()

    @property
    def layers(self) -> LayerFold:
        return self._layers.fold

    @property
    def ranks(self) -> RankFold:
        return self._ranks.fold

    @property
    def ring(self) -> RingFold:
        return self._ring.fold

    @property
    def version(self) -> str:
        """A text that changes whenever a file changed."""
        return f"{self._layers.version} {self._ranks.version} {self._ring.version}"

    @property
    def num_damaged(self) -> int:
        """Lines in the three files that could not be read."""
        return sum(one.num_damaged for one in (self._layers, self._ranks, self._ring))


def number(value: Any) -> float | None:
    """A finite number; None for anything else."""
    if type(value) is not float and type(value) is not int:
        return None
    try:
        converted = float(value)
    except OverflowError:
        return None
    return converted if math.isfinite(converted) else None


def whole(value: Any) -> int:
    """A count; 0 for anything else."""
    return value if type(value) is int and 0 <= value < 1 << 53 else 0


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _rank_name(index: int, size: int) -> str:
    first = index * size
    return f"rank {first}" if size == 1 else f"ranks {first}-{first + size - 1}"
