"""Decides which ranks slow the others down, from a few numbers of each rank."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

# A slow rank must cost at least this share of a step to be reported.
_WORTH = 0.05
# A run is slow below this share of its own median speed over at least this many comparisons.
_SLOW_SHARE, _LEAST_LOOKS, _LOOKS = 0.8, 3, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPace:
    """One rank's seconds.

    ``host``: from the start of the step to its first collective (data, Python); ``device``: one
    fixed small computation; ``step``: a whole step.
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
    def sentence(self) -> str:
        what = {
            "host": "reading data and Python before the step",
            "device": "a fixed computation on its device",
        }[self.what]
        return (
            f"rank {self.rank}: {what} took {self.seconds:.4f} s, the median rank "
            f"{self.median:.4f} s, in {self.checks} comparisons in a row"
        )


class Stragglers:
    """Counts slow comparisons; reports a rank again only after it has kept up.

    Args:
        factor: slowness relative to the median rank that counts as slow.
        device_factor: the same for the fixed computation on the device; None uses ``factor``.
        checks: number of slow comparisons in a row.
    """

    def __init__(self, *, factor: float, checks: int, device_factor: float | None = None) -> None:
        self._factors = {"host": factor, "device": device_factor or factor}
        self._checks = checks
        self._slow: dict[tuple[int, str], int] = {}

    def note(self, paces: Sequence[RankPace]) -> list[Straggler]:
        """Compare all ranks, given by rank; returns new stragglers."""
        stragglers = []
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
                    stragglers.append(
                        Straggler(rank=rank, what=what, seconds=value, median=median, checks=count)
                    )
        return stragglers


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRun:
    """A slowdown of all ranks together; seconds are medians of many steps."""

    seconds: float
    usual: float
    host_seconds: float
    usual_host_seconds: float
    slowest_host: int

    @property
    def sentence(self) -> str:
        """One sentence."""
        share = self.usual / self.seconds if self.seconds else 0.0
        return (
            f"steps take {self.seconds:.4f} s, and usually {self.usual:.4f} s in this run: "
            f"{share:.2f} of its tokens per second. {self.host_seconds:.4f} s (usually "
            f"{self.usual_host_seconds:.4f} s) pass before the first collective, in data loading "
            f"and Python; rank {self.slowest_host} takes longest"
        )


class SlowRuns:
    """Compares the run's speed with its own median; reports a slowdown once until it has
    recovered."""

    def __init__(self) -> None:
        self._usual: deque[tuple[float, float]] = deque(maxlen=_LOOKS)
        self._is_slow = False

    def note(self, paces: Sequence[RankPace]) -> SlowRun | None:
        """Record the medians of the steps since the last call, by rank."""
        seconds = statistics.median(pace.step for pace in paces)
        hosts = [pace.host for pace in paces]
        host = max(hosts)
        if len(self._usual) >= _LEAST_LOOKS:
            usual = statistics.median(one for one, _ in self._usual)
            is_slow = seconds > usual / _SLOW_SHARE
            was_slow, self._is_slow = self._is_slow, is_slow
            if is_slow:  # slow steps must not enter the usual ones
                if was_slow:
                    return None
                return SlowRun(
                    seconds=seconds,
                    usual=usual,
                    host_seconds=host,
                    usual_host_seconds=statistics.median(one for _, one in self._usual),
                    slowest_host=hosts.index(host),
                )
        self._usual.append((seconds, host))
        return None
