"""Measures the layers at intervals, and reports them: a file, columns, warnings.

The ranks' sums are reduced after the previous step was read, so that ranks at different steps are
detected first; on CUDA they are read with a later step, so that nothing waits.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner.config.schema import OptimConfig
from runner.distributed.observers import Failure
from runner.engine.activations import (
    KINDS,
    MOST_STRETCHES,
    SPREAD,
    Activations,
    Before,
    LayerSums,
    stretches,
)
from runner.engine.first_batch import FirstBatch
from runner.policy.decision.early import EarlyRules, EarlyWarnings, Look, Warned
from runner.policy.decision.history import WARNING, Incident
from runner.system.json_lines import LineFile, step_of, tail
from runner.train.agreed_step import Measured, StepInfo
from runner.train.run import EngineRun

COLUMNS = "layers/"  # prefix of the columns
LAYERS = "layers"  # the observer
_POSITIONS_EVERY = 10  # measurements per report of the loss by position
# Measurements per one of g^2 / v and of histograms: these take longer, and no rule uses them.
_MOMENTS_EVERY = 4
_NOISE_LOOKS = 20  # measurements over which gradient noise is averaged: one is very rough
# A router whose balance (see _balance) is lower in so many measurements in a row has collapsed.
_COLLAPSED, _COLLAPSED_LOOKS = 0.25, 3
_QUARTER = 4
_TAIL_BYTES = 4 << 20  # of a file's end, enough for the latest measurements
_LINE_BYTES = 4 << 10  # upper bound on a line of the metrics


class LayerWatch:
    """Measures at intervals of updates, on one rank; rank 0 inside the forward pass as well.

    The numbers are those of :class:`LayerSums`, :class:`Activations` and :class:`FirstBatch`. A
    measurement that fails is left out; until all ranks know, it is NaN.

    Args:
        every: steps between measurements.
    """

    def __init__(
        self,
        run: EngineRun,
        activations: Activations,
        first: FirstBatch,
        table: LayerTable,
        every: int,
    ) -> None:
        self._observers, self._device = run.observers, run.engine.device
        self._activations, self._first = activations, first
        self._sums = LayerSums(run.engine, table.names, table.groups)
        self.num_largest = 2 * len(table.groups)
        self._every, self._is_first = every, run.group.is_first
        self._before: Before | None = None
        self._counts: Sequence[torch.Tensor] = ()
        self._has_moments = False

    def begin(self, step: int) -> bool:
        """Begin measuring if the step is due; returns whether it is."""
        if step % self._every or self._observers.is_out(LAYERS):
            return False
        self._has_moments = step // self._every % _MOMENTS_EVERY == 0
        self._observers.alone(LAYERS, self._begin, None)
        return True

    def _begin(self) -> None:
        self._activations.begin(is_inside=self._is_first, has_spread=self._has_moments)
        self._first.begin(is_inside=self._is_first)

    def before(self, counts: Sequence[torch.Tensor]) -> None:
        """Measure before the update, when gradients exist.

        Args:
            counts: terms of each sample's loss, by micro-batch.
        """
        self._counts = counts
        self._before = self._observers.alone(
            LAYERS, lambda: self._sums.before(has_moments=self._has_moments), None
        )

    def after(self) -> torch.Tensor:
        """Measure after the update; returns this rank's numbers, FP64 on the device.

        The last :attr:`num_largest` are to be maximised over the ranks, the others summed.
        """
        before, self._before = self._before, None
        size = self._sums.size + self._activations.size + self._first.size + self.num_largest
        # The others' numbers are summed with these.
        nothing = torch.full((size,), math.nan, dtype=torch.float64, device=self._device)
        result = self._observers.alone(LAYERS, lambda: self._measured(before), nothing)
        self._activations.stop()
        self._counts = ()
        return result

    def _measured(self, before: Before | None) -> torch.Tensor:
        assert before is not None, "an error before the update leaves this observer out"
        parts = [self._sums.after(before), self._activations.end(self._device)]
        parts.append(self._first.end(self._counts, self._device))
        return torch.cat([*parts, self._sums.largest])

    @property
    def length(self) -> int:
        """Length of the sequences whose loss is reported by position."""
        return self._activations.length


class LayerTable:
    """Turns measurements into readable numbers; equal on all ranks.

    Args:
        blocks: of the network; a layer is one of them, or a module outside all blocks.
        shapes: shapes of the whole parameters, which the engine may shard.
        experts: by router, how many experts it has, and how many of them a token goes to.

    Attributes:
        groups: numbers of the names of each layer's matrices, or of all it has where it has none.
    """

    def __init__(
        self,
        network: nn.Module,
        blocks: Sequence[nn.Module],
        shapes: Mapping[str, Sequence[int]],
        optim: OptimConfig,
        *,
        num_units: int,
        experts: Mapping[str, tuple[int, int]],
    ) -> None:
        called = {id(module): name for name, module in network.named_modules()}
        self._blocks = [called[id(block)] for block in blocks]
        self.names = [n for n, p in network.named_parameters() if p.requires_grad]
        self._matrices = [len(shapes[name]) >= 2 for name in self.names]
        self.optim = optim
        self._num_units = num_units
        self._members: dict[str, list[int]] = {}
        for at, name in enumerate(self.names):
            inside = (block for block in self._blocks if name.startswith(f"{block}."))
            layer = next(inside, name.rpartition(".")[0] or name)
            self._members.setdefault(layer, []).append(at)
        self._experts = experts
        self.groups = [
            [at for at in members if self._matrices[at]] or members
            for members in self._members.values()
        ]

    def layers(self, measured: Measured) -> dict[str, dict[str, float]]:
        """The numbers of each layer; NaN for what could not be measured."""
        by_layer: dict[str, dict[str, float]] = {}
        by_kind = self._by_kind(measured)
        for name, members in self._members.items():
            sums = {kind: sum(by_kind[kind][at] for at in members) for kind in KINDS}
            by_layer[name] = {
                "grad": math.sqrt(sums["grad"]) / max(measured.tokens, 1),
                "weight": math.sqrt(sums["weight"]),
                "update": math.sqrt(sums["moved"] / sums["held"]) if sums["held"] > 0 else math.nan,
                "adam_rms": self._adam(sums["ratio"], sums["count"], measured),
            }
        for at in range(self._num_units):
            layer = by_layer.setdefault(self._blocks[at], {})
            layer["residual_rms"], layer["attention_logit"] = self._of_unit(measured, at)
        return by_layer

    def model(self, measured: Measured) -> dict[str, float]:
        """The numbers of the whole model that could be measured."""
        by_kind = self._by_kind(measured)
        norms = [math.sqrt(square) for square in by_kind["grad"] if square > 0]
        moved = zip(by_kind["moved"], by_kind["held"], self._matrices, strict=True)
        ratios = [math.sqrt(m / h) for m, h, is_matrix in moved if is_matrix and h > 0]
        pairs = zip(by_kind["ratio"], by_kind["count"], strict=True)
        adam = [self._adam(ratio, count, measured) for ratio, count in pairs]
        units = [self._of_unit(measured, at) for at in range(self._num_units)]
        log_sums = measured.numbers[self._inside(2 * self._num_units) :][:2]
        noise, signal = self._noise(measured)
        numbers = {
            "grad_ratio": max(norms) / statistics.median(norms) if norms else math.nan,
            "grad_first_to_last": self._first_to_last(by_kind["grad"]),
            "weight_norm": math.sqrt(sum(by_kind["weight"])),
            "update_ratio": statistics.median(ratios) if ratios else math.nan,
            "residual_rms": units[-1][0] if units else math.nan,
            "attention_logit": max((logit for _, logit in units), default=math.nan),
            "logsumexp": log_sums[0],
            "logsumexp_max": log_sums[1],
            "adam_rms": max((rms for rms in adam if not math.isnan(rms)), default=math.nan),
            "grad_noise": noise,
            "grad_signal": signal,
            "expert_balance": min(self.balances(measured).values(), default=math.nan),
        }
        return {name: value for name, value in numbers.items() if math.isfinite(value)}

    def by_position(self, measured: Measured) -> tuple[list[float], list[float]]:
        """Summed loss and counted tokens of each stretch of a sequence."""
        at = self._inside(2 * self._num_units + 2)
        losses, counts = measured.numbers[at:], measured.numbers[at + MOST_STRETCHES :]
        num = stretches(measured.length)
        return list(losses[:num]), list(counts[:num])

    def histograms(self, measured: Measured) -> dict[str, dict[str, list[float]]]:
        """Quantiles and the largest of absolute values by layer and kind, where measured."""
        found: dict[str, dict[str, list[float]]] = {}
        at, most = self.num_sums, len(measured.numbers) - 2 * len(self.groups)
        for kind, scale in (("weights", 1.0), ("gradients", 1.0 / max(measured.tokens, 1))):
            for name in self._members:
                *sums, count = measured.numbers[at : at + SPREAD]
                if count > 0:
                    values = [*(one / count for one in sums), measured.numbers[most]]
                    found.setdefault(name, {})[kind] = [scale * value for value in values]
                at, most = at + SPREAD, most + 1
        at = self._inside(2 * self._num_units + 2 + 2 * MOST_STRETCHES)
        for unit in range(self._num_units):
            outputs = list(measured.numbers[at + unit * SPREAD :][:SPREAD])
            if outputs[-1] > 0:
                found.setdefault(self._blocks[unit], {})["outputs"] = outputs
        return found

    def loads(self, measured: Measured) -> dict[str, list[float]]:
        """The share of choices of each expert by router, where measured."""
        at, found = self._first + 2, {}
        for name, (num, _) in self._experts.items():
            counts = measured.numbers[at : at + num]
            at += num
            if sum(counts) > 0:
                found[name] = [count / sum(counts) for count in counts]
        return found

    def balances(self, measured: Measured) -> dict[str, float]:
        """How even the experts' load is by router, where measured: see :func:`_balance`."""
        loads = self.loads(measured)
        return {name: _balance(load, self._experts[name][1]) for name, load in loads.items()}

    def _noise(self, measured: Measured) -> tuple[float, float]:
        """:func:`gradient_noise` of the first micro-batch and the whole; NaN where both are one."""
        square, few = measured.numbers[self._first :][:2]
        many = measured.tokens
        if not 0 < few < many:
            return math.nan, math.nan
        return gradient_noise(square / few**2, few, measured.grad_norm**2, many)

    @property
    def _first(self) -> int:
        """Where the numbers of :class:`FirstBatch` begin."""
        return self._inside((2 + SPREAD) * self._num_units + 2 + 2 * MOST_STRETCHES)

    @property
    def num_sums(self) -> int:
        """Number of leading values that are finite at every applied update."""
        return len(KINDS) * len(self.names)

    def _inside(self, at: int) -> int:
        return self.num_sums + 2 * SPREAD * len(self.groups) + at

    def _by_kind(self, measured: Measured) -> dict[str, Sequence[float]]:
        size = len(self.names)
        return {kind: measured.numbers[n * size : (n + 1) * size] for n, kind in enumerate(KINDS)}

    def _of_unit(self, measured: Measured, at: int) -> tuple[float, float]:
        """RMS of a block's output, and its largest attention logit."""
        square = measured.numbers[self._inside(at)]
        residual = math.sqrt(square) if square >= 0 else math.nan
        return residual, measured.numbers[self._inside(self._num_units + at)]

    def _first_to_last(self, squares: Sequence[float]) -> float:
        """Gradient norm of the first quarter of the blocks over that of the last."""
        num = len(self._blocks) // _QUARTER
        if not num:
            return math.nan
        by_depth = [sum(squares[at] for at in self._members.get(b, ())) for b in self._blocks]
        first, last = sum(by_depth[:num]), sum(by_depth[-num:])
        return math.sqrt(first / last) if last > 0 else math.nan

    def _adam(self, ratios: float, count: float, measured: Measured) -> float:
        """sqrt(mean(g^2 / v)) of summed ratios, with the clipped gradient and v's bias corrected.

        RMS_t of StableAdamW (Wortsman et al. 2023, arXiv 2304.13013), with g^2 in v already.
        """
        if not count:
            return math.nan
        clip = self.optim.clip
        scale = measured.tokens * (max(1.0, measured.grad_norm / clip) if clip > 0 else 1.0)
        unbiased = 1 - self.optim.beta2**measured.step
        square = ratios / count * unbiased / max(scale, 1) ** 2
        return math.sqrt(square) if square >= 0 else math.nan


