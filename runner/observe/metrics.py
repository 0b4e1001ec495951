"""``metrics.jsonl``: a line an attempted step.

After a crash the file is cut back to where the loaded checkpoint was saved, and the steps
done again write the same lines again. After a rollback nothing is cut: for each step the
last line with action ``apply`` is the one that counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from runner.observe.lines import LineFile


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsLine:
    """``cursor`` is the next sample position after the step, ``samples`` what it read.

    ``loss`` in nats per token and ``grad_norm`` (before clipping) are None when not finite.
    ``time`` is the clock's at the line's writing, in seconds since the epoch. ``stalls`` tells
    what else the training thread spent since the line before: seconds by kind, one of
    :data:`runner.observe.goodput.STALLS`, kinds without any left out.
    """

    step: int
    cursor: int
    samples: tuple[int, int]
    loss: float | None
    grad_norm: float | None
    lr: float
    tokens: int
    tokens_per_second: float
    seconds: float
    data_wait_seconds: float
    verdict: str
    action: str
    eval_loss: float | None = None
    time: float = 0.0
    stalls: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values. Not ``asdict``, which copies: a line is written every step."""
        return {name: getattr(self, name) for name in _NAMES}


_NAMES = tuple(spec.name for spec in fields(MetricsLine))


def finite_or_none(value: float) -> float | None:
    """JSON has no NaN; null says it."""
    return value if math.isfinite(value) else None


class Metrics:
    """Rank 0 writes, the others' calls do nothing (``path`` None). ``check``: see LineFile."""

    def __init__(
        self, path: Path | None, *, length: int, check: Callable[[], None] = lambda: None
    ) -> None:
        self._file = LineFile(path, length=length, check=check) if path is not None else None

    def write(self, line: MetricsLine) -> None:
        if self._file is not None:
            self._file.append(line.to_json(), durably=False)

    def sync(self) -> int:
        """Length in bytes, all of it durable; 0 on other ranks."""
        return self._file.sync() if self._file is not None else 0

    def num_bytes(self) -> int:
        """Length in bytes, all of it there for other processes; 0 on other ranks."""
        return self._file.num_bytes() if self._file is not None else 0

    def close(self) -> None:
        if self._file is not None:
            self._file.sync()
            self._file.close()
