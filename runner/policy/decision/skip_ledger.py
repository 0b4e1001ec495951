"""The skip ledger: sample positions that the run never reads again.

A set of half-open ranges over the global stream of samples, kept sorted and disjoint.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


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

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

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
