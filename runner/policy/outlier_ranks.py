"""Which rank is an outlier: computes other numbers for the same micro-batch, or is slow. Pure."""

from __future__ import annotations

import statistics
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ByRank = Sequence[Sequence[Any]]  # of each rank [kind of its device, its numbers]

_NOISE = 1e-2  # relative tolerance if the machine does not repeat bits
_NAMED_GRADIENTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Opinion:
    """The result of a comparison: ``odd`` ranks differ from ``most``; between two ranks it does not
    show which is wrong."""

    odd: tuple[int, ...] = ()
    is_clear: bool = False

    @property
    def agrees(self) -> bool:
        return not self.odd


def opinion_on(by_rank: ByRank, *, exactly: bool) -> Opinion:
    """Compare the ranks, those with devices of the same kind only."""
    odd: list[int] = []
    is_clear = True
    for kind in dict.fromkeys(str(one[0]) for one in by_rank):
        members = {rank: one[1] for rank, one in enumerate(by_rank) if str(one[0]) == kind}
        groups = _groups(members, exactly=exactly)
        most = max(groups, key=len)
        is_majority = 2 * len(most) > len(members)
        is_clear = is_clear and is_majority
        if len(groups) > 1:
            odd += [
                rank for group in groups if group is not most or not is_majority for rank in group
            ]
    return Opinion(odd=tuple(sorted(odd)), is_clear=is_clear)


def _groups(members: Mapping[int, Sequence[float]], *, exactly: bool) -> list[list[int]]:
    """The ranks, with those together that have the same numbers."""
    groups: list[list[int]] = []
    for rank, numbers in members.items():
        alike = (g for g in groups if _alike(members[g[0]], numbers, exactly=exactly))
        group = next(alike, None)
        if group is None:
            groups.append([rank])
        else:
            group.append(rank)
    return groups


def dissent(by_rank: ByRank, opinion: Opinion, *, exactly: bool) -> str:
    """In words, how the odd ranks differ, of whom none is named."""
    groups = _groups({rank: by_rank[rank][1] for rank in opinion.odd}, exactly=exactly)
    ranks = " and ".join(" = ".join(map(str, group)) for group in groups)
    if opinion.is_clear:
        return f"ranks {ranks} give other bits than most for the same micro-batch, each time"
    return (
        f"ranks {ranks} give different bits for the same micro-batch, each time; "
        "without a majority it is unknown which one is wrong"
    )


def named(computed: Sequence[ByRank], opinions: Sequence[Opinion]) -> tuple[int, ...]:
    """The one rank at fault; empty if it is unknown.

    It is the rank outside the majority each time; without a majority, the only rank that does not
    repeat its own numbers.
    """
    against = [one for one in opinions if not one.agrees]
    if all(one.is_clear for one in against):
        ranks = set.intersection(*(set(one.odd) for one in against))
        alone = len(ranks) == 1 and all(len(one.odd) == 1 for one in against)
        return tuple(ranks) if alone else ()
    unsteady = [
        rank
        for rank, (_, first) in enumerate(computed[0])
        if any(not _alike(first, one[rank][1], exactly=True) for one in computed[1:])
    ]
    return tuple(unsteady) if len(unsteady) == 1 else ()


def changed_ranks(before: ByRank, again: ByRank, *, exactly: bool) -> tuple[int, ...]:
    """The ranks whose numbers are no longer what they were; empty if none or all changed."""
    changed = [
        rank
        for rank, (then, now) in enumerate(zip(before, again, strict=True))
        if not _alike(then[1], now[1], exactly=exactly)
    ]
    return tuple(changed) if len(changed) < len(before) else ()


def differing(own: Mapping[str, Any], other: Mapping[str, Any], *, exactly: bool) -> str:
    """In words, the parameters whose gradients differ; empty where none do."""
    names = [
        name
        for name in own.keys() & other.keys()
        if not (
            own[name] == other[name]
            if exactly
            else _alike([own[name]], [other[name]], exactly=False)
        )
    ]
    if not names:
        return ""
    some = ", ".join(sorted(names)[:_NAMED_GRADIENTS])
    more = len(names) - _NAMED_GRADIENTS
    return f", in the gradients of {some}" + (f" and {more} more" if more > 0 else "")


def _alike(one: Sequence[float], other: Sequence[float], *, exactly: bool) -> bool:
    if len(one) != len(other):
        return False
    floor = 0.0 if exactly else _NOISE
    return all(
        _bits(a) == _bits(b) or abs(a - b) <= floor * max(abs(a), abs(b)) > 0
        for a, b in zip(one, other, strict=True)
    )


def _bits(number: float) -> bytes:
    return struct.pack("<d", number)


# A slow rank must cost at least this share of a step to be reported.
_WORTH = 0.05
# A run is slow below this share of its own median speed over at least this many comparisons.
_SLOW_SHARE, _LEAST_LOOKS, _LOOKS = 0.8, 3, 100


# Of ``ranks.jsonl``: memory in use, power, temperature, clock of the multiprocessors.
GPU_COLUMNS = ("gpu_gib", "gpu_watts", "gpu_celsius", "gpu_mhz")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPace:
    """One rank's seconds.

    ``host``: from the start of the step to its first collective (data, Python); ``device``: one
    fixed small computation; ``step``: a whole step. ``gpu``: a number for each of GPU_COLUMNS,
    0 where it is unknown.
    """

    host: float
    device: float
    step: float
    gpu: Sequence[float] = ()


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
            f"{share:.2f} of its speed. {self.host_seconds:.4f} s (usually "
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
