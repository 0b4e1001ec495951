"""``holdfast check-model key=value ...``: tests what exactness needs of a model and its data.

Takes the settings of a run without training it: trials in this process on a few samples, then
(without ``--quick``) short real runs in a temporary folder: on each engine, and with poison and
a kill against undisturbed runs.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from runner.command.arguments import Parser
from runner.command.bar import Bar
from runner.command.check_samples import sample_checks
from runner.command.demo import skip_override
from runner.config.compose import compose
from runner.config.schema import RunConfig
from runner.config.validate import check as check_settings
from runner.data.dataset import NOT_COUNTED, Dataset
from runner.data.feed import MicroBatch, few
from runner.distributed.env import place_from
from runner.distributed.rendezvous import end_group, start_group
from runner.engine.protocol import Engine, MicroStep
from runner.model.blueprint import Blueprint, GuestBlueprint
from runner.model.quantised import quantised_layers
from runner.run_dir.paths import RunDir
from runner.session import parts
from runner.session.corpus import open_dataset
from runner.startup.checks import (
    ROUNDING,
    BatchRows,
    Check,
    are_equal,
    exactness_checks,
    gradients_reach,
    repeated_step,
    running_buffers,
    sample_losses,
    step_losses,
    with_gradient,
    works_of,
)
from runner.startup.memory_need import SavedActivations, engine_facts, memory_need, room_bytes
from runner.system.environment import variables
from runner.system.error import EXIT_CONFIG, EXIT_DONE, is_installed
from runner.system.parsing import json_text

_CPU = torch.device("cpu")
_ROWS = 4
_IN_PROCESS, _SHORT_RUNS = 12, 10  # checks and runs, about
# Overrides for the short runs; they come after the user's settings and take precedence.
_SHORT = (
    "batch.global_size=4",
    "batch.micro_size=2",
    "data.workers=0",
    "eval.every=0",
    "schedule.warmup=2",
    "checkpoint.every=6",
    "checkpoint.clean_after=3",
    "checkpoint.memory_every=0",
    "guard.min_history=6",
    "track.every=1000",
    "parallel.device=cpu",
)


_POISON = "faults=[poison@samples=40-49]"
_KILL = "faults=[kill@step=15,rank=0]"


def check_model_command(arguments: Sequence[str]) -> int:
    """Parse, run the trials, print a table; returns 0 if all trials that could run hold, else 2."""
    parser = Parser("check-model", __doc__)
    parser.flag("--quick", "no short runs")
    parser.add_settings()
    options = parser.parse_args(arguments)
    began = time.monotonic()
    settings = [*options.overrides, "parallel=single", "parallel.device=cpu"]
    config = compose(settings, config_dir=options.config_dir)
    check_settings(config, world_size=1)
    if config.compute.precision.value == "auto":
        config.compute.precision = type(config.compute.precision).fp32
    start_group(place_from({}), _CPU, timeout_seconds=600)
    checks: list[Check] = []
    try:
        with Bar("preparing the data", 0) as bar:
            dataset = open_dataset(config, progress=lambda what, done, total: bar.at(done, total))
        with Bar("trying the model", _IN_PROCESS, unit="checks") as bar:
            tried = _in_process(config, dataset)
            for check in chain(tried, sample_checks(dataset, settings, options.config_dir)):
                checks.append(check)
                bar.at(len(checks), max(_IN_PROCESS, len(checks) + 1))
    finally:
        end_group()
    if not options.quick:
        with (
            tempfile.TemporaryDirectory(prefix="holdfast-check-") as folder,
            Bar("short runs", _SHORT_RUNS, unit="runs") as bar,
        ):
            runs = _ShortRuns(Path(folder), options, bar)
            checks += [_engine_check(runs), *_fault_checks(runs)]
    return print_checks("check-model", "what exactness needs", checks, time.monotonic() - began)


# -- in this process -----------------------------------------------------------------------


def _in_process(config: RunConfig, dataset: Dataset) -> Iterator[Check]:
    network = parts.blueprint(config, dataset)

    def reloaded() -> Engine:
        return parts.engine(config, network, place_from({}), _CPU)

    engine = reloaded()
    batch = few(dataset, config.data.seq_len, _ROWS)
    micro_steps = works_of(batch, 1, _CPU)
    if isinstance(network, GuestBlueprint):
        engine.running.keep(running_buffers(engine, micro_steps))
        yield from exactness_checks(network, engine, micro_steps)
    else:
        yield from repeated_step(engine, micro_steps)
    # From here on the weights change.
    yield _no_other_source(engine, micro_steps)
    yield from _sums(engine, batch)
    # An adapter's first matrix gets a gradient only once its second is not zero.
    yield gradients_reach(*with_gradient(engine, micro_steps, updates=2))
    yield _same_after_reload(engine, reloaded(), micro_steps)
    yield _memory(config, network, engine, micro_steps)


def _memory(
    config: RunConfig, network: Blueprint, engine: Engine, micro_steps: Sequence[MicroStep]
) -> Check:
    with SavedActivations() as saved:
        engine.accumulate(micro_steps)
        engine.apply(skip=torch.ones(()), grad_scale=torch.ones(()), learning_rate=0.0)
    need = memory_need(
        engine.shards(),
        network.parameters(),
        engine_facts(config.parallel, config.compute, place_from({})),
        quantised=quantised_layers(network.twin_network),
        activations=saved.num_bytes,
        samples=_ROWS,
        snapshots=0,
    )
    description = need.line(room_bytes(_CPU, 1)).removeprefix("memory of a rank: ")
    return Check(name="memory of one rank", holds=True, found=description, remedy="")


def _no_other_source(engine: Engine, works: Sequence[MicroStep]) -> Check:
    steps = []
    for seed in (1, 2):
        np.random.seed(seed)
        random.seed(seed)
        steps.append(step_losses(engine, works))
    return Check.of(
        "no other random source",
        "" if are_equal(*steps) else "the loss depends on numpy's or Python's random numbers",
        "numpy's and Python's generators change nothing",
        "draw from torch's global generator, which is seeded for each micro-batch",
    )


def _sums(engine: Engine, batch: MicroBatch) -> Iterator[Check]:
    """Check the model's sums without dropout, which is drawn for the whole batch."""
    rows = list(range(len(batch.positions)))
    middle = len(rows) // 2
    whole = sample_losses(engine, batch)
    halves = [
        sample_losses(engine, BatchRows(batch, part)) for part in (rows[:middle], rows[middle:])
    ]
    apart = float(((whole - torch.cat(halves)).abs() / whole.abs().clamp(min=1e-9)).max())
    yield Check(
        name="the loss is a sum per sample",
        holds=apart <= ROUNDING,
        found=f"the losses of samples in half batches differ by {apart:.1g} from those in the "
        "whole batch",
        remedy="no sample may change another's loss in eval(): no mean over the batch; give the "
        "sum and the count of each sample",
    )
    padded = sample_losses(engine, _last_as_padding(batch))
    is_alone = bool(padded[-1] == 0) and torch.allclose(padded[:-1], whole[:-1], rtol=ROUNDING)
    yield Check.of(
        "padding adds nothing",
        "" if is_alone else "a row of padding changes the loss of others",
        "a row of padding has no loss and changes no other",
        "compute a sample's loss only from its own row",
    )


