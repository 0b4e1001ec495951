"""What the scripts of drills begin and end with: their ranks, and runs one after another."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist


@contextlib.contextmanager
def ranked() -> Iterator[int]:
    """This rank's number, 0 alone; under torchrun with a group of all, which is left together."""
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("gloo")
    yield dist.get_rank() if dist.is_initialized() else 0
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def in_turn(todo: Sequence[str], run: Callable[[str, list[Any]], Any]) -> dict[str, Any]:
    """The end of each; ``run`` is given its name and what the run before it skipped."""
    ends: dict[str, Any] = {}
    skipped: list[Any] = []
    for name in todo:
        ends[name] = run(name, skipped)
        if isinstance(ends[name], dict):
            skipped = ends[name].get("skipped", skipped)
    return ends
