"""The runner's side: a complete run, opened but driven step by step by the measurement."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from runner import assemble
from runner.compose import compose
from runner.config import RunConfig
from runner.dist.launcher import Place, launch_from
from runner.policy.ledger import Ledger
from runner.rundir import RunDir
from runner.train import Run, Session
from scripts.bench.task import Task

# Neither evaluation nor checkpoints nor printing within the steps that are timed.
_QUIET = (
    "eval.every=0",
    "checkpoint.every=1000000",
    "checkpoint.memory_every=0",
    "track.every=1000000",
)
_ENDLESS = ("steps=1000000", "schedule=cosine", "schedule.total=2000")
_NUM_STEPS = 256  # in the opponents' file of tokens, which goes round


def settings(out: Path, overrides: Sequence[str]) -> RunConfig:
    """Of a run without end that does nothing but steps, unless ``overrides`` ask for more."""
    return compose([*_QUIET, *_ENDLESS, *overrides, f"out={out}"])


def first_losses(out: Path, count: int) -> list[float]:
    """Mean cross-entropy of the first updates, from the run's own metrics."""
    with (out / "metrics.jsonl").open() as file:
        lines = [json.loads(line) for line in itertools.islice(file, count)]
    return [float(line["loss"]) for line in lines if line["action"] == "apply"]


@contextmanager
def opened(config: RunConfig, place: Place, device: torch.device) -> Iterator[Run]:
    """A complete run with its first checkpoint, ready to take steps. Collective."""
    run_dir, launch = RunDir(Path(config.out)), launch_from(os.environ)
    stop = assemble.stop_request(config, launch)
    witness = assemble.witness(config, place, launch, run_dir, stop)
    run = Session(config, place, launch, device, run_dir, {}, witness, stop, []).open()
    run.loop.begin()
    yield run
    run.ring.close(forget=True)  # nobody comes back for its snapshots in memory
    run.feed.close()
    run.reporter.close()


def make_task(config: RunConfig, folder: Path, *, steps: int = _NUM_STEPS) -> Task:
    """What ``config`` trains, for the opponents; writes the tokens of its first steps."""
    dataset = assemble.open_dataset(config)
    stream = assemble.sample_stream(config, dataset)
    cursor, rows = 0, []
    for _ in range(steps):
        plan = stream.plan(cursor, Ledger())
        rows.append(np.stack([dataset[int(index)].tokens for index in plan.indices]))
        cursor = plan.stop
    tokens = folder / "tokens.npy"
    np.save(tokens, np.stack(rows).astype(np.uint16 if dataset.vocab_size <= 2**16 else np.uint32))
    optim, schedule = config.optim, config.schedule
    return Task(
        shape=assemble.model_shape(config, dataset),
        tokens=str(tokens),
        seed=config.seed,
        global_size=config.batch.global_size,
        micro_size=config.batch.micro_size,
        workers=config.data.workers,
        prefetch=config.data.prefetch,
        total=schedule.total or config.steps,
        warmup=schedule.warmup,
        floor=schedule.floor,
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        clip=optim.clip,
    )
