"""Chooses the next probe from the results so far, until a cause is proven.

The letters are those of the probes in docs/explaining.md. Every decision uses readings that are the
same on all ranks, so all ranks run the same probes and reach the same finding.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from runner.data.cursor import BatchPlan, Indices
from runner.data.feed import MicroBatch
from runner.distributed.observers import Failure
from runner.explain.case import NOT_RECOMPUTED, Case, Evidence, inconclusive, listing, sticky
from runner.explain.culprits import Culprits
from runner.explain.earlier_weights import doubt_culprits
from runner.explain.probe import Bench
from runner.explain.reading import (
    Reading,
    Row,
    differing_ranks,
    is_beyond,
    noise_floor,
    outstanding,
    ranks_of,
    relative_difference,
    usual,
)
from runner.policy.decision.finding import Cause, Finding, Remedy
from runner.policy.decision.signals import Limits

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


class Replay:
    """Finds the causes of bad steps.

    Args:
        known: returns samples that are known to be good, as many as a step has, or none.
        host: the name of this rank's host.
        reread: replaces the loader's samples of a plan by those that were read again.
    """

    def __init__(
        self,
        bench: Bench,
        *,
        known: Callable[[], Indices],
        host: str,
        reread: Callable[[BatchPlan, tuple[MicroBatch, ...]], None],
    ) -> None:
        self._bench = bench
        self._known = known
        self._host = host
        self._reread = reread

    def explain(self, case: Case) -> Finding:
        """The cause of a bad step, the same on all ranks. Collective; the state is unchanged."""
        first = self._bench.begin(case.attempt)
        evidence = Evidence(most_steps=case.most_steps, first=first, batches=case.attempt.batches)
        evidence.note("first", first)
        finding = self._find(case, evidence)
        hosts = self._bench.hosts(self._host)
        if finding.cause is Cause.sticky and len(set(hosts)) > 1:
            finding = replace(finding, remedy=Remedy.leave)
        return replace(
            finding,
            hosts=tuple(dict.fromkeys(hosts[rank] for rank in finding.ranks)),
            not_tried=tuple(dict.fromkeys([*evidence.not_tried, *finding.not_tried])),
            steps=self._bench.num_steps,
            numbers=evidence.numbers,
            layers=evidence.layers,
        )

    def known_now(self) -> Reading | None:
        """The reading of good samples with the current weights; None without any. Collective."""
        indices = self._known()
        return self._bench.known(indices) if len(indices) else None

    def repeats_known(self) -> bool:
        """Whether known samples give the same numbers twice, and on other ranks. Collective."""
        indices = self._known()
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

    def _find(self, case: Case, evidence: Evidence) -> Finding:
        again = evidence.note("A", self._bench.compute_watched(evidence.batches))
        if again.is_good(case.limits):
            return self._transient(case, evidence, again)
        misread = self._misread(case, evidence)
        if misread is not None:
            return misread
        if case.overflowed:
            numerics = self._numerics(case, evidence, again)
            if numerics is not None:
                return numerics
        return self._bad_again(case, evidence, again)

    # -- A is good: a transient fault, unless it is intermittent -----------------------------

    def _transient(self, case: Case, evidence: Evidence, again: Reading) -> Finding:
        readings = [again]
        for number in range(2, _REPEATS + 1):
            readings.append(evidence.note(f"A{number}", self._bench.compute(evidence.batches)))
        bad = [reading for reading in readings if not reading.is_good(case.limits)]
        if bad:
            good = [reading for reading in readings if reading.is_good(case.limits)]
            return self._intermittent(case, evidence, good, [evidence.first, *bad])
        floor = noise_floor(readings)
        evidence.numbers["floor"] = floor
        if floor > _MOST_NOISE or not all(
            is_beyond(evidence.first, one, floor) for one in readings
        ):
            return inconclusive(
                Cause.not_reproducible,
                f"repeated computations of the step differ by {floor:.2g}, relatively: a replay "
                "proves nothing",
            )
        ranks = differing_ranks(evidence.first, readings, floor)
        named = tuple(ranks) if len(ranks) == 1 else ()
        return Finding(
            cause=Cause.transient,
            remedy=Remedy.redo,
            why=f"the step is good in {_REPEATS} repetitions from the same samples and weights; "
            f"{_rank_sentence(named, ranks)}",
            refutation="the step is bad again",
            is_tried=True,
            ranks=named,
        )

    # -- J: read the samples again -----------------------------------------------------------

    def _misread(self, case: Case, evidence: Evidence) -> Finding | None:
        """A finding if samples differ from those in the data set; None if they do not."""
        plan = case.attempt.plan
        fresh = self._read_until_stable(plan, evidence)
        if fresh is None:
            return None
        wrong = self._bench.differs(evidence.batches, fresh)
        if not any(wrong):
            return None
        evidence.batches = fresh
        reading = evidence.note("J", self._bench.compute(fresh))
        if not reading.is_good(case.limits):
            evidence.not_tried.append("J: samples were read wrongly, but that is not all")
            return None
        self._reread(plan, fresh)
        ranks = tuple(rank for rank, positions in enumerate(wrong) if positions)
        positions = sorted(position for of_rank in wrong for position in of_rank)
        return Finding(
            cause=Cause.misread,
            remedy=Remedy.redo,
            why=f"{len(positions)} sample(s) (stream positions {listing(positions)}) had other "
            "bits than the data set returns now, and with those the step is good: storage, loader "
            "or host memory",
            refutation="the step is bad with the samples read again",
            is_tried=True,
            ranks=ranks,
            positions=tuple(positions),
        )

    def _read_until_stable(
        self, plan: BatchPlan, evidence: Evidence
    ) -> tuple[MicroBatch, ...] | None:
        """The batch once two reads in a row are equal; None if they never are."""
        previous = self._bench.read(plan)
        for _ in range(_MOST_READS - 1):
            batches = self._bench.read(plan)
            if not self._bench.all_readable([*previous, *batches]):
                evidence.not_tried.append("J: samples could not be read again")
                return None
            if not any(self._bench.differs(previous, batches)):
                return batches
            previous = batches
        evidence.not_tried.append("J: the data set gives other samples each time")
        return None

    # -- A is bad again -------------------------------------------------------------------------

    def _bad_again(self, case: Case, evidence: Evidence, again: Reading) -> Finding:
        indices = self._known()
        if not len(indices):
            return inconclusive(
                Cause.unclear, "bad each time, and no samples are known to be good (data.held_out)"
            )
        known = evidence.note("known", self._bench.known(indices))
        rotated = None
        if self._bench.world_size > 1:
            rotated = evidence.note("B", self._bench.rotated(case.attempt.plan, 1))
            ranks = _sticky_ranks([again, rotated], known, self._bench.world_size)
            ranks = ranks or _where_samples_turn_bad(again, rotated, known)
            ranks = ranks or _where_all_are_worse(again, rotated, case.limits)
            if ranks:
                return _differing_copy(ranks) if self._bench.copies_differ() else sticky(ranks)
            if rotated.is_good(case.limits):
                return self._repeat(case, evidence, again, rotated)
        else:
            evidence.not_tried.append("B: there is one rank only")
        numerics = None if case.overflowed else self._numerics(case, evidence, again)
        if numerics is not None:
            return numerics
        if not known.is_good(case.limits):
            later = self._later_is_good(case, known, evidence)
            if later is None:
                return self._bad_on_known(case, indices, known, evidence)
            known = later
        level = usual(known)
        assert level is not None, "a good reading is finite"
        readings = [reading for reading in (again, rotated) if reading is not None]
        if not set.intersection(*(outstanding(reading, level) for reading in readings)):
            unsteady = self._unsteady(case, evidence, again)
            if unsteady is not None:
                return unsteady
        culprits = Culprits(self._bench, case, evidence, indices=indices, known=known, level=level)
        finding = culprits.find(readings)
        return doubt_culprits(self._bench, case, evidence, indices=indices, finding=finding)

    def _repeat(self, case: Case, evidence: Evidence, again: Reading, rotated: Reading) -> Finding:
        """Repeat a step that was bad twice, but good when ranks swapped their samples."""
        good: list[Reading] = []
        bad = [evidence.first, again]
        for number in range(2, _MOST_AGAIN + 1):
            if len(good) == 2 or not evidence.left(self._bench):
                break
            reading = evidence.note(f"A{number}", self._bench.compute(evidence.batches))
            (good if reading.is_good(case.limits) else bad).append(reading)
        if good:
            return self._intermittent(case, evidence, good, bad)
        # Bad each time on these ranks and good on others: the samples decide whether a device
        # fails, but they are not at fault.
        ranks = _turning_ranks(again, rotated) or self._own_samples_alone(case, evidence)
        if not ranks:
            return inconclusive(
                Cause.unclear,
                f"bad {len(bad)} of {len(bad)} times, and good when ranks swapped their samples: a "
                "device that fails on some samples; no rank can be named",
            )
        return sticky(ranks, "samples are bad on {who} each time, and good on another rank")

    def _own_samples_alone(self, case: Case, evidence: Evidence) -> set[int]:
        """The ranks that make the step bad while all others compute padding, in all tries.

        Empty if all do, none does, or there are too many ranks to try.
        """
        bad: set[int] = set()
        world_size = self._bench.world_size
        if world_size > _MOST_RANKS_ALONE:
            return bad
        while evidence.left(self._bench) >= world_size and not bad:
            for rank in range(world_size):
                alone = self._bench.compute_of(evidence.batches, rank)
                if not evidence.note(f"rank {rank} alone", alone).is_good(case.limits):
                    bad.add(rank)
        return bad if len(bad) < world_size else set()

    def _intermittent(
        self, case: Case, evidence: Evidence, good: Sequence[Reading], bad: Sequence[Reading]
    ) -> Finding:
        """The finding for a step that is sometimes good and sometimes bad: samples are not at
        fault.

        A rank is named if only its own numbers differed each time the step was bad, or if it alone
        has made the step bad.
        """
        rank = _differing_rank(good, bad)
        ranks = self._own_samples_alone(case, evidence) if rank is None else {rank}
        if len(ranks) == 1:
            (rank,) = ranks
            return Finding(
                cause=Cause.sticky,
                remedy=Remedy.redo,
                why=f"rank {rank} computes bad numbers intermittently (the step was bad {len(bad)} "
                f"of {len(bad) + len(good)} times) from the same samples and weights; no other "
                "rank does",
                refutation="another rank's numbers differ, or none",
                is_tried=True,
                ranks=(rank,),
            )
        finding = inconclusive(
            Cause.not_reproducible,
            f"the same step is sometimes good ({len(good)} times) and sometimes bad "
            f"({len(bad)} times): a device that fails intermittently, or a computation that is not "
            "deterministic",
        )
        return replace(finding, remedy=Remedy.redo)

    # -- C: in a wider precision ----------------------------------------------------------------

    def _numerics(self, case: Case, evidence: Evidence, again: Reading) -> Finding | None:
        """A finding if the step is bad only in the run's precision; None if also in a wider one."""
        name = self._bench.wider
        if not name or not evidence.left(self._bench):
            evidence.not_tried.append("C: there is no wider precision here")
            return None
        wide = self._bench.compute_wider(evidence.batches)
        if isinstance(wide, Failure):
            evidence.not_tried.append(f"C: this model cannot be computed in {name}: {wide.why}")
            return None
        evidence.note(f"C {name}", wide)
        if not wide.is_good(case.limits) or not _is_far(again, wide):
            return None
        strayed = self._bench.strayed_weights()
        if strayed:
            # A wider precision can hold the number of a flipped bit: no operation is at fault.
            evidence.numbers["strayed"] = strayed[:_MOST_NAMES]
            return None
        unsteady = self._unsteady(case, evidence, again)
        if unsteady is not None:
            return unsteady
        module, evidence.layers = self._bench.first_bad_module()
        module_text = (
            f"the first bad number comes from {module}" if module else "no module is named"
        )
        applies = self._bench.applies_wider
        return Finding(
            cause=Cause.numerics,
            remedy=Remedy.widen if applies else Remedy.ladder,
            why=f"in {name} the same step is good (loss {wide.loss:.4g}, norm "
            f"{wide.grad_norm:.4g}); {module_text}",
            refutation=f"the step is bad in {name} as well",
            is_tried=True,
            module=module,
            not_tried=() if applies else (f"this engine makes no update in {name}: {_ADVICE}",),
        )

    def _unsteady(self, case: Case, evidence: Evidence, again: Reading) -> Finding | None:
        """The finding if the step does not repeat: then no comparison with it proves anything."""
        bad = [evidence.first, again]
        for number in range(min(_MOST_DOUBTS, evidence.left(self._bench))):
            once_more = evidence.note(
                f"A once more {number}", self._bench.compute(evidence.batches)
            )
            if once_more.is_good(case.limits):
                return self._intermittent(case, evidence, [once_more], bad)
            if _is_far(again, once_more):
                return self._intermittent(case, evidence, [], [*bad, once_more])
        return None

    def _later_is_good(self, case: Case, known: Reading, evidence: Evidence) -> Reading | None:
        """The reading of samples far after the incident, if it shows that the weights are intact.

        The limits are those of training. A network that has memorised its samples may exceed them
        on most held-out samples, only by their loss: then samples of the stream are used instead.
        None if these are bad too, or the known ones are bad in another way.
        """
        rows = known.rows.values()
        if not all(row.is_finite for row in rows):
            return None
        above = sum(row.level > case.limits.loss for row in rows)
        if 2 * above <= len(known.rows) or not evidence.left(self._bench):
            return None
        later = evidence.note("later", self._bench.compute(self._bench.read(case.later)))
        is_usable = later.is_good(case.limits) and all(r.is_finite for r in later.rows.values())
        return later if is_usable else None

    def _bad_on_known(
        self, case: Case, indices: Indices, known: Reading, evidence: Evidence
    ) -> Finding:
        """The finding if known samples are bad as well: the data is not at fault."""
        if evidence.left(self._bench):
            once_more = evidence.note("known again", self._bench.known(indices))
            if once_more.is_good(case.limits):
                return self._intermittent(case, evidence, [once_more], [evidence.first, known])
        known_level = usual(known)
        is_gradient_alone = known_level is not None and known.loss <= case.limits.loss
        few_ranks = 1 < self._bench.world_size <= _MOST_RANKS_ALONE
        if is_gradient_alone and few_ranks and evidence.left(self._bench) > self._bench.world_size:
            ranks = self._ranks_alone(case, indices, evidence)
            if ranks:
                return sticky(ranks)
        why = "samples that are known to be good are bad with these weights too"
        if case.came_again:
            why += (
                ", and every step from the clean checkpoint up to this one has come as it did the "
                "first time: training itself has made them"
            )
        else:
            evidence.not_tried += [NOT_RECOMPUTED]
            why += ": the state is corrupted or the rate too high; it is not these samples"
        return Finding(cause=Cause.unclear, remedy=Remedy.go_back, why=why)

    def _ranks_alone(self, case: Case, indices: Indices, evidence: Evidence) -> list[int]:
        """The ranks whose gradient is bad while all others compute padding; empty if all are.

        They must be bad with other samples too. Weights may be bad for a few samples, and one rank
        has them all by chance: its device is sound.
        """
        alone = [
            evidence.note(f"rank {rank} alone", self._bench.known_of(indices, rank))
            for rank in range(self._bench.world_size)
        ]
        bad = [rank for rank, reading in enumerate(alone) if not reading.is_good(case.limits)]
        if not bad or len(bad) == len(alone) or evidence.left(self._bench) < len(bad):
            return []
        others = max(one.grad_norm for rank, one in enumerate(alone) if rank not in bad)
        for rank in bad:
            with_others = self._bench.known_of(indices[::-1], rank)
            evidence.note(f"rank {rank} alone, other samples", with_others)
            for one in (alone[rank], with_others):
                is_small = one.grad_norm <= _STANDS_ALONE * others  # NaN is not
                if is_small or one.is_good(case.limits):
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
    nonfinite = _nonfinite_ranks([*readings, known], world_size)
    if nonfinite:
        return nonfinite
    ranks = set(range(world_size))
    levels = [usual(known, without=ranks - {rank}) for rank in range(world_size)]
    levels_known = [level for level in levels if level is not None]
    if not levels_known:
        return ()
    lowest = min(levels_known, key=lambda level: level.level)
    suspects = ranks_of(known, outstanding(known, lowest))
    level = usual(known, without=suspects)
    if not suspects or level is None:
        return ()
    bad = [ranks_of(one, outstanding(one, level)) for one in (*readings, known)]
    return tuple(sorted(suspects)) if all(one == suspects for one in bad) else ()


