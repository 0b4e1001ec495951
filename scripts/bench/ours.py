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

from runner.config.compose import compose
from runner.config.schema import Precision, RunConfig
from runner.distributed.env import RankEnv
from runner.policy.decision.skip_ledger import Ledger
from runner.session import parts
from runner.session.corpus import open_dataset, sample_stream
from runner.session.group import group_at_hand
from runner.session.inventory import has_native_bf16
from runner.session.session import open_run
from runner.train.run import EngineRun
from scripts.bench.fair import refuse_uneven
from scripts.bench.task import Task

_CORPUS = "data=python"
# Neither evaluation nor checkpoints nor printing within the steps that are timed.
_QUIET = (
    "eval.every=0",
    "checkpoint.every=1000000",
    "checkpoint.memory_every=0",
    "track.every=1000000",
    "parallel.reduce_each_micro_batch=false",  # as the other side: once a step
)
_ENDLESS = ("steps=1000000", "schedule=cosine", "schedule.total=2000")
_NUM_STEPS = 256  # in the other side's file of tokens, which goes round


def settings(out: Path, overrides: Sequence[str]) -> RunConfig:
    """Of a run without end that does nothing but steps, unless ``overrides`` ask for more.

    ``compute.precision=auto`` is settled as the runner does it, so the other side takes the same.
    """
    config = compose([_CORPUS, *_QUIET, *_ENDLESS, *overrides, f"out={out}"])
    if config.compute.precision is Precision.auto:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        is_bf16 = has_native_bf16(device, os.environ)
        config.compute.precision = Precision.bf16 if is_bf16 else Precision.fp32
    return config


def first_losses(out: Path, count: int) -> list[float]:
    """Mean cross-entropy of the first updates, from the run's own metrics."""
    with (out / "metrics.jsonl").open() as file:
        lines = [json.loads(line) for line in itertools.islice(file, count)]
    return [float(line["loss"]) for line in lines if line["action"] == "apply"]


@contextmanager
def opened(config: RunConfig, place: RankEnv, device: torch.device) -> Iterator[EngineRun]:
    """A complete run with its first checkpoint, ready to take steps. Collective."""
    run = open_run(group_at_hand(config, place, device), config)
    run.loop.begin()
    yield run
    run.ring.close(forget=True)  # nobody comes back for its snapshots in memory
    run.feed.close()
    run.reporter.close()


def make_task(
    config: RunConfig, folder: Path, *, steps: int = _NUM_STEPS, is_shared: bool = True
) -> Task:
    """What ``config`` trains, for the other side; writes the tokens of its first steps.

    Args:
        is_shared: false where both sides are the runner, which follows every setting.

    Raises:
        MeasureError: it has settings that the other side would not follow.
    """
    if is_shared:
        refuse_uneven(config, settings(folder, [f"parallel={config.parallel.kind.value}"]))
    dataset = open_dataset(config)
    stream = sample_stream(config, dataset)
    cursor, rows = 0, []
    for _ in range(steps):
        plan = stream.plan(cursor, Ledger())
        rows.append(np.stack([dataset[int(index)].tokens for index in plan.indices]))
        cursor = plan.stop
    tokens = folder / "tokens.npy"
    np.save(tokens, np.stack(rows).astype(np.uint16 if dataset.vocab_size <= 2**16 else np.uint32))
    optim, schedule = config.optim, config.schedule
    return Task(
        shape=parts.model_shape(config, dataset),
        tokens=str(tokens),
        seed=config.seed,
        global_size=config.batch.global_size,
        micro_size=config.batch.micro_size,
        workers=config.data.workers,
        total=schedule.total or config.steps,
        warmup=schedule.warmup,
        floor=schedule.floor,
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        clip=optim.clip,
        precision=config.compute.precision.value,
        compile=config.compute.compile,
    )
