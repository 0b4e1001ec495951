"""The check of devices on one node alone, before others depend on it.

    python -m runner.health.burn_in SECONDS

Prints what is wrong with a device; nothing if all give equal bits, or none could be asked.
"""

from __future__ import annotations

import sys
import time

import torch

from runner.distributed.device import device_name
from runner.health.checks import DeviceReport, device_kind, judge, products
from runner.health.nvml import GpuHealth, gpu_health
from runner.system.process import host_name


def burn_in(seconds: float, *, spoilt: int | None = None) -> str:
    """What is wrong with this node's devices; "" if nothing is. A device counts as a rank.

    Args:
        spoilt: for drills: the products of this device are wrong.
    """
    until = time.monotonic() + seconds
    count = torch.cuda.device_count()
    devices = [torch.device("cuda", number) for number in range(count)] or [torch.device("cpu")]
    while True:
        reports = [_report(device, number == spoilt) for number, device in enumerate(devices)]
        fault = judge(reports)
        if fault is not None:
            return fault.reason
        if time.monotonic() >= until:
            return ""


def _report(device: torch.device, is_spoilt: bool) -> DeviceReport:
    uuid = device_name(device)
    health = (gpu_health(uuid) if uuid else None) or GpuHealth()
    return DeviceReport(
        host=host_name(),
        kind=device_kind(device),
        bits=products(device, is_spoilt),
        wrong_sums=0,
        broken=health.broken,
    )


if __name__ == "__main__":
    sys.stdout.write(burn_in(float(sys.argv[1])))
