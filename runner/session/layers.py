"""Makes the measurement of the model's layers and its report, from the settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from runner.distributed.observers import ObservedRanks, Observers
from runner.engine.activations import Activations
from runner.policy.decision.early import EarlyRules, EarlyWarnings, Look
from runner.policy.decision.history import Incident
from runner.policy.decision.signals import StepSignals
from runner.policy.decision.spike_frequency import SpikeScore
from runner.session.phases import Machinery, Opened
from runner.startup.resume import Resumed
from runner.system.json_lines import LineFile, iter_lines, step_of, tail
from runner.train.agreed_step import StepInfo
from runner.train.layers import LayerLog, LayerPlaces, LayerTable, LayerWatch
from runner.train.source_columns import SourceColumns

SPIKES = "spike score"  # the observer
_TAIL_BYTES = 4 << 20  # of a file's end, enough for the latest measurements
_LINE_BYTES = 4 << 10  # upper bound on a line of the metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """``watch`` measures during steps, ``log`` records the results."""

    watch: LayerWatch
    log: LayerLog


@dataclass(frozen=True, slots=True)
class Columns:
    """Extra columns of a step's line: sources and layers."""

    sources: SourceColumns
    layers: Layers | None
    report: Callable[[Incident], None]
    observers: Observers
    spikes: SpikeScore = field(default_factory=SpikeScore)

    def of(self, info: StepInfo) -> dict[str, float]:
        """The columns of one attempted step, equal on all ranks."""
        alone, signals, layers = self.observers.alone, info.signals, self.layers
        nothing: dict[str, float] = {}
        columns = alone("sources", lambda: self.sources.of(info), nothing)
        # One loss for each line of the metrics: a start reads them from there.
        alone(SPIKES, lambda: self._count_spikes(signals), None)
        if layers is None:
            return columns
        return columns | alone(
            "layer report",
            lambda: layers.log.columns(signals.step, signals.grad_norm, info.measured),
            nothing,
        )

    def _count_spikes(self, signals: StepSignals) -> None:
        share = self.spikes.note(signals.loss)
        if share is not None:
            self.report(
                Incident(
                    kind="advice",
                    step=signals.step,
                    decision="only reported",
                    reason=f"{share:.2%} of the last 1,000 losses are 7 standard deviations above "
                    "their mean, and as many before: try a rate that is lower by a fifth "
                    "(optim.lr), or a longer warm-up",
                    detail={"spike_score": round(share, 6)},
                )
            )


def spike_score(opened: Opened, resumed: Resumed, ranks: ObservedRanks) -> SpikeScore:
    """The spike score of the losses so far, from rank 0's metrics. Collective."""
    score = SpikeScore()
    if opened.group.is_first:
        for line in iter_lines(opened.group.run_dir.metrics, stop=resumed.metrics_bytes):
            loss = line.get("loss")
            score.note(float(loss) if isinstance(loss, int | float) else math.nan)
    score.load_json(ranks.from_first(score.to_json()))
    return score


def make_layers(
    opened: Opened, machinery: Machinery, resumed: Resumed, observers: Observers
) -> Layers | None:
    """Make both parts; None if nothing is measured. Collective."""
    config, group, network = opened.lease.config, opened.group, opened.corpus.network
    every, engine = config.track.layers_every, machinery.engine
    if not every:
        return None
    ranks = observers.ranks
    blocks = network.units(engine.network)
    shapes = {name: one.shape for name, one in network.parameters().items()}
    places = LayerPlaces.of(engine.network, blocks, shapes)
    activations = Activations(engine.objective, blocks, is_compiled=config.compute.compile)
    table = LayerTable(places, config.optim, num_units=activations.num_units)
    looks, length = ranks.all_or_none("reading the layers' file", lambda: _past(opened, resumed))
    log = LayerLog(
        table,
        EarlyWarnings(EarlyRules(every=every, warmup=config.schedule.warmup)),
        file=ranks.all_or_none("opening the layers' file", lambda: _file(opened, length)),
        past=[Look(step=step, values=values) for step, values in ranks.from_first(looks)],
        norms={int(step): norm for step, norm in ranks.from_first(_norms(opened, resumed))},
        attempt=opened.written.journal.attempt + 1,  # the line of this start is written later
        clip=config.optim.clip,
        report=lambda incident: _warn(opened, machinery, incident),
    )
    machinery.ring.also_keep(opened.written.journal.history.kept_serials)
    watch = LayerWatch(
        engine,
        activations,
        places,
        every=every,
        is_first=group.is_first,
        observers=observers,
    )
    return Layers(watch=watch, log=log)


def _warn(opened: Opened, machinery: Machinery, incident: Incident) -> None:
    """Journal the warning, and pin the checkpoint before it."""
    keeps = {"keeps": machinery.ring.newest_clean()}
    opened.written.report(replace(incident, detail={**incident.detail, **keeps}))


def _file(opened: Opened, length: int) -> LineFile | None:
    """Open the file to append: for a repeated step the later line counts."""
    group = opened.group
    if not group.is_first:
        return None
    return LineFile(group.run_dir.layers, length=length, check=opened.lease.run_lease.check)


def _past(opened: Opened, resumed: Resumed) -> tuple[list[tuple[int, Mapping[str, Any]]], int]:
    """Read on rank 0 the latest measurements before the step that the run resumes from.

    Also returns the offset at which the last whole line ends.
    """
    if not opened.group.is_first:
        return [], 0
    lines, length = tail(opened.group.run_dir.layers, _TAIL_BYTES)
    window = EarlyRules(every=1).window
    looks: dict[int, Mapping[str, Any]] = {}
    for line in lines:
        step, model = step_of(line), line.get("model")
        if resumed.step - window <= step <= resumed.step and isinstance(model, dict):
            looks[step] = {n: v for n, v in model.items() if isinstance(v, int | float)}
    return sorted(looks.items()), length


def _norms(opened: Opened, resumed: Resumed) -> list[tuple[int, float]]:
    """Gradient norms of the steps since the last measurement, from rank 0's metrics."""
    if not opened.group.is_first:
        return []
    every = opened.lease.config.track.layers_every
    lines, _ = tail(opened.group.run_dir.metrics, min(_TAIL_BYTES, every * _LINE_BYTES))
    return [
        (step_of(line), float(line["grad_norm"]))
        for line in lines
        if line.get("action") == "apply"
        and resumed.step - every < step_of(line) <= resumed.step
        and isinstance(line.get("grad_norm"), int | float)
    ]
