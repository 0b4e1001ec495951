"""The order of the probes: what is computed next, given what came out, until a cause is proven.

The letters are those of the probes in docs/explaining.md. Every decision rests on readings that all
ranks hold alike, so all ranks do the same probes and come to the same finding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from runner.data.cursor import BatchPlan, Indices
from runner.data.feed import MicroBatch
from runner.explain.finding import Cause, Finding, Remedy
from runner.explain.probe import Attempt, Bench, left_out
from runner.explain.reading import (
    Reading,
    Usual,
    differing_ranks,
    is_beyond,
    noise_floor,
    outstanding,
    ranks_of,
    usual,
)
from runner.policy.decision.signals import Limits

_REPEATS = 3  # of a step that came out good: the refutation of a transient fault
_MOST_NOISE = 1e-3  # relative: beyond it nothing can be told from a replay
_MOST_READS = 3  # of a batch, until two in a row are alike
_MOST_RANKS_ALONE = 4  # one by one; more would cost more than an incident may
_MANY = 0.25  # of a batch: it may be the data's new level
_MOST_VERIFIED = 3  # sets of culprits that are left out

_NO_BACKWARD_REPLAY = "F, G, H: replays from a checkpoint are not built"
_NO_PRECISION = "C: another precision is not built"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One bad step. ``limits`` held it; ``later`` is a batch far behind it."""

    attempt: Attempt
    limits: Limits
    later: BatchPlan
    most_steps: int


@dataclass(slots=True, kw_only=True)
class _Evidence:
    """What the probes told so far."""

    first: Reading
    batches: Sequence[MicroBatch]
    not_tried: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    def note(self, probe: str, reading: Reading) -> Reading:
        self.numbers[probe] = reading.to_json()
        return reading


