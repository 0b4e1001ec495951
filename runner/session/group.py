"""This rank and its process group, from the first line of a command to its last."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from runner.config.schema import (
    DebugConfig,
    LogKind,
    ParallelConfig,
    PreemptConfig,
    RunConfig,
    TrackConfig,
    WatchdogConfig,
)
from runner.distributed.agreement import Ranks
from runner.distributed.device import (
    device_facts,
    device_name,
    device_versions,
    find_device,
    versions,
)
from runner.distributed.env import (
    JobEnv,
    RankEnv,
    debug_settings,
    is_torchruns_own,
    keep_dump,
    launch_from,
    set_debug,
)
from runner.distributed.rendezvous import Departure, Facts, end_group, start_group, take_device
from runner.engine.modes import be_deterministic
from runner.health.notice import notices
from runner.health.preemption import StopLook, StopRequest
from runner.health.rank_monitor import RankMonitor
from runner.observe.console import Console
from runner.run_dir.paths import RunDir
from runner.run_dir.start_times import StartTimes
from runner.system import log
from runner.system.environment import changeable, variables
from runner.system.error import ConfigError, RunnerError, Superseded
from runner.system.process import own_process, pid_namespace
from runner.train.run import RankGroup

# The rendezvous has its own limit and names missing ranks.
_MEET_SECONDS = 60.0
# An error that all ranks have agreed on ends them within this time of each other.
_DEPARTURE_SECONDS = 20.0
_log = logging.getLogger(__name__)


@contextmanager
def join(config: RunConfig, place: RankEnv) -> Iterator[RankGroup]:
    """Start the monitor and the process group; in the context, a failing rank tells the others.

    Raises:
        RunnerError: the ranks do not come together.
    """
    times = StartTimes.of(variables())
    times.mark("imports")
    refuse_untried(config.parallel, place)
    # Before CUDA starts, because it reads some variables only once.
    switched = be_deterministic(changeable()) if config.compute.deterministic else {}
    found_device = find_device(config.parallel.device, place, variables())
    device = take_device(found_device)
    run_dir, launch = RunDir(Path(config.out)), launch_from(variables())
    stop, monitor = watched(config.preempt, config.watchdog, place, launch, run_dir)
    stop.listen()
    heart = monitor.heart
    as_json = config.track.log is LogKind.json
    log.begin(as_json=as_json, rank=place.rank, step=lambda: heart.step)
    monitor.start()
    debug = _collective_debug(config.debug, place, device, run_dir)
    facts: dict[str, Any] = {
        "rank": place.rank,
        "process": own_process(),
        "pids": pid_namespace(),
        "versions": versions() | device_versions(found_device),
        "gpu": device_name(device),
    }
    parallel = config.parallel
    monitor.expect(
        "rendezvous with the other ranks (parallel.start_seconds)",
        parallel.start_seconds + _MEET_SECONDS,
    )

    def have_met(room: Store, near: Sequence[Facts]) -> None:
        monitor.expect(
            "connecting to the other ranks, all of which have started (parallel.timeout_seconds; "
            "NCCL_SOCKET_IFNAME selects the interface, debug=nccl logs more)",
            parallel.timeout_seconds,
        )
        monitor.watch_start(room, near)

    try:
        peers, departure = start_group(
            place,
            device,
            timeout_seconds=parallel.timeout_seconds,
            start_seconds=parallel.start_seconds,
            facts=facts,
            problem=found_device.problem,
            have_met=have_met,
        )
        monitor.expect(
            "taking the run directory (watchdog.slow_seconds)", config.watchdog.slow_seconds
        )
        with _telling(monitor, departure):
            group = _group(config.track, place, launch, device, run_dir, stop, monitor)
            versions_here = device_versions(found_device) | device_facts(device) | switched
            times.mark("rendezvous")
            group = replace(group, debug=debug, peers=peers, times=times)
            yield replace(group, device_versions=versions_here)
    except RunnerError:
        monitor.end()
        raise
    monitor.end()


def watched(
    preempt: PreemptConfig,
    watchdog: WatchdogConfig,
    place: RankEnv,
    launch: JobEnv,
    run_dir: RunDir,
) -> tuple[StopRequest, RankMonitor]:
    """What hears of requests to stop, and the monitor of this rank; neither has begun."""
    end = launch.end_time
    stop = StopRequest(
        grace_seconds=preempt.grace_seconds,
        stop_at=None if end is None else end - preempt.margin_seconds,
        has_agent=launch.has_agent,
    )
    asking = notices(preempt.notice, stop)  # raises on all ranks alike
    monitor = RankMonitor(
        place=place,
        launch=launch,
        run_dir=run_dir,
        stop=stop,
        watchdog=watchdog,
        notices=asking if place.local_rank == 0 else None,
    )
    return stop, monitor


def _collective_debug(
    debug: DebugConfig, place: RankEnv, device: torch.device, run_dir: RunDir
) -> dict[str, str]:
    """Turn the debugging of collectives on; returns the settings in effect."""
    settings = debug_settings(debug.kind.value, folder=run_dir.debug)
    if device.type == "cuda" and place.is_first and is_torchruns_own(variables()):
        _log.info(
            "TORCH_NCCL_ASYNC_ERROR_HANDLING=3 instead of torchrun's 1, which would remove the "
            "evidence of a hang"
        )
    effective = set_debug(changeable(), settings)
    keep_dump(run_dir.debug, place.rank)
    return effective


def refuse_untried(parallel: ParallelConfig, place: RankEnv) -> None:
    """
    Raises:
        ConfigError: there are more ranks than were ever measured.
    """
    most = parallel.max_ranks
    if place.world_size > most:
        raise ConfigError(
            f"parallel.max_ranks={most}: there are {place.world_size} ranks. It is untested "
            "whether so many start, save and report a crash in time (docs/scale.md). To try it: "
            f"parallel.max_ranks={place.world_size}"
        )


def group_at_hand(config: RunConfig, place: RankEnv, device: torch.device) -> RankGroup:
    """Wrap a process group that the caller starts and ends; for benchmarks and tests."""
    run_dir, launch = RunDir(Path(config.out)), launch_from(variables())
    stop, monitor = watched(config.preempt, config.watchdog, place, launch, run_dir)
    return _group(config.track, place, launch, device, run_dir, stop, monitor)


def _group(
    track: TrackConfig,
    place: RankEnv,
    launch: JobEnv,
    device: torch.device,
    run_dir: RunDir,
    stop: StopRequest,
    monitor: RankMonitor,
) -> RankGroup:
    ranks = Ranks(device)
    return RankGroup(
        place=place,
        launch=launch,
        device=device,
        run_dir=run_dir,
        stop=stop,
        stop_look=StopLook(lambda: stop.is_set, ranks),
        monitor=monitor,
        console=Console(
            silent=not place.is_first, every=track.every, as_json=track.log is LogKind.json
        ),
        ranks=ranks,
    )


@contextmanager
def _telling(monitor: RankMonitor, departure: Departure) -> Iterator[None]:
    """Report an error of this rank alone before it propagates."""
    try:
        yield
        departure.announce()
    except Superseded as error:
        monitor.causes.failed(error)
        raise
    except RunnerError as error:
        if not departure.is_common(_DEPARTURE_SECONDS):
            alone = RuntimeError(f"of this rank alone: {type(error).__name__}: {error}")
            monitor.causes.failed(alone)
            raise alone from error
        raise
    except Exception as error:
        monitor.causes.failed(error)
        raise
    finally:
        end_group(monitor.all_have_met)
