"""Decides about unreadable samples: which to skip, and when to give up.

Pure. All ranks decide from the same gathered values, so all decide alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

# A rank that was refused its whole share, and at least this many samples, has lost its storage: the
# samples are probably sound and must not be skipped.
_LEAST_SHARE = 4
_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A sample that a rank could not read.

    ``position`` is its place in the stream (or in the held-out set), ``index``
    that in the data set, ``name`` the data set's name for it. ``refused``: the system repeatedly
    refused to read it; otherwise the data was not a valid sample.
    """

    rank: int
    position: int
    index: int
    name: str
    error: str
    refused: bool

    def __str__(self) -> str:
        return f"position {self.position} ({self.name}) on rank {self.rank}: {self.error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOver:
    """Skip these positions for good and continue."""

    positions: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """End the run. ``may_pass``: a restart may help, as the samples may be sound."""

    reason: str
    may_pass: bool


def decide(
    unreadable: Sequence[Unreadable], *, shares: Sequence[int], known: Collection[int], most: int
) -> PassOver | GiveUp:
    """Decide about the unreadable samples of one step.

    Args:
        shares: number of samples assigned to each rank, by rank.
        known: indices of the samples skipped so far.
        most: how many different samples may be skipped in total.
    """
    refused = Counter(one.rank for one in unreadable if one.refused)
    lost = [rank for rank, num in refused.items() if num >= max(shares[rank], _LEAST_SHARE)]
    if lost:
        one = next(one for one in unreadable if one.rank == lost[0])
        return GiveUp(
            reason=f"rank {', '.join(map(str, sorted(lost)))} could not read one sample of its "
            f"share, so its storage failed, not the samples: {one}. Restart when the storage is "
            "back",
            may_pass=True,
        )
    num_all = len({*known, *(one.index for one in unreadable)})
    if num_all > most:
        return GiveUp(
            reason=f"{num_all} different samples cannot be read, and data.max_unreadable={most} "
            f"may be skipped: {_some(unreadable)}. Repair the data, or allow more",
            may_pass=False,
        )
    return PassOver(
        positions=tuple(sorted(one.position for one in unreadable)),
        reason=f"{_some(unreadable)}; {num_all} of at most {most} (data.max_unreadable)",
    )


def _some(unreadable: Sequence[Unreadable]) -> str:
    ordered = sorted(unreadable, key=lambda one: one.position)
    remaining = len(ordered) - _SHOWN
    names = "; ".join(map(str, ordered[:_SHOWN]))
    return names + (f"; and {remaining} more" if remaining > 0 else "")
