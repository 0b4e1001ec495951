"""Measures the layers of a step at intervals, and reports them: a file, columns, warnings.

The sums of all ranks are taken when the step before was read, so that ranks which stand elsewhere
are found first; on CUDA they are looked at with a later step, so that nothing waits for them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from runner.engine.activations import MOST_STRETCHES, Activations, stretches
from runner.engine.layer_sums import KINDS, Before, LayerSums
from runner.engine.protocol import Engine
from runner.policy.decision.early import EarlyWarnings, Look, Warned
from runner.policy.decision.history import WARNING, Incident
from runner.system.json_lines import LineFile

COLUMNS = "layers/"  # prefix of the columns
_POSITIONS_EVERY = 10  # looks between two tellings of the loss by position
# Looks between two at g^2 / v: no rule is made of it, and it takes a third of the sums.
_MOMENTS_EVERY = 4
_QUARTER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlaces:
    """Which parameter belongs to which layer, in the model's order, equal on all ranks.

    Args:
        names: of the trained parameters.
        matrices: whether each has two dimensions or more.
        layers: the layer of each: a block, or the module outside of all blocks.
        blocks: names of the blocks.
    """

    names: tuple[str, ...]
    matrices: tuple[bool, ...]
    layers: tuple[str, ...]
    blocks: tuple[str, ...]

    @classmethod
    def of(
        cls, network: nn.Module, blocks: Sequence[nn.Module], shapes: Mapping[str, Sequence[int]]
    ) -> LayerPlaces:
        """
        Args:
            shapes: of the whole parameters, which the engine may shard.
        """
        called = {id(module): name for name, module in network.named_modules()}
        prefixes = tuple(called[id(block)] for block in blocks)
        names = tuple(n for n, p in network.named_parameters() if p.requires_grad)
        return cls(
            names=names,
            matrices=tuple(len(shapes[name]) >= 2 for name in names),
            layers=tuple(_layer(name, prefixes) for name in names),
            blocks=prefixes,
        )


def _layer(name: str, blocks: Sequence[str]) -> str:
    inside = (block for block in blocks if name.startswith(f"{block}."))
    return next(inside, name.rpartition(".")[0] or name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measurements of all ranks at one step; :class:`LayerWatch` has the order of numbers."""

    step: int
    numbers: tuple[float, ...]
    length: int
    tokens: int
    grad_norm: float


class LayerWatch:
    """Measures at intervals of updates, on one rank.

    The numbers: those of :class:`LayerSums`, then those of :class:`Activations`.

    Args:
        every: in updates.
        is_first: whether this rank looks inside of the forward pass.
    """

    def __init__(
        self,
        engine: Engine,
        activations: Activations,
        places: LayerPlaces,
        *,
        every: int,
        is_first: bool,
    ) -> None:
        self._device = engine.device
        self._activations = activations
        self._sums = LayerSums(engine, places.names)
        self._every = every
        self._is_first = is_first
        self._before: Before | None = None
        self._has_moments = False

    def begin(self, step: int) -> bool:
        """Whether the step of this update is measured; if so, begin."""
        if step % self._every:
            return False
        self._activations.begin(is_inside=self._is_first)
        self._has_moments = step // self._every % _MOMENTS_EVERY == 0
        return True

    def before(self) -> None:
        """Measure before the update, when gradients exist."""
        self._before = self._sums.before(has_moments=self._has_moments)

    def after(self) -> torch.Tensor:
        """Measure after the update; returns this rank's numbers, FP64 on the device."""
        assert self._before is not None
        sums, self._before = self._sums.after(self._before), None
        return torch.cat([sums, self._activations.end(self._device)])

    @property
    def length(self) -> int:
        """Length of the sequences whose loss is reported by position."""
        return self._activations.length


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRules:
    """What the numbers of an update depend on. ``clip`` 0: off."""

    clip: float
    beta2: float


