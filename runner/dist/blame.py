"""Who was at fault: from the ranks' reports to one sentence. Pure.

An exception of a rank's own comes before a signal, a signal before an exit without a word, that
before what the collectives show, and that before silence. Ranks that only lost contact with others
are never to blame while there is anybody else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runner.dist.evidence import Report
from runner.dist.flight import first_divergence

_MOST_NAMED = 8
_OWN_FAULTS = ("exception", "fatal", "signal", "exit")  # the surest sign first


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """The cause of a crash.

    ``signature`` stays the same when the same thing fails at the same place again, whatever
    the numbers in its message are; ``first`` is the report to show, when there is one.
    """

    kind: str
    ranks: tuple[int, ...]
    step: int
    reason: str
    signature: str
    first: Report | None = None


def blame(reports: Sequence[Report], world_size: int) -> Blame:
    """The cause that the reports of one incarnation speak for. ``reports`` may be empty."""
    step = max((report.step for report in reports), default=0)
    for kind in _OWN_FAULTS:
        guilty = [report for report in reports if report.kind == kind]
        if guilty:
            return _own_fault(kind, guilty, reports)
    silent = tuple(sorted(set(range(world_size)) - {report.rank for report in reports}))
    if not reports:
        return Blame(
            kind="silence",
            ranks=(),
            step=0,
            reason="every rank ended without a word: killed all at once, cut off, or the power went",
            signature="silence",
        )
    divergence = first_divergence({report.rank: report.collectives for report in reports})
    if divergence is not None and not silent:
        return Blame(
            kind=divergence.kind,
            ranks=divergence.ranks,
            step=step,
            reason=f"{_KIND_WORDS[divergence.kind]}: {divergence.words}{_doing(reports, divergence.ranks)}",
            signature=f"{divergence.kind} {_without_numbers(divergence.words)}",
        )
    if silent:
        return _silent(silent, reports, step)
    return _stuck(reports, step)


_KIND_WORDS = {
    "operation": "ranks entered different collectives",
    "shape": "ranks entered one collective with different shapes",
    "absent": "a collective was not entered by all",
}


def _own_fault(kind: str, guilty: list[Report], reports: Sequence[Report]) -> Blame:
    first = min(guilty, key=lambda report: report.time)
    same = [r for r in guilty if _without_numbers(r.message) == _without_numbers(first.message)]
    ranks = tuple(sorted(report.rank for report in same))
    at = f" at {first.where}" if first.where else ""
    others = [report for report in reports if report.kind not in _OWN_FAULTS]
    waiting = "" if kind == "exception" else changed_shape(others) or _waiting_in(others)
    return Blame(
        kind=kind,
        ranks=ranks,
        step=first.step,
        reason=f"rank {_names(ranks)}: {first.message} in {first.phase} of step {first.step}{at}{waiting}",
        signature=f"{kind} {_without_numbers(first.message)} {_without_numbers(first.where)}",
        first=first,
    )


def _silent(silent: tuple[int, ...], reports: Sequence[Report], step: int) -> Blame:
    hung = any(report.kind in ("hang", "called") for report in reports)
    what = (
        "does not answer: stopped (SIGSTOP), frozen, or cut off"
        if hung
        else "is gone without a word: SIGKILL, out of memory, or its node is down"
    )
    return Blame(
        kind="silence",
        ranks=silent,
        step=step,
        reason=f"rank {_names(silent)} {what}{_waiting_in(reports)}",
        signature=f"silence {what}",
    )


def _stuck(reports: Sequence[Report], step: int) -> Blame:
    """All ranks told, all collectives match: somebody is busy, or the network is."""
    waiting = [report for report in reports if _last_open(report) is not None]
    busy = [report for report in reports if _last_open(report) is None]
    if busy and waiting:
        ranks = tuple(report.rank for report in busy)
        places = "; ".join(f"rank {r.rank} in {r.phase} at {r.where}" for r in busy[:_MOST_NAMED])
        return Blame(
            kind="hang",
            ranks=ranks,
            step=step,
            reason=f"{places}, for {busy[0].seconds:.0f} s{_waiting_in(waiting)}",
            signature=f"hang {_without_numbers(busy[0].where)}",
        )
    first = reports[0]
    return Blame(
        kind="network",
        ranks=tuple(report.rank for report in reports),
        step=step,
        reason=f"all ranks are in {first.phase} of step {step} at {first.where} and none gets on: "
        f"{first.message or 'the network between them may be down'}",
        signature=f"network {_without_numbers(first.where)}",
    )


def _last_open(report: Report) -> Mapping[str, object] | None:
    entries = report.collectives
    return entries[-1] if entries and not entries[-1]["finished"] else None


def _waiting_in(reports: Sequence[Report]) -> str:
    for report in reports:
        entry = _last_open(report)
        if entry is not None:
            return (
                f"; rank {report.rank} waited for it in {entry['op']} #{entry['seq']} "
                f"at {entry['line'] or report.where}"
            )
    return ""


def changed_shape(reports: Sequence[Report]) -> str:
    """A rank whose last collective was not as large as at the same line before.

    gloo aborts the rank that received the wrong size, which takes its own record with it.
    """
    for report in reports:
        entries = report.collectives
        for last in reversed(entries[-3:]):
            key = (last["group"], last["op"], last["line"])
            before = [
                str(entry["sizes"])
                for entry in entries
                if (entry["group"], entry["op"], entry["line"]) == key
                and entry["seq"] < last["seq"]
            ]
            # A line that hands over many sizes, such as a model's forward, tells nothing.
            if len(before) > 1 and len(set(before)) == 1 and before[0] != str(last["sizes"]):
                return (
                    f"; rank {report.rank} handed over {last['sizes']} in {last['op']} "
                    f"#{last['seq']} at {last['line']}, where it was {before[0]} before"
                )
    return ""


def _doing(reports: Sequence[Report], ranks: tuple[int, ...]) -> str:
    """What the odd ones were busy with."""
    told = [r for r in reports if r.rank in ranks and r.where]
    return "".join(f"; rank {r.rank} is in {r.phase} at {r.where}" for r in told[:_MOST_NAMED])


def _names(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return ", ".join(map(str, ranks[:_MOST_NAMED])) + more


def _without_numbers(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+|\d+", "N", text)
