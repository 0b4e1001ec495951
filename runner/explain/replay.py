"""The order of the probes: what is computed next, given what came out, until a cause is proven.

The letters are those of the probes in docs/explaining.md. Every decision rests on readings that all
ranks hold alike, so all ranks do the same probes and come to the same finding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from runner.data.cursor import BatchPlan, Indices
from runner.data.feed import MicroBatch
from runner.explain.case import NO_WAY_BACK, Case, Evidence, nothing, some
from runner.explain.culprits import Culprits
from runner.explain.finding import Cause, Finding, Remedy
from runner.explain.probe import Bench
from runner.explain.reading import (
    Reading,
    apart,
    differing_ranks,
    is_beyond,
    noise_floor,
    outstanding,
    ranks_of,
    usual,
)

_MOST_AGAIN = 5  # of a step that is bad now and then
_REPEATS = 3  # of a step that came out good: the refutation of a transient fault
_MOST_NOISE = 1e-3  # relative: beyond it nothing can be told from a replay
_MOST_READS = 3  # of a batch, until two in a row are alike
_MOST_RANKS_ALONE = 4  # one by one; more would cost more than an incident may

# In a wider precision the step must be another one, not one just below the limits.
_FAR_LOSS, _FAR_NORM = 0.05, 0.3
_MOST_TOLD = 8  # parameters
_ADVICE = "compute this operation in FP32, or bound its input (model.qk_norm, model.z_loss)"


class Replay:
    """Finds the cause of one bad step after the other.

    Args:
        known: samples that are known to be good; as many as a step has, or none.
        host: the name of this rank's.
        reread: gives the loader the samples of a plan as they were read again.
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
        """The cause of a bad step, on all ranks alike. Collective; the state is as before."""
        first = self._bench.begin(case.attempt)
        seen = Evidence(most_steps=case.most_steps, first=first, batches=case.attempt.batches)
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
            layers=seen.layers,
        )

    def known_now(self) -> Reading | None:
        """Samples known to be good, with the weights as they are; None without any. Collective."""
        indices = self._known()
        return self._bench.known(indices) if len(indices) else None

    def _found(self, case: Case, seen: Evidence) -> Finding:
        again = seen.note("A", self._bench.compute_watched(seen.batches))
        if again.is_good(case.limits):
            return self._came_out_good(case, seen, again)
        misread = self._misread(case, seen)
        if misread is not None:
            return misread
        if case.overflowed:
            numerics = self._in_the_precision(case, seen, again)
            if numerics is not None:
                return numerics
        return self._comes_again(case, seen, again)

    # -- A came out good: a transient fault, unless it comes and goes -----------------------

    def _came_out_good(self, case: Case, seen: Evidence, again: Reading) -> Finding:
        readings = [again]
        for number in range(2, _REPEATS + 1):
            readings.append(seen.note(f"A{number}", self._bench.compute(seen.batches)))
        bad = [reading for reading in readings if not reading.is_good(case.limits)]
        if bad:
            good = [reading for reading in readings if reading.is_good(case.limits)]
            return _comes_and_goes(good, [seen.first, *bad])
        floor = noise_floor(readings)
        seen.numbers["floor"] = floor
        if floor > _MOST_NOISE or not all(is_beyond(seen.first, one, floor) for one in readings):
            return nothing(
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

    def _misread(self, case: Case, seen: Evidence) -> Finding | None:
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
            why=f"{len(positions)} sample(s) (stream positions {some(positions)}) were other bits "
            "than the data set gives when it is asked again, and with those the step is good: "
            "storage, loader or the memory of the host",
            refutation="the step is bad with the samples read again",
            is_tried=True,
            ranks=ranks,
            positions=tuple(positions),
        )

    def _settled(self, plan: BatchPlan, seen: Evidence) -> tuple[MicroBatch, ...] | None:
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

    def _comes_again(self, case: Case, seen: Evidence, again: Reading) -> Finding:
        indices = self._known()
        if not len(indices):
            return nothing(
                Cause.unclear, "bad each time, and no samples are known to be good (data.held_out)"
            )
        known = seen.note("known", self._bench.known(indices))
        rotated = None
        if self._bench.world_size > 1:
            rotated = seen.note("B", self._bench.rotated(case.attempt.plan, 1))
            ranks = _sticky_ranks([again, rotated], known, self._bench.world_size)
            if ranks:
                return _sick_copy(ranks) if self._bench.copies_differ() else _sticky(ranks)
            if rotated.is_good(case.limits):
                return self._now_and_then(case, seen, again)
        else:
            seen.not_tried.append("B: there is one rank only")
        numerics = None if case.overflowed else self._in_the_precision(case, seen, again)
        if numerics is not None:
            return numerics
        if not known.is_good(case.limits):
            later = self._later_is_good(case, known, seen)
            if later is None:
                return self._bad_on_known(case, indices, known, seen)
            known = later
        level = usual(known)
        assert level is not None, "a good reading is finite"
        culprits = Culprits(self._bench, case, seen, known=known, level=level)
        return culprits.find([reading for reading in (again, rotated) if reading is not None])

    def _now_and_then(self, case: Case, seen: Evidence, again: Reading) -> Finding:
        """Bad twice, and good when each rank computed its neighbour's samples."""
        good: list[Reading] = []
        bad = [seen.first, again]
        for number in range(2, _MOST_AGAIN + 1):
            if len(good) == 2 or not seen.left(self._bench):
                break
            reading = seen.note(f"A{number}", self._bench.compute(seen.batches))
            (good if reading.is_good(case.limits) else bad).append(reading)
        return _comes_and_goes(good, bad)

    # -- C: in a wider precision ----------------------------------------------------------------

    def _in_the_precision(self, case: Case, seen: Evidence, again: Reading) -> Finding | None:
        """Bad in the run's precision only; None where the wider one is bad as well."""
        name = self._bench.wider
        if not name or not seen.left(self._bench):
            seen.not_tried.append("C: there is no wider precision here")
            return None
        wide = self._bench.compute_wider(seen.batches)
        if wide is None:
            seen.not_tried.append(f"C: no memory for the model in {name}")
            return None
        seen.note(f"C {name}", wide)
        if not wide.is_good(case.limits) or not _is_far(again, wide):
            return None
        strayed = self._bench.strayed_weights()
        if strayed:
            # A flipped bit makes a number that the wider precision can hold: no operation's fault.
            seen.numbers["strayed"] = strayed[:_MOST_TOLD]
            return None
        module, seen.layers = self._bench.first_bad_module()
        where = f"the first bad number comes from {module}" if module else "no module is named"
        can = self._bench.applies_wider
        return Finding(
            cause=Cause.numerics,
            remedy=Remedy.widen if can else Remedy.ladder,
            why=f"in {name} the same step is good (loss {wide.loss:.4g}, norm "
            f"{wide.grad_norm:.4g}); {where}",
            refutation=f"the step is bad in {name} as well",
            is_tried=True,
            module=module,
            not_tried=() if can else (f"this engine makes no update in {name}: {_ADVICE}",),
        )

    def _later_is_good(self, case: Case, known: Reading, seen: Evidence) -> Reading | None:
        """Samples far behind the incident, where they say that the weights are sound.

        The limits are those of training. A network that has learnt its samples by heart may lie
        above them on held-out ones, on most of these and by no more than their level: then samples
        of the stream are the measure. None where they are bad too, or known ones are so otherwise.
        """
        rows = known.rows.values()
        if not all(row.is_finite for row in rows):
            return None
        above = sum(row.level > case.limits.loss for row in rows)
        if 2 * above <= len(known.rows) or not seen.left(self._bench):
            return None
        later = seen.note("later", self._bench.compute(self._bench.read(case.later)))
        is_measure = later.is_good(case.limits) and all(r.is_finite for r in later.rows.values())
        return later if is_measure else None

    def _bad_on_known(
        self, case: Case, indices: Indices, known: Reading, seen: Evidence
    ) -> Finding:
        """Known samples are bad as well: not the data's fault."""
        own = usual(known)
        is_gradient_alone = own is not None and known.loss <= case.limits.loss
        alone = 1 < self._bench.world_size <= _MOST_RANKS_ALONE
        if is_gradient_alone and alone and seen.left(self._bench) >= self._bench.world_size:
            rank = self._rank_alone(case, indices, seen)
            if rank is not None:
                return _sticky([rank])
        words = "samples that are known to be good are bad with these weights too"
        if case.came_again:
            words += (
                ", and every step from the clean checkpoint up to this one has come as it did the "
                "first time: training itself has made them"
            )
        else:
            seen.not_tried += [NO_WAY_BACK]
            words += ": the state is corrupted or the rate too high; it is not these samples"
        return Finding(cause=Cause.unclear, remedy=Remedy.go_back, why=words)

    def _rank_alone(self, case: Case, indices: Indices, seen: Evidence) -> int | None:
        """The one rank whose own gradient is bad, all others having padding only."""
        bad = []
        for rank in range(self._bench.world_size):
            reading = seen.note(f"rank {rank} alone", self._bench.known_of(indices, rank))
            if not reading.is_good(case.limits):
                bad.append(rank)
        return bad[0] if len(bad) == 1 else None