class LayerTable:
    """Turns measurements into the numbers that a person reads."""

    def __init__(self, places: LayerPlaces, rules: UpdateRules, *, num_units: int) -> None:
        self._places = places
        self._rules = rules
        self._num_units = num_units
        self._members: dict[str, list[int]] = {}
        for at, layer in enumerate(places.layers):
            self._members.setdefault(layer, []).append(at)

    def layers(self, seen: Measured) -> dict[str, dict[str, float]]:
        """The numbers of each layer that could be measured."""
        by_layer: dict[str, dict[str, float]] = {}
        by_kind = self._by_kind(seen)
        for name, members in self._members.items():
            sums = {kind: sum(by_kind[kind][at] for at in members) for kind in KINDS}
            by_layer[name] = {
                "grad": math.sqrt(sums["grad"]) / max(seen.tokens, 1),
                "weight": math.sqrt(sums["weight"]),
                **_ratio("update", sums["moved"], sums["held"]),
                **self._adam(sums["ratio"], sums["count"], seen),
            }
        for at in range(self._num_units):
            residual, logit = self._of_unit(seen, at)
            inside = {"residual_rms": residual, "attention_logit": logit}
            layer = by_layer.setdefault(self._places.blocks[at], {})
            layer |= {key: value for key, value in inside.items() if math.isfinite(value)}
        return by_layer

    def model(self, seen: Measured) -> dict[str, float]:
        """The numbers of the whole model that could be measured."""
        by_kind = self._by_kind(seen)
        norms = [math.sqrt(square) for square in by_kind["grad"] if square > 0]
        moved = zip(by_kind["moved"], by_kind["held"], self._places.matrices, strict=True)
        ratios = [math.sqrt(m / h) for m, h, is_matrix in moved if is_matrix and h > 0]
        pairs = zip(by_kind["ratio"], by_kind["count"], strict=True)
        adam = [self._adam(ratio, count, seen) for ratio, count in pairs if count]
        units = [self._of_unit(seen, at) for at in range(self._num_units)]
        log_sums = seen.numbers[self._inside(2 * self._num_units) :][:2]
        numbers = {
            "grad_ratio": max(norms) / statistics.median(norms) if norms else math.nan,
            "grad_first_to_last": self._first_to_last(by_kind["grad"]),
            "weight_norm": math.sqrt(sum(by_kind["weight"])),
            "update_ratio": statistics.median(ratios) if ratios else math.nan,
            "residual_rms": units[-1][0] if units else math.nan,
            "attention_logit": max((logit for _, logit in units), default=math.nan),
            "logsumexp": log_sums[0],
            "logsumexp_max": log_sums[1],
            "adam_rms": max((one["adam_rms"] for one in adam if one), default=math.nan),
        }
        return {name: value for name, value in numbers.items() if math.isfinite(value)}

    def by_position(self, seen: Measured) -> tuple[list[float], list[float]]:
        """Summed loss and counted tokens of each stretch of a sequence."""
        at = self._inside(2 * self._num_units + 2)
        losses, counts = seen.numbers[at:][:MOST_STRETCHES], seen.numbers[at + MOST_STRETCHES :]
        num = stretches(seen.length)
        return list(losses[:num]), list(counts[:num])

    @property
    def num_sums(self) -> int:
        """Numbers that are finite at every update that was applied."""
        return self._inside(0)

    def _inside(self, at: int) -> int:
        return len(KINDS) * len(self._places.names) + at

    def _by_kind(self, seen: Measured) -> dict[str, Sequence[float]]:
        size = len(self._places.names)
        return {kind: seen.numbers[n * size : (n + 1) * size] for n, kind in enumerate(KINDS)}

    def _of_unit(self, seen: Measured, at: int) -> tuple[float, float]:
        """RMS of a block's output, and its largest attention logit."""
        square = seen.numbers[self._inside(at)]
        residual = math.sqrt(square) if square >= 0 else math.nan
        return residual, seen.numbers[self._inside(self._num_units + at)]

    def _first_to_last(self, squares: Sequence[float]) -> float:
        """Gradient norm of the first quarter of the blocks over that of the last."""
        num = len(self._places.blocks) // _QUARTER
        if not num:
            return math.nan
        of_block = {block: 0.0 for block in self._places.blocks}
        for layer, square in zip(self._places.layers, squares, strict=True):
            if layer in of_block:
                of_block[layer] += square
        by_depth = list(of_block.values())
        first, last = sum(by_depth[:num]), sum(by_depth[-num:])
        return math.sqrt(first / last) if last > 0 else math.nan

    def _adam(self, ratios: float, count: float, seen: Measured) -> dict[str, float]:
        """sqrt(mean(g^2 / v)) of summed ratios, with the clipped gradient and v's bias corrected.

        RMS_t of StableAdamW (Wortsman et al. 2023, arXiv 2304.13013), with g^2 in v already.
        """
        if not count:
            return {}
        clip = self._rules.clip
        scale = seen.tokens * (max(1.0, seen.grad_norm / clip) if clip > 0 else 1.0)
        unbiased = 1 - self._rules.beta2**seen.step
        square = ratios / count * unbiased / max(scale, 1) ** 2
        return {"adam_rms": math.sqrt(square)} if square >= 0 else {}


