"""Probe E: finds the samples that make a step bad, whichever rank computes them.

Samples that stand out against known ones are tried first, and of these the ones that stand out
most: a sample that is merely unusual beside them is not bad. If none does, bisection finds the
longest good prefix of the batch in log2(samples) computations; the next sample makes it bad. That
sample is named if it is bad by itself, or together with one partner, but not if it needs many
others. In each case the step must be good without the named samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import zip_longest

from runner.data.cursor import Indices
from runner.explain.case import NOT_RECOMPUTED, Case, Evidence, inconclusive, listing, sticky
from runner.explain.probe import Bench, without_samples
from runner.explain.reading import Reading, Usual, outstanding
from runner.policy.decision.finding import Cause, Finding, Remedy

_MANY = 0.25  # of a batch; more may be a new level of the data
_FAR_LOUDER = 20.0  # times as far above known samples
_MOST_VERIFIED = 3  # sets of culprits that are left out in turn
_MOST_BISECTED = 3  # culprits that are searched for by bisection


class Culprits:
    """One search for culprits.

    Args:
        indices: of samples known to be good.
        known: the reading of good samples with these weights; ``level``: their usual level.
    """

    def __init__(
        self,
        bench: Bench,
        case: Case,
        evidence: Evidence,
        *,
        indices: Indices,
        known: Reading,
        level: Usual,
    ) -> None:
        self._indices = indices
        self._bench = bench
        self._case = case
        self._evidence = evidence
        self._level = level
        self._usual_loss = known.loss
        self._whole = 0.0

    def find(self, readings: Sequence[Reading]) -> Finding:
        """
        Args:
            readings: of the bad step, on different ranks.
        """
        self._whole = readings[0].tokens
        all_positions = set(readings[0].rows)
        culprits = set.intersection(*(outstanding(r, self._level) for r in readings))
        if not culprits:
            return self._bisect(sorted(all_positions), all_positions)
        if len(culprits) > len(all_positions) * _MANY and self._continues(culprits):
            return Finding(
                cause=Cause.data_mix,
                remedy=Remedy.ladder,
                why=f"{len(culprits)} of {len(all_positions)} samples stand out against known "
                "ones, and so do later ones, whichever rank computes them",
                refutation="the samples that follow are as before",
                is_tried=True,
            )
        culprits = _loudest(culprits, readings[0], self._level)
        for _ in range(_MOST_VERIFIED):
            if culprits >= all_positions or not self._budget_left:
                break
            remaining = self._without(culprits, f"E without {listing(sorted(culprits))}")
            if remaining.is_good(self._case.limits):
                return self._unless_dependent(culprits, all_positions)
            further = outstanding(remaining, self._level)
            if not further:
                return self._bisect(sorted(all_positions - culprits), all_positions, culprits)
            culprits |= further
        return self._data_finding(culprits, all_positions, is_tried=False)

    def _unless_dependent(self, culprits: set[int], all_positions: set[int]) -> Finding:
        """The finding about culprits that stand out, unless they do so only because of others.

        Where samples depend on each other, by a statistic of their micro-batch, one bad sample
        makes all of them stand out. So some are computed among samples that are known to be good.
        """
        groups = self._bench.micro_batches(self._evidence.batches)
        shared = [sorted(culprits & set(group)) for group in groups]
        shared = [group for group in shared if len(group) > 1]
        for at in (0, -1) if shared else ():
            if not self._budget_left:
                self._evidence.not_tried.append("E: each culprit by itself: no computation left")
                break
            kept = {group[at] for group in shared}
            if not kept <= self._bad_alone(kept):
                return self._guilty(culprits, shared, all_positions)
        return self._data_finding(culprits, all_positions, is_tried=True)

    def _bad_alone(self, kept: set[int]) -> set[int]:
        """Which of these stand out among known samples, one of each micro-batch.

        Padding would be no company: where samples depend on each other, any sample stands out of
        it.
        """
        reading = self._bench.among_known(self._evidence.batches, kept, self._indices)
        self._evidence.note(f"E among known {listing(sorted(kept))}", reading)
        return outstanding(reading, self._level) & kept

    def _guilty(
        self, culprits: set[int], shared: Sequence[Sequence[int]], all_positions: set[int]
    ) -> Finding:
        """The finding about the culprits that stand out alone, one of each micro-batch a time."""
        needed = max(map(len, shared)) + 1
        why = "samples depend on the others of their micro-batch, and stand out together"
        if self._budget_left < needed:
            self._evidence.not_tried.append(
                f"E: each sample by itself takes {needed} computations, {self._budget_left} are "
                "left (explain=full)"
            )
            return inconclusive(Cause.unclear, why)
        guilty = culprits - {position for group in shared for position in group}
        for kept in zip_longest(*shared):
            guilty |= self._bad_alone({one for one in kept if one is not None})
        remaining = self._without(guilty, f"E without {listing(sorted(guilty))}")
        if guilty and remaining.is_good(self._case.limits):
            return self._data_finding(guilty, all_positions, is_tried=True)
        return inconclusive(Cause.unclear, why)

    @property
    def _budget_left(self) -> int:
        return self._evidence.left(self._bench)

    def _without(self, positions: Collection[int], name: str) -> Reading:
        """The step without these samples, which count with their usual loss."""
        reading = self._bench.compute(without_samples(self._evidence.batches, positions))
        reading = replace(reading, tokens=self._whole, usual_loss=self._usual_loss)
        return self._evidence.note(name, reading)

    def _continues(self, culprits: Collection[int]) -> bool:
        """Whether later samples stand out as well: a new data mix rather than bad samples."""
        first = self._evidence.first.rows
        if not all(first[p].is_finite for p in culprits if p in first):
            return False
        batches = self._bench.read(self._case.later)
        later_reading = self._evidence.note("later", self._bench.compute(batches))
        share = len(outstanding(later_reading, self._level)) / max(len(later_reading.rows), 1)
        return 2 * share * len(first) > len(culprits)

    # -- bisection --------------------------------------------------------------------------

    def _bisect(
        self, order: list[int], all_positions: set[int], culprits: Collection[int] = ()
    ) -> Finding:
        """Find culprits among ``order``, besides those in ``culprits``."""
        culprits = set(culprits)
        for _ in range(_MOST_BISECTED):
            needed = math.ceil(math.log2(max(len(order), 2))) + 2
            if self._budget_left < needed:
                self._evidence.not_tried.append(
                    f"E: halving a batch of {len(order)} samples takes {needed} computations, "
                    f"{self._budget_left} are left (explain=full)"
                )
                break
            group = self._first_culprits(order, culprits, all_positions)
            if not group:
                self._evidence.not_tried.append("E: many samples together, none of them by itself")
                break
            culprits |= group
            remaining = self._without(culprits, f"E without {listing(sorted(culprits))}")
            if remaining.is_good(self._case.limits):
                return self._unless_of_rank(culprits, all_positions)
            order = [position for position in order if position not in culprits]
        if culprits:
            why = f"{len(culprits)} sample(s) stand out, but the step is bad without them too"
        else:
            why = (
                "bad whichever rank computes it and good on known samples, but no sample of it "
                "stands out by itself"
            )
            self._evidence.not_tried.append(NOT_RECOMPUTED)
        return inconclusive(Cause.unclear, why)

    def _unless_of_rank(self, culprits: set[int], all_positions: Collection[int]) -> Finding:
        """The finding about culprits whose own numbers do not stand out.

        They must be bad on other ranks too, or the fault is that of a rank.
        """
        data = self._data_finding(culprits, all_positions, is_tried=True)
        if self._bench.world_size < 2:
            return data
        if not self._budget_left:
            self._evidence.not_tried.append("E: the culprits on other ranks: no computation left")
            return replace(data, remedy=Remedy.ladder, is_tried=False)
        others = set(all_positions) - culprits
        reading = self._bench.rotated_without(self._case.attempt.plan, others)
        reading = replace(reading, tokens=self._whole, usual_loss=self._usual_loss)
        self._evidence.note(f"B only {listing(sorted(culprits))}", reading)
        if not reading.is_good(self._case.limits):
            return data
        rows = self._evidence.first.rows
        ranks = {rows[position].rank for position in culprits}
        if len(ranks) > 1:
            return inconclusive(
                Cause.unclear,
                f"{len(culprits)} sample(s) make the step bad on their ranks and not on others",
            )
        return sticky(ranks, "samples are bad on {who} each time, and good on another rank")

    def _first_culprits(
        self, order: Sequence[int], named: Collection[int], all_positions: Collection[int]
    ) -> set[int]:
        """The sample after the longest good prefix, with its partner if it needs one.

        Empty if it is bad only together with many others.
        """

        def is_good(kept: Collection[int]) -> bool:
            omitted = set(all_positions) - set(kept)
            name = f"E only {listing(sorted(kept))}"
            return self._without(omitted, name).is_good(self._case.limits)

        length = _longest_good(len(order), lambda stop: is_good(order[:stop]))
        last = order[length]
        if not is_good([last]):
            return {last}
        before = order[:length]
        if self._budget_left < math.ceil(math.log2(max(len(before), 2))) + 2:
            return set()
        partner = before[_longest_good(len(before), lambda stop: is_good([*before[:stop], last]))]
        return set() if is_good([partner, last]) else {partner, last}

    def _data_finding(
        self, culprits: Collection[int], all_positions: Collection[int], *, is_tried: bool
    ) -> Finding:
        positions, is_whole = sorted(culprits), len(culprits) >= len(all_positions)
        count_text = f"{len(positions)} sample{'s' if len(positions) > 1 else ''}"
        why = (
            f"{count_text} (stream positions {listing(positions)}) far above known good ones, or "
            "not finite, on whichever rank"
        )
        if is_tried:
            why += "; without them the step is good"
        elif is_whole:
            why += "; they are the whole batch"
        return Finding(
            cause=Cause.data,
            remedy=Remedy.skip if is_tried and not is_whole else Remedy.ladder,
            why=why,
            refutation="the step is still bad without them",
            is_tried=is_tried,
            positions=tuple(positions),
        )


def _loudest(culprits: set[int], reading: Reading, level: Usual) -> set[int]:
    """Those that are not finite; without any, those within a factor of the loudest."""
    rows = {position: reading.rows[position] for position in culprits}
    infinite = {position for position, row in rows.items() if not row.is_finite}
    excess = {position: level.excess(row) for position, row in rows.items()}
    most = max(excess.values(), default=0.0)
    return infinite or {p for p, one in excess.items() if one * _FAR_LOUDER >= most}


def _longest_good(size: int, is_good: Callable[[int], bool]) -> int:
    """The length of the longest good prefix, found in log2(size) calls.

    The empty prefix is good, and that of length ``size`` is bad.
    """
    good, bad = 0, size
    while bad - good > 1:
        middle = (good + bad) // 2
        if is_good(middle):
            good = middle
        else:
            bad = middle
    return good
