"""Median and MAD over the last N clean values, at the cost of one insertion a step.

Only finite values of applied steps may enter: outliers in the window would hide later ones.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from itertools import islice

# Makes the MAD of a normal distribution its standard deviation (Rousseeuw and Croux, 1993).
MAD_TO_SIGMA = 1.4826


class Window:
    """The last ``size`` values, kept in order of arrival and in order of size."""

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        self._size = size
        self._arrived: deque[float] = deque()
        self._sorted: list[float] = []
        self._run_start = 0
        for value in values:
            self.push(value)

    def __len__(self) -> int:
        return len(self._sorted)

    def push(self, value: float) -> None:
        """Add one finite value; a full window drops its oldest."""
        assert math.isfinite(value), "only clean values enter statistics"
        arrived, ordered = self._arrived, self._sorted
        if len(ordered) == self._size:
            del ordered[bisect_left(ordered, arrived.popleft())]
        arrived.append(value)
        insort(ordered, value)

    def values(self) -> list[float]:
        """Values in order of arrival."""
        return list(self._arrived)

    def newest(self, count: int) -> list[float]:
        """The last ``count`` values (fewer if there are fewer), newest first."""
        return list(islice(reversed(self._arrived), count))

    def largest(self, rank: int) -> float:
        """The ``rank``-th largest value, 1 being the largest; the smallest if there are fewer."""
        return self._sorted[-min(rank, len(self._sorted))]

    def median(self) -> float:
        """The median; the mean of the two middle values for even lengths, as in numpy."""
        return median_of_sorted(self._sorted)

    def sigma(self) -> float:
        """Robust standard deviation: 1.4826 times the median absolute deviation."""
        return self.center_and_sigma()[1]

    def center_and_sigma(self) -> tuple[float, float]:
        """Median and sigma, at the cost of one."""
        center = median_of_sorted(self._sorted)
        return center, MAD_TO_SIGMA * self._median_deviation(center)

    def _median_deviation(self, center: float) -> float:
        """The median of ``|value - center|``.

        The k values closest to the center are contiguous in the sorted list. One push moves the
        start of that run by an index or two, so the search from the last start is short; its result
        does not depend on where it starts.
        """
        ordered, count = self._sorted, len(self._sorted)
        closest = count // 2 + 1
        low = min(self._run_start, count - closest)
        while low and center - ordered[low - 1] <= ordered[low - 1 + closest] - center:
            low -= 1
        last = count - closest
        while low < last and center - ordered[low] > ordered[low + closest] - center:
            low += 1
        self._run_start = low
        left, right = center - ordered[low], ordered[low + closest - 1] - center
        if count % 2:
            return left if left > right else right
        # Even count: mean of the two middle deviations, the farthest of the run being one.
        inner_left = center - ordered[low + 1] if left >= right else left
        inner_right = ordered[low + closest - 2] - center if right > left else right
        return (max(left, right) + max(inner_left, inner_right)) / 2


def median_of_sorted(ordered: list[float]) -> float:
    """The median of sorted values."""
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2
