"""Chooses the next probe from the results so far, until a cause is proven.

The letters are those of the probes in docs/explaining.md. Every decision uses readings that are the
same on all ranks, so all ranks run the same probes and reach the same finding.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from runner.data.cursor import BatchPlan, Indices
from runner.data.feed import MicroBatch
from runner.distributed.observers import Failure
from runner.explain.case import NOT_RECOMPUTED, Case, Probes, inconclusive, listing, shown
from runner.explain.culprits import Culprits
from runner.explain.probe import Bench
from runner.explain.reading import (
    Reading,
    SampleRow,
    differing_ranks,
    is_beyond,
    noise_floor,
    outstanding,
    ranks_of,
    usual,
)
from runner.policy.decision.finding import Cause, Finding, Remedy, relative_difference
from runner.policy.decision.signals import Limits
from runner.system.units import counted, first_few

_MOST_AGAIN = 5  # repetitions of a step that is bad intermittently
_REPEATS = 3  # repetitions of a step that was good again, to refute a transient fault
_MOST_DOUBTS = 2  # repetitions of a step whose cause would be an operation, or samples together
_MOST_NOISE = 1e-3  # relative; with more noise a replay proves nothing
_MOST_READS = 3  # reads of a batch, until two in a row are equal
_MOST_RANKS_ALONE = 4  # tested one by one; more would exceed the budget of an incident

# In a wider precision the step must be clearly different, not just below the limits.
_FAR_LOSS, _FAR_NORM = 0.05, 0.3
_MOST_NAMES = 8  # parameters
_STANDS_ALONE = 8.0  # times the others' gradient norm; samples differ by less
_ADVICE = "compute this operation in FP32, or bound its input (model.qk_norm, model.z_loss)"
_ON_ALL_SAMPLES = "samples are bad on {who}, its own and its neighbours'; on other ranks not"


class Replay:
    """Finds the causes of bad steps."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def explain(self, case: Case) -> Finding:
        """The cause of a bad step, the same on all ranks. Collective; the state is unchanged."""
        search = _Search(self._bench, case)
        finding = search.find()
        hosts = self._bench.hosts()
        if finding.cause is Cause.sticky and len(set(hosts)) > 1:
            finding = replace(finding, remedy=Remedy.leave)
        return replace(
            finding,
            hosts=tuple(dict.fromkeys(hosts[rank] for rank in finding.ranks)),
            not_tried=tuple(dict.fromkeys([*search.not_tried, *finding.not_tried])),
            steps=self._bench.num_steps,
            numbers=search.numbers,
            layers=search.layers,
        )

    def known_now(self) -> Reading | None:
        """The reading of good samples with the current weights; None without any. Collective."""
        indices = self._bench.known_indices()
        return self._bench.known(indices) if len(indices) else None

    def repeats_known(self) -> bool:
        """Whether known samples give the same numbers twice, and on other ranks. Collective."""
        indices = self._bench.known_indices()
        once, twice = self._bench.known(indices), self._bench.known(indices)
        others = self._bench.known(indices[::-1])  # each sample on another rank
        last = len(indices) - 1
        moved = {-2 - last - name: row for name, row in others.rows.items()}
        return (
            noise_floor([once, twice]) <= _MOST_NOISE
            and relative_difference(once.grad_norm, others.grad_norm) <= _FAR_LOSS
            and all(
                relative_difference(row.loss, moved[name].loss) <= _MOST_NOISE
                for name, row in once.rows.items()
            )
        )


