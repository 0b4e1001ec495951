"""The settings of a case for the runner. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from scripts.swarm.case import Case

STEPS, BATCH, SEQ_LEN, EVERY = 30, 8, 16, 6
MIXED = ("code", "talk", "web")
_LEVELS = {"mixture": (0.2, 0.2, 0.2), "levels": (0.0, 0.2, 1.0)}
MIXTURES = ("texts", *_LEVELS)
_WEIGHTS = (1.0, 1.0, 1.0)
# In nats: wider than the defaults, because the loss of eight short sequences is a noisy number.
_LIMITS = {"loss_floor": 1.6, "drift_nats": 15.0}
_RATES = {"adamw": 1e-2, "sgd": 0.5, "lion": 2e-3, "muon": 1e-2, "adafactor": 5e-2}
_HANGING = ("hang", "stop", "skip_collective", "other_", "no_break")
_SOON_HUNG = ("watchdog.floor_seconds=6", "watchdog.slow_seconds=30")
_ALIKE = (
    *(f"steps={STEPS}", f"schedule.total={STEPS}", "schedule.warmup=3", "eval.samples=24"),
    *(f"batch.global_size={BATCH}", f"data.seq_len={SEQ_LEN}", "data.held_out=0.1"),
    *(f"checkpoint.every={EVERY}", "checkpoint.clean_after=3", "guard.cooldown_steps=0"),
    *("guard.min_history=8", "resume.stale_seconds=5", "debug.check_devices=false"),
)


def weights_of(case: Case, start: int) -> tuple[float, ...]:
    """The mixture's weights at a start; the first one is 0."""
    changed = [one.weights for one in case.breaks[:start] if one.weights]
    return changed[-1] if changed else _WEIGHTS


def layout_of(case: Case, start: int) -> tuple[str, int]:
    """Engine and ranks at a start."""
    engine, ranks = case.engine, case.ranks
    for one in case.breaks[:start]:
        engine, ranks = one.engine or engine, one.ranks or ranks
    return engine, ranks


def overrides(case: Case, folder: Path, start: int = 0) -> list[str]:
    """
    Args:
        folder: for what several runs share: texts.
        start: number of this start of the run.
    """
    engine, _ = layout_of(case, start)
    words = [*_ALIKE, f"seed={case.seed}", f"parallel={engine}", f"batch.micro_size={case.micro}"]
    words += [f"compute.precision={case.precision}"]
    if engine == "hsdp":
        words.append("parallel.shard_size=2")
    words += [f"data.workers={case.workers}"]
    # Quick enough that the sources' losses lie far apart before the run is over.
    rate = _RATES[case.optim] * (3 if case.data == "levels" and case.optim == "adamw" else 1)
    # At the full rate half of these networks diverge by themselves.
    rate *= 0.3 if case.optim == "sgd" and "batchnorm" in case.model else 1
    words += [f"optim={case.optim}", f"optim.lr={rate:g}", "optim.weight_decay=0.1"]
    if case.optim == "adafactor":
        words.remove("optim.weight_decay=0.1")
    words += ["optim.ema=0.8"] if case.ema else []
    words += [*_model(case), *_data(case, folder, start), *_watched(case), *_guarded(case)]
    words += ["checkpoint.every=auto"] if case.auto else []
    words += case.settings
    return [*words, *_faulty(case)]


def _faulty(case: Case) -> list[str]:
    faults = ",".join(f"'{fault}'" for fault in case.faults)
    if not faults:
        return []
    words = list(_SOON_HUNG) if hangs(case) else []
    words += ["debug.check_devices=true"] if "wrong_product" in faults else []
    return [*words, f"faults=[{faults}]"]


def hangs(case: Case) -> bool:
    """Whether some fault of it may have ranks wait for each other."""
    return any(fault.startswith(_HANGING) for fault in case.faults)


