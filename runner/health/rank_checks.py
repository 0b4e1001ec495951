"""Periodic checks of the ranks: is one slow, does one hold a corrupted copy?

Collective, at steps that all ranks agree on. Every rank journals the same result.

    python -m runner.health.rank_checks SECONDS

checks the devices of one node alone, before others depend on it. It prints what is wrong with one;
nothing if all give equal bits, or none could be asked.
"""

from __future__ import annotations

import hashlib
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from runner.distributed.agreement import Ranks
from runner.distributed.device import device_name
from runner.engine.protocol import Engine
from runner.health.nvml import GpuHealth, GpuMeter, gpu_health
from runner.policy.decision.history import Incident
from runner.policy.outlier_ranks import GPU_COLUMNS, RankPace, SlowRuns, Stragglers
from runner.policy.restart import HARDWARE
from runner.system.error import LeaveError
from runner.system.process import host_name
from runner.system.units import name_ranks

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
        self._meter = GpuMeter(device_name(device))
        size, self._products = _PROBE.get(device.type, _OTHER_PROBE)
        # In the precision of training, because a throttled GPU is slow in its matrix units.
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._matrix = torch.ones(size, size, device=device, dtype=dtype)
        self._product = torch.empty_like(self._matrix)

    def look(self, step: int) -> None:
        """Journal ranks that became slow. Collective."""
        host, whole = self._take_seconds()
        gpu = self._meter.read() or [0.0] * len(GPU_COLUMNS)
        own = [_median(host), self._probe(), _median(whole), *gpu]
        size, rank = len(own), self._ranks.rank
        slots = [0.0] * (size * self._ranks.world_size)
        slots[size * rank : size * (rank + 1)] = own
        sums = self._ranks.sum(slots)
        rows = [sums[at : at + size] for at in range(0, len(sums), size)]
        paces = [
            RankPace(host=host, device=device, step=step, gpu=gpu)
            for host, device, step, *gpu in rows
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


@dataclass(eq=False)
class ReplicaInspector:
    """Compares the replicas of a state, bit by bit.

    Args:
        distrust: called with the last step at which the copies were equal (0: never compared);
            later checkpoints are not to be used again.
        next_serial: returns the serial of the next checkpoint; ``distrust`` concerns earlier ones.
    """

    ranks: Ranks
    engine: Engine
    report: Callable[[Incident], None]
    distrust: Callable[[int], None]
    next_serial: Callable[[], int]
    good_step: int

    def look(self, step: int, good_step: int = 0) -> None:
        """
        Args:
            good_step: a step at which they were equal as well.

        Raises:
            LeaveError: copies differ; the ranks are named. All ranks raise it.
        """
        odd = differing_copies(self.engine, self.ranks)
        self.good_step = max(self.good_step, good_step)
        if not odd:
            self.good_step = step
            return
        reason = (
            f"{name_ranks(odd)}: replicated state differs from the other copies "
            f"at step {step}; it was equal at step {self.good_step}"
        )
        self.report(
            Incident(
                kind="replica_mismatch",
                step=step,
                decision=f"restart from a checkpoint no later than step {self.good_step}",
                reason=reason,
                ranks=tuple(odd),
                # If the run ends before the marks are on disk, the next start reads these.
                detail={"good_step": self.good_step, "next_serial": self.next_serial()},
            )
        )
        self.distrust(self.good_step)
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


# Tests every rank's device before an attempt: a product, a sum over ranks, NVML.
#
# A device that computes wrongly mostly does so without an error. Equal devices must give equal bits
# for one product, each time; a device that differs is named if the others are a majority.


_SIZE = {"cpu": 128, "cuda": 4096}
_SECONDS = {"cpu": 0.0, "cuda": 1.0}
_FEWEST = 2  # products: one alone cannot differ from itself
_SUMMED = {"cpu": 1 << 12, "cuda": 1 << 22}  # elements
_PERIOD = 251  # a prime, so that neighbours in memory and whole pages hold different numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """What one rank measured. Ranks exchange it as JSON.

    Args:
        kind: model and libraries; devices of one kind must give equal bits.
        bits: a digest of each product, in order.
        wrong_sums: number of wrong elements in the sum over ranks.
    """

    host: str
    kind: str
    bits: list[str]
    wrong_sums: int
    broken: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFault:
    """A device that must not be trained on.

    Args:
        ranks: the ranks whose devices are at fault; empty if that is unknown.
        host: the host of the first of them, which a supervisor leaves out; empty if unknown.
    """

    ranks: tuple[int, ...] = ()
    host: str = ""
    reason: str

    def incident(
        self,
        *,
        step: int,
        incarnation: int,
        signature: str = "",
        decision: str = "restart from the ring",
    ) -> Incident:
        """The journal line, as for any crash.

        Args:
            signature: what is alike at each such crash; empty: that of a check of devices.
        """
        return Incident(
            kind="crash",
            step=step,
            decision=decision,
            reason=self.reason,
            ranks=self.ranks,
            detail={
                "incarnation": incarnation,
                "cause": HARDWARE,
                "signature": signature or f"device check {self.reason.partition(': ')[2]}",
                "host": self.host,
                "traceback": "",
            },
        )


def check_devices(
    device: torch.device, ranks: Ranks, say: Callable[[str], None], *, is_spoilt: bool = False
) -> DeviceFault | None:
    """Test the device of each rank; on CUDA this takes about a second. Collective.

    Args:
        is_spoilt: for drills: this rank's products are wrong.
    """
    own = replace(report_of(device, is_spoilt), wrong_sums=_wrong_sums(device, ranks))
    reports = [DeviceReport(**fields) for fields in ranks.gather(asdict(own))]
    for rank, report in enumerate(reports):
        for warning in report.warnings:
            say(f"warning: rank {rank} on {report.host}: {warning}")
    return faulty_device(reports)


def report_of(device: torch.device, is_spoilt: bool = False) -> DeviceReport:
    """Test a device alone: a product of two matrices, several times, and NVML."""
    uuid = device_name(device)
    health = (gpu_health(uuid) if uuid else None) or GpuHealth()
    return DeviceReport(
        host=host_name(),
        kind=device_kind(device),
        bits=_products(device, is_spoilt),
        wrong_sums=0,
        broken=health.broken,
        warnings=health.warnings,
    )


def burn_in(seconds: float) -> str:
    """What is wrong with this node's devices; "" if nothing is. A device counts as a rank."""
    until = time.monotonic() + seconds
    count = torch.cuda.device_count()
    devices = [torch.device("cuda", number) for number in range(count)] or [torch.device("cpu")]
    while True:
        fault = faulty_device([report_of(device) for device in devices])
        if fault is not None:
            return fault.reason
        if time.monotonic() >= until:
            return ""


def faulty_device(reports: Sequence[DeviceReport]) -> DeviceFault | None:
    """Decide from the reports of all ranks, in rank order, whether a device is faulty. Pure."""
    by_rank = list(enumerate(reports))
    if broken := [rank for rank, one in by_rank if one.broken]:
        return _fault(broken, reports, reports[broken[0]].broken)
    if unsteady := [rank for rank, one in by_rank if len(set(one.bits)) > 1]:
        message = "its device gives other bits for the same product of two matrices each time"
        return _fault(unsteady, reports, message)
    kinds = [one.kind for one in reports]
    groups = [(kinds.index(one.kind), one.bits[0]) for one in reports]
    if odd := odd_ones(groups):
        if len(odd) < sum(kind == kinds[odd[0]] for kind in kinds):
            message = "its device gives other bits for one product of two matrices than its like"
            return _fault(odd, reports, message)
        return DeviceFault(
            reason=f"{name_ranks(odd)}: equal devices give different bits for one product of two "
            "matrices; without a majority it is unknown which is wrong"
        )
    if wrong := [rank for rank, one in by_rank if one.wrong_sums]:
        return DeviceFault(
            reason=f"{name_ranks(wrong)}: an all-reduce of known numbers gave wrong ones "
            f"({reports[wrong[0]].wrong_sums} elements); a device or a link is broken"
        )
    return None


def _fault(ranks: Sequence[int], reports: Sequence[DeviceReport], message: str) -> DeviceFault:
    host = reports[ranks[0]].host
    return DeviceFault(
        ranks=tuple(ranks), host=host, reason=f"{name_ranks(ranks)} on {host}: {message}"
    )


def device_kind(device: torch.device) -> str:
    """Devices and libraries of one kind give equal bits."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} {torch.version.cuda or torch.version.hip}"
    threads = torch.get_num_threads()  # the sum is cut into one part for each rank
    return f"{_cpu_model()} {torch.backends.cpu.get_cpu_capability()} {threads} {torch.__version__}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _products(device: torch.device, is_spoilt: bool) -> list[str]:
    """Multiply as training does: in a GPU's matrix units."""
    size = _SIZE.get(device.type, 1024)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    numbers = torch.arange(size * size, device=device) % _PERIOD
    one = ((numbers - _PERIOD // 2) / 128).to(dtype).reshape(size, size)  # exact in BF16
    other = one.flip(0).contiguous()
    other[0, 0] += float(is_spoilt)
    until = time.monotonic() + _SECONDS.get(device.type, 0.0)
    digests: list[str] = []
    while len(digests) < _FEWEST or time.monotonic() < until:
        digests.append(checksum([torch.mm(one, other)]))
    return digests if len(set(digests)) > 1 else digests[:_FEWEST]


def _wrong_sums(device: torch.device, ranks: Ranks) -> int:
    numbers = torch.arange(_SUMMED.get(device.type, 1 << 12), device=device) % _PERIOD
    packed = (numbers * (ranks.rank + 1)).float()
    ranks.all_reduce(packed)
    # Whole numbers are exact in FP32 up to 2^24, enough for 360 ranks; FP64 beyond that.
    total = ranks.world_size * (ranks.world_size + 1) // 2
    expected = (numbers * total).float()
    if total * _PERIOD >= 1 << 24:
        return int(((packed - expected).abs() > 1e-5 * expected).sum())
    return int((packed != expected).sum())


if __name__ == "__main__":
    sys.stdout.write(burn_in(float(sys.argv[1])))
