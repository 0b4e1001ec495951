"""Says what differs first between an undisturbed run and one that was killed and resumed.

Pure: from two records to findings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from runner.prove.compare import (
    COMPONENTS,
    QUIET,
    READ,
    STATE,
    Finding,
    are_equal,
    differing,
    find_start,
    finding,
    is_near,
    loss_difference,
    mean_loss,
    spread,
)
from runner.prove.record import Batch, Save, Step, Trajectory
from runner.prove.tensors import look_at_state

ROUNDING = 1e-4  # relative; a first gradient that differs by less was summed in another order


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """One resume: where it went on, what differs first, what else differs at that step."""

    start: int
    last: int  # the last step that was compared
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    loss_difference: float | None = None  # the largest, over the steps after the first finding
    since: tuple[tuple[str, int], ...] = ()  # components that differ, and from which step on

    @property
    def is_equal(self) -> bool:
        return all(finding.kind == "rounding" for finding in self.findings)


def compare_start(
    reference: Trajectory,
    resumed: Trajectory,
    saves: Sequence[Save],
    *,
    exact_until: int | None = None,
    tolerance: float = 0.0,
) -> Judgement:
    """Compare one resumed start of a script with the undisturbed run.

    Args:
        resumed: its steps are numbered from 1.
        saves: the checkpoints that were there, in order.
        exact_until: the last step up to which the reference repeats bit for bit; None: all.
        tolerance: relative, for later steps of a script that does not repeat its own bits.
    """
    reference = without_snapshots(reference)
    start = find_start(reference, resumed.steps.get(1, {}), saves)
    moved = resumed.moved(start - 1)
    _choose_calls(reference.steps.get(start, {}), moved.steps.get(start, {}))
    findings = _whole(start, saves)
    quiet: dict[str, int] = {}  # since which step it differs
    last = start - 1
    for step in sorted(moved.steps):
        if reference.steps.get(step, {}).keys() != moved.steps[step].keys():
            continue
        allowed = tolerance if exact_until is None or step > exact_until else 0.0
        found = _differing(reference, moved, step, allowed, is_first=step - start < 2)
        if step <= moved.last:
            last = step
            quiet = {name: quiet.get(name, step) for name in QUIET if name in found}
        if not set(found) - {*QUIET}:
            continue
        first = _explained(reference, moved, step, found, quiet.get("random"))
        findings += first
        if [one.kind for one in first] != ["rounding"]:
            break
        tolerance, exact_until = max(tolerance, ROUNDING * 100), step
    return Judgement(
        start=start,
        last=max(last, min(moved.last, reference.last)),
        findings=tuple(findings),
        notes=() if findings else tuple(_notes(reference, moved, quiet)),
        loss_difference=(loss_difference(reference, moved, findings[0].step) if findings else None),
        since=_since(reference, moved),
    )


def _choose_calls(expected: Mapping[int, Step], got: Mapping[int, Step]) -> None:
    """Replace a first call in vain, before a process learns, by the one that read what it should.

    Scripts call a model with zeros once, to see its shapes.
    """
    for rank, step in got.items():
        batches = expected.get(rank, Step()).batches[:1]
        for call in step.later:
            if [tuple(call["batch"])] == batches != step.batches[:1]:
                step.batches[:1] = batches
                step.random, step.buffers = call["random"], call["buffers"]


def _notes(reference: Trajectory, moved: Trajectory, quiet: Mapping[str, int]) -> Iterator[str]:
    """What differs and has no effect so far."""
    if step := quiet.get("random"):
        names = ", ".join(_generators(reference, moved, step))
        yield (
            f"The random state ({names}) differs from step {step}, and nothing that was compared "
            "depends on it."
        )
    if step := quiet.get("schedules"):
        one, two = (found.steps[step][0].schedules for found in (reference, moved))
        yield (
            f"The learning rate schedule counts {two} at step {step}, was {one}; the rates are "
            "equal so far."
        )


def _since(reference: Trajectory, moved: Trajectory) -> tuple[tuple[str, int], ...]:
    """The first step, bit for bit, of each component that differs; in the order of steps."""
    first: dict[str, int] = {}
    start = min(moved.steps, default=0)
    for step in sorted(moved.steps.keys() & reference.steps.keys()):
        for name in _differing(reference, moved, step, 0.0, is_first=step - start < 2):
            first.setdefault(name, step)
    return tuple(first.items())


def without_snapshots(reference: Trajectory) -> Trajectory:
    """The same without copies of the weights that do not change in most steps.

    Frozen weights, which are recorded with the first step, are those of every step.
    """
    first = reference.steps.get(1, {})
    moving: set[str] = set()
    ranks = [reference.steps[step].get(0, Step()) for step in sorted(reference.steps)]
    for label in {label for step in ranks for label in step.copies}:
        held = [step.copies[label] for step in ranks if label in step.copies]
        changes = sum(a != b for a, b in pairwise(held))
        if changes * 2 >= len(held) - 1 > 0:
            moving.add(label)
    steps = {
        number: {
            rank: replace(
                step,
                copies={k: v for k, v in step.copies.items() if k in moving},
                frozen=step.frozen or first.get(rank, Step()).frozen,
            )
            for rank, step in ranks_.items()
        }
        for number, ranks_ in reference.steps.items()
    }
    return replace(reference, steps=steps)


def _whole(start: int, saves: Sequence[Save]) -> list[Finding]:
    """Whether the script went on where it should."""
    if not saves:
        return []
    newest = saves[-1].after
    if start == 1:
        words = f"The resumed script starts anew, at step 1, though step {newest} was saved"
        return [finding("not_resumed", 1, words + ": it loads no checkpoint.")]
    # What else is saved, such as the best weights, is nothing to resume from.
    # One that is written beside the training is there only some steps later.
    later = [save for save in saves if save.after >= start - 1]
    newer = [save for save in later[1:] if save.is_like(later[0])]
    if newer:
        newest = newer[-1].after
        words = f"The resumed script goes on after step {start - 1}, though step {newest} was saved"
        return [finding("older_checkpoint", start, words + ": it loads an older checkpoint.")]
    return []


def _differing(
    reference: Trajectory, moved: Trajectory, step: int, tolerance: float, *, is_first: bool
) -> list[str]:
    """The components that differ on any rank, in causal order."""
    expected, got = reference.steps[step], moved.steps[step]
    if expected.keys() != got.keys():
        return []
    # A copy may be found only once it was made, which may be in a first step.
    lacks_copies = is_first and any(not got[r].copies and expected[r].copies for r in got)
    ignored = ("copies",) if lacks_copies else ()
    found = [
        name
        for rank in got
        for name in differing(expected[rank], got[rank], tolerance=tolerance, ignored=ignored)
    ]
    if _is_midway(expected, got):
        found = [name for name in found if name not in (*READ, "losses", "buffers")]
    # Nor do they explain a gradient for which there is another reason.
    is_alone = "gradients" in found and set(found) <= {"buffers", "gradients", "losses"}
    if not is_alone and _are_broadcast(expected, got):
        found = [name for name in found if name != "buffers"]
    return [name for name in COMPONENTS if name in found]


def _are_broadcast(expected: Mapping[int, Step], got: Mapping[int, Step]) -> bool:
    """Whether every rank's buffers are its own or rank 0's, which DDP broadcasts before a step."""
    first = expected.get(0, Step()).buffers
    return all(
        are_equal(step.buffers, expected[rank].buffers, 0.0) or are_equal(step.buffers, first, 0.0)
        for rank, step in got.items()
    )


def _is_midway(expected: Mapping[int, Step], got: Mapping[int, Step]) -> bool:
    """Whether a step was taken up between its batches, so that it reads only the last of them."""
    return all(
        0 < len(got[rank].batches) < len(step.batches)
        and step.batches[-len(got[rank].batches) :] == got[rank].batches
        for rank, step in expected.items()
    )


def _explained(
    reference: Trajectory,
    moved: Trajectory,
    step: int,
    found: Sequence[str],
    random_since: int | None,
) -> list[Finding]:
    """A finding for each component that no other one at this step explains."""
    got = moved.steps[step]
    state = [look_at_state(reference, got, step, name) for name in found if name in STATE]
    findings = [one for one in state if one]
    of_random = _of_random(reference, moved, random_since) if random_since else None
    if "batches" in found:
        data = look_at_data(reference, moved, step, random_differs=of_random is not None)
        if data.kind == "random" and of_random:
            words = f" Step {step} reads {data.words}: its data is drawn from that state."
            return [*findings, replace(of_random, sentence=of_random.sentence + words)]
        words = f"Data: step {step} reads {data.words}."
        findings.append(finding(f"data_{data.kind}", step, words, rank=data.rank or 0))
    elif not findings and of_random:
        words = (
            f" Data, weights and optimizer are equal; the loss and the gradient of step {step} "
            "differ: dropout and the like are not repeated."
        )
        findings.append(replace(of_random, sentence=of_random.sentence + words))
    elif of_random and random_since == step:
        findings.append(of_random)
    return findings or [_of_result(reference, moved, step)]


def _of_random(reference: Trajectory, moved: Trajectory, since: int) -> Finding:
    names = _generators(reference, moved, since)
    words = f"The random state ({', '.join(names)}) differs from step {since}."
    return finding("random", since, words, names=names)


def _of_result(reference: Trajectory, moved: Trajectory, step: int) -> Finding:
    """The same state and data give another gradient."""
    if _is_midway(reference.steps[step], moved.steps[step]):
        words = (
            f"Step {step} was taken up between its batches, and the gradients of the first ones "
        )
        return finding("gradients", step, words + "are lost: the checkpoint lacks them.")
    pairs = [(reference.steps[step][r], moved.steps[step][r]) for r in moved.steps[step]]
    size = max(spread(one, two) for one, two in pairs)
    if size <= ROUNDING:
        return finding(
            "rounding",
            step,
            f"Every state and batch is equal, but the gradient of step {step} differs in its last "
            f"digits ({size:.1e}): sums are taken in another order, as when DDP has rebuilt its "
            "buckets after its first step. No state is lost.",
        )
    return finding(
        "gradients",
        step,
        f"Weights, optimizer, data and random state of step {step} are equal, but its loss or "
        f"gradient is not (by {size:.1e}): the forward pass depends on something that is not "
        "saved, such as a counter in a module.",
    )


def _generators(reference: Trajectory, moved: Trajectory, step: int) -> tuple[str, ...]:
    names = {
        name
        for rank, one in moved.steps[step].items()
        for name, state in one.random.items()
        if reference.steps[step][rank].random.get(name, state) != state
    }
    return tuple(sorted(names))


# -- on another number of ranks

_LOSS = 0.01  # relative; sums over other ranks are rounded otherwise, BF16 in its third digit


def compare_ranks(reference: Trajectory, resumed: Trajectory, saves: Sequence[Save]) -> Judgement:
    """Compare a resume on another number of ranks: samples and loss of each step.

    Args:
        resumed: numbered from 1.
        saves: the checkpoints that were there, in order.
    """
    start = _start_on_other_ranks(reference, resumed, saves)
    moved = resumed.moved(start - 1)
    last = min(moved.last, reference.last)
    ranks = f"{resumed.world_size} ranks" if resumed.world_size > 1 else "1 rank"
    findings: list[Finding] = []
    notes: list[str] = []
    for step in range(start, last + 1):
        expected, got = samples(reference.steps[step]), samples(moved.steps[step])
        if got != expected:
            lost, more = (expected - got).total(), (got - expected).total()
            words = (
                f"On {ranks} step {step} reads other samples than on "
                f"{reference.world_size}: {lost} of {expected.total()} are missing, {more} are new."
            )
            findings.append(finding("data_other", step, words))
            break
        one, two = mean_loss(reference.steps[step]), mean_loss(moved.steps[step])
        if one is None or two is None or is_near(one, two, _LOSS) or notes:
            continue
        words = f"The loss of step {step} is {two:.6g}, was {one:.6g}, on equal samples"
        if not _draws(reference):
            findings.append(finding("gradients", step, words + "."))
            break
        notes.append(f"{words}: it draws random numbers, as dropout does, each rank its own.")
    since = findings[0].step if findings else start
    difference = loss_difference(reference, moved, since)
    return Judgement(
        start=start, last=last, findings=tuple(findings), notes=tuple(notes),
        loss_difference=difference,
    )  # fmt: skip


def _start_on_other_ranks(reference: Trajectory, resumed: Trajectory, saves: Sequence[Save]) -> int:
    """The step after the newest checkpoint; earlier if that was written beside the training.

    State of another number of ranks tells nothing, but the samples do.
    """
    newest, earlier = saves[-1].after + 1, [1, *(save.after + 1 for save in saves[:-1])]
    first = samples(resumed.steps.get(1, {}))
    possible = (s for s in range(newest, earlier[-1], -1) if s in reference.steps)
    return next((s for s in possible if samples(reference.steps[s]) == first), newest)


def _draws(reference: Trajectory) -> bool:
    """Whether most steps leave torch's generators in another state."""
    ranks = [reference.steps[step].get(0, Step()) for step in sorted(reference.steps)]
    states = [[step.random.get(name) for name in ("torch", "cuda")] for step in ranks]
    return sum(a != b for a, b in pairwise(states)) * 2 > len(states)


