"""Periodic checks of the ranks: is one slow, does one hold a corrupted copy?

Collective, at steps that all ranks agree on. Every rank journals the same result.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from runner.distributed.agreement import Ranks
from runner.engine.protocol import Engine
from runner.policy.decision.history import Incident
from runner.policy.straggler import RankPace, SlowRuns, Stragglers
from runner.system.error import LeaveError

_PROBE_REPEATS = 5
# Size of the matrices, and products in a row. Eight of 4,096 are the 1.1 TFLOP of one of 8,192, in
# a quarter of the memory: 1.5 to 2 ms of an H100, against which a launch (some us) is nothing.
_PROBE = {"cpu": (192, 1), "cuda": (4096, 8)}
_OTHER_PROBE = (512, 1)
# By bytes of an element.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 18  # 64-bit words at a time
_PLACE = 0x1E3779B97F4A7C15  # odd, and so is the next
_FACTOR = 0x3F58476D1CE4E5B9


class PaceInspector:
    """Compares the ranks' speed.

    Args:
        take_seconds: returns the seconds of the steps since its last call: for each step those
            before its first collective, and all of them.
        note: called with the step and each rank's measurements.
    """

    def __init__(
        self,
        *,
        ranks: Ranks,
        device: torch.device,
        stragglers: Stragglers,
        take_seconds: Callable[[], tuple[list[float], list[float]]],
        report: Callable[[Incident], None],
        note: Callable[[int, Sequence[RankPace]], None] = lambda step, paces: None,
    ) -> None:
        self._ranks = ranks
        self._device = device
        self._stragglers = stragglers
        self._slow_runs = SlowRuns()
        self._take_seconds = take_seconds
        self._report = report
        self._note = note
        size, self._products = _PROBE.get(device.type, _OTHER_PROBE)
        # In the precision of training, because a throttled GPU is slow in its matrix units.
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._matrix = torch.ones(size, size, device=device, dtype=dtype)
        self._product = torch.empty_like(self._matrix)

    def look(self, step: int) -> None:
        """Journal ranks that became slow. Collective."""
        host, whole = self._take_seconds()
        own = [_median(host), self._probe(), _median(whole)]
        world = self._ranks.world_size
        slots = [0.0] * (3 * world)
        slots[3 * self._ranks.rank : 3 * self._ranks.rank + 3] = own
        sums = self._ranks.sum(slots)
        paces = [
            RankPace(host=sums[3 * r], device=sums[3 * r + 1], step=sums[3 * r + 2])
            for r in range(world)
        ]
        self._note(step, paces)
        for straggler in self._stragglers.note(paces):
            self._report(
                Incident(
                    kind="straggler",
                    step=step,
                    decision="go on",
                    reason=straggler.sentence,
                    ranks=(straggler.rank,),
                )
            )
        slow = self._slow_runs.note(paces)
        if slow is not None:
            self._report(
                Incident(kind="throughput", step=step, decision="go on", reason=slow.sentence)
            )

    def _probe(self) -> float:
        """Seconds that fixed matrix products take; the fastest of a few, against noise."""
        seconds = self._device_seconds if self._device.type == "cuda" else self._host_seconds
        return min(seconds() for _ in range(_PROBE_REPEATS))

    def _host_seconds(self) -> float:
        began = time.perf_counter()
        self._multiply()
        return time.perf_counter() - began

    def _device_seconds(self) -> float:
        """By the device's clock: the host's would count its own way to the device."""
        began, ended = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        began.record()
        self._multiply()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3

    def _multiply(self) -> None:
        for _ in range(self._products):
            torch.mm(self._matrix, self._matrix, out=self._product)


class ReplicaInspector:
    """Compares the replicas of a state, bit by bit.

    Args:
        distrust: called with the last step at which the copies were equal (0: never compared);
            later checkpoints are not to be used again.
        next_serial: returns the serial of the next checkpoint; ``distrust`` concerns earlier ones.
    """

    def __init__(
        self,
        *,
        ranks: Ranks,
        engine: Engine,
        report: Callable[[Incident], None],
        distrust: Callable[[int], None],
        next_serial: Callable[[], int],
        good_step: int,
    ) -> None:
        self._ranks = ranks
        self._engine = engine
        self._report = report
        self.distrust = distrust
        self._next_serial = next_serial
        self._good_step = good_step

    def look(self, step: int, good_step: int = 0) -> None:
        """
        Args:
            good_step: a step at which they were equal as well.

        Raises:
            LeaveError: copies differ; the ranks are named. All ranks raise it.
        """
        odd = differing_copies(self._engine, self._ranks)
        self._good_step = max(self._good_step, good_step)
        if not odd:
            self._good_step = step
            return
        reason = (
            f"rank {', '.join(map(str, odd))}: replicated state differs from the other copies "
            f"at step {step}; it was equal at step {self._good_step}"
        )
        self._report(
            Incident(
                kind="replica_mismatch",
                step=step,
                decision=f"restart from a checkpoint no later than step {self._good_step}",
                reason=reason,
                ranks=tuple(odd),
                # If the run ends before the marks are on disk, the next start reads these.
                detail={"good_step": self._good_step, "next_serial": self._next_serial()},
            )
        )
        self.distrust(self._good_step)
        raise LeaveError(reason)


def differing_copies(engine: Engine, ranks: Ranks) -> list[int]:
    """The ranks whose copy of replicated state differs: see :func:`odd_ones`. Collective."""
    copy, tensors = engine.replicated()
    sums = ranks.gather([copy, checksum(tensors)])
    return odd_ones([(int(group), str(value)) for group, value in sums])


def checksum(tensors: Sequence[torch.Tensor]) -> str:
    """A checksum that changes if one bit changes, or if two words or two tensors swap places.

    Each tensor's 64-bit words are mixed with their places and summed in wrapping int64, so the sum
    does not depend on the device or on the order of addition. It is computed in pieces, which
    takes a few MiB besides the tensors.
    """
    numbers: list[object] = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]
    sums = [sum_of_words(tensor) for tensor in tensors]
    numbers += torch.stack(sums).tolist() if sums else []
    return hashlib.sha256(repr(numbers).encode()).hexdigest()


def sum_of_words(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of one tensor's words: int64 scalar on its device, without waiting for it."""
    words = tensor.detach().reshape(-1).view(_WORDS[tensor.element_size()])
    size = min(_PIECE, len(words))
    places = torch.arange(size, device=words.device).mul_(_PLACE)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for piece in torch.split(words, size) if size else ():
        # A polynomial in an odd number, so that the order of the pieces matters, too.
        total.mul_(_FACTOR).add_(_mixed(piece, places[: len(piece)]).sum())
    return total


def _mixed(words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Mix each word's bits with its place, not linearly; returns int64 [words].

    The words are multiplied by an odd number and xored with a shift of themselves, as in splitmix64
    (Steele, Lea and Flood, 2014). For each place this is one to one, so a changed word changes the
    result. A sum of a linear function would not notice that two words changed places.
    """
    mixed = torch.add(words, places).mul_(_FACTOR)
    return mixed.bitwise_xor_(mixed >> 29)


def odd_ones(sums: Sequence[tuple[int, str]]) -> list[int]:
    """Ranks whose replica differs from the majority; all ranks if there is no majority."""
    odd: list[int] = []
    for group in {copy for copy, _ in sums}:
        members = {rank: value for rank, (copy, value) in enumerate(sums) if copy == group}
        counts = Counter(members.values()).most_common()
        if len(counts) > 1:
            most, count = counts[0]
            clear = count * 2 > len(members)
            odd += [rank for rank, value in members.items() if not clear or value != most]
    return sorted(odd)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0
