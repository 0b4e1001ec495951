"""What ranks tell each other: sums of a few numbers, small JSON values, and failures.

Everything here is a collective: every rank calls it, in the same order. Values travel as
JSON bytes, never pickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from runner.error import RankError, RunnerError

T = TypeVar("T")


class Ranks:
    """The agreement among the ranks of the default group, over tensors on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def sum(self, numbers: list[float]) -> list[float]:
        """Element-wise FP64 sum over ranks; the same bits on every rank."""
        packed = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        dist.all_reduce(packed)
        return [float(value) for value in packed.tolist()]

    def gather(self, value: Any) -> list[Any]:
        """The JSON value of every rank, by rank, on every rank."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [int(size) for size in self.sum(self._own_slot(len(data)))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self._device)
        padded[: len(data)] = data.to(self._device)
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return [
            json.loads(bytes(part[:size].tolist()))
            for part, size in zip(parts, sizes, strict=True)
        ]

    def _own_slot(self, number: float) -> list[float]:
        return [number if rank == self.rank else 0.0 for rank in range(self.world_size)]

    def from_first(self, value: Any) -> Any:
        """Rank 0's JSON value, on every rank; the others' argument is ignored."""
        data = bytearray(json.dumps(value if self.rank == 0 else None).encode())
        size = int(self.sum([float(len(data)) if self.rank == 0 else 0.0])[0])
        buffer = torch.zeros(size, dtype=torch.uint8, device=self._device)
        if self.rank == 0:
            buffer.copy_(torch.frombuffer(data, dtype=torch.uint8))
        dist.broadcast(buffer, src=0)
        return json.loads(bytes(buffer.tolist()))

    def all_or_none(self, what: str, work: Callable[[], T]) -> T:
        """Run ``work`` everywhere; if it failed anywhere, every rank raises the same error.

        Raises:
            RunnerError: the class and text of the lowest failing rank's own error when that
                was ours; :class:`RankError` with every failing rank's words otherwise.
        """
        result: list[T] = []
        own: dict[str, str] = {}
        try:
            result.append(work())
        except Exception as error:  # whatever it was, the others are waiting for us
            own = {"type": type(error).__name__, "text": str(error) or type(error).__name__}
            local = error
        if self.sum([1.0 if own else 0.0])[0] == 0:
            return result[0]
        reports = self.gather(own)
        raised = _agreed_error(what, reports)
        if own:
            raise raised from local
        raise raised


def _agreed_error(what: str, reports: list[dict[str, str]]) -> RunnerError:
    failed = {rank: report for rank, report in enumerate(reports) if report}
    first = next(iter(failed.values()))
    ours = {kind.__name__: kind for kind in _subclasses(RunnerError)}
    if first["type"] in ours and all(report == first for report in failed.values()):
        return ours[first["type"]](first["text"])
    words = "; ".join(f"rank {rank}: {r['type']}: {r['text']}" for rank, r in failed.items())
    kind = ours.get(first["type"], RankError)
    return kind(f"{what} failed on {len(failed)} of {len(reports)} ranks: {words}")


def _subclasses(kind: type[RunnerError]) -> list[type[RunnerError]]:
    children = kind.__subclasses__()
    return [kind, *(deeper for child in children for deeper in _subclasses(child))]