def samples(ranks: Mapping[int, Step]) -> Counter[str]:
    """How often each sample is in the batches of all ranks."""
    return Counter(row for step in ranks.values() for batch in step.batches for row in batch)


# Which batches a resumed script reads, by those that the undisturbed run read.


_KNOWN = 0.5  # share of a batch's samples that the undisturbed run read, to be called the same


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFinding:
    """``kind`` is the end of the finding's kind, ``words`` what to say after "step N reads"."""

    kind: str
    words: str
    rank: int | None = None


def look_at_data(
    reference: Trajectory, resumed: Trajectory, step: int, *, random_differs: bool
) -> DataFinding:
    """Say what the first differing batch is.

    Args:
        step: the step in which batches differ.
        random_differs: whether a generator's state differs as the step begins.
    """
    expected, got = reference.steps[step], resumed.steps[step]
    theirs = {
        rank: other
        for rank in got
        for other in expected
        if rank != other and got[rank].batches and got[rank].batches == expected[other].batches
    }
    if theirs:
        rank = min(theirs)
        return DataFinding(
            kind="rank", words=f"on rank {rank} the batch of rank {theirs[rank]}", rank=rank
        )
    read, steps = _flat(reference)
    where, batch = _first_differing(reference, resumed, step)
    sources = {place - where: steps[place] for place, known in enumerate(read) if known == batch}
    if not sources:
        return _unknown(reference, resumed, step, random_differs=random_differs)
    kind, source, words = _shifted(epoch_starts(reference), step, sources)
    # A generator that stands where it stood then has drawn that batch.
    is_drawn = any(
        state == reference.steps[source][rank].random.get(name) != expected[rank].random.get(name)
        for rank, one in got.items()
        for name, state in one.random.items()
    )
    if is_drawn:
        return DataFinding(kind="random", words=f"the batch of step {source}")
    return DataFinding(kind=kind, words=f"the batch of step {source}: {words}")