class _Search(Probes):
    """The search for the cause of one bad step."""

    layers: Mapping[str, Any] = MappingProxyType({})

    def find(self) -> Finding:
        again = self.note("A", self.bench.compute(self.batches, watched=True))
        if self.is_good(again):
            return self._transient(again)
        misread = self._misread()
        if misread is not None:
            return misread
        numerics = self._numerics(again) if self.case.overflowed else None
        return numerics or self._bad_again(again)

    # -- A is good: a transient fault, unless it is intermittent -----------------------------

    def _transient(self, again: Reading) -> Finding:
        readings = [again, *(self.again(f"A{number}") for number in range(2, _REPEATS + 1))]
        bad = [reading for reading in readings if not self.is_good(reading)]
        if bad:
            return self._intermittent(
                [reading for reading in readings if self.is_good(reading)], [self.first, *bad]
            )
        floor = self.numbers["floor"] = noise_floor(readings)
        is_gone = all(is_beyond(self.first, reading, floor) for reading in readings)
        if floor > _MOST_NOISE or not is_gone:
            return inconclusive(
                f"repeated computations of the step differ by {floor:.2g}, relatively: a replay "
                "proves nothing",
                Cause.not_reproducible,
            )
        ranks = differing_ranks(self.first, readings, floor)
        return shown(
            Cause.transient,
            f"the step is good in {_REPEATS} repetitions from the same samples and weights; "
            f"{_rank_sentence(ranks)}",
            ranks=tuple(ranks) if len(ranks) == 1 else (),
        )

    # -- J: read the samples again -----------------------------------------------------------

    def _misread(self) -> Finding | None:
        """A finding if samples differ from those in the data set; None if they do not."""
        plan = self.case.plan
        fresh = self._read_until_stable(plan)
        wrong = [] if fresh is None else self.bench.differs(self.batches, fresh)
        if fresh is None or not any(wrong):
            return None
        self.batches = fresh
        if not self.is_good(self.again("J")):
            self.not_tried.append("J: samples were read wrongly, but that is not all")
            return None
        self.bench.replace_read(plan, fresh)
        positions = tuple(sorted(position for of_rank in wrong for position in of_rank))
        return shown(
            Cause.misread,
            f"{counted(len(positions), 'sample')} (stream positions {listing(positions)}) had "
            "other bits than the data set returns now, and with those the step is good: storage, "
            "loader or host memory",
            ranks=tuple(rank for rank, of_rank in enumerate(wrong) if of_rank),
            positions=positions,
        )

    def _read_until_stable(self, plan: BatchPlan) -> tuple[MicroBatch, ...] | None:
        """The batch once two reads in a row are equal; None if they never are."""
        previous = self.bench.read(plan)
        for _ in range(_MOST_READS - 1):
            batches = self.bench.read(plan)
            if not self.bench.all_readable([*previous, *batches]):
                self.not_tried.append("J: samples could not be read again")
                return None
            if not any(self.bench.differs(previous, batches)):
                return batches
            previous = batches
        self.not_tried.append("J: the data set gives other samples each time")
        return None

    # -- A is bad again -------------------------------------------------------------------------

    def _bad_again(self, again: Reading) -> Finding:
        indices = self.bench.known_indices()
        if not len(indices):
            why = "bad each time, and no samples are known to be good (data.held_out)"
            return inconclusive(why)
        known = self.note("known", self.bench.known(indices))
        readings = [again]
        if self.bench.world_size > 1:
            rotated = self.note("B", self.bench.rotated(self.case.plan))
            readings.append(rotated)
            of_rank = self._of_a_rank(again, rotated, known)
            if of_rank is not None:
                return of_rank
        else:
            self.not_tried.append("B: there is one rank only")
        numerics = None if self.case.overflowed else self._numerics(again)
        if numerics is not None:
            return numerics
        if not self.is_good(known):
            later = self._later_is_good(known)
            if later is None:
                return self._bad_on_known(indices, known)
            known = later
        if strayed := self._strayed():
            return shown(
                Cause.state,
                f"an element of {first_few(strayed, _MOST_NAMES)} is far above all others: samples "
                "that use it are bad, and known ones, which do not, are good",
                refutation="no weight is far above the others",
            )
        level = usual(known)
        assert level is not None, "a good reading is finite"
        culprits = Culprits(self, indices=indices, known=known, level=level)
        if set.intersection(*(outstanding(reading, level) for reading in readings)):
            return culprits.find(readings)
        return self._unsteady(again) or culprits.find(readings)

    def _of_a_rank(self, again: Reading, rotated: Reading, known: Reading) -> Finding | None:
        """The finding if ranks are at fault, or the step is good where they swap their samples."""
        ranks = (
            _sticky_ranks([again, rotated], known, self.bench.world_size)
            or _where_samples_turn_bad(again, rotated, known)
            or _where_all_are_worse(again, rotated, self.case.limits)
        )
        if ranks:
            return self.of_ranks(ranks, _ON_ALL_SAMPLES)
        return self._repeat(again, rotated) if self.is_good(rotated) else None

    def _repeat(self, again: Reading, rotated: Reading) -> Finding:
        """Repeat a step that was bad twice, but good when ranks swapped their samples."""
        good: list[Reading] = []
        bad = [self.first, again]
        for number in range(2, _MOST_AGAIN + 1):
            if len(good) < 2 and self.left:
                reading = self.again(f"A{number}")
                (good if self.is_good(reading) else bad).append(reading)
        if good:
            return self._intermittent(good, bad)
        # Bad each time on these ranks and good on others: the samples decide whether a device
        # fails, but they are not at fault.
        ranks = _turning_ranks(again, rotated) or self._own_samples_alone()
        if not ranks:
            return inconclusive(
                f"bad {len(bad)} of {len(bad)} times, and good when ranks swapped their samples: a "
                "device that fails on some samples; no rank can be named"
            )
        return self.of_ranks(ranks)

    def _own_samples_alone(self) -> Collection[int]:
        """The ranks that make the step bad while all others compute padding, in all tries.

        Empty if all do, none does, or there are too many ranks to try.
        """
        bad: set[int] = set()
        world_size = self.bench.world_size
        while world_size <= _MOST_RANKS_ALONE and self.left >= world_size and not bad:
            for rank in range(world_size):
                alone = self.bench.compute_of(self.batches, rank, tokens=self.first.tokens)
                if not self.is_good(self.note(f"rank {rank} alone", alone)):
                    bad.add(rank)
        return bad if len(bad) < world_size else set()

    def _intermittent(self, good: Sequence[Reading], bad: Sequence[Reading]) -> Finding:
        """The finding for a step that is sometimes good and sometimes bad: samples are not at
        fault.

        A rank is named if only its own numbers differed each time the step was bad, or if it alone
        has made the step bad.
        """
        ranks = _differing_rank(good, bad) or self._own_samples_alone()
        if len(ranks) == 1:
            return replace(
                self.of_ranks(
                    ranks,
                    f"{{who}} computes bad numbers intermittently (the step was bad {len(bad)} "
                    f"of {len(bad) + len(good)} times) from the same samples and weights; no "
                    "other rank does",
                ),
                refutation="another rank's numbers differ, or none",
            )
        return inconclusive(
            f"the same step is sometimes good ({len(good)} times) and sometimes bad "
            f"({len(bad)} times): a device that fails intermittently, or a computation that is not "
            "deterministic",
            Cause.not_reproducible,
            Remedy.redo,
        )

    # -- C: in a wider precision ----------------------------------------------------------------

    def _numerics(self, again: Reading) -> Finding | None:
        """A finding if the step is bad only in the run's precision; None if also in a wider one."""
        name = self.bench.wider
        if not name or not self.left:
            self.not_tried.append("C: there is no wider precision here")
            return None
        wide = self.bench.compute_wider(self.batches)
        if isinstance(wide, Failure):
            self.not_tried.append(f"C: this model cannot be computed in {name}: {wide.why}")
            return None
        self.note(f"C {name}", wide)
        if not self.is_good(wide) or not _is_far(again, wide):
            return None
        if self._strayed():
            return None  # a wider precision can hold the number of a flipped bit
        unsteady = self._unsteady(again)
        if unsteady is not None:
            return unsteady
        module, self.layers = self.bench.first_bad_module()
        module_text = (
            f"the first bad number comes from {module}" if module else "no module is named"
        )
        finding = shown(
            Cause.numerics,
            f"in {name} the same step is good (loss {wide.loss:.4g}, norm "
            f"{wide.grad_norm:.4g}); {module_text}",
            module=module,
        )
        finding = replace(finding, refutation=finding.refutation.format(wider=name))
        if self.bench.applies_wider:
            return finding
        why_not = f"this engine makes no update in {name}: {_ADVICE}"
        return replace(finding, remedy=Remedy.ladder, not_tried=(why_not,))

    def _strayed(self) -> list[str]:
        """Parameters in which a bit has flipped, by the look of it. Collective."""
        strayed = self.bench.strayed_weights()
        if strayed:
            self.numbers["strayed"] = strayed[:_MOST_NAMES]
        return strayed

    def _unsteady(self, again: Reading) -> Finding | None:
        """The finding if the step does not repeat: then no comparison with it proves anything."""
        bad = [self.first, again]
        for number in range(min(_MOST_DOUBTS, self.left)):
            once_more = self.again(f"A once more {number}")
            if self.is_good(once_more):
                return self._intermittent([once_more], bad)
            if _is_far(again, once_more):
                return self._intermittent([], [*bad, once_more])
        return None

    def _later_is_good(self, known: Reading) -> Reading | None:
        """The reading of samples far after the incident, if it shows that the weights are intact.

        The limits are those of training. A network that has memorised its samples may exceed them
        on most held-out samples, only by their loss: then samples of the stream are used instead.
        None if these are bad too, or the known ones are bad in another way.
        """
        rows = known.rows.values()
        above = sum(row.level > self.case.limits.loss for row in rows)
        is_by_loss = all(row.is_finite for row in rows) and 2 * above > len(known.rows)
        if not is_by_loss or not self.left:
            return None
        later = self.note("later", self.bench.compute(self.bench.read(self.case.later)))
        is_usable = self.is_good(later) and all(r.is_finite for r in later.rows.values())
        return later if is_usable else None

    def _bad_on_known(self, indices: Indices, known: Reading) -> Finding:
        """The finding if known samples are bad as well: the data is not at fault."""
        if self.left:
            once_more = self.note("known again", self.bench.known(indices))
            if self.is_good(once_more):
                return self._intermittent([once_more], [self.first, known])
        is_gradient_alone = usual(known) is not None and known.loss <= self.case.limits.loss
        few_ranks = 1 < self.bench.world_size <= _MOST_RANKS_ALONE
        if is_gradient_alone and few_ranks and self.left > self.bench.world_size:
            ranks = self._ranks_alone(indices)
            if ranks:
                return self.of_ranks(ranks, _ON_ALL_SAMPLES)
        why = "samples that are known to be good are bad with these weights too"
        if self.case.came_again:
            why += (
                ", and every step from the clean checkpoint up to this one has come as it did the "
                "first time: training itself has made them"
            )
        else:
            self.not_tried.append(NOT_RECOMPUTED)
            why += ": the state is corrupted or the rate too high; it is not these samples"
        return inconclusive(why, remedy=Remedy.go_back)

    def _ranks_alone(self, indices: Indices) -> list[int]:
        """The ranks whose gradient is bad while all others compute padding; empty if all are.

        They must be bad with other samples too. Weights may be bad for a few samples, and one rank
        has them all by chance: its device is sound.
        """
        alone = [
            self.note(f"rank {rank} alone", self.bench.known(indices, rank=rank))
            for rank in range(self.bench.world_size)
        ]
        bad = [rank for rank, reading in enumerate(alone) if not self.is_good(reading)]
        if not bad or len(bad) == len(alone) or self.left < len(bad):
            return []
        most = max(reading.grad_norm for reading in alone if self.is_good(reading))
        for rank in bad:
            with_others = self.bench.known(indices[::-1], rank=rank)
            self.note(f"rank {rank} alone, other samples", with_others)
            for reading in (alone[rank], with_others):
                is_small = reading.grad_norm <= _STANDS_ALONE * most  # NaN is not
                if is_small or self.is_good(reading):
                    return []
        return bad


