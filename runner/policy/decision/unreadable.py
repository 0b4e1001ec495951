"""What to do about samples that cannot be read: which to skip, and when to give up.

Pure. All ranks decide from the same gathered values, so all decide alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

# A rank whose whole share the system refused, and at least this much, has lost its
# storage: its samples are probably sound, and skipping them would only lose them.
_LEAST_SHARE = 4
_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A sample that a rank could not read.

    ``position`` is its place in the stream (or in the held-out set), ``index``
    that in the data set, ``name`` the data set's name for it. ``refused``: the system would not
    give it, again and again; otherwise the data was not a valid sample.
    """

    rank: int
    position: int
    index: int
    name: str
    words: str
    refused: bool

    def __str__(self) -> str:
        return f"position {self.position} ({self.name}) on rank {self.rank}: {self.words}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOver:
    """Skip these positions for good, and go on."""

    positions: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """End the run. ``may_pass``: starting again may help, as the samples may be sound."""

    reason: str
    may_pass: bool


def decide(
    found: Sequence[Unreadable], *, shares: Sequence[int], known: Collection[int], most: int
) -> PassOver | GiveUp:
    """What to do about the unreadable samples of one step.

    Args:
        shares: samples that each rank had to read, by rank.
        known: indices of the samples skipped so far.
        most: how many different samples may be skipped in all.
    """
    refused = Counter(one.rank for one in found if one.refused)
    lost = [rank for rank, num in refused.items() if num >= max(shares[rank], _LEAST_SHARE)]
    if lost:
        one = next(one for one in found if one.rank == lost[0])
        return GiveUp(
            reason=f"rank {', '.join(map(str, sorted(lost)))} could not read one sample of its "
            f"share, so its storage is gone and not they: {one}. Start again when it is back",
            may_pass=True,
        )
    num_all = len({*known, *(one.index for one in found)})
    if num_all > most:
        return GiveUp(
            reason=f"{num_all} different samples cannot be read, data.max_unreadable={most} may be "
            f"passed over: {_some(found)}. Mend the data, or allow more",
            may_pass=False,
        )
    return PassOver(
        positions=tuple(sorted(one.position for one in found)),
        reason=f"{_some(found)}; {num_all} of at most {most} (data.max_unreadable)",
    )


def _some(found: Sequence[Unreadable]) -> str:
    ordered = sorted(found, key=lambda one: one.position)
    rest = len(ordered) - _SHOWN
    names = "; ".join(map(str, ordered[:_SHOWN]))
    return names + (f"; and {rest} more" if rest > 0 else "")
