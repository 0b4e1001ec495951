"""Which errors say that the machine is broken, not the program: by texts of CUDA, NCCL and NVIDIA.

Only the sure ones: an error that a program can also cause ("unspecified launch failure" of a wrong
kernel, "an illegal memory access") fails at the same step again, and is told as what it is.
"""

from __future__ import annotations

import re

_HARDWARE = re.compile(
    r"uncorrectable (?:ECC|NVLink) error|double[- ]bit ECC|ECC error"
    r"|fallen off the bus|GPU is lost|[Gg]pu is lost|GPU requires reset"
    r"|\bX[Ii][Dd]\b\D{0,12}(?:48|62|63|64|74|79|92|94|95|119|120|140|143)\b"
    r"|hardware stack error|[Rr]ow remapp(?:er|ing) fail"
    r"|CUDA-capable device\(s\) is/are busy or unavailable|no CUDA-capable device is detected"
    r"|system not yet initialized|NVLink (?:fatal )?error|[Ff]abric (?:manager )?error"
    r"|[Mm]achine check|Hardware Error|[Uu]ncorrectable (?:memory|PCIe?) error"
)


def is_hardware(text: str) -> bool:
    """Whether an error's text says that a device or its machine has failed."""
    return _HARDWARE.search(text) is not None
