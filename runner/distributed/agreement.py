"""What ranks exchange: sums of a few numbers, small JSON values, and failures.

Everything here is a collective: every rank calls it, in the same order. Values travel as
JSON bytes, never pickled.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from runner.distributed.rendezvous import difference
from runner.policy.decision.signals import NUM_LANES, all_equal, lanes
from runner.system.error import RankError, RunnerError

T = TypeVar("T")
FINGERPRINT_SIZE = 2 * NUM_LANES
# All-gather into one tensor; torch 2.13 renamed it and warns of the old name.
_gather_flat: Callable[[torch.Tensor, torch.Tensor], Any] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)
_LOOK_SECONDS = 0.5


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

    def all_reduce(self, packed: torch.Tensor) -> None:
        """Element-wise sum over ranks, in place; does not wait for the device."""
        dist.all_reduce(packed)

    def fingerprint(self, identity: Mapping[str, Any]) -> list[float]:
        """FINGERPRINT_SIZE numbers for ``identity``; :meth:`require_alike` compares their sums."""
        numbers = lanes(repr(identity))
        return [float(n) for n in numbers] + [float(n * n) for n in numbers]

    def require_alike(self, sums: Sequence[float], identity: Mapping[str, Any]) -> None:
        """Check that all ranks had the same identity. Collective if they had not.

        Args:
            sums: of all ranks' :meth:`fingerprint`.
            identity: this rank's.

        Raises:
            RankError: identities differ; names what differs, and on which ranks.
        """
        if not all_equal(sums[:NUM_LANES], sums[NUM_LANES:], self.world_size):
            raise RankError(f"ranks drifted apart: {difference(self.gather(identity))}")

    def may_repeat(self, step: int) -> bool:
        """Whether the ranks may compute this step speculatively, and then again."""
        return True

    def gather(self, value: Any) -> list[Any]:
        """The JSON value of every rank, by rank, on every rank."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        # One tensor for all: a list of them would cost a copy, and a transfer, for each rank.
        sizes = torch.empty(self.world_size, dtype=torch.int64, device=self._device)
        _gather_flat(sizes, torch.tensor([len(data)], device=self._device))
        lengths = sizes.tolist()
        longest = max(lengths)
        padded = torch.zeros(longest, dtype=torch.uint8, device=self._device)
        padded[: len(data)] = data.to(self._device)
        parts = torch.empty(self.world_size * longest, dtype=torch.uint8, device=self._device)
        _gather_flat(parts, padded)
        packed = parts.cpu().numpy().data
        return [
            json.loads(bytes(packed[at * longest : at * longest + length]))
            for at, length in enumerate(lengths)
        ]

    def from_first(self, value: Any) -> Any:
        """Rank 0's JSON value, on every rank; the others' argument is ignored."""
        data = bytearray(json.dumps(value if self.rank == 0 else None).encode())
        size = int(self.sum([float(len(data)) if self.rank == 0 else 0.0])[0])
        buffer = torch.zeros(size, dtype=torch.uint8, device=self._device)
        if self.rank == 0:
            buffer.copy_(torch.frombuffer(data, dtype=torch.uint8))
        dist.broadcast(buffer, src=0)
        return json.loads(buffer.cpu().numpy().tobytes())

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
        except Exception as error:  # whatever the error was, the other ranks wait for this one
            own = {"type": type(error).__name__, "text": str(error) or type(error).__name__}
            local = error
        if self.sum([1.0 if own else 0.0])[0] == 0:
            return result[0]
        reports = self.gather(own)
        raised = _agreed_error(what, reports)
        if own:
            raise raised from local
        raise raised

    def all_or_none_patiently(self, what: str, work: Callable[[], T]) -> T:
        """As :meth:`all_or_none`, for ``work`` that may outlast ``parallel.timeout_seconds``.

        It runs in a thread. Meanwhile the ranks report every half second who is done, so
        that no collective waits longer; the watchdog finds a disk that hangs.
        """
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:  # raised by the waiting thread
                done.set_exception(error)

        # Not a pool: Python waits for its threads at exit, even when a disk hangs.
        threading.Thread(target=run, name=what, daemon=True).start()
        while True:
            wait([done], timeout=_LOOK_SECONDS)
            if self.sum([float(done.done())])[0] == self.world_size:
                return self.all_or_none(what, done.result)


def _agreed_error(what: str, reports: list[dict[str, str]]) -> RunnerError:
    failed = {rank: report for rank, report in enumerate(reports) if report}
    first = next(iter(failed.values()))
    kinds = {kind.__name__: kind for kind in _subclasses(RunnerError)}
    if first["type"] in kinds and all(report == first for report in failed.values()):
        return kinds[first["type"]](first["text"])
    message = "; ".join(f"rank {rank}: {r['type']}: {r['text']}" for rank, r in failed.items())
    kind = kinds.get(first["type"], RankError)
    return kind(f"{what} failed on {len(failed)} of {len(reports)} ranks: {message}")


def _subclasses(kind: type[RunnerError]) -> list[type[RunnerError]]:
    children = kind.__subclasses__()
    return [kind, *(deeper for child in children for deeper in _subclasses(child))]
