"""Median and MAD over the last N clean values, at the cost of one insertion a step.

Only finite values of applied steps may enter: a rule whose outliers enter its own window
goes blind to the trouble it should see.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable

# Makes the MAD of a normal distribution its standard deviation (Rousseeuw and Croux, 1993).
MAD_TO_SIGMA = 1.4826


class Window:
    """The last ``size`` values, kept in order of arrival and in order of size."""

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        self._size = size
        self._arrived: deque[float] = deque()
        self._sorted: list[float] = []
        for value in values:
            self.push(value)

    def __len__(self) -> int:
        return len(self._arrived)

    def push(self, value: float) -> None:
        """Admit one finite value; the oldest leaves when the window is full."""
        assert math.isfinite(value), "only clean values enter statistics"
        if len(self._arrived) == self._size:
            oldest = self._arrived.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]
        self._arrived.append(value)
        insort(self._sorted, value)

    def values(self) -> list[float]:
        """In order of arrival."""
        return list(self._arrived)

    def median(self) -> float:
        """Lower-upper mean for even lengths, as numpy's."""
        middle = len(self._sorted) // 2
        if len(self._sorted) % 2:
            return self._sorted[middle]
        return (self._sorted[middle - 1] + self._sorted[middle]) / 2

    def sigma(self) -> float:
        """Robust standard deviation: 1.4826 times the median absolute deviation."""
        return MAD_TO_SIGMA * self._median_deviation(self.median())

    def _median_deviation(self, center: float) -> float:
        """The middle one of ``|value - center|``, in O(log n).

        The k closest values to the center are one run of the sorted list; a binary search
        finds where it begins.
        """
        ordered, count = self._sorted, len(self._sorted)
        closest = count // 2 + 1
        low, high = 0, count - closest
        while low < high:
            start = (low + high) // 2
            if center - ordered[start] > ordered[start + closest] - center:
                low = start + 1
            else:
                high = start
        left, right = center - ordered[low], ordered[low + closest - 1] - center
        if count % 2:
            return max(left, right)
        # Even count: mean of the two middle deviations, the farthest of the run being one.
        inner_left = center - ordered[low + 1] if left >= right else left
        inner_right = ordered[low + closest - 2] - center if right > left else right
        return (max(left, right) + max(inner_left, inner_right)) / 2