def _last_as_padding(batch: MicroBatch) -> MicroBatch:
    targets = batch.targets.clone()
    targets[-1] = NOT_COUNTED
    real = None if batch.real is None else batch.real.clone()
    if real is not None:
        real[-1] = False
    return replace(batch, targets=targets, real=real)


def _same_after_reload(engine: Engine, reloaded: Engine, works: Sequence[MicroStep]) -> Check:
    reloaded.running.keep(engine.running.names)
    state = {shard.name: shard.local for shard in engine.shards()}
    for shard in reloaded.shards():
        shard.local.copy_(state[shard.name])
    reloaded.finish_load(engine.update_counts())
    is_same = are_equal(step_losses(engine, works), step_losses(reloaded, works))
    problem = "something other than weights, moments and buffers affects the next step"
    return Check.of(
        "the next step after a reload is equal",
        "" if is_same else problem,
        "weights, moments and buffers are the whole state",
        "keep no state in attributes of the module that training changes",
    )


# -- short real runs -----------------------------------------------------------------------


class _ShortRuns:
    """Runs the trainer in folders of its own.

    Attributes:
        code: exit code of the last one.
    """

    def __init__(self, folder: Path, options: Namespace, bar: Bar) -> None:
        self._folder, self._bar, self._settings = folder, bar, list(options.overrides)
        self._settings += [f"--config-dir={options.config_dir}"] if options.config_dir else []
        self.code = EXIT_DONE

    def summary(self, name: str, *settings: str, ranks: int = 1) -> dict[str, Any] | None:
        """The summary of a run with these settings; None where it failed."""
        command = [sys.executable, "-m"]
        if ranks > 1:
            command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
        out = self._folder / name
        command += ["runner", *self._settings, *_SHORT, f"out={out}", *settings]
        environment = {"OMP_NUM_THREADS": "1", **variables()}
        done = subprocess.run(command, env=environment, check=False, capture_output=True)
        self._bar.add(1)
        self.code = done.returncode
        return RunDir(out).stored_summary() if self.code == EXIT_DONE else None