def _ratio(name: str, square: float, of: float) -> dict[str, float]:
    return {name: math.sqrt(square / of)} if of > 0 else {}


class LayerLog:
    """Takes measurements, equal on all ranks; rank 0 writes the file.

    Args:
        file: takes a line each look; None on the other ranks.
        past: looks of earlier starts, the same on all ranks.
        norms: gradient norms of the last steps before this start, by step.
        attempt: number of this start of the run.
        clip: the bound of the gradient norm.
        tell: takes an incident, which is only information.
    """

    def __init__(
        self,
        table: LayerTable,
        early: EarlyWarnings,
        *,
        file: LineFile | None,
        past: Iterable[Look],
        norms: Mapping[int, float],
        attempt: int,
        clip: float,
        tell: Callable[[Incident], None],
    ) -> None:
        self._table = table
        self._early = early
        self._file = file
        self._attempt = attempt
        self._clip = clip
        self._tell = tell
        self._norms: dict[int, float] = dict(norms)
        self._by_position: list[tuple[int, list[float], list[float]]] = []
        for look in past:
            early.note(look)

    def columns(self, step: int, norm: float, seen: Measured | None) -> dict[str, float]:
        """Take a step's gradient norm, and the measurements of this step or an earlier one.

        Returns:
            Further columns of its line.
        """
        self._norms[step] = norm
        self._norms.pop(step - 2 * self._early.rules.every, None)
        if seen is None or not all(map(math.isfinite, seen.numbers[: self._table.num_sums])):
            return {}
        model = {**self._table.model(seen), **self._clip_share(seen.step)}
        self._write(seen, model)
        warned = self._early.note(Look(step=seen.step, values=model))
        if warned is not None:
            self._tell(_incident(warned, seen.step))
        return {f"{COLUMNS}{name}": _rounded(value) for name, value in model.items()}

    def _clip_share(self, step: int) -> dict[str, float]:
        """The share of clipped steps since the last look."""
        since = range(max(1, step - self._early.rules.every + 1), step + 1)
        norms = [self._norms[one] for one in since if one in self._norms]
        if not self._clip or not norms:
            return {}
        return {"clip_share": sum(norm > self._clip for norm in norms) / len(norms)}

    def close(self) -> None:
        """No more lines come."""
        if self._file is not None:
            self._file.close()

    def _write(self, seen: Measured, model: Mapping[str, float]) -> None:
        positions = self._positions(seen)
        if self._file is None:
            return
        layers = {
            name: {key: _rounded(value) for key, value in of_layer.items() if math.isfinite(value)}
            for name, of_layer in self._table.layers(seen).items()
        }
        line: dict[str, Any] = {
            "step": seen.step,
            "attempt": self._attempt,
            "layers": layers,
            "model": {name: _rounded(value) for name, value in model.items()},
            **positions,
        }
        self._file.append(line, durably=False)

    def _positions(self, seen: Measured) -> dict[str, Any]:
        """The loss by position, once enough looks are collected."""
        sums, counts = self._table.by_position(seen)
        self._by_position.append((seen.step, sums, counts))
        if len(self._by_position) < _POSITIONS_EVERY or not seen.length:
            return {}
        taken, self._by_position = self._by_position, []
        taken = [one for one in taken if len(one[1]) == len(sums)]
        losses = [
            _rounded(sum(one[1][at] for one in taken) / num) if num else None
            for at in range(len(sums))
            for num in [sum(one[2][at] for one in taken)]
        ]
        return {
            "loss_by_position": losses,
            "positions": seen.length,
            "position_steps": [taken[0][0], seen.step],
        }


def _incident(warned: Warned, step: int) -> Incident:
    return Incident(
        kind=WARNING,
        step=step,
        decision="alarm, only told" if warned.is_alarm else "only told",
        reason=f"it may be about to diverge: {warned.words}",
        detail={
            "signals": {one.signal: _rounded(one.value) for one in warned.signs},
            "agreeing": list(warned.agreeing),
        },
    )


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