def _is_far(one: Reading, other: Reading) -> bool:
    """Whether two precisions differ by more than rounding: a step near its limit is no fault."""
    return (
        one.nonfinite_ranks != other.nonfinite_ranks
        or apart(one.loss, other.loss) > _FAR_LOSS
        or apart(one.grad_norm, other.grad_norm) > _FAR_NORM
    )


def _sticky_ranks(readings: Sequence[Reading], known: Reading, world_size: int) -> tuple[int, ...]:
    """The ranks on which samples are bad, whichever they are, judged by the other ranks.

    Empty where there are none, or where none is left to judge by.
    """
    ranks = set(range(world_size))
    levels = [usual(known, without=ranks - {rank}) for rank in range(world_size)]
    sound = [level for level in levels if level is not None]
    if not sound:
        return ()
    best = min(sound, key=lambda level: level.level)
    sick = ranks_of(known, outstanding(known, best))
    level = usual(known, without=sick)
    if not sick or level is None:
        return ()
    bad = [ranks_of(one, outstanding(one, level)) for one in (*readings, known)]
    return tuple(sorted(sick)) if all(one == sick for one in bad) else ()


def _comes_and_goes(good: Sequence[Reading], bad: Sequence[Reading]) -> Finding:
    """The same step, good at one time and bad at another. A rank is named where its own numbers
    were others each time that it was bad, and no other rank's were."""
    floor = noise_floor(good) if len(good) > 1 else 1.0
    each = [differing_ranks(one, good, floor) for one in bad] if floor <= _MOST_NOISE else []
    if len(each) > 1 and all(ranks == each[0] and len(ranks) == 1 for ranks in each):
        (rank,) = each[0]
        return Finding(
            cause=Cause.sticky,
            remedy=Remedy.redo,
            why=f"what rank {rank} computes is bad now and then ({len(bad)} times of "
            f"{len(bad) + len(good)}), with the same samples and weights; all other ranks' numbers "
            "are the same each time",
            refutation="another rank's numbers differ, or none",
            is_tried=True,
            ranks=(rank,),
        )
    return nothing(
        Cause.not_reproducible,
        "the same step is good at one time and bad at another: a device that fails now and then, "
        "or a computation that does not repeat",
    )


