"""The skip ledger: sample positions that the run never reads again; and which unreadable samples
enter it. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass


class Ledger:
    """Disjoint half-open ranges ``[start, stop)`` of sample positions."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in ranges:
            self.add(start, stop)

    def add(self, start: int, stop: int) -> None:
        """Add ``[start, stop)``, merging adjacent ranges.

        Raises:
            ValueError: unless ``0 <= start < stop``.
        """
        if not 0 <= start < stop:
            raise ValueError(f"skip range [{start}, {stop}): need 0 <= start < stop")
        first = bisect_left(self._stops, start)
        last = bisect_right(self._starts, stop)
        if first < last:
            start = min(start, self._starts[first])
            stop = max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    def __contains__(self, position: int) -> bool:
        at = bisect_right(self._starts, position) - 1
        return at >= 0 and position < self._stops[at]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._starts, self._stops, strict=True))

    def copy(self) -> Ledger:
        """An independent copy."""
        return Ledger(self)

    def allowed(self, start: int) -> Iterator[tuple[int, int | None]]:
        """The ranges from ``start`` on that may be read; the last has no end (None)."""
        at = bisect_right(self._stops, start)
        for skip_start, skip_stop in zip(self._starts[at:], self._stops[at:], strict=True):
            if start < skip_start:
                yield start, skip_start
            start = max(start, skip_stop)
        yield start, None

    def before(self, stop: int, count: int) -> int:
        """The position after which ``count`` positions below ``stop`` may be read; at least 0."""
        at = bisect_left(self._starts, stop) - 1
        while at >= 0:
            free = stop - self._stops[at]
            if free >= count:
                break
            count -= max(0, free)
            stop = self._starts[at]
            at -= 1
        return max(0, stop - count)

    def num_skipped(self, start: int, stop: int) -> int:
        """How many positions of ``[start, stop)`` are in the ledger."""
        overlaps = (min(stop, b) - max(start, a) for a, b in self)
        return sum(size for size in overlaps if size > 0)


# A rank that was refused its whole share, and at least this many samples, has lost its storage: the
# samples are probably sound and must not be skipped.
_LEAST_SHARE = 4
_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A sample that a rank could not read.

    ``position`` is its place in the stream (or in the held-out set), ``index``
    that in the data set, ``name`` the data set's name for it. ``refused``: the system repeatedly
    refused to read it; otherwise the data was not a valid sample.
    """

    rank: int
    position: int
    index: int
    name: str
    error: str
    refused: bool

    def __str__(self) -> str:
        return f"position {self.position} ({self.name}) on rank {self.rank}: {self.error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOver:
    """Skip these positions for good and continue."""

    positions: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """End the run. ``may_pass``: a restart may help, as the samples may be sound."""

    reason: str
    may_pass: bool


def decide_unreadable(
    unreadable: Sequence[Unreadable], *, shares: Sequence[int], known: Collection[int], most: int
) -> PassOver | GiveUp:
    """Decide about the unreadable samples of one step.

    Args:
        shares: number of samples assigned to each rank, by rank.
        known: indices of the samples skipped so far.
        most: how many different samples may be skipped in total.
    """
    refused = Counter(one.rank for one in unreadable if one.refused)
    lost = [rank for rank, num in refused.items() if num >= max(shares[rank], _LEAST_SHARE)]
    if lost:
        one = next(one for one in unreadable if one.rank == lost[0])
        its, plural = ("its", "") if len(lost) == 1 else ("their", "s")
        who = f"rank{plural} {' and '.join(map(str, sorted(lost)))}"
        return GiveUp(
            reason=f"{who} could not read one sample of {its} share, so {its} storage failed, not "
            f"the samples: {one}. Restart when the storage is back",
            may_pass=True,
        )
    num_all = len({*known, *(one.index for one in unreadable)})
    if num_all > most:
        return GiveUp(
            reason=f"{num_all} different samples cannot be read, and data.max_unreadable={most} "
            f"may be skipped: {_some(unreadable)}. Repair the data, or allow more",
            may_pass=False,
        )
    return PassOver(
        positions=tuple(sorted(one.position for one in unreadable)),
        reason=f"{_some(unreadable)}; {num_all} of at most {most} (data.max_unreadable)",
    )


def _some(unreadable: Sequence[Unreadable]) -> str:
    ordered = sorted(unreadable, key=lambda one: one.position)
    remaining = len(ordered) - _SHOWN
    names = "; ".join(map(str, ordered[:_SHOWN]))
    return names + (f"; and {remaining} more" if remaining > 0 else "")
