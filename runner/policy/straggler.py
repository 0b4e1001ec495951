"""Decides which ranks slow the others down, from a few numbers of each. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# A slow rank must cost at least this share of a step to be reported.
_WORTH = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPace:
    """One rank's seconds.

    ``host`` from the step's begin to its first collective (data, Python), ``device`` for one fixed
    small computation, ``step`` for a whole step.
    """

    host: float
    device: float
    step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that was slow in ``checks`` comparisons in a row; ``what`` is host or device."""

    rank: int
    what: str
    seconds: float
    median: float
    checks: int

    @property
    def words(self) -> str:
        what = {
            "host": "reading data and Python before the step",
            "device": "a fixed computation on its device",
        }[self.what]
        return (
            f"rank {self.rank}: {what} took {self.seconds:.4f} s, the median rank "
            f"{self.median:.4f} s, in {self.checks} comparisons in a row"
        )


class Stragglers:
    """Counts slow comparisons; a rank is reported once, until it has kept up again.

    Args:
        factor: how much slower than the median rank counts as slow.
        device_factor: the same for the fixed computation on its device; None: ``factor``.
        checks: in how many comparisons in a row.
    """

    def __init__(self, *, factor: float, checks: int, device_factor: float | None = None) -> None:
        self._factors = {"host": factor, "device": device_factor or factor}
        self._checks = checks
        self._slow: dict[tuple[int, str], int] = {}

    def note(self, paces: Sequence[RankPace]) -> list[Straggler]:
        """Compare all ranks, by rank; returns those that have just become stragglers."""
        found = []
        step = statistics.median(pace.step for pace in paces)
        for what in ("host", "device"):
            seconds = [getattr(pace, what) for pace in paces]
            # The lower median: with two ranks the mean would hide the slow one.
            median = statistics.median_low(seconds)
            for rank, value in enumerate(seconds):
                is_slow = value > median * self._factors[what]
                if what == "host":
                    is_slow = is_slow and value - median > _WORTH * step
                count = self._slow.get((rank, what), 0) + 1 if is_slow else 0
                self._slow[rank, what] = count
                if count == self._checks:
                    found.append(
                        Straggler(rank=rank, what=what, seconds=value, median=median, checks=count)
                    )
        return found