def gradient_noise(small: float, few: float, large: float, many: float) -> tuple[float, float]:
    """Trace of the covariance of one term's gradient, and the squared norm of the true gradient.

    Unbiased (McCandlish et al. 2018, arXiv 1812.06162, appendix A.1); either may be negative.

    Args:
        small: squared norm of the mean gradient of ``few`` terms.
        large: of ``many`` terms, with these.
    """
    signal = (many * large - few * small) / (many - few)
    return (small - large) / (1 / few - 1 / many), signal


def _balance(load: Sequence[float], num_chosen: int) -> float:
    """Entropy of the experts' load: 0 where all tokens choose the same, 1 where all are alike."""
    entropy = -sum(share * math.log(share) for share in load if share > 0)
    least, most = math.log(num_chosen), math.log(len(load))
    return max(0.0, (entropy - least) / (most - least))


class LayerLog:
    """Records measurements, equal on all ranks; rank 0 writes the file, a line per measurement.

    Collective: measurements of earlier starts, and gradient norms of the last steps before this
    one, are read on rank 0.
    """

    def __init__(self, run: EngineRun, table: LayerTable, rules: EarlyRules) -> None:
        ranks, run_dir = run.observers.ranks, run.group.run_dir
        is_first, resumed = run.group.is_first, run.resumed.step

        def past() -> tuple[list[Any], int]:
            return _past(run_dir.layers, resumed, rules.window) if is_first else ([], 0)

        def opened() -> LineFile | None:
            """To append: for a repeated step the later line counts."""
            check = run.lease.check
            return LineFile(run_dir.layers, length=length, check=check) if is_first else None

        looks, length = ranks.all_or_none("reading the layers' file", past)
        norms = _norms(run_dir.metrics, resumed, rules.every) if is_first else []
        self._run, self._table, self._early = run, table, EarlyWarnings(rules)
        self._file = ranks.all_or_none("opening the layers' file", opened)
        self._attempt = run.journal.attempt + 1  # the line of this start is written later
        self._by_position: list[tuple[int, list[float], list[float]]] = []
        self._noises: deque[tuple[float, float]] = deque(maxlen=_NOISE_LOOKS)
        self._num_collapsed = 0
        for step, values in ranks.from_first(looks):
            self._early.note(Look(step=step, values=values))
            self._noise_scale(values)
        self._norms = {int(step): float(norm) for step, norm in ranks.from_first(norms)}

    def columns(self, info: StepInfo | None) -> dict[str, float]:
        """Record a step's gradient norm, and measurements of this step or an earlier one.

        Returns:
            Extra columns of its line.
        """
        if info is None:
            return {}
        step, measured = info.signals.step, info.measured
        self._norms[step] = info.signals.grad_norm
        self._norms.pop(step - 2 * self._early.rules.every, None)
        if measured is None or not all(
            map(math.isfinite, measured.numbers[: self._table.num_sums])
        ):
            return {}
        model = {**self._table.model(measured), **self._clip_share(measured.step)}
        model |= self._noise_scale(model)
        self._write(measured, model)
        self._warn_of_collapse(measured, model.get("expert_balance", math.nan))
        warned = self._early.note(Look(step=measured.step, values=model))
        if warned is not None:
            clean = self._run.ring.newest_clean()  # it pins the checkpoint before it
            keeps = clean.serial if clean else None
            self._run.written.report(_incident(warned, measured.step, keeps=keeps))
        return {f"{COLUMNS}{name}": _rounded(value) for name, value in model.items()}

    def _clip_share(self, step: int) -> dict[str, float]:
        """The share of clipped steps since the last measurement."""
        since = range(max(1, step - self._early.rules.every + 1), step + 1)
        norms = [self._norms[one] for one in since if one in self._norms]
        clip = self._table.optim.clip
        if not clip or not norms:
            return {}
        return {"clip_share": sum(norm > clip for norm in norms) / len(norms)}

    def _noise_scale(self, model: Mapping[str, float]) -> dict[str, float]:
        """The simple noise scale in terms of the loss, over the last measurements."""
        if not {"grad_noise", "grad_signal"} <= model.keys():
            return {}
        self._noises.append((model["grad_noise"], model["grad_signal"]))
        noise, signal = (math.fsum(column) for column in zip(*self._noises, strict=True))
        return {"noise_scale": noise / signal} if noise > 0 and signal > 0 else {}

    def _warn_of_collapse(self, measured: Measured, balance: float) -> None:
        self._num_collapsed = self._num_collapsed + 1 if balance < _COLLAPSED else 0
        if self._num_collapsed != _COLLAPSED_LOOKS:
            return
        balances = self._table.balances(measured)
        name = min(balances, key=balances.__getitem__)
        load = self._table.loads(measured)[name]
        heavy = max(range(len(load)), key=load.__getitem__)
        idle = sum(not share for share in load)
        self._run.written.report(
            Incident(
                kind="experts",
                step=measured.step,
                decision="only reported",
                reason=f"the router {name} has collapsed: {load[heavy]:.0%} of its choices "
                f"are expert {heavy}, and {idle} of {len(load)} experts got no token, in "
                f"{_COLLAPSED_LOOKS} measurements in a row",
                detail={"balance": _rounded(balance), "router": name},
            )
        )

    def _write(self, measured: Measured, model: Mapping[str, float]) -> None:
        positions = self._positions(measured)
        if self._file is None:
            return
        layers = {
            name: {key: _rounded(value) for key, value in of_layer.items() if math.isfinite(value)}
            for name, of_layer in self._table.layers(measured).items()
        }
        line: dict[str, Any] = {
            "step": measured.step,
            "attempt": self._attempt,
            "layers": layers,
            "model": {name: _rounded(value) for name, value in model.items()},
            **positions,
        }
        histograms = self._table.histograms(measured)
        if histograms:
            line["histograms"] = {
                name: {kind: list(map(_rounded, row)) for kind, row in kinds.items()}
                for name, kinds in histograms.items()
            }
        loads = self._table.loads(measured)
        if loads:
            line["experts"] = {name: list(map(_rounded, load)) for name, load in loads.items()}
        self._file.append(line, durably=False)

    def _positions(self, measured: Measured) -> dict[str, Any]:
        """The loss by position, once enough measurements are collected."""
        sums, counts = self._table.by_position(measured)
        self._by_position.append((measured.step, sums, counts))
        if len(self._by_position) < _POSITIONS_EVERY or not measured.length:
            return {}
        samples, self._by_position = self._by_position, []
        samples = [one for one in samples if len(one[1]) == len(sums)]
        losses = [
            _rounded(sum(one[1][at] for one in samples) / num) if num else None
            for at in range(len(sums))
            for num in [sum(one[2][at] for one in samples)]
        ]
        return {
            "loss_by_position": losses,
            "positions": measured.length,
            "position_steps": [samples[0][0], measured.step],
        }


