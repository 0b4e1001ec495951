"""How far a host is trusted after what happened to it in any run. Pure.

Others are preferred to a host that failed, the more the more often it did, until that is forgotten.
It is never excluded: where nothing better is left, it takes part. A shorter memory would gain
nothing: no node that the run needs is left idle (measured: docs/clusters.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from runner.policy.restart import HARDWARE

# What happens to a host.
DIED = "died"  # it fell silent, or its scheduler lost it
SLOW = "slow"
PASSED = "passed"  # the check of its devices, after a fault
_WEIGHT = {HARDWARE: 1.0, DIED: 1.0, SLOW: 0.25}
KINDS = (*_WEIGHT, PASSED)
REMEMBER_DAYS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvent:
    """Something that happened to a host.

    Args:
        kind: one of :data:`KINDS`.
        time: in seconds since the epoch.
        run: the run in which it happened.
    """

    host: str
    kind: str
    time: float
    reason: str = ""
    run: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """
    Args:
        faults: how many are remembered, a slow spell as a quarter; 0: the host is trusted.
        is_tested: it passed the check of its devices since the last.
        reason: the last fault.
    """

    faults: float = 0.0
    is_tested: bool = True
    reason: str = ""


def standing(events: Iterable[NodeEvent], *, now: float, days: float = REMEMBER_DAYS) -> Standing:
    """The standing of one host, from what happened to it in so many days, in any order."""
    known = sorted(events, key=lambda event: event.time)
    faults = [one for one in known if one.kind in _WEIGHT and one.time > now - days * 86400]
    if not faults:
        return Standing()
    last = faults[-1]
    return Standing(
        faults=sum(_WEIGHT[one.kind] for one in faults),
        is_tested=any(one.kind == PASSED and one.time >= last.time for one in known),
        reason=last.reason,
    )


def choose(
    nodes: Sequence[str],
    *,
    count: int,
    bad: Collection[str] = (),
    lost: Collection[str] = (),
    known: Mapping[str, Standing] | None = None,
) -> list[str] | None:
    """Choose ``count`` of ``nodes``, in their order: no lost ones, and bad ones only if needed.

    Args:
        bad: those that failed in this run.
        known: of all, from all runs, as far as anything is.

    Returns:
        None if too few nodes are left.
    """
    usable = [node for node in nodes if node not in lost]
    if len(usable) < count:
        return None
    faults = {node: one.faults for node, one in (known or {}).items()}
    better_first = sorted(usable, key=lambda node: (node in bad, faults.get(node, 0.0)))
    chosen = set(better_first[:count])
    return [node for node in usable if node in chosen]
