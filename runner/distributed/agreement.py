"""What ranks exchange: sums of a few numbers, small JSON values, and failures.

Everything here is a collective: every rank calls it, in the same order. Values travel as
JSON bytes, never pickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from runner.distributed.rendezvous import difference
from runner.policy.decision.signals import NUM_LANES, all_equal, lanes
from runner.system.error import RankError, RunnerError
from runner.system.process import in_thread

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

    def maximise(self, packed: torch.Tensor) -> None:
        """Element-wise maximum over ranks, in place; does not wait for the device."""
        dist.all_reduce(packed, op=dist.ReduceOp.MAX)

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

    def of_first(self, what: str, work: Callable[[], Any]) -> Any:
        """Run ``work`` on rank 0; its JSON value, on every rank. Raises as :meth:`all_or_none`."""
        return self.from_first(self.all_or_none(what, lambda: work() if self.rank == 0 else None))

    def all_or_none_patiently(self, what: str, work: Callable[[], T]) -> T:
        """As :meth:`all_or_none`, for ``work`` that may outlast ``parallel.timeout_seconds``.

        It runs in a thread. Meanwhile the ranks report every half second who is done, so
        that no collective waits longer; the watchdog finds a disk that hangs.
        """
        future = in_thread(work, what)
        while True:
            wait([future], _LOOK_SECONDS)
            if self.sum([float(future.done())])[0] == self.world_size:
                return cast(T, self.all_or_none(what, lambda: _outcome(future)))


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


# Work that may take hours on some ranks while the others wait, without waiting in a collective.
#
# Each rank works in a thread. Meanwhile the ranks report every half second whether they
# are done, whether one has failed or is asked to stop, and whether work proceeds: no collective
# lasts longer than that, and the watchdog sees proceeding work as progress, and hanging work
# as a hang, on every rank.


_END_SECONDS = 10.0  # for a cancelled thread to clean up


class Cancelled(BaseException):
    """The work is no longer wanted: another rank failed, or the run was asked to stop.

    Not an ``Exception``: what the work calls may take those for faults of its own and try again.
    """


class Pulse:
    """The progress of the work. The working thread sets it, the waiting thread reads it."""

    def __init__(self) -> None:
        self.now: tuple[str, int, int] = ("", 0, 0)  # what, done, total
        self.count = 0
        self._is_cancelled = False

    def tell(self, what: str, done: int, total: int) -> None:
        """
        Raises:
            Cancelled: the work must end.
        """
        if self._is_cancelled:
            raise Cancelled("the work was cancelled")
        if (what, done, total) != self.now:
            self.now = (what, done, total)
            self.count += 1

    def cancel(self) -> None:
        """Make the next :meth:`tell` raise."""
        self._is_cancelled = True


def _outcome(future: Future[T]) -> T | None:
    """The result; None if the work was cancelled because another rank failed."""
    error = future.exception() if future.done() else Cancelled()
    if isinstance(error, Cancelled):
        return None
    if error is not None and not isinstance(error, Exception):
        raise RankError(f"{type(error).__name__}: {error}") from error
    return future.result()


def all_or_none_slowly(
    ranks: Ranks,
    what: str,
    work: Callable[[Callable[[str, int, int], None]], T],
    *,
    moved: Callable[[], None],
    show: Callable[[str, int, int], None],
    is_asked_to_stop: Callable[[], bool],
) -> T | None:
    """Run ``work`` everywhere; if it failed anywhere, every rank raises the same error. Collective.

    Args:
        work: takes the :class:`Pulse` to which it reports its progress.
        moved: called when any rank's work has progressed.
        show: called with this rank's progress.

    Returns:
        The result of ``work``; None, on all ranks alike, when some rank was asked to stop.

    Raises:
        RunnerError: as ``Ranks.all_or_none``.
    """
    pulse = Pulse()
    future = in_thread(lambda: work(pulse.tell), what)
    last = -1.0
    while True:
        wait([future], _LOOK_SECONDS)
        is_done = future.done()
        has_failed = is_done and future.exception() is not None
        own = [float(is_done), float(has_failed), float(is_asked_to_stop())]
        done, failed, stop, count = ranks.sum([*own, float(pulse.count)])
        if count != last:
            last = count
            moved()
        if done == ranks.world_size or failed or stop:
            break
        show(*pulse.now)
    pulse.cancel()
    wait([future], _END_SECONDS)
    if stop and not failed:
        return None
    if not failed:
        show(*pulse.now)
    return ranks.all_or_none(what, lambda: _outcome(future))