def _shifted(epochs: set[int], step: int, sources: Mapping[int, int]) -> tuple[str, int, str]:
    """Name a batch that the undisturbed run read at other places: kind, its step, what it means.

    Args:
        epochs: the first step of each.
        sources: by how many batches later each of its places is, and the step of it.
    """
    nearest = min(sources, key=abs)
    begun = max((s for s in epochs if s <= step), default=1)
    if abs(nearest) > 1:
        for by, source in sources.items():
            if by < 0 and source in epochs and (begun != step or len(epochs) == 1):
                return "restarted", source, "the sampler starts anew"
        for source in sources.values():
            other = max((s for s in epochs if s <= source), default=1)
            if other != begun and abs((source - other) - (step - begun)) <= 1:
                return "epoch", source, "the order of another epoch"
    name = "skipped" if nearest > 0 else "repeated"
    count = "one batch is" if abs(nearest) == 1 else f"{abs(nearest)} batches are"
    return name, sources[nearest], f"{count} {name}"


def _unknown(
    reference: Trajectory, resumed: Trajectory, step: int, *, random_differs: bool
) -> DataFinding:
    """A batch that the undisturbed run never read as a whole."""
    known = {row for ranks in reference.steps.values() for row in _rows(ranks)}
    rows = _rows(resumed.steps[step])
    share = sum(row in known for row in rows) / len(rows) if rows else 0.0
    if share >= _KNOWN:
        if random_differs and not resumed.has_workers and _may_be_drawn(reference):
            return DataFinding(kind="random", words="known samples in another order")
        same = sorted(rows) == sorted(_rows(reference.steps[step]))
        words = "its own samples in another order" if same else "known samples in another order"
        return DataFinding(kind="order", words=words)
    if resumed.has_workers and share == 0.0 and not epochs_repeat(reference):
        words = "samples that no step read: they are made anew, from other seeds of the workers"
        return DataFinding(kind="augmented", words=words)
    if random_differs:
        return DataFinding(kind="random", words="samples that no step read")
    return DataFinding(kind="other", words="samples that no step read")