def _engine_check(runs: _ShortRuns) -> Check:
    """Run five steps on each engine, on two ranks each."""
    has_zero = is_installed("zero")
    kinds = ["single", "ddp", "fsdp", *(["zero1", "zero3"] if has_zero else [])]
    precision = "compute.precision=bf16" if has_zero else "compute.precision=fp32"
    results, losses = [], []
    for kind in kinds:
        ranks = 1 if kind == "single" else 2
        summary = runs.summary(kind, f"parallel={kind}", precision, "steps=5", ranks=ranks)
        if summary is None:
            results.append(f"{kind}: ended with {runs.code}")
        else:
            losses.append(float(summary["final_loss"]))
            results.append(f"{kind} {str(summary['state_digest'])[:8]}")
    difference = max(losses) - min(losses) if losses else 0.0
    return Check(
        name="engines over five steps",
        holds=len(losses) == len(kinds),
        found=f"{', '.join(results)}; last losses {difference:.2g} apart",
        remedy="start the failing one by hand to see why; different digests are fine, because "
        "engines round differently",
    )


def _fault_checks(runs: _ShortRuns) -> Iterator[Check]:
    single = ("parallel=single", "steps=30", "schedule.total=30")
    poisoned = runs.summary("poisoned", *single, _POISON)
    failure = f"the poisoned run ended with {runs.code}"
    skip = poisoned and runs.summary("never", *single, skip_override(poisoned["skipped"]))
    yield _compared("poisoned against skipped", poisoned, skip, failure)
    whole = runs.summary("whole", *single)
    runs.summary("killed", *single, _KILL)
    killed = runs.summary("killed", *single, _KILL)
    failure = f"the runs ended with {runs.code}"
    yield _compared("killed against not killed", killed, whole, failure)


def _compared(
    name: str, first: dict[str, Any] | None, second: dict[str, Any] | None, failure: str
) -> Check:
    is_same, found = False, failure
    if first and second:
        is_same = first["state_digest"] == second["state_digest"]
        digests = (str(summary["state_digest"])[:16] for summary in (first, second))
        found = f"end states {' and '.join(digests)}"
    remedy = "see the checks above; the usual cause is state outside of the module"
    return Check(name=name, holds=is_same, found=found, remedy=remedy)


# -- what is printed -----------------------------------------------------------------------


def print_checks(title: str, heading: str, checks: Sequence[Check], seconds: float) -> int:
    """Print the checks; returns the exit code: 2 if one fails that is not a warning."""
    table = Table(title=f"{title} ({seconds:.0f} s)", title_justify="left")
    for text in (heading, "", "what was seen, and what to do"):
        table.add_column(text)
    for check in checks:
        remedy = f" -> {check.remedy}" if check.holds is False else ""
        table.add_row(check.name, _mark(check), check.found + remedy)
    Console(file=sys.stdout, width=120, markup=False, highlight=False).print(table)
    return _exit_code(checks)


def print_json(checks: Sequence[Check]) -> int:
    """Print a JSON line for each; returns the exit code as :func:`print_checks`."""
    for check in checks:
        line = {"check": check.name, "result": _mark(check), "found": check.found}
        if check.holds is False:
            line["remedy"] = check.remedy
        sys.stdout.write(json_text(line) + "\n")
    return _exit_code(checks)


def _mark(check: Check) -> str:
    """The result of a check in one word."""
    if check.holds is False:
        return "warns" if check.is_warning else "FAILS"
    return "ok" if check.holds else "-"


def _exit_code(checks: Sequence[Check]) -> int:
    """The exit code of the command."""
    fails = any(check.holds is False and not check.is_warning for check in checks)
    return EXIT_CONFIG if fails else EXIT_DONE
