"""The agreement of one process with itself, where nobody has made a process group."""

from __future__ import annotations

import json
from typing import Any

import torch

from runner.distributed.agreement import Ranks


class LoneRanks(Ranks):
    """:class:`Ranks` of a world of one."""

    def __init__(self) -> None:
        self.rank = 0
        self.world_size = 1

    def sum(self, numbers: list[float]) -> list[float]:
        return list(numbers)

    def all_reduce(self, packed: torch.Tensor) -> None:
        """Nothing is added."""

    def gather(self, value: Any) -> list[Any]:
        return [json.loads(json.dumps(value))]

    def from_first(self, value: Any) -> Any:
        return json.loads(json.dumps(value))
