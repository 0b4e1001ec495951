"""Agreement for a single process without a process group."""

from __future__ import annotations

import json
from typing import Any

import torch

from runner.distributed.agreement import Ranks


class SingleProcessRanks(Ranks):
    """:class:`Ranks` for a world size of one."""

    def __init__(self) -> None:
        self.rank = 0
        self.world_size = 1

    def sum(self, numbers: list[float]) -> list[float]:
        return list(numbers)

    def all_reduce(self, packed: torch.Tensor) -> None:
        """Does nothing: there is no other rank."""

    def gather(self, value: Any) -> list[Any]:
        return [json.loads(json.dumps(value))]

    def from_first(self, value: Any) -> Any:
        return json.loads(json.dumps(value))