def _sick_copy(ranks: Sequence[int]) -> Finding:
    """What looks like a sick device is its copy of the weights."""
    who = ", ".join(map(str, ranks))
    return Finding(
        cause=Cause.state,
        remedy=Remedy.go_back,
        why=f"what rank {who} computes is bad, whichever samples it has, and its copy of the "
        "weights is not the others'",
        refutation="the copies are equal",
        is_tried=True,
        ranks=tuple(ranks),
    )


def _sticky(ranks: Sequence[int]) -> Finding:
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    verb = "compute" if len(ranks) > 1 else "computes"
    return Finding(
        cause=Cause.sticky,
        remedy=Remedy.ladder,
        why=f"what {who} {verb} is bad, their own samples, their neighbours' and known good ones "
        "alike, and good elsewhere",
        refutation="it follows the samples to another rank",
        is_tried=True,
        ranks=tuple(ranks),
    )


def _whose(named: tuple[int, ...], differing: set[int]) -> str:
    if named:
        return f"it was rank {named[0]} whose own numbers were others"
    if differing:
        return f"the numbers of {len(differing)} ranks were others: nobody can be named"
    return (
        "every rank's losses and activations' gradients were the same: a weight's gradient or the "
        "sum over ranks was wrong, and nobody can be named"
    )
