"""Trials of the early warnings: slow divergences and healthy trainings, in one process.

    python scripts/early.py --slow 20 --healthy 10 --steps 800 --rows FILE.jsonl

A slow divergence is a healthy training whose rate is ramped up until the loss rises; the event is
the step at which the running median of the loss lies 0.2 nats above its best; a training that never
rises is left out. Prints a JSON line a training, and at the end how many were warned of 50 steps
before, and how many warnings and alarms healthy steps had. With ``--rows`` the trainings that the
file has are not made again, so that it can be done in pieces (``--seconds``).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from runner.config.compose import compose
from runner.data.dataset import Dataset
from runner.distributed.agreement import Ranks
from runner.distributed.env import RankEnv
from runner.distributed.observers import Observers
from runner.engine.activations import Activations
from runner.engine.protocol import MicroStep
from runner.policy.decision.early import EarlyRules, EarlyWarnings, Look
from runner.session import parts
from runner.train.layers import LayerPlaces, LayerTable, LayerWatch, Measured, OptimConfig

_MEDIAN = 21  # losses
_RISE = 0.2  # nats
_CLIP = 1.0
_LEAD = 50  # steps
_HEALTHY = 1000  # added to the seeds of healthy trainings


@dataclass(frozen=True)
class Trial:
    """One training: a model, a seed, a rate over steps."""

    seed: int
    overrides: tuple[str, ...]
    rate: float
    warmup: int
    ramp_from: int
    ramp: float  # factor a step from there on
    steps: int
    beta2: float

    def rate_at(self, step: int) -> float:
        rate = self.rate * min(1.0, step / max(self.warmup, 1))
        if self.ramp > 1:
            return rate * self.ramp ** max(0, step - self.ramp_from)
        # A cosine to a tenth.
        return rate * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, step / self.steps))))


def make_trial(number: int, *, is_slow: bool, steps: int) -> Trial:
    """A trial with its own model, seed and rate."""
    dice = random.Random(f"{number} {is_slow}")
    dim = dice.choice((32, 48, 64))
    rate = dice.choice((1e-3, 2e-3, 3e-3, 6e-3))
    overrides = (
        f"model.dim={dim}",
        f"model.layers={dice.choice((2, 3, 4, 6))}",
        f"model.heads={dice.choice((2, 4))}",
        f"model.qk_norm={dice.choice(('false', 'false', 'true'))}",
        f"model.tied_head={dice.choice(('false', 'true'))}",
        f"data.seq_len={dice.choice((32, 64))}",
        f"batch.global_size={dice.choice((8, 16))}",
        f"seed={number}",
    )
    ramp_from = dice.choice((100, 150, 200))
    return Trial(
        seed=number,
        overrides=overrides,
        rate=rate,
        warmup=dice.choice((20, 50, 100)),
        ramp_from=ramp_from if is_slow else steps,
        ramp=dice.choice((1.005, 1.01, 1.015, 1.02)) if is_slow else 1.0,
        steps=steps,
        beta2=dice.choice((0.95, 0.99, 0.999)),
    )


def run(trial: Trial, every: int) -> dict[str, Any]:
    """Train; returns the losses, the measurements, the warnings and the event."""
    config = compose(
        [
            "out=unused", "model=tiny", "data=synthetic", "data.workers=0",
            "compute.precision=fp32", "parallel=single", "eval.every=0",
            f"optim.beta2={trial.beta2}", f"optim.clip={_CLIP}", *trial.overrides,
            f"batch.micro_size={16}",
        ]
    )  # fmt: skip
    place = RankEnv(rank=0, world_size=1, local_rank=0, local_world_size=1)
    device = torch.device("cpu")
    dataset: Dataset = parts.open_dataset(config)
    network = parts.decoder_blueprint(config, parts.model_shape(config, dataset))
    engine = parts.engine(config, network, place, device)
    blocks = network.units(engine.network)
    shapes = {name: one.shape for name, one in network.parameters().items()}
    places = LayerPlaces.of(engine.network, blocks, shapes)
    activations = Activations(engine.objective, blocks, is_compiled=False)
    watch = LayerWatch(
        engine,
        activations,
        places,
        every=every,
        is_first=True,
        observers=Observers(Ranks(device), report=lambda incident: None),
    )
    rules = OptimConfig(clip=_CLIP, beta2=trial.beta2)
    table = LayerTable(places, rules, num_units=activations.num_units)
    early = EarlyWarnings(EarlyRules(every=every, warmup=trial.warmup))
    feed = parts.feed(config, dataset, parts.sample_stream(config, dataset), place, device)
    losses: list[float] = []
    inspections: list[dict[str, float]] = []
    warned: list[tuple[int, bool, str]] = []
    size = config.batch.global_size
    for step in range(1, trial.steps + 1):
        indices = np.arange((step - 1) * size, step * size) % len(dataset)
        works = [MicroStep(batch=b.to(device), seed=step) for b in feed.fixed(indices)]
        is_due = watch.begin(step)
        sums = engine.accumulate(works)
        if is_due:
            watch.before()
        tokens = float(sums.count)
        norm = float(sums.grad_square.sqrt()) / tokens
        losses.append(float(sums.loss) / tokens)
        scale = tokens * max(1.0, norm / _CLIP)
        bad = float(not math.isfinite(norm))
        engine.apply(
            skip=torch.tensor(bad),
            grad_scale=torch.tensor(scale),
            learning_rate=trial.rate_at(step),
        )
        if is_due:
            numbers = tuple(watch.after().tolist())
            measured = Measured(
                step=step, numbers=numbers, length=watch.length, tokens=int(tokens), grad_norm=norm
            )
            values = table.model(measured)
            inspections.append({"step": step, "loss": losses[-1], "norm": norm, **values})
            warning = early.note(Look(step=step, values=values))
            if warning is not None:
                warned.append((step, warning.is_alarm, warning.sentence))
        if event(losses) is not None:
            break
    return {"losses": losses, "looks": inspections, "warned": warned, "event": event(losses)}


def event(losses: list[float]) -> int | None:
    """The step at which the running median is 0.2 nats above its best; the newest step only."""
    if len(losses) < _MEDIAN or len(losses) % 5:
        return None
    medians = [
        statistics.median(losses[at : at + _MEDIAN])
        for at in range(0, len(losses) - _MEDIAN + 1, 5)
    ]
    last = statistics.median(losses[-_MEDIAN:])
    if not math.isfinite(last) or last > min(m for m in medians if math.isfinite(m)) + _RISE:
        return len(losses)
    return None


@dataclass
class Counts:
    """What the trials came to."""

    divergences: int = 0
    warned_50_steps_before: int = 0
    with_an_alarm: int = 0
    healthy_trainings: int = 0
    healthy_steps: int = 0
    false_warnings: int = 0
    false_alarms: int = 0

    def add(self, row: dict[str, Any]) -> None:
        """Count one training."""
        warned, event = row["warned"], row["event"]
        num_alarms = sum(is_alarm for _, is_alarm, _ in warned)
        if row["kind"] == "healthy":
            self.healthy_trainings += 1
            self.healthy_steps += row["steps"]
            self.false_warnings += len(warned)
            self.false_alarms += num_alarms
        elif event is not None:
            self.divergences += 1
            self.warned_50_steps_before += any(event - step >= _LEAD for step, *_ in warned)
            self.with_an_alarm += num_alarms > 0

    @property
    def holds(self) -> bool:
        """Whether nine in ten were warned of in time, with one alarm in 100,000 healthy steps."""
        is_early = self.warned_50_steps_before >= 0.9 * self.divergences
        return is_early and self.false_alarms * 100_000 <= self.healthy_steps


def _row(kind: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Make one training."""
    is_slow = kind == "slow"
    steps = 4 * options.steps if is_slow else options.steps
    trial = make_trial(seed, is_slow=is_slow, steps=steps)
    outcome = run(trial, options.every)
    row = {
        "kind": kind, "seed": trial.seed, "overrides": trial.overrides, "rate": trial.rate,
        "steps": len(outcome["losses"]), "event": outcome["event"],
        "warned": outcome["warned"],
    }  # fmt: skip
    return {**row, "looks": outcome["looks"]} if options.looks else row


