"""Turns keyword arguments into the settings of a run, checked as on the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args, get_type_hints

from runner.config.compose import suggestion, type_name
from runner.config.schema import ParallelKind, Precision, RunConfig, ScheduleKind, former_key
from runner.config.validate import check
from runner.policy.retention.records import FEWEST_SLOTS
from runner.system.error import ConfigError

# Settings that need our engine, or storage that the embedded guard does not use.
_NOT_HERE = {
    "remote": "copy the clean checkpoints of out/ring yourself",
    "memory_mirror": "snapshots stay on their own node",
    "remedy": "the guard cannot compute a step of your loop again",
    "cooldown_steps": "the learning rate is your schedule's",
}
_RESUME = ("allow_change", "take_over", "stale_seconds")


def run_config(
    out: str | Path,
    *,
    every: int | str,
    accumulate: int,
    skip: Any,
    given: dict[str, Any],
) -> RunConfig:
    """The settings of an embedded run; unused ones keep their defaults.

    Args:
        given: of ``guard.*``, ``checkpoint.*``, ``preempt.*`` and ``resume.*``, without the group.

    Raises:
        ConfigError: an unknown key, or a value that cannot be.
    """
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ConfigError(f"accumulate={accumulate!r}: must be an integer of at least 1")
    if isinstance(skip, str) or not isinstance(skip, Iterable):
        raise ConfigError(f"skip={skip!r}: must be ranges of batch numbers, [[400, 432]]")
    config = RunConfig(out=str(out))
    config.compute.precision = Precision.fp32  # unused: the script chooses it
    config.parallel.kind = ParallelKind.ddp
    config.schedule.kind = ScheduleKind.constant
    config.batch.global_size = config.batch.micro_size = accumulate
    config.data.skip = [list(pair) if isinstance(pair, Iterable) else pair for pair in skip]
    config.watchdog.enabled = False
    config.guard.cooldown_steps = 0
    config.checkpoint.every = every
    if isinstance(every, int):
        config.checkpoint.clean_after = max(1, min(config.checkpoint.clean_after, every))
    for key, value in given.items():
        _set(config, key, value)
    check(config, world_size=1)
    return config


# Settings of checkpoint.*, preempt.* and resume.* that a ring without the guard uses.
_OF_RING = (
    "keep",
    "keep_every",
    "clean_after",
    "write_mib_per_second",
    "memory_slots",
    "memory_limit_gib",
    "grace_seconds",
    "margin_seconds",
    *_RESUME,
)
_RARELY = 1_000_000  # steps; the script decides when to save


def ring_config(out: str | Path, *, memory: bool, given: dict[str, Any]) -> RunConfig:
    """The settings of a ring without the guard.

    Args:
        memory: whether snapshots are kept in memory.
        given: of :data:`_OF_RING`.

    Raises:
        ConfigError: an unknown key, or a value that cannot be.
    """
    for key, value in given.items():
        if key not in _OF_RING:
            hint = suggestion(key, set(_OF_RING))
            raise ConfigError(f"{key}={value!r}: no such setting{hint}; {', '.join(_OF_RING)}")
    settings = {"memory_slots": FEWEST_SLOTS} if memory else {"memory_every": 0}
    settings |= {"clean_after": 1, **given}
    return run_config(out, every=_RARELY, accumulate=1, skip=[], given=settings)


def _set(config: RunConfig, key: str, value: Any) -> None:
    if key in _NOT_HERE:
        raise ConfigError(
            f"{key}={value!r}: is not available in a loop of your own: {_NOT_HERE[key]}"
        )
    specs = {
        spec.name: (group, spec)
        for group in (config.resume, config.preempt, config.checkpoint, config.guard)
        for spec in dataclasses.fields(group)
        if group is not config.resume or spec.name in _RESUME
    }
    if key not in specs:
        for name in ("guard", "checkpoint", "preempt", "resume"):
            if what := former_key(f"{name}.{key}"):
                raise ConfigError(f"{key}={value!r}: {what}")
        known = specs.keys() - _NOT_HERE.keys()
        raise ConfigError(
            f"{key}={value!r}: no such setting{suggestion(key, known)}; guard.*, checkpoint.* "
            "and preempt.* of docs/configuration.md are taken, without the group"
        )
    group, spec = specs[key]
    hint = get_type_hints(type(group))[key]
    kinds = get_args(hint) or (hint,)
    kinds = (*kinds, int) if float in kinds else kinds
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ConfigError(f"{key}={value!r}: must be {type_name(spec)}")
    setattr(group, key, value)
