"""Journal lines, grouped into incidents and notices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.policy.alert import BAD_STEPS, FAR_STEPS, TROUBLE
from runner.run_dir.time_account import plausible_seconds
from runner.tools.report.follow import whole

# Kinds that a person reads about first; others are notices or belong to the settings.
INCIDENT_KINDS = TROUBLE | {"crash"}
READING = "reading"  # a signature found in the run's own curve
CHANGE_KINDS = {"setting_changed", "mixture", "interval"}
# Lines that comment on an incident.
REMARK_KINDS = {"episode", "explained"}
# Neither an incident nor a warning.
_QUIET_KINDS = {"start", "restored", "stable", READING} | REMARK_KINDS | CHANGE_KINDS
_NAMES_NOTHING = ("unclear", "not reproducible")
_MOST_CHARACTERS = 2000  # of one text of a line, in characters
_MOST_NAMES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One journal line as it is shown: texts are bounded, missing fields are empty."""

    time: float
    attempt_number: int
    kind: str
    step: int
    decision: str
    reason: str
    ranks: tuple[int, ...]
    samples: tuple[int, int] | None
    sample_ids: tuple[str, ...]
    cost_steps: int
    cost_seconds: float
    detail: Mapping[str, Any]

    @property
    def cause(self) -> Mapping[str, Any]:
        """The verdict of a line that was explained; empty for others."""
        cause = self.detail.get("cause")
        return cause if isinstance(cause, dict) else {}


def line_of(record: Mapping[str, Any]) -> Line | None:
    """Parse a journal record; None if it is not one."""
    kind, step, detail = record.get("kind"), record.get("step"), record.get("detail")
    if not isinstance(kind, str) or type(step) is not int:
        return None
    span = ints(record.get("samples"))
    return Line(
        time=plausible_seconds(record.get("time")) or 0.0,
        attempt_number=whole(record.get("attempt")),
        kind=kind[:40],
        step=step,
        decision=_text(record.get("decision")),
        reason=_text(record.get("reason")),
        ranks=tuple(ints(record.get("ranks"))),
        samples=(span[0], span[1]) if len(span) == 2 else None,
        sample_ids=tuple(map(_text, list_of(record.get("sample_ids"))[:_MOST_NAMES])),
        cost_steps=whole(record.get("cost_steps")),
        cost_seconds=plausible_seconds(record.get("cost_seconds")) or 0.0,
        detail=detail if isinstance(detail, dict) else {},
    )


def group_incidents(lines: Iterable[Line]) -> list[list[Line]]:
    """Group the lines of incidents: each group ends with the episode that describes it."""
    groups: list[list[Line]] = []
    current: list[Line] | None = None
    for line in lines:
        if line.kind in REMARK_KINDS:
            for group in reversed(groups):
                if _is_remark_on(line, group):
                    group.append(line)
                    break
            if line.kind == "episode" and line.decision != "persistent":
                current = None
        elif line.kind not in INCIDENT_KINDS:
            current = None if line.kind == "start" else current
        elif current and line.kind in BAD_STEPS and abs(line.step - current[-1].step) <= FAR_STEPS:
            current.append(line)
            current = None if line.kind == "rollback" else current
        else:
            groups.append([line])
            current = groups[-1] if line.kind in ("discard", "redo") else None
    return groups


def verdicts(group: Sequence[Line]) -> list[Mapping[str, Any]]:
    """The distinct causes that replays found, newest first; those that name a cause come first."""
    distinct: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for cause in (line.cause for line in reversed(group)):
        if cause.get("cause"):
            names = tuple(str(cause.get(name)) for name in ("cause", "why", "positions"))
            distinct.setdefault(names, cause)
    return sorted(distinct.values(), key=lambda cause: cause["cause"] in _NAMES_NOTHING)


def readings(lines: Iterable[Line]) -> list[Line]:
    """Signatures that the run found in its own curve."""
    return [line for line in lines if line.kind == READING]


def notices(lines: Iterable[Line]) -> list[Line]:
    """Distinct lines that warn about something other than a bad step."""
    excluded = INCIDENT_KINDS | _QUIET_KINDS
    distinct: dict[tuple[str, str], Line] = {}
    for line in lines:
        if line.kind not in excluded:
            distinct.setdefault((line.kind, line.reason), line)
    return list(distinct.values())


def _is_remark_on(line: Line, group: Sequence[Line]) -> bool:
    """Whether an episode spans the group's samples, or a late verdict has its evidence."""
    if line.kind == "explained":
        bundle = line.cause.get("bundle")
        return bundle is not None and any(one.cause.get("bundle") == bundle for one in group)
    span, begun = line.samples, group[0].samples
    return span is None or begun is None or span[0] <= begun[0] < span[1]


def _text(value: Any) -> str:
    return str(value)[:_MOST_CHARACTERS] if value is not None else ""


def list_of(value: Any) -> list[Any]:
    """A list; an empty one for anything else."""
    return value if isinstance(value, list) else []


def texts(value: Any) -> list[str]:
    """The bounded texts of a list; none for anything else."""
    return [str(one)[:300] for one in list_of(value)[:16]]


def ints(value: Any) -> list[int]:
    """The whole numbers of a list; none for anything else."""
    return [item for item in list_of(value) if type(item) is int]