def _where_samples_turn_bad(again: Reading, rotated: Reading, known: Reading) -> tuple[int, ...]:
    """The one rank on which samples stand out that do not on any other, both ways; else empty.

    A device may make some samples worse and others better, so that known ones do not tell.
    """
    level = usual(known)
    if level is None:
        return ()
    sets = [outstanding(reading, level) for reading in (again, rotated)]
    ranks = [ranks_of(one, of_one) for one, of_one in zip((again, rotated), sets, strict=True)]
    is_one = all(sets) and ranks[0] == ranks[1] and len(ranks[0]) == 1
    moves = all(
        _differs_far(again.rows[p], rotated.rows[p]) and again.rows[p].rank != rotated.rows[p].rank
        for p in sets[0] | sets[1]
    )
    return tuple(ranks[0]) if is_one and moves and not sets[0] & sets[1] else ()


def _where_all_are_worse(again: Reading, rotated: Reading, limits: Limits) -> tuple[int, ...]:
    """The one rank on which each sample is worse than on any other, and too bad for the gate.

    A device may make all samples a little worse, so that none stands out by itself. Its peers must
    be good: else the weights may be bad, and a device makes samples better.
    """
    on: dict[int, list[float]] = {}
    worse: set[int] = set()
    for position, row in again.rows.items():
        other = rotated.rows.get(position)
        if other is None or not (row.is_finite and other.is_finite):
            return ()
        for one in (row, other):
            on.setdefault(one.rank, []).append(one.level)
        if relative_difference(row.loss, other.loss) > _FAR_LOSS:
            worse.add((row if row.loss > other.loss else other).rank)
    if len(worse) != 1:
        return ()
    (rank,) = worse
    touching = [
        (p, row) for p, row in again.rows.items() if rank in (row.rank, rotated.rows[p].rank)
    ]
    differ = all(_differs_far(row, rotated.rows[p]) for p, row in touching)
    others = [statistics.mean(levels) for one, levels in on.items() if one != rank]
    is_bad = statistics.mean(on[rank]) > limits.loss >= max(others)
    return (rank,) if differ and is_bad else ()


