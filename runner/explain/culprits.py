"""Probe E: which samples make a step bad, whichever rank computes them.

Those that stand out against known ones come first. Where none does, the batch is halved for its
longest good beginning (log2 of its samples computations): the next sample is the one that makes it
bad. It is named where it does so by itself, or with one partner; what only tips a scale that many
have filled is not. In each case the step must be good without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from runner.explain.case import NO_WAY_BACK, Case, Evidence, nothing, some
from runner.explain.finding import Cause, Finding, Remedy
from runner.explain.probe import Bench, left_out
from runner.explain.reading import Reading, Usual, outstanding

_MANY = 0.25  # of a batch: it may be the data's new level
_MOST_VERIFIED = 3  # sets of culprits that are left out
_MOST_BISECTED = 3  # culprits that are looked for by halving


class Culprits:
    """One search.

    Args:
        known: samples known to be good, with these weights; ``level`` is what is usual there.
    """

    def __init__(
        self, bench: Bench, case: Case, seen: Evidence, *, known: Reading, level: Usual
    ) -> None:
        self._bench = bench
        self._case = case
        self._seen = seen
        self._level = level
        self._usual_loss = known.loss
        self._whole = 0.0

    def find(self, readings: Sequence[Reading]) -> Finding:
        """
        Args:
            readings: of the bad step, on different ranks.
        """
        self._whole = readings[0].tokens
        everybody = set(readings[0].rows)
        culprits = set.intersection(*(outstanding(r, self._level) for r in readings))
        if not culprits:
            return self._bisected(sorted(everybody), everybody)
        if len(culprits) > len(everybody) * _MANY and self._goes_on(culprits):
            return Finding(
                cause=Cause.data_mix,
                remedy=Remedy.ladder,
                why=f"{len(culprits)} of {len(everybody)} samples stand out against known ones, "
                "and so do those far behind them, whichever rank computes them",
                refutation="the samples that follow are as before",
                is_tried=True,
            )
        for _ in range(_MOST_VERIFIED):
            if culprits >= everybody or not self._left:
                break
            rest = self._without(culprits, f"E without {some(sorted(culprits))}")
            if rest.is_good(self._case.limits):
                return self._data(culprits, everybody, is_tried=True)
            more = outstanding(rest, self._level)
            if not more:
                return self._bisected(sorted(everybody - culprits), everybody, culprits)
            culprits |= more
        return self._data(culprits, everybody, is_tried=False)

    @property
    def _left(self) -> int:
        return self._seen.left(self._bench)

    def _without(self, positions: Collection[int], name: str) -> Reading:
        """The step but for these samples, which have their usual level."""
        rest = self._bench.compute(left_out(self._seen.batches, positions))
        rest = replace(rest, tokens=self._whole, usual_loss=self._usual_loss)
        return self._seen.note(name, rest)

    def _goes_on(self, culprits: Collection[int]) -> bool:
        """Whether samples far behind stand out as these do: another mix, and no range of them."""
        first = self._seen.first.rows
        if not all(first[p].is_finite for p in culprits if p in first):
            return False
        batches = self._bench.read(self._case.later)
        after = self._seen.note("later", self._bench.compute(batches))
        share = len(outstanding(after, self._level)) / max(len(after.rows), 1)
        return 2 * share * len(first) > len(culprits)

    # -- halving ----------------------------------------------------------------------------

    def _bisected(
        self, order: list[int], everybody: set[int], found: Collection[int] = ()
    ) -> Finding:
        """Culprits among ``order``, besides those that were ``found``."""
        found = set(found)
        for _ in range(_MOST_BISECTED):
            needed = math.ceil(math.log2(max(len(order), 2))) + 2
            if self._left < needed:
                self._seen.not_tried.append(
                    f"E: halving a batch of {len(order)} samples takes {needed} computations, "
                    f"{self._left} are left (explain=full)"
                )
                break
            group = self._first_culprits(order, found, everybody)
            if not group:
                self._seen.not_tried.append("E: many samples together, none of them by itself")
                break
            found |= group
            rest = self._without(found, f"E without {some(sorted(found))}")
            if rest.is_good(self._case.limits):
                return self._data(found, everybody, is_tried=True)
            order = [position for position in order if position not in found]
        if found:
            words = f"{len(found)} sample(s) stand out, but the step is bad without them too"
        else:
            words = (
                "bad whichever rank computes it and good on known samples, but no sample of it "
                "stands out by itself"
            )
            self._seen.not_tried.append(NO_WAY_BACK)
        return nothing(Cause.unclear, words)

    def _first_culprits(
        self, order: Sequence[int], gone: Collection[int], everybody: Collection[int]
    ) -> set[int]:
        """The sample that ends the longest good beginning, with its partner where it has one.

        Empty where it is bad with many others only.
        """

        def is_good(kept: Collection[int]) -> bool:
            left = set(everybody) - set(kept)
            name = f"E only {some(sorted(kept))}"
            return self._without(left, name).is_good(self._case.limits)

        length = _longest(len(order), lambda stop: is_good(order[:stop]))
        last = order[length]
        if not is_good([last]):
            return {last}
        before = order[:length]
        if self._left < math.ceil(math.log2(max(len(before), 2))) + 2:
            return set()
        partner = before[_longest(len(before), lambda stop: is_good([*before[:stop], last]))]
        return set() if is_good([partner, last]) else {partner, last}

    def _data(
        self, culprits: Collection[int], everybody: Collection[int], *, is_tried: bool
    ) -> Finding:
        positions, is_whole = sorted(culprits), len(culprits) >= len(everybody)
        num = f"{len(positions)} sample{'s' if len(positions) > 1 else ''}"
        told = (
            f"{num} (stream positions {some(positions)}) far above what is known to be good, or "
            "not finite, on whichever rank"
        )
        if is_tried:
            told += "; without them the step is good"
        elif is_whole:
            told += "; they are the whole batch"
        return Finding(
            cause=Cause.data,
            remedy=Remedy.skip if is_tried and not is_whole else Remedy.ladder,
            why=told,
            refutation="the step is still bad without them",
            is_tried=is_tried,
            positions=tuple(positions),
        )


def _longest(size: int, is_good: Callable[[int], bool]) -> int:
    """The length of the longest good beginning of ``size``, where the whole is bad and nothing is
    good; in log2(size) questions."""
    good, bad = 0, size
    while bad - good > 1:
        middle = (good + bad) // 2
        if is_good(middle):
            good = middle
        else:
            bad = middle
    return good