def refused_in(case: Case, start: int) -> str:
    """Words of the refusal that these settings meet at a start by design; "" for none."""
    if not layout_of(case, start)[0].startswith("zero"):
        return ""
    if case.precision == "fp32":  # found before the optimizer is looked at
        return "needs compute.precision=bf16"
    if case.optim == "muon":
        return "works on whole matrices"
    return "needs whole parameters" if case.optim == "adafactor" else ""


def _model(case: Case) -> list[str]:
    if not case.model:
        return ["model.dim=16"]
    words = ["model._target_=scripts.swarm.guests.Net", f"model.traits=[{','.join(case.model)}]"]
    return [*words, f"model.units={case.units}"] if case.units != 1.0 else words


def _data(case: Case, folder: Path, start: int) -> list[str]:
    own = "data._target_=scripts.swarm.guests.Ids"
    if case.data == "synthetic":
        return ["data.vocab_size=32"]
    if case.data == "text":
        return ["data=text", f"data.path={folder / 'text'}"]
    if case.data == "stream":
        return ["data._target_=scripts.swarm.guests.stream", "data.vocab_size=32"]
    if case.data in MIXTURES:
        weights = zip(MIXED, weights_of(case, start), strict=True)
        sources = [
            f"{{name: {name}, weight: {weight}, {_source(case, folder, salt)}}}"
            for salt, (name, weight) in enumerate(weights)
        ]
        changed = any(one.weights for one in case.breaks[:start])
        allowed = ["resume.allow=[data.sources]"] if changed else []
        kind = "data=text" if case.data == "texts" else own
        return [kind, f"data.sources=[{', '.join(sources)}]", *allowed]
    more = {
        "own": [],
        "augmented": ["data.augmented=true"],
        "packed": ["data.short=true", "data.pack=true"],
    }[case.data]
    return [own, *more]


def _source(case: Case, folder: Path, number: int) -> str:
    if case.data == "texts":
        return f"path: {folder / 'texts' / MIXED[number]}.txt"
    return f"arguments: {{level: {_LEVELS[case.data][number]}, salt: {number}}}"


def _watched(case: Case) -> list[str]:
    return [
        *(f"eval.every={case.evaluate}", f"debug.audit_every={case.audit}"),
        f"track.layers_every={case.layers}",
        f"debug.replica_check_every={case.replicas}",
        f"debug.preflight={json.dumps(case.preflight)}",
        *_tracker(case),
        *_ended_early(case),
        f"checkpoint.keep_best={json.dumps(case.best)}",
        f"checkpoint.keep={case.keep}",
        f"checkpoint.background={json.dumps(case.background)}",
        f"checkpoint.memory_every={3 if case.memory else 0}",
    ]


def _ended_early(case: Case) -> list[str]:
    # The loss falls, so that the first evaluation stays the best.
    return [f"eval.stop_after={case.stop_after}", "eval.goal=highest"] if case.stop_after else []


def _tracker(case: Case) -> list[str]:
    if case.tracker in ("tensorboard", "wandb", "mlflow"):
        return [f"track.{case.tracker}=true"]
    told = f"track._target_=tests.tracking.{case.tracker}"
    return [told, "track.path=/dev/null"] if case.tracker else []


def _guarded(case: Case) -> list[str]:
    words = [f"explain={case.explain}", f"guard.remedy={case.remedy}"]
    words += ["guard.sync=false"] if case.late else []
    return [*words, *(f"guard.{name}={value}" for name, value in limits(case).items())]


def limits(case: Case) -> dict[str, float]:
    """The guard's limits, in the unit of the loss."""
    # Eight sequences of sources that differ in level, learnt quickly: noisier still, and a slope
    # measured over eight steps takes up to half of the floor away.
    wider = 2.0 if case.data == "levels" else 1.0
    return {name: value * wider * case.units for name, value in _LIMITS.items()}


def told(skipped: Sequence[Sequence[int]]) -> list[str]:
    """The setting that has a run never read these positions."""
    ranges = ",".join(f"[{start},{stop}]" for start, stop in skipped)
    return [f"data.skip=[{ranges}]"] if ranges else []
