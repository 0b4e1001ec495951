"""``metrics.jsonl``: one line per attempted step.

After a crash the file is cut back to where the loaded checkpoint was saved, and the steps
repeated then write the same lines again. After a rollback nothing is cut: for each step the
last line with action ``apply`` is the one that counts. :mod:`runner.policy.columns` says how to
add a column.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from runner.policy.columns import PACE_STEPS
from runner.system.json_lines import iter_lines, step_of
from runner.system.parsing import whole


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsLine:
    """``cursor`` is the next sample position after the step, ``samples`` what it read.

    ``loss`` and ``eval_loss`` are in nats per token, ``grad_norm`` is before clipping,
    ``tokens_per_second`` are samples where there are no tokens. A value not
    finite is null in the file, and is named there; see :func:`runner.system.parsing.json_text`.
    ``loss_limit`` and ``norm_limit`` are what the gate would have let pass, None without a limit.
    ``time`` is the clock's at the line's writing, in seconds since the epoch. ``stalls`` tells
    what else the training thread spent since the line before: seconds by kind, one of
    :data:`runner.run_dir.time_account.STALLS`, kinds without any left out; and ``discarded``, what
    a step took that was given up for a sample that could not be read. ``columns`` are further
    numbers by name, keys of their own in the file.
    """

    step: int
    cursor: int
    samples: tuple[int, int]
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_per_second: float
    seconds: float
    data_wait_seconds: float
    verdict: str
    action: str
    eval_loss: float | None = None
    loss_limit: float | None = None
    norm_limit: float | None = None
    time: float = 0.0
    stalls: Mapping[str, float] = field(default_factory=dict)
    columns: Mapping[str, float] = field(default_factory=dict)

    @property
    def held_out(self) -> float | None:
        """The held-out loss: of an evaluation of ours, or what a loop logged."""
        return self.columns.get("eval_loss", self.eval_loss)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values. Not by ``asdict``, which copies: this runs every step."""
        return {**{name: getattr(self, name) for name in _NAMES}, **self.columns}

    def to_state(self) -> dict[str, Any]:
        """Exact JSON values of a line without evaluation and time, for :meth:`from_state`.

        A number that is not finite becomes a word that float() reads back.
        """
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        words = {
            name: v if v is None or math.isfinite(v) else repr(v) for name, v in numbers.items()
        }
        rest = {name: getattr(self, name) for name in (*_COUNTS, *_TEXTS)}
        columns = {n: v if math.isfinite(v) else repr(v) for n, v in self.columns.items()}
        return {**rest, **words, "samples": list(self.samples), "columns": columns}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> MetricsLine:
        """
        Raises:
            LookupError, TypeError, ValueError: it is not what :meth:`to_state` returns.
        """
        numbers: dict[str, Any] = {
            n: None if state[n] is None else float(state[n]) for n in _NUMBERS
        }
        counts: dict[str, Any] = {name: whole(state[name], name) for name in _COUNTS}
        texts: dict[str, Any] = {name: str(state[name]) for name in _TEXTS}
        start, stop = state["samples"]
        return cls(
            **{**counts, **texts, **numbers},
            samples=(whole(start, "samples"), whole(stop, "samples")),
            columns={
                str(name): float(number) if isinstance(number, str) else 0 + number
                for name, number in dict(state["columns"]).items()
            },
        )


_COUNTS, _TEXTS = ("step", "cursor", "tokens"), ("verdict", "action")
_NUMBERS = (
    *("loss", "grad_norm", "lr", "tokens_per_second", "seconds", "data_wait_seconds"),
    *("loss_limit", "norm_limit"),
)
_NAMES = tuple(spec.name for spec in fields(MetricsLine) if spec.name != "columns")


def held_out_before(path: Path, step: int) -> float | None:
    """The newest held-out loss in the metrics of an earlier step; None without one."""
    newest = None
    for line in iter_lines(path):
        loss = line.get("eval_loss")
        if isinstance(loss, float) and math.isfinite(loss) and step_of(line) < step:
            newest = loss
    return newest


# Tokens per second, MFU and time to go.


# Dense BF16 peak in TFLOP/s of devices with these words in their names (vendors' data sheets). The
# longest match counts.
_PEAKS = {
    2500.0: ("GB300", "GB200", "MI355X"),
    2300.0: ("MI350X",),
    2250.0: ("B300", "B200"),
    1750.0: ("B100",),
    1307.0: ("MI325X", "MI300X"),
    989.0: ("H200", "H100", "H800"),  # GH200 as well
    836.0: ("H200 NVL",),
    835.0: ("H100 NVL",),
    756.0: ("H100 PCIe", "H800 PCIe"),
    362.0: ("L40S",),
    312.0: ("A100", "A800"),
    181.0: ("L40",),
    165.0: ("A30",),
    150.0: ("A40",),
    148.0: ("H20",),
}


def peak_tflops(device_name: str) -> float | None:
    """Peak of one device, or None if its name is unknown here."""
    found = {part: peak for peak, parts in _PEAKS.items() for part in parts if part in device_name}
    return found[max(found, key=len)] if found else None


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
        self._recent: deque[tuple[float, int]] = deque(maxlen=PACE_STEPS)

    def note(self, seconds: float, tokens: int) -> Pace:
        """Add one step, and return the pace including it."""
        self._recent.append((seconds, tokens))
        total = max(1e-9, sum(seconds for seconds, _ in self._recent))
        rate = sum(tokens for _, tokens in self._recent) / total
        mfu = rate * self._flops_per_token / self._peak_flops if self._peak_flops else None
        return Pace(tokens_per_second=rate, seconds_per_step=total / len(self._recent), mfu=mfu)
