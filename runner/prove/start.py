"""At which step a resumed script went on, told from what it began with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from runner.prove.compare import are_equal, distance
from runner.prove.record import Save, Step, Trajectory

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
        return _nearest(reference, first)
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


def _nearest(reference: Trajectory, first: Mapping[int, Step]) -> int:
    return min(reference.steps, key=lambda step: _distance(reference.steps[step], first), default=1)


def _distance(ranks: Mapping[int, Step], first: Mapping[int, Step]) -> float:
    common = ranks.keys() & first.keys()
    return max((distance(ranks[r], first[r]) for r in common), default=float("inf"))