def main() -> int:
    """Run the trials; 0 when the bounds hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--slow", type=int, default=20, help="divergences to see")
    parser.add_argument("--healthy", type=int, default=10)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--first", type=int, default=0, help="seed of the first training")
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin none after these")
    parser.add_argument("--looks", action="store_true", help="print what was measured, too")
    parser.add_argument("--rows", type=Path, help="JSON lines to go on from, and to append to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    began, counts = time.monotonic(), Counts()
    has_rows = options.rows and options.rows.exists()
    lines = options.rows.read_text().splitlines() if has_rows else []
    rows: dict[int, dict[str, Any]] = {row["seed"]: row for row in map(json.loads, lines)}
    for number in itertools.count(options.first):
        is_slow = counts.divergences < options.slow
        is_enough = counts.healthy_trainings >= options.healthy
        if (is_enough and not is_slow) or time.monotonic() - began > options.seconds:
            break
        kind, seed = ("slow", number) if is_slow else ("healthy", _HEALTHY + number)
        if seed not in rows:
            rows[seed] = _row(kind, seed, options)
            if options.rows:
                with options.rows.open("a") as file:
                    file.write(json.dumps(rows[seed]) + "\n")
        counts.add(rows[seed])
        if not options.rows:
            print(json.dumps(rows[seed]), flush=True)
    print(json.dumps(asdict(counts)))
    dist.destroy_process_group()
    return 0 if counts.holds else 1


if __name__ == "__main__":
    sys.exit(main())
