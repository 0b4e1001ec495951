"""Tests every rank's device before an attempt: a product, a sum over ranks, NVML.

A device that computes wrongly mostly does so without an error. Equal devices must give equal bits
for one product, each time; a device that differs is named if the others are a majority.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from runner.distributed.agreement import Ranks
from runner.distributed.device import device_name
from runner.health.checks import checksum, odd_ones
from runner.health.flight_recorder import named
from runner.health.nvml import GpuHealth, gpu_health
from runner.policy.decision.history import Incident
from runner.system.process import host_name

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

    def incident(self, *, step: int, incarnation: int) -> Incident:
        """The journal line, as for any crash."""
        return Incident(
            kind="crash",
            step=step,
            decision="restart from the ring",
            reason=self.reason,
            ranks=self.ranks,
            detail={
                "incarnation": incarnation,
                "cause": "hardware",
                "signature": f"device check {self.reason.partition(': ')[2]}",
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
    own = _report_on(device, ranks, is_spoilt)
    reports = [DeviceReport(**fields) for fields in ranks.gather(asdict(own))]
    for rank, report in enumerate(reports):
        for warning in report.warnings:
            say(f"warning: rank {rank} on {report.host}: {warning}")
    return judge(reports)


def _report_on(device: torch.device, ranks: Ranks, is_spoilt: bool) -> DeviceReport:
    uuid = device_name(device)
    health = (gpu_health(uuid) if uuid else None) or GpuHealth()
    return DeviceReport(
        host=host_name(),
        kind=device_kind(device),
        bits=_products(device, is_spoilt),
        wrong_sums=_wrong_sums(device, ranks),
        broken=health.broken,
        warnings=health.warnings,
    )


def judge(reports: Sequence[DeviceReport]) -> DeviceFault | None:
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
            reason=f"rank {named(odd)}: equal devices give different bits for one product of two "
            "matrices; without a majority it is unknown which is wrong"
        )
    if wrong := [rank for rank, one in by_rank if one.wrong_sums]:
        return DeviceFault(
            reason=f"rank {named(wrong)}: an all-reduce of known numbers gave wrong ones "
            f"({reports[wrong[0]].wrong_sums} elements); a device or a link is broken"
        )
    return None


def _fault(ranks: Sequence[int], reports: Sequence[DeviceReport], message: str) -> DeviceFault:
    host = reports[ranks[0]].host
    return DeviceFault(
        ranks=tuple(ranks), host=host, reason=f"rank {named(ranks)} on {host}: {message}"
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