def _incident(warned: Warned, step: int, *, keeps: int | None) -> Incident:
    return Incident(
        kind=WARNING,
        step=step,
        decision="alarm, only reported" if warned.is_alarm else "only noted",
        reason=f"it may be about to diverge: {warned.sentence}"
        if warned.is_alarm
        else f"one sign, which healthy trainings have too: {warned.sentence}",
        detail={
            "signals": {one.signal: _rounded(one.value) for one in warned.signs},
            "agreeing": list(warned.agreeing),
            "keeps": keeps,
        },
    )


def watch_layers(
    run: EngineRun, optim: OptimConfig, *, every: int, warmup: int, is_compiled: bool
) -> None:
    """Measure the layers ``every`` so many steps and report them; never if it is 0. Collective.

    Args:
        warmup: steps of the schedule in which warnings expect more.
        is_compiled: hooks in the model's modules would not be called.
    """
    if not every:
        return
    rules = EarlyRules(every=every, warmup=warmup)
    made = run.observers.together(LAYERS, lambda: _layers(run, optim, rules, is_compiled))
    if made is None or isinstance(made, Failure):
        return
    watch, log = made
    run.stepper.layers = watch
    run.reporter.add_columns("layer report", log.columns)


def _layers(
    run: EngineRun, optim: OptimConfig, rules: EarlyRules, is_compiled: bool
) -> tuple[LayerWatch, LayerLog]:
    network, engine = run.corpus.network, run.engine
    blocks = network.units(engine.network)
    shapes = {name: tuple(one.shape) for name, one in network.parameters().items()}
    activations = Activations(engine.objective, blocks, is_compiled=is_compiled)
    first = FirstBatch(
        engine.objective, blocks, is_compiled=is_compiled, factor=engine.gradient_factor
    )
    table = LayerTable(
        engine.network,
        blocks,
        shapes,
        optim,
        num_units=activations.num_units,
        experts={one.name: (one.num_experts, one.num_chosen) for one in first.routers},
    )
    log = LayerLog(run, table, rules)
    run.ring.also_keep(run.history.kept_serials)
    return LayerWatch(run, activations, first, table, rules.every), log


def _past(path: Path, resumed: int, window: int) -> tuple[list[tuple[int, Mapping[str, Any]]], int]:
    """The latest measurements before the step that the run resumes from.

    Also returns the offset at which the last whole line ends.
    """
    lines, length = tail(path, _TAIL_BYTES)
    looks: dict[int, Mapping[str, Any]] = {}
    for line in lines:
        step, model = step_of(line), line.get("model")
        if resumed - window <= step <= resumed and isinstance(model, dict):
            looks[step] = {n: v for n, v in model.items() if isinstance(v, int | float)}
    return sorted(looks.items()), length


def _norms(metrics: Path, resumed: int, every: int) -> list[tuple[int, float]]:
    """Gradient norms of the steps since the last measurement."""
    lines, _ = tail(metrics, min(_TAIL_BYTES, every * _LINE_BYTES))
    return [
        (step_of(line), float(line["grad_norm"]))
        for line in lines
        if line.get("action") == "apply"
        and resumed - every < step_of(line) <= resumed
        and isinstance(line.get("grad_norm"), int | float)
    ]


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
