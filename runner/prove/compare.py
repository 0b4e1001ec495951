"""Compares steps: what differs, in the order in which one causes the other; which are equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.policy.decision.finding import relative_difference
from runner.prove.record import Entry, Save, Step, Trajectory

# In causal order: what a step begins with, what it reads, what follows.
STATE = ("weights", "frozen", "state", "options", "buffers", "scalers", "copies")
READ = ("batches", "random")
RESULT = ("losses", "gradients")
QUIET = ("random", "schedules")  # these alone may differ without an effect
COMPONENTS = (*STATE, *READ, "schedules", *RESULT)
# Whatever the arithmetic, these are the same bits.
EXACT = ("options", "scalers", "schedules", *READ)
# Of these a process may know more after some steps: modules are found when they are called.
IN_COMMON = ("frozen", "buffers", "random")


# In tests/prove_resume nearly each has a planted defect; docs/prove_resume.md explains them.
_KINDS = """
not_resumed older_checkpoint weights weights_rounded frozen optimizer_state optimizer_steps
param_groups rank learning_rate options buffers scaler ema data_restarted data_skipped data_repeated
data_epoch data_order data_augmented data_rank data_other random rounding gradients
"""
KINDS = frozenset(_KINDS.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What differs: since which step, on which rank, of what names (the first few)."""

    kind: str
    step: int
    rank: int
    names: tuple[str, ...]
    sentence: str


def finding(
    kind: str, step: int, sentence: str, *, rank: int = 0, names: Sequence[str] = ()
) -> Finding:
    """A finding with its first names."""
    return Finding(kind=kind, step=step, rank=rank, names=tuple(names[:8]), sentence=sentence)


def differing(
    reference: Step, other: Step, *, tolerance: float = 0.0, ignored: Iterable[str] = ()
) -> list[str]:
    """The components that differ, in causal order.

    Args:
        tolerance: relative, of norms and losses; 0: bit for bit.
        ignored: components that are not compared.
    """
    found = []
    is_last = not (reference.gradients and other.gradients)  # the state after the last step
    for name in COMPONENTS:
        one, two = getattr(reference, name), getattr(other, name)
        if name in ignored or (is_last and name in (*READ, *RESULT, "buffers")):
            continue
        if name in IN_COMMON:
            common = one.keys() & two.keys()
            one, two = ({key: side[key] for key in common} for side in (one, two))
        if name == "copies":
            if any(best_copy(own, two, tolerance) != own for own in one.values()):
                found.append(name)
        elif not are_equal(one, two, 0.0 if name in EXACT else tolerance):
            found.append(name)
    return found


def are_equal(one: Any, two: Any, tolerance: float) -> bool:
    """Whether two values of a record are equal; entries by digest, or by norm and tolerance."""
    if isinstance(one, Mapping):
        return (
            isinstance(two, Mapping)
            and one.keys() == two.keys()
            and all(are_equal(value, two[key], tolerance) for key, value in one.items())
        )
    if is_entry(one) and is_entry(two):
        return same(one, two, tolerance)
    if isinstance(one, Sequence) and not isinstance(one, str):
        return len(one) == len(two) and all(
            are_equal(a, b, tolerance) for a, b in zip(one, two, strict=True)
        )
    if isinstance(one, float) and isinstance(two, float):
        return one == two or (one != one and two != two) or is_near(one, two, tolerance)
    return bool(one == two)


def is_entry(value: Any) -> bool:
    """Whether it is the digest of a tensor, with its norm, or a number in its place."""
    return isinstance(value, Sequence) and len(value) >= 2 and isinstance(value[0], str) and (
        value[1] is None or isinstance(value[1], int | float)
    )  # fmt: skip


def same(one: Entry, two: Entry, tolerance: float = 0.0) -> bool:
    """Whether two tensors are equal; by their norms if there is a tolerance."""
    if one[0] == two[0] and (one[0] or one[1] == two[1]):
        return True
    if not tolerance:
        return False
    if one[1] is None or two[1] is None:
        return True  # integers, which have no norm
    return is_near(one[1], two[1], tolerance)


def is_near(one: float, two: float, tolerance: float) -> bool:
    """Whether two numbers agree but for a relative tolerance."""
    return abs(one - two) <= tolerance * max(abs(one), abs(two))


