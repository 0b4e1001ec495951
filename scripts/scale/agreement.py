"""One rank's part of gathering a JSON value from all: memory, copies, parsing; no network."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from runner.distributed.agreement import Ranks


def measure(world_size: int) -> dict[str, Any]:
    """Seconds of CPU on each rank, of the second call."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        ranks, value = Ranks(torch.device("cpu")), {"host": "gpu00017", "numbers": list(range(20))}
        for _ in range(2):
            began = time.process_time()
            gathered = ranks.gather(value)
            seconds = time.process_time() - began
        assert len(gathered) == world_size and gathered[0] == value
        return {"cpu_seconds": round(seconds, 4)}
    finally:
        dist.destroy_process_group()
