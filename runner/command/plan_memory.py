"""``python -m runner plan --ranks N key=value ...``: what a run would take of a rank's memory.

Nothing of it is started: shapes alone are computed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from runner.config.compose import compose
from runner.config.schema import Precision
from runner.config.validate import check
from runner.distributed.env import RankEnv
from runner.session import parts
from runner.session.corpus import open_dataset
from runner.startup.memory_need import MemoryNeed, PlannedMemory, planned_memory
from runner.system.error import ConfigError
from runner.system.parsing import json_text
from runner.system.units import format_bytes


def plan_memory(
    overrides: Sequence[str],
    *,
    config_dir: str | None,
    ranks: int,
    ranks_per_node: int,
    room_gib: float | None,
    as_json: bool,
) -> int:
    """Count and print; returns the exit code.

    Args:
        ranks_per_node: what a node has at most.
        room_gib: memory of a rank's device.

    Raises:
        ConfigError: a setting or option is out of bounds.
        DataError: the data cannot be opened.
    """
    for name, number in (("--ranks", ranks), ("--ranks-per-node", ranks_per_node)):
        if number < 1:
            raise ConfigError(f"{name} {number}: must be at least 1")
    if room_gib is not None and not room_gib > 0:
        raise ConfigError(f"--room-gib {room_gib}: must be more than 0")
    config = compose(list(overrides), config_dir=config_dir)
    check(config, world_size=ranks)
    if config.compute.precision is Precision.auto:
        config.compute.precision = Precision.bf16
    place = RankEnv(
        rank=0, world_size=ranks, local_rank=0, local_world_size=min(ranks, ranks_per_node)
    )
    dataset = open_dataset(config)
    planned = planned_memory(config, parts.blueprint(config, dataset), dataset, place)
    room = None if room_gib is None else round(room_gib * (1 << 30))
    precision = config.compute.precision.value
    if as_json:
        sys.stdout.write(json_text(_json(planned, room, precision), indent=1) + "\n")
    else:
        title = f"Memory of a rank of {ranks:,}, parallel={config.parallel.kind.value}, {precision}"
        _print(title, planned, room)
    return 0


def _json(planned: PlannedMemory, room: int | None, precision: str) -> dict[str, Any]:
    need = planned.need
    return {
        **asdict(need),
        "total": _total(need),
        "precision": precision,
        "room": room,
        "fitting_micro_size": None if room is None else need.fitting(room),
        "activations_unknown": planned.unknown or None,
    }


def _total(need: MemoryNeed) -> int:
    return need.fixed + (need.activations or 0)


def _print(title: str, planned: PlannedMemory, room: int | None) -> None:
    need = planned.need
    table = Table("what", "bytes", "how it is counted", title=title, title_justify="left")
    table.columns[1].justify = "right"
    table.add_row("parameters", format_bytes(need.weights), "FP32, this rank's part")
    table.add_row("gradients", format_bytes(need.gradients), "FP32, reduced")
    table.add_row("moments", format_bytes(need.optimizer), "all that the optimizer keeps")
    table.add_row("gathered weights", format_bytes(need.gathered), "to compute with, at most")
    if need.activations is None:
        table.add_row("activations", "not known", planned.unknown)
    else:
        of_samples = f"kept for the backward pass of {need.samples} samples (batch.micro_size)"
        table.add_row("activations", format_bytes(need.activations), of_samples)
    table.add_section()
    table.add_row("together", format_bytes(_total(need)), "without what libraries keep")
    table.add_row("snapshots", format_bytes(need.snapshots), "in the host's memory")
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    if room is not None:
        console.print(_fits(need, room))


def _fits(need: MemoryNeed, room: int) -> str:
    most = need.fitting(room)
    if most is None:
        left = room - need.fixed
        return (
            f"{format_bytes(room)} would leave {format_bytes(left)} for activations"
            if left > 0
            else f"{format_bytes(room)} would not hold weights, gradients and moments"
        )
    if most == 0:
        return (
            f"{format_bytes(room)} would not hold a micro-batch of one sample: use more ranks, "
            "parallel=fsdp or zero3, compute.recompute=blocks or parallel.offload=cpu"
        )
    return f"{format_bytes(room)} would hold micro-batches of up to {most:,} samples"