def _is_far(first: Reading, other: Reading) -> bool:
    """Whether two precisions differ by more than rounding near a limit would explain."""
    return (
        first.nonfinite_ranks != other.nonfinite_ranks
        or relative_difference(first.loss, other.loss) > _FAR_LOSS
        or relative_difference(first.grad_norm, other.grad_norm) > _FAR_NORM
    )


def _sticky_ranks(readings: Sequence[Reading], known: Reading, world_size: int) -> tuple[int, ...]:
    """The ranks on which all samples are bad, judged by the other ranks.

    Empty if there are none, or no rank is left to judge by.
    """
    readings = [*readings, known]
    nonfinite = _nonfinite_ranks(readings, world_size)
    if nonfinite:
        return nonfinite
    ranks = set(range(world_size))
    levels = [usual(known, without=ranks - {rank}) for rank in ranks]
    lowest = min((level for level in levels if level), key=lambda level: level.level, default=None)
    suspects = ranks_of(known, outstanding(known, lowest)) if lowest else set()
    level = usual(known, without=suspects)
    if not suspects or level is None:
        return ()
    is_same = all(ranks_of(r, outstanding(r, level)) == suspects for r in readings)
    return tuple(sorted(suspects)) if is_same else ()


def _where_samples_turn_bad(again: Reading, rotated: Reading, known: Reading) -> tuple[int, ...]:
    """The one rank on which samples stand out that do not on any other, both ways; else empty.

    A device may make some samples worse and others better, so that known ones do not tell.
    """
    level = usual(known)
    if level is None:
        return ()
    here, there = outstanding(again, level), outstanding(rotated, level)
    ranks = ranks_of(again, here)
    is_one = here and there and len(ranks) == 1 and ranks == ranks_of(rotated, there)
    moves = all(_turns(again.rows[p], rotated.rows[p]) for p in here | there)
    return tuple(ranks) if is_one and moves and not here & there else ()