class Replay:
    """Finds the cause of one bad step after the other.

    Args:
        known: samples that are known to be good; as many as a step has, or none.
        host: the name of this rank's.
        bf16: the step is computed in BF16, in which numbers overflow that FP32 can hold.
        reread: gives the loader the samples of a plan as they were read again.
    """

    def __init__(
        self,
        bench: Bench,
        *,
        known: Callable[[], Indices],
        host: str,
        bf16: bool,
        reread: Callable[[BatchPlan, tuple[MicroBatch, ...]], None],
    ) -> None:
        self._bench = bench
        self._known = known
        self._host = host
        self._bf16 = bf16
        self._reread = reread

    def explain(self, case: Case) -> Finding:
        """The cause of a bad step, on all ranks alike. Collective; the state is as before."""
        first = self._bench.begin(case.attempt)
        seen = _Evidence(first=first, batches=case.attempt.batches)
        seen.note("first", first)
        found = self._found(case, seen)
        hosts = self._bench.hosts(self._host)
        if found.cause is Cause.sticky and len(set(hosts)) > 1:
            found = replace(found, remedy=Remedy.leave)
        return replace(
            found,
            hosts=tuple(dict.fromkeys(hosts[rank] for rank in found.ranks)),
            not_tried=tuple(dict.fromkeys([*seen.not_tried, *found.not_tried])),
            steps=self._bench.num_steps,
            numbers=seen.numbers,
        )

    def _found(self, case: Case, seen: _Evidence) -> Finding:
        again = seen.note("A", self._bench.compute(seen.batches))
        if again.is_good(case.limits):
            return self._came_out_good(case, seen, again)
        misread = self._misread(case, seen)
        if misread is not None:
            return misread
        return self._comes_again(case, seen, again)

    # -- A came out good: a transient fault, unless it comes and goes -----------------------

    def _came_out_good(self, case: Case, seen: _Evidence, again: Reading) -> Finding:
        readings = [again]
        for number in range(2, _REPEATS + 1):
            readings.append(seen.note(f"A{number}", self._bench.compute(seen.batches)))
        bad = [reading for reading in readings if not reading.is_good(case.limits)]
        if bad:
            return _nothing(
                Cause.not_reproducible,
                "the same step is good at one time and bad at another: a device that fails now "
                "and then, or a computation that does not repeat",
            )
        floor = noise_floor(readings)
        seen.numbers["floor"] = floor
        if floor > _MOST_NOISE or not all(is_beyond(seen.first, one, floor) for one in readings):
            return _nothing(
                Cause.not_reproducible,
                f"the step computed again differs from itself by {floor:.2g}, relatively: nothing "
                "can be told from that",
            )
        ranks = differing_ranks(seen.first, readings, floor)
        named = tuple(ranks) if len(ranks) == 1 else ()
        return Finding(
            cause=Cause.transient,
            remedy=Remedy.redo,
            why=f"computed {_REPEATS} times again from the same samples and weights the step is "
            f"good each time, and {_whose(named, ranks)}",
            refutation="the step is bad again",
            is_tried=True,
            ranks=named,
        )

    # -- J: the samples from storage again ---------------------------------------------------

    def _misread(self, case: Case, seen: _Evidence) -> Finding | None:
        """Samples that were not what the data set holds; None where they were."""
        plan = case.attempt.plan
        fresh = self._settled(plan, seen)
        if fresh is None:
            return None
        wrong = self._bench.differs(seen.batches, fresh)
        if not any(wrong):
            return None
        seen.batches = fresh
        reading = seen.note("J", self._bench.compute(fresh))
        if not reading.is_good(case.limits):
            seen.not_tried.append("J: samples were read wrongly, but that is not all")
            return None
        self._reread(plan, fresh)
        ranks = tuple(rank for rank, positions in enumerate(wrong) if positions)
        positions = sorted(position for of_rank in wrong for position in of_rank)
        return Finding(
            cause=Cause.misread,
            remedy=Remedy.redo,
            why=f"{len(positions)} sample(s) (stream positions {_some(positions)}) were other bits "
            "than the data set gives when it is asked again, and with those the step is good: "
            "storage, loader or the memory of the host",
            refutation="the step is bad with the samples read again",
            is_tried=True,
            ranks=ranks,
            positions=tuple(positions),
        )

    def _settled(self, plan: BatchPlan, seen: _Evidence) -> tuple[MicroBatch, ...] | None:
        """The batch as two reads in a row give it; None where none do."""
        before = self._bench.read(plan)
        for _ in range(_MOST_READS - 1):
            batches = self._bench.read(plan)
            if not self._bench.could_all([*before, *batches]):
                seen.not_tried.append("J: samples could not be read again")
                return None
            if not any(self._bench.differs(before, batches)):
                return batches
            before = batches
        seen.not_tried.append("J: the data set gives other samples each time")
        return None

    # -- bad again ------------------------------------------------------------------------------

    def _comes_again(self, case: Case, seen: _Evidence, again: Reading) -> Finding:
        indices = self._known()
        if not len(indices):
            return _nothing(
                Cause.unclear, "bad each time, and no samples are known to be good (data.held_out)"
            )
        known = seen.note("known", self._bench.known(indices))
        rotated = None
        if self._bench.world_size > 1:
            rotated = seen.note("B", self._bench.rotated(case.attempt.plan, 1))
            rank = _sticky_rank(again, rotated, known, self._bench.world_size)
            if rank is not None:
                return _sticky(rank)
            if rotated.is_good(case.limits):
                return _nothing(
                    Cause.not_reproducible,
                    "bad twice, and good when each rank computes its neighbour's samples",
                )
        else:
            seen.not_tried.append("B: there is one rank only")
        level = usual(known)
        if level is None or not known.is_good(case.limits):
            return self._bad_on_known(case, indices, known, seen)
        return self._in_the_data(case, seen, level, [r for r in (again, rotated) if r is not None])

    def _bad_on_known(
        self, case: Case, indices: Indices, known: Reading, seen: _Evidence
    ) -> Finding:
        """Known samples are bad as well: not the data's fault."""
        own = usual(known)
        is_gradient_alone = own is not None and known.loss <= case.limits.loss
        alone = 1 < self._bench.world_size <= _MOST_RANKS_ALONE
        if is_gradient_alone and alone and self._left(case) >= self._bench.world_size:
            rank = self._rank_alone(case, indices, seen)
            if rank is not None:
                return _sticky(rank)
        seen.not_tried += [_NO_PRECISION, _NO_BACKWARD_REPLAY]
        return Finding(
            cause=Cause.unclear,
            remedy=Remedy.go_back,
            why="samples that are known to be good are bad with these weights too: the state is "
            "corrupted, the rate too high, or numbers overflow; it is not these samples",
        )

    def _rank_alone(self, case: Case, indices: Indices, seen: _Evidence) -> int | None:
        """The one rank whose own gradient is bad, all others having padding only."""
        bad = []
        for rank in range(self._bench.world_size):
            reading = seen.note(f"rank {rank} alone", self._bench.known_of(indices, rank))
            if not reading.is_good(case.limits):
                bad.append(rank)
        return bad[0] if len(bad) == 1 else None

    # -- E: which samples -----------------------------------------------------------------------

    def _in_the_data(
        self, case: Case, seen: _Evidence, level: Usual, readings: Sequence[Reading]
    ) -> Finding:
        culprits = set.intersection(*(outstanding(reading, level) for reading in readings))
        if not culprits:
            seen.not_tried += ["E: no sample stands out by itself", _NO_BACKWARD_REPLAY]
            return _nothing(
                Cause.unclear,
                "bad whichever rank computes it and good on known samples, but no sample of it "
                "stands out by itself",
            )
        everybody = set(readings[0].rows)
        if len(culprits) > len(everybody) * _MANY and self._goes_on(case, seen, level, culprits):
            return Finding(
                cause=Cause.data_mix,
                remedy=Remedy.ladder,
                why=f"{len(culprits)} of {len(everybody)} samples stand out against known ones, "
                "and so do those far behind them, whichever rank computes them",
                refutation="the samples that follow are as before",
                is_tried=True,
            )
        whole = readings[0].tokens
        for _ in range(_MOST_VERIFIED):
            if culprits >= everybody or not self._left(case):
                break
            rest = self._bench.compute(left_out(seen.batches, culprits))
            rest = seen.note(f"E without {_some(sorted(culprits))}", replace(rest, tokens=whole))
            if rest.is_good(case.limits):
                return self._data(culprits, everybody, seen, is_tried=True)
            more = outstanding(rest, level)
            if not more:
                seen.not_tried.append("E: the rest is bad as well, and no sample of it stands out")
                return _nothing(
                    Cause.unclear,
                    f"{len(culprits)} sample(s) stand out, but the step is bad without them too",
                )
            culprits |= more
        return self._data(culprits, everybody, seen, is_tried=False)

    def _goes_on(
        self, case: Case, seen: _Evidence, level: Usual, culprits: Collection[int]
    ) -> bool:
        """Whether samples far behind stand out as these do: another mix, and no range of them."""
        if not all(seen.first.rows[p].is_finite for p in culprits if p in seen.first.rows):
            return False
        after = seen.note("later", self._bench.compute(self._bench.read(case.later)))
        share = len(outstanding(after, level)) / max(len(after.rows), 1)
        return 2 * share * len(seen.first.rows) > len(culprits)

    def _data(
        self, culprits: set[int], everybody: set[int], seen: _Evidence, *, is_tried: bool
    ) -> Finding:
        positions = sorted(culprits)
        seen.not_tried.append(_NO_PRECISION)
        could_overflow = self._bf16 and any(
            not seen.first.rows[p].is_finite for p in positions if p in seen.first.rows
        )
        num = f"{len(positions)} sample{'s' if len(positions) > 1 else ''}"
        told = (
            f"{num} (stream positions {_some(positions)}) far above what is known to be good, or "
            "not finite, on whichever rank"
        )
        if is_tried:
            told += "; without them the step is good"
        elif culprits >= everybody:
            told += "; they are the whole batch"
        if could_overflow:
            told += "; in FP32 they may be good, which was not tried"
        return Finding(
            cause=Cause.unclear if could_overflow else Cause.data,
            remedy=Remedy.skip if is_tried and culprits < everybody else Remedy.ladder,
            why=told,
            refutation="the step is still bad without them",
            is_tried=is_tried,
            positions=tuple(positions),
        )

    def _left(self, case: Case) -> int:
        """Computations that this incident may still cost."""
        return case.most_steps - self._bench.num_steps