def _nonfinite_ranks(readings: Sequence[Reading], world_size: int) -> tuple[int, ...]:
    """The ranks with NaN or Inf in every reading, if no other rank has any in one of them.

    No level is needed to judge by. Where samples differ much, one of a sound rank may stand out.
    """
    ranks_by_reading = [
        ranks_of(one, (p for p, row in one.rows.items() if not row.is_finite)) for one in readings
    ]
    first = ranks_by_reading[0]
    is_same = all(ranks == first for ranks in ranks_by_reading)
    return tuple(sorted(first)) if is_same and len(first) < world_size else ()


def _differing_rank(good: Sequence[Reading], bad: Sequence[Reading]) -> int | None:
    """The only rank whose own numbers differed from the good ones each time the step was bad."""
    floor = noise_floor(good) if len(good) > 1 else 1.0
    if floor > _MOST_NOISE:
        return None
    by_reading = [differing_ranks(one, good, floor) for one in bad]
    is_one = len(by_reading[0]) == 1 and all(ranks == by_reading[0] for ranks in by_reading)
    return next(iter(by_reading[0])) if is_one and len(by_reading) > 1 else None


def _turning_ranks(again: Reading, rotated: Reading) -> set[int]:
    """The ranks on which samples have other numbers than on the next rank, and are bad."""
    return {
        row.rank
        for position, row in again.rows.items()
        for other in [rotated.rows.get(position)]
        if other is not None and other.rank != row.rank and _differs_far(row, other)
    }


def _differs_far(row: Row, other: Row) -> bool:
    return (
        relative_difference(row.loss, other.loss) > _FAR_LOSS
        or relative_difference(row.norm, other.norm) > _FAR_NORM
    )


def _differing_copy(ranks: Sequence[int]) -> Finding:
    """The finding if a rank's copy of the weights is wrong, rather than its device."""
    who = ", ".join(map(str, ranks))
    return Finding(
        cause=Cause.state,
        remedy=Remedy.go_back,
        why=f"all samples are bad on rank {who}, and its copy of the weights differs from the "
        "others",
        refutation="the copies are equal",
        is_tried=True,
        ranks=tuple(ranks),
    )


def _rank_sentence(named: tuple[int, ...], differing: set[int]) -> str:
    if named:
        return f"only the numbers of rank {named[0]} had differed"
    if differing:
        return f"the numbers of {len(differing)} ranks had differed: no single rank can be named"
    return (
        "every rank's losses and activations' gradients were the same: a weight's gradient or the "
        "sum over ranks was wrong, and no rank can be named"
    )