def _where_all_are_worse(again: Reading, rotated: Reading, limits: Limits) -> tuple[int, ...]:
    """The one rank on which each sample is worse than on any other, and too bad for the gate.

    A device may make all samples a little worse, so that none stands out by itself. The other ranks
    must be good: else the weights may be bad, and another rank's device may make samples better.
    """
    levels: dict[int, list[float]] = {}
    worse: set[int] = set()
    for position, row in again.rows.items():
        other = rotated.rows.get(position)
        if other is None or not (row.is_finite and other.is_finite):
            return ()
        for computed in (row, other):
            levels.setdefault(computed.rank, []).append(computed.level)
        if relative_difference(row.loss, other.loss) > _FAR_LOSS:
            worse.add((row if row.loss > other.loss else other).rank)
    if len(worse) != 1:
        return ()
    (rank,) = worse
    differ = all(
        _differs_far(row, rotated.rows[p])
        for p, row in again.rows.items()
        if rank in (row.rank, rotated.rows[p].rank)
    )
    means = {one: statistics.mean(of_rank) for one, of_rank in levels.items()}
    is_bad = means.pop(rank) > limits.loss >= max(means.values())
    return (rank,) if differ and is_bad else ()


def _nonfinite_ranks(readings: Sequence[Reading], world_size: int) -> tuple[int, ...]:
    """The ranks with NaN or Inf in every reading, if no other rank has any in one of them.

    No level is needed to judge by. Where samples differ much, one of a sound rank may stand out.
    """
    ranks, *others = [
        ranks_of(r, (p for p, row in r.rows.items() if not row.is_finite)) for r in readings
    ]
    is_same = all(other == ranks for other in others)
    return tuple(sorted(ranks)) if is_same and len(ranks) < world_size else ()


