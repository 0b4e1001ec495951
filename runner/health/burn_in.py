"""The check of devices on one node alone, before others depend on it.

    python -m runner.health.burn_in SECONDS

Prints what is wrong with a device; nothing if all give equal bits, or none could be asked.
"""

from __future__ import annotations

import sys
import time

import torch

from runner.health.rank_checks import judge, report_of


def burn_in(seconds: float) -> str:
    """What is wrong with this node's devices; "" if nothing is. A device counts as a rank."""
    until = time.monotonic() + seconds
    count = torch.cuda.device_count()
    devices = [torch.device("cuda", number) for number in range(count)] or [torch.device("cpu")]
    while True:
        fault = judge([report_of(device) for device in devices])
        if fault is not None:
            return fault.reason
        if time.monotonic() >= until:
            return ""


if __name__ == "__main__":
    sys.stdout.write(burn_in(float(sys.argv[1])))