def best_copy(
    own: Mapping[str, Entry], copies: Mapping[str, Mapping[str, Entry]], tolerance: float
) -> Mapping[str, Entry] | None:
    """``own`` if some copy equals it, else one with the same names; None without any.

    The names of copies depend on the order in which they were found.
    """
    alike = [copy for copy in copies.values() if copy.keys() == own.keys()]
    if any(are_equal(own, copy, tolerance) for copy in alike):
        return own
    return alike[0] if alike else None


def distance(one: Step, two: Step) -> float:
    """The mean relative difference of the weights' norms; infinite where names differ."""
    pairs = [
        (entry[1], two.weights[name][1])
        for name, entry in one.weights.items()
        if name in two.weights and entry[1] is not None and two.weights[name][1] is not None
    ]
    if not pairs:
        return float("inf")
    return math.fsum(relative_difference(a, b) for a, b in pairs) / len(pairs)


def spread(one: Step, two: Step) -> float:
    """The largest relative difference of norms and losses that two steps have."""
    pairs: list[tuple[Any, Any]] = list(zip(one.losses, two.losses, strict=False))
    for name in ("weights", "gradients"):
        mine, theirs = getattr(one, name), getattr(two, name)
        pairs += [(e[1], theirs[k][1]) for k, e in mine.items() if e and theirs.get(k)]
    numbers = [(a, b) for a, b in pairs if isinstance(a, float) and isinstance(b, float)]
    return max((relative_difference(a, b) for a, b in numbers), default=0.0)


def loss_difference(reference: Trajectory, moved: Trajectory, since: int) -> float | None:
    """The largest difference of the ranks' mean losses from a step on; None without losses."""
    differences = []
    for step in range(since, min(moved.last, reference.last) + 1):
        one, two = mean_loss(reference.steps[step]), mean_loss(moved.steps.get(step, {}))
        if one is not None and two is not None:
            differences.append(abs(one - two))
    return max(differences, default=None)


def mean_loss(ranks: Mapping[int, Step]) -> float | None:
    """Over the ranks; None where no loss was seen."""
    losses = [step.loss for step in ranks.values() if step.loss is not None]
    return sum(losses) / len(losses) if losses else None


# -- at which step a resumed script went on

# What a component that equals a step's says for it; the rest counts one.
_VOTES = {"weights": 3, "state": 3}
_VOTING = ("weights", "state", "options", "batches", "random", "copies", "scalers")


def find_start(reference: Trajectory, first: Mapping[int, Step], saves: Sequence[Save]) -> int:
    """The step of the reference that a resumed script began with.

    Weights or optimizer state that are those of the newest checkpoint decide. Else each component
    votes for the steps that it equals, and weights that equal none for the step nearest to them.

    Args:
        first: what its first step began with and read, by rank.
        saves: the checkpoints before it, in order.
    """
    newest = saves[-1].after + 1 if saves else 0
    expected = reference.steps.get(newest)
    if expected and any(_equal(expected, first, name) for name in ("weights", "state")):
        return newest
    scores = {step: _score(ranks, first) for step, ranks in reference.steps.items()}
    by_weights = [s for s, ranks in reference.steps.items() if _equal(ranks, first, "weights")]
    if by_weights or max(scores.values(), default=0) >= max(_VOTES.values()):
        return max(scores, key=lambda step: (scores[step], -abs(step - newest)))
    if not expected:
        steps = reference.steps
        return min(steps, key=lambda step: _distance(steps[step], first), default=1)
    beginning = reference.steps.get(1, {})
    return newest if _distance(expected, first) <= _distance(beginning, first) else 1


def _score(ranks: Mapping[int, Step], first: Mapping[int, Step]) -> int:
    return sum(_VOTES.get(name, 1) for name in _VOTING if _equal(ranks, first, name))


def _equal(ranks: Mapping[int, Step], first: Mapping[int, Step], name: str) -> bool:
    """Whether a component is there and equal on all ranks."""
    value: Callable[[Step], object] = lambda step: getattr(step, name)  # noqa: E731
    return ranks.keys() == first.keys() and all(
        bool(value(ranks[r])) and are_equal(value(ranks[r]), value(first[r]), 0.0) for r in ranks
    )


def _distance(ranks: Mapping[int, Step], first: Mapping[int, Step]) -> float:
    common = ranks.keys() & first.keys()
    return max((distance(ranks[r], first[r]) for r in common), default=float("inf"))
