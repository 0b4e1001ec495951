"""``holdfast profile key=value ...``: where the time of a step goes, by torch's profiler.

Takes the settings of a run. Its first steps are done in the folder OUT-profile, which must not
exist: five to get going, then five under the profiler. On several ranks:

    torchrun --nproc-per-node=8 -m runner profile out=runs/a key=value ...

Each rank leaves a trace there, to be opened at ui.perfetto.dev; rank 0 prints what its own shows.
"""

from __future__ import annotations

import resource
import shutil
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from runner.command.arguments import Parser
from runner.config.compose import compose
from runner.config.validate import check as check_settings
from runner.distributed.env import place_from
from runner.session.group import join
from runner.session.session import open_run
from runner.system.environment import changeable, variables
from runner.system.error import EXIT_DONE, ConfigError
from runner.system.json_lines import read_lines
from runner.system.units import format_bytes
from runner.train.run import EngineRun

_WARMUP, _STEPS = 5, 5
_MOST_NAMED = 10  # operations
# Keeps two lines of torch's own off the console.
_QUIET = ("KINETO_LOG_LEVEL", "6")
# Overrides after the user's settings: steps, and nothing between them.
_ALONE = (
    *("eval.every=0", "eval.stop_after=0", "faults=[]"),
    *("checkpoint.every=1000000000", "checkpoint.memory_every=0", "checkpoint.keep_best=false"),
    *("checkpoint.remote=null", "checkpoint.memory_mirror=false", "checkpoint.memory_slots=null"),
    *("track.read=false", "track.every=1000000000", "track.command=null", "debug.audit_every=0"),
)
_COMMUNICATION = ("nccl", "gloo:", "c10d::")  # in or before the names of kernels and operations
Spans = list[tuple[float, float]]


def profile_command(arguments: Sequence[str]) -> int:
    """Run the steps on this rank; rank 0 prints.

    Raises:
        ConfigError: the settings cannot be used, or the folder exists.
    """
    parser = Parser("profile", __doc__)
    parser.add_settings()
    options = parser.parse_args(arguments)
    place = place_from(variables())
    config = compose([*options.overrides, *_ALONE], config_dir=options.config_dir)
    folder = Path(f"{config.out.rstrip('/')}-profile")
    if place.rank == 0 and folder.exists():
        raise ConfigError(f"profile: {folder} exists; remove it, or name another out=")
    config.steps, config.epochs = max(config.steps, _WARMUP + _STEPS + 1), None
    config.out, track = str(folder / "run"), config.track
    track.tensorboard = track.wandb = track.mlflow = False
    track._target_ = None
    check_settings(config, world_size=place.world_size)
    with join(config, place) as group:
        run = open_run(group, config)
        run.loop.begin()
        for _ in range(_WARMUP):
            run.loop.step()
        changeable().setdefault(*_QUIET)
        activities = [ProfilerActivity.CPU]
        activities += [ProfilerActivity.CUDA] if run.engine.device.type == "cuda" else []
        with profile(activities=activities) as measured:
            for _ in range(_STEPS):
                run.loop.step()
        measured.export_chrome_trace(str(folder / f"rank-{place.rank}.json"))
        run.ring.close(wait=False, forget=True)
        run.feed.close()
        run.reporter.close()
        group.ranks.sum([0.0])  # nobody writes to the run's folder any more
        if place.rank == 0:
            _print(run, measured, folder)
            shutil.rmtree(folder / "run")
    return EXIT_DONE


def _print(run: EngineRun, measured: profile, folder: Path) -> None:
    lines = read_lines(run.group.run_dir.metrics)[0][-_STEPS:]
    seconds = [float(line["seconds"]) for line in lines]
    waits = [float(line["data_wait_seconds"]) for line in lines]
    wall = sum(seconds) * 1e6
    table = Table("of a step", "", title=f"{_STEPS} steps of rank 0", title_justify="left")
    spread = f"{min(seconds):.3g} to {max(seconds):.3g}"
    table.add_row("seconds", f"{statistics.median(seconds):.3g} ({spread})")
    table.add_row("waiting for data", f"{sum(waits) / sum(seconds):.1%}")
    is_cuda = run.engine.device.type == "cuda"
    kind = DeviceType.CUDA if is_cuda else DeviceType.CPU
    spans: dict[bool, Spans] = {True: [], False: []}
    for event in measured.events() or ():  # type: ignore[no-untyped-call]
        if event.device_type == kind:
            is_communication = any(word in event.name for word in _COMMUNICATION)
            spans[is_communication].append((event.time_range.start, event.time_range.end))
    communication, everything = covered(spans[True]), covered(spans[True] + spans[False])
    table.add_row("communication", f"{communication / wall:.1%}")
    if is_cuda:
        alone = everything - covered(spans[False])
        table.add_row("of it beside no computation", f"{alone / wall:.1%}")
        table.add_row("the GPU has nothing to do", f"{max(0.0, 1 - everything / wall):.1%}")
    peak = (
        torch.cuda.max_memory_allocated()
        if is_cuda
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    table.add_row("memory at its peak", format_bytes(peak))
    console = Console(file=sys.stdout, soft_wrap=True)
    console.print(table)
    operations = Table("operation", "calls a step", "ms a step, of itself")
    averages = measured.key_averages()
    cost = "self_device_time_total" if is_cuda else "self_cpu_time_total"
    for one in sorted(averages, key=lambda one: -getattr(one, cost))[:_MOST_NAMED]:
        took = getattr(one, cost) / _STEPS / 1e3
        operations.add_row(one.key[:60], f"{one.count / _STEPS:g}", f"{took:.3g}")
    console.print(operations)
    if is_cuda and not everything:
        console.print("no kernel of the GPU was recorded; KINETO_LOG_LEVEL=1 says why")
    console.print(f"traces: {folder}/rank-*.json, for ui.perfetto.dev")


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
