"""How far a host is trusted after what happened to it in any run. Pure.

A host that failed is on probation: others are preferred to it, until it has passed the check of its
devices and then been well for a while, which doubles with each fault. It is never excluded:
where nothing better is left, it takes part.
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
_MOST_DOUBLINGS = 5


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
class NodeRules:
    """
    Args:
        probation_hours: after one fault; doubles with each further one.
        forget_days: after which a fault counts no more.
    """

    probation_hours: float = 24.0
    forget_days: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """
    Args:
        faults: how many count, a slow spell as a quarter; 0: the host is trusted.
        is_tested: it passed the check of its devices since the last.
        until: when the probation ends, in seconds since the epoch; without the check it does not.
        badness: 0 for a trusted host; of two others the better one has less.
        reason: the last fault.
    """

    faults: float = 0.0
    is_tested: bool = True
    until: float = 0.0
    badness: float = 0.0
    reason: str = ""


def standing(events: Iterable[NodeEvent], *, now: float, rules: NodeRules) -> Standing:
    """The standing of one host, from what happened to it, in any order.

    A time in the future, of a clock that is wrong, counts as now.
    """
    known = sorted(events, key=lambda event: event.time)
    oldest = now - rules.forget_days * 86400
    faults = [one for one in known if one.kind in _WEIGHT and one.time > oldest]
    if not faults:
        return Standing()
    last = faults[-1]
    passed = [one.time for one in known if one.kind == PASSED and one.time >= last.time]
    weight = sum(_WEIGHT[one.kind] for one in faults)
    doublings = min(max(0.0, weight - 1), _MOST_DOUBLINGS)
    hours = rules.probation_hours * min(1.0, weight) * 2**doublings
    until = min(passed[0] if passed else last.time, now) + hours * 3600
    return Standing(
        faults=weight,
        is_tested=bool(passed),
        until=until,
        badness=0.0 if passed and now >= until else weight,
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
    badness = {node: one.badness for node, one in (known or {}).items()}
    better_first = sorted(usable, key=lambda node: (node in bad, badness.get(node, 0.0)))
    chosen = set(better_first[:count])
    return [node for node in usable if node in chosen]