def _differing_rank(good: Sequence[Reading], bad: Sequence[Reading]) -> set[int]:
    """The only rank whose own numbers differed from the good ones each time the step was bad."""
    floor = noise_floor(good) if len(good) > 1 else 1.0
    if floor > _MOST_NOISE or len(bad) < 2:
        return set()
    ranks, *others = [differing_ranks(reading, good, floor) for reading in bad]
    return ranks if len(ranks) == 1 and all(other == ranks for other in others) else set()


def _turning_ranks(again: Reading, rotated: Reading) -> set[int]:
    """The ranks on which samples have other numbers than on the next rank, and are bad."""
    return {
        row.rank
        for position, row in again.rows.items()
        if position in rotated.rows and _turns(row, rotated.rows[position])
    }


def _turns(row: SampleRow, other: SampleRow) -> bool:
    """Whether a sample has other numbers on another rank."""
    return row.rank != other.rank and _differs_far(row, other)


def _differs_far(row: SampleRow, other: SampleRow) -> bool:
    return (
        relative_difference(row.loss, other.loss) > _FAR_LOSS
        or relative_difference(row.norm, other.norm) > _FAR_NORM
    )


def _rank_sentence(differing: Collection[int]) -> str:
    if len(differing) == 1:
        return f"only the numbers of rank {next(iter(differing))} had differed"
    if differing:
        return f"the numbers of {len(differing)} ranks had differed: no single rank can be named"
    return (
        "every rank's losses and activations' gradients were the same: a weight's gradient or the "
        "sum over ranks was wrong, and no rank can be named"
    )