def _sticky_rank(again: Reading, rotated: Reading, known: Reading, world_size: int) -> int | None:
    """The one rank on which samples are bad, whichever they are, judged by the other ranks."""
    found = []
    for rank in range(world_size):
        level = usual(known, without=rank)
        if level is None:
            continue
        bad = [ranks_of(one, outstanding(one, level)) for one in (again, rotated, known)]
        if bad == [{rank}] * 3:
            found.append(rank)
    return found[0] if len(found) == 1 else None


def _sticky(rank: int) -> Finding:
    return Finding(
        cause=Cause.sticky,
        remedy=Remedy.ladder,
        why=f"what rank {rank} computes is bad, its own samples, its neighbour's and known good "
        "ones alike, and good elsewhere",
        refutation="it follows the samples to another rank",
        is_tried=True,
        ranks=(rank,),
    )


def _nothing(cause: Cause, why: str) -> Finding:
    """Nothing is proven."""
    return Finding(cause=cause, remedy=Remedy.ladder, why=why)


def _whose(named: tuple[int, ...], differing: set[int]) -> str:
    if named:
        return f"it was rank {named[0]} whose own numbers were others"
    if differing:
        return f"the numbers of {len(differing)} ranks were others: nobody can be named"
    return (
        "every rank's losses and activations' gradients were the same: a weight's gradient or the "
        "sum over ranks was wrong, and nobody can be named"
    )


def _some(positions: Sequence[int]) -> str:
    told = ", ".join(map(str, positions[:8]))
    return told + (f" and {len(positions) - 8} more" if len(positions) > 8 else "")
