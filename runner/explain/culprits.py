"""Probe E: finds the samples that make a step bad, whichever rank computes them. Then probe D.

Samples that stand out against known ones are tried first, and of these the ones that stand out
most: a sample that is merely unusual beside them is not bad. If none does, bisection finds the
longest good prefix of the batch in log2(samples) computations; the next sample makes it bad. That
sample is named if it is bad by itself, or together with one partner, but not if it needs many
others. In each case the step must be good without the named samples.

Probe D computes the culprits and known samples with the weights of the clean checkpoint. A sample
that stands out with these as well is bad by itself. One that does not may be the first to show that
the weights are becoming bad: where a few samples have most of the loss, known ones may still be
good.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import zip_longest

from runner.data.cursor import Indices
from runner.explain.case import NOT_RECOMPUTED, Probes, inconclusive, listing, shown
from runner.explain.probe import without_samples
from runner.explain.reading import Reading, Usual, outstanding, usual
from runner.policy.decision.finding import Cause, Finding, Remedy
from runner.system.units import counted

_MANY = 0.25  # of a batch; more may be a new level of the data
_FAR_LOUDER = 20.0  # times as far above known samples
_MOST_VERIFIED = 3  # sets of culprits that are left out in turn
_MOST_BISECTED = 3  # culprits that are searched for by bisection
_STEPS_D = 2


class Culprits:
    """One search for culprits.

    Args:
        indices: of samples known to be good.
        known: the reading of good samples with these weights; ``level``: their usual level.
    """

    def __init__(self, probes: Probes, *, indices: Indices, known: Reading, level: Usual) -> None:
        self._probes = probes
        self._indices = indices
        self._level = level
        self._usual_loss = known.loss
        self._whole = 0.0
        self._all: set[int] = set()

    def find(self, readings: Sequence[Reading]) -> Finding:
        """The finding about the samples, or one that goes back first. Collective.

        Args:
            readings: of the bad step, on different ranks.
        """
        self._whole, self._all = readings[0].tokens, set(readings[0].rows)
        finding = self._find(readings)
        return self._doubted(finding) if finding.cause is Cause.data else finding

    def _find(self, readings: Sequence[Reading]) -> Finding:
        culprits = set.intersection(*(outstanding(r, self._level) for r in readings))
        if not culprits:
            return self._bisect(set())
        if len(culprits) > len(self._all) * _MANY and self._continues(culprits):
            return shown(
                Cause.data_mix,
                f"{len(culprits)} of {len(self._all)} samples stand out against known "
                "ones, and so do later ones, whichever rank computes them",
            )
        culprits = _loudest(culprits, readings[0], self._level)
        for _ in range(_MOST_VERIFIED):
            if culprits >= self._all or not self._probes.left:
                break
            remaining = self._without(culprits)
            if self._probes.is_good(remaining):
                return self._unless_dependent(culprits)
            further = outstanding(remaining, self._level)
            if not further:
                return self._bisect(culprits)
            culprits |= further
        return self._data_finding(culprits, is_tried=False)

    def _unless_dependent(self, culprits: set[int]) -> Finding:
        """The finding about culprits that stand out, unless they do so only because of others.

        Where samples depend on each other, by a statistic of their micro-batch, one bad sample
        makes all of them stand out. So some are computed among samples that are known to be good.
        """
        groups = self._probes.bench.micro_batches(self._probes.batches)
        shared = [sorted(culprits & set(group)) for group in groups]
        shared = [group for group in shared if len(group) > 1]
        for at in (0, -1) if shared else ():
            if not self._probes.left:
                self._probes.not_tried.append("E: each culprit by itself: no computation left")
                break
            kept = {group[at] for group in shared}
            if not kept <= self._bad_alone(kept):
                return self._guilty(culprits, shared)
        return self._data_finding(culprits)

    def _bad_alone(self, kept: set[int]) -> set[int]:
        """Which of these stand out among known samples, one of each micro-batch.

        Not among padding: where samples depend on each other, any sample stands out of padding.
        """
        probes = self._probes
        reading = probes.bench.among_known(probes.batches, kept, self._indices)
        probes.note(f"E among known {listing(sorted(kept))}", reading)
        return outstanding(reading, self._level) & kept

    def _guilty(self, culprits: set[int], shared: Sequence[Sequence[int]]) -> Finding:
        """The finding about the culprits that stand out alone, one of each micro-batch a time."""
        if self._can_afford(max(map(len, shared)) + 1, "each sample by itself takes"):
            guilty = culprits - {position for group in shared for position in group}
            for kept in zip_longest(*shared):
                guilty |= self._bad_alone({position for position in kept if position is not None})
            if self._probes.is_good(self._without(guilty)) and guilty:
                return self._data_finding(guilty)
        return inconclusive(
            "samples depend on the others of their micro-batch, and stand out together"
        )

    def _can_afford(self, needed: int, what: str) -> bool:
        left = self._probes.left
        if left < needed:
            self._probes.not_tried.append(
                f"E: {what} {needed} computations, {left} are left (explain=full)"
            )
        return left >= needed

    def _without(self, positions: Collection[int], name: str = "") -> Reading:
        """The step without these samples, which count with their usual loss."""
        name = name or f"E without {listing(sorted(positions))}"
        reading = self._probes.bench.compute(without_samples(self._probes.batches, positions))
        return self._whole_step(name, reading)

    def _whole_step(self, name: str, reading: Reading) -> Reading:
        reading = replace(reading, tokens=self._whole, usual_loss=self._usual_loss)
        return self._probes.note(name, reading)

    def _continues(self, culprits: Collection[int]) -> bool:
        """Whether later samples stand out as well: a new data mix rather than bad samples."""
        probes, first = self._probes, self._probes.first.rows
        if not all(first[p].is_finite for p in culprits if p in first):
            return False
        batches = probes.bench.read(probes.case.later)
        later_reading = probes.note("later", probes.bench.compute(batches))
        share = len(outstanding(later_reading, self._level)) / max(len(later_reading.rows), 1)
        return 2 * share * len(first) > len(culprits)

    # -- bisection --------------------------------------------------------------------------

    def _bisect(self, culprits: set[int]) -> Finding:
        """Find culprits besides these."""
        for _ in range(_MOST_BISECTED):
            order = sorted(self._all - culprits)
            halving = f"halving a batch of {len(order)} samples takes"
            if not self._can_afford(_computations(order), halving):
                break
            group = self._first_culprits(order)
            if not group:
                self._probes.not_tried.append("E: many samples together, none of them by itself")
                break
            culprits = culprits | group
            if self._probes.is_good(self._without(culprits)):
                return self._unless_of_rank(culprits)
        if culprits:
            return inconclusive(
                f"it is also bad without the {counted(len(culprits), 'sample')} that stood out"
            )
        self._probes.not_tried.append(NOT_RECOMPUTED)
        return inconclusive(
            "bad whichever rank computes it and good on known samples, but no sample of it "
            "stands out by itself"
        )

    def _unless_of_rank(self, culprits: set[int]) -> Finding:
        """The finding about culprits whose own numbers do not stand out.

        They must be bad on other ranks too, or the fault is that of a rank.
        """
        probes, data = self._probes, self._data_finding(culprits, "that make the step bad")
        if probes.bench.world_size < 2:
            return data
        if not probes.left:
            probes.not_tried.append("E: the culprits on other ranks: no computation left")
            return replace(data, remedy=Remedy.ladder, is_tried=False)
        reading = probes.bench.rotated(probes.case.plan, without=self._all - culprits)
        reading = self._whole_step(f"B only {listing(sorted(culprits))}", reading)
        if not probes.is_good(reading):
            return self._data_finding(culprits, "that make the step bad on whichever rank")
        ranks = {probes.first.rows[position].rank for position in culprits}
        if len(ranks) > 1:
            return inconclusive(
                f"{len(culprits)} samples make the step bad on their ranks and not on others"
            )
        return probes.of_ranks(ranks)

    def _first_culprits(self, order: Sequence[int]) -> set[int]:
        """The sample after the longest good prefix, with its partner if it needs one.

        Empty if it is bad only together with many others.
        """

        def is_good(kept: Collection[int]) -> bool:
            name = f"E only {listing(sorted(kept))}"
            return self._probes.is_good(self._without(self._all - set(kept), name))

        length = _longest_good(len(order), lambda stop: is_good(order[:stop]))
        last, before = order[length], order[:length]
        if not is_good([last]):
            return {last}
        if self._probes.left < _computations(before):
            return set()
        partner = before[_longest_good(len(before), lambda stop: is_good([*before[:stop], last]))]
        return set() if is_good([partner, last]) else {partner, last}

    def _data_finding(
        self, culprits: Collection[int], how: str = "", *, is_tried: bool = True
    ) -> Finding:
        """``how`` they are bad; by default each of them stands out."""
        if not how:
            ranks = ", on whichever rank" if self._probes.bench.world_size > 1 else ""
            how = f"far above known good ones, or not finite{ranks}"
        positions, is_whole = tuple(sorted(culprits)), len(culprits) >= len(self._all)
        count_text = f"{counted(len(positions), 'sample')}"
        why = f"{count_text} (stream positions {listing(positions)}) {how}"
        if is_tried:
            why += "; without them the step is good"
        elif is_whole:
            why += "; they are the whole batch"
        finding = shown(Cause.data, why, positions=positions, is_tried=is_tried)
        return finding if is_tried and not is_whole else replace(finding, remedy=Remedy.ladder)

    # -- probe D ------------------------------------------------------------------------------

    def _doubted(self, finding: Finding) -> Finding:
        """The finding, or one that goes back first if no culprit is bad by itself. Collective."""
        probes, bench = self._probes, self._probes.bench
        if probes.case.earlier is None:
            return finding
        if probes.left < _STEPS_D:
            probes.not_tried.append("D: no computation is left for the weights of the checkpoint")
            return finding
        readings = probes.case.earlier(
            lambda: (bench.known(self._indices), bench.compute(probes.batches))
        )
        if readings is None:
            probes.not_tried.append(
                "D: no clean checkpoint can be loaded, or there is no memory for a copy of the "
                "state"
            )
            return finding
        known, before = probes.note("D known", readings[0]), probes.note("D", readings[1])
        level = usual(known)
        if level is None or outstanding(before, level) & set(finding.positions):
            return finding
        why = (
            f"{counted(len(finding.positions), 'sample')} (stream positions "
            f"{listing(finding.positions)}) stood out with these weights, but not with those of "
            "the clean checkpoint: the weights may have become bad"
        )
        return replace(inconclusive(why, remedy=Remedy.go_back), fallback=finding)


def _loudest(culprits: set[int], reading: Reading, level: Usual) -> set[int]:
    """Those that are not finite; without any, those within a factor of the loudest."""
    infinite = {position for position in culprits if not reading.rows[position].is_finite}
    if infinite:
        return infinite
    excess = {position: level.excess(reading.rows[position]) for position in culprits}
    most = max(excess.values())
    return {position for position, above in excess.items() if above * _FAR_LOUDER >= most}


def _computations(order: Sequence[int]) -> int:
    """How many computations a search by bisection takes."""
    return math.ceil(math.log2(max(len(order), 2))) + 2


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
