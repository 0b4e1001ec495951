"""Tokens per second, MFU and time to go."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

# Dense BF16 peak in TFLOP/s by a part of the device's name (vendors' data sheets). The first match
# counts: a name that is part of another comes after it.
_PEAKS = (
    ("GB300", 2500.0),
    ("GB200", 2500.0),
    ("B300", 2250.0),
    ("B200", 2250.0),
    ("B100", 1750.0),
    ("H200 NVL", 836.0),
    ("H200", 989.0),  # GH200 as well
    ("H100 NVL", 835.0),
    ("H100 PCIe", 756.0),
    ("H100", 989.0),
    ("H800 PCIe", 756.0),
    ("H800", 989.0),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A40", 150.0),
    ("A30", 165.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("MI355X", 2500.0),
    ("MI350X", 2300.0),
    ("MI325X", 1307.0),
    ("MI300X", 1307.0),
)
_STEPS_AVERAGED = 20


def peak_tflops(device_name: str) -> float | None:
    """Peak of one device, or None if its name is unknown here."""
    return next((peak for part, peak in _PEAKS if part in device_name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """``mfu`` is a share of the peak (PaLM, appendix B), None where the peak is unknown."""

    tokens_per_second: float
    seconds_per_step: float
    mfu: float | None


class Throughput:
    """A running average over the last steps.

    Args:
        flops_per_token: forward and backward of the model.
        peak_flops: of all devices together, or None.
    """

    def __init__(self, *, flops_per_token: float, peak_flops: float | None) -> None:
        self._flops_per_token = flops_per_token
        self._peak_flops = peak_flops
        self._recent: deque[tuple[float, int]] = deque(maxlen=_STEPS_AVERAGED)

    def note(self, seconds: float, tokens: int) -> Pace:
        """Add one step, and return the pace including it."""
        self._recent.append((seconds, tokens))
        total = max(1e-9, sum(seconds for seconds, _ in self._recent))
        rate = sum(tokens for _, tokens in self._recent) / total
        mfu = rate * self._flops_per_token / self._peak_flops if self._peak_flops else None
        return Pace(tokens_per_second=rate, seconds_per_step=total / len(self._recent), mfu=mfu)