def _may_be_drawn(reference: Trajectory) -> bool:
    """Whether an order may come from a generator that is recorded.

    An order that is drawn for each epoch moves it between two steps.
    """
    steps = [step for ranks in reference.steps.values() for step in ranks.values()]
    return any(step.between for step in steps) or not epochs_repeat(reference)


def epochs_repeat(reference: Trajectory) -> bool:
    """Whether any sample was read twice."""
    rows = [row for ranks in reference.steps.values() for row in _rows(ranks)]
    return len(set(rows)) < len(rows)


def epoch_starts(reference: Trajectory) -> set[int]:
    """The steps with which an epoch begins: where a sample comes again.

    Ranks that shuffle each for itself read the same samples within an epoch: then one rank's count.
    """
    steps = reference.steps
    of_first = _starts({step: {0: ranks[0]} for step, ranks in steps.items() if 0 in ranks})
    end = min(of_first - {1}, default=max(steps, default=0) + 1)
    held: dict[int, set[str]] = {}
    for step in range(1, end):
        for rank, one in steps.get(step, {}).items():
            held.setdefault(rank, set()).update(_rows({rank: one}))
    is_shared = sum(map(len, held.values())) > len(set().union(*held.values()))
    return of_first if is_shared else _starts(steps)


def _starts(steps: Mapping[int, Mapping[int, Step]]) -> set[int]:
    starts, seen = {1}, set[str]()
    for step in sorted(steps):
        rows = set(_rows(steps[step]))
        if rows & seen:
            starts.add(step)
            seen = set()
        seen |= rows
    return starts


def _rows(ranks: Mapping[int, Step]) -> list[str]:
    return [row for rank in sorted(ranks) for batch in ranks[rank].batches for row in batch]


def _flat(reference: Trajectory) -> tuple[list[tuple[Batch, ...]], list[int]]:
    """The micro-batches of all ranks in the order of reading, and the step of each."""
    read, steps = [], []
    for step in sorted(reference.steps):
        own = _micro(reference.steps[step])
        read += own
        steps += [step] * len(own)
    return read, steps


def _micro(ranks: Mapping[int, Step]) -> list[tuple[Batch, ...]]:
    columns = [ranks[rank].batches for rank in sorted(ranks)]
    return list(zip(*columns, strict=False))


def _first_differing(
    reference: Trajectory, resumed: Trajectory, step: int
) -> tuple[int, tuple[Batch, ...]]:
    """The place of the step's first differing micro-batch, and what is read there."""
    before = sum(len(_micro(reference.steps[s])) for s in reference.steps if s < step)
    expected, got = _micro(reference.steps[step]), _micro(resumed.steps[step])
    for number, batch in enumerate(got):
        if number >= len(expected) or batch != expected[number]:
            return before + number, batch
    return before + len(got), ()
