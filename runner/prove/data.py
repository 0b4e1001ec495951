"""Which batches a resumed script reads, by those that the undisturbed run read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from runner.prove.record import Batch, Step, Trajectory

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
