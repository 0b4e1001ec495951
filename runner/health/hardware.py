"""Recognises errors of broken hardware by the texts of CUDA, NCCL and NVIDIA's driver.

Errors that a program can cause as well are not among them ("unspecified launch failure" of a wrong
kernel, "an illegal memory access"): such a program fails at the same step again.
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
    """Whether an error's text shows that a device or its machine has failed."""
    return _HARDWARE.search(text) is not None
