"""Journal lines, grouped into incidents and notices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Kinds that a person reads about first; others are notices or belong to the settings.
INCIDENT_KINDS = frozenset(
    {"discard", "redo", "rollback", "rebaseline", "halt", "crash", "unreadable", "evaluation"}
)
READING = "reading"  # a signature found in the run's own curve
CHANGE_KINDS = frozenset({"setting_changed", "mixture", "interval"})
# Neither an incident nor a warning.
QUIET_KINDS = (
    frozenset({"start", "restored", "episode", "explained", "stable", READING}) | CHANGE_KINDS
)
# Lines that comment on an incident.
REMARK_KINDS = frozenset({"episode", "explained"})
_NAMES_NOTHING = ("unclear", "not reproducible")
_FAR_STEPS = 30  # without an episode, a line this many steps later starts another incident
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
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class IncidentGroup:
    """The journal lines of one incident, in order."""

    lines: list[Line]
    place: int | None = None

    @property
    def first(self) -> Line:
        return self.lines[0]

    def last_of(self, kind: str) -> Line | None:
        return next((line for line in reversed(self.lines) if line.kind == kind), None)


def line_of(record: Mapping[str, Any]) -> Line | None:
    """Parse a journal record; None if it is not one."""
    kind, step = record.get("kind"), record.get("step")
    if not isinstance(kind, str) or type(step) is not int:
        return None
    detail = record.get("detail")
    return Line(
        time=_seconds(record.get("time")),
        attempt_number=_count(record.get("attempt")),
        kind=kind[:40],
        step=step,
        decision=_text(record.get("decision")),
        reason=_text(record.get("reason")),
        ranks=tuple(rank for rank in _list(record.get("ranks")) if type(rank) is int),
        samples=_span(record.get("samples")),
        sample_ids=tuple(_text(name) for name in _list(record.get("sample_ids"))[:_MOST_NAMES]),
        cost_steps=_count(record.get("cost_steps")),
        cost_seconds=_seconds(record.get("cost_seconds")),
        detail=detail if isinstance(detail, dict) else {},
    )


def group_incidents(lines: Iterable[Line]) -> list[IncidentGroup]:
    """Group the lines of incidents: each group ends with the episode that describes it."""
    groups: list[IncidentGroup] = []
    current: IncidentGroup | None = None
    for line in lines:
        if line.kind == "episode":
            _add_episode(groups, line)
            current = None if line.decision != "persistent" else current
        elif line.kind == "explained":
            _add_explanation(groups, line)
        elif line.kind not in INCIDENT_KINDS:
            current = None if line.kind == "start" else current
        elif current is not None and _belongs(line, current):
            current.lines.append(line)
            current = None if line.kind == "rollback" else current
        else:
            current = IncidentGroup(lines=[line])
            groups.append(current)
            if line.kind not in ("discard", "redo"):
                current = None
    return groups


def verdicts(trouble: IncidentGroup) -> list[Mapping[str, Any]]:
    """The distinct causes that replays found, newest first; those that name a cause come first."""
    causes = [line.detail.get("cause") for line in reversed(trouble.lines)]
    distinct: dict[tuple[str, str, str], Mapping[str, Any]] = {}
    for one in causes:
        if isinstance(one, dict) and one.get("cause"):
            names = (str(one.get("cause")), str(one.get("why")), str(one.get("positions")))
            distinct.setdefault(names, one)
    return sorted(distinct.values(), key=lambda one: one.get("cause") in _NAMES_NOTHING)


def readings(lines: Iterable[Line]) -> list[Line]:
    """Signatures that the run found in its own curve."""
    return [line for line in lines if line.kind == READING]


def notices(lines: Iterable[Line]) -> list[Line]:
    """Distinct lines that warn about something other than a bad step."""
    excluded = INCIDENT_KINDS | QUIET_KINDS
    distinct: dict[tuple[str, str], Line] = {}
    for line in lines:
        if line.kind not in excluded:
            distinct.setdefault((line.kind, line.reason), line)
    return list(distinct.values())


def _belongs(line: Line, trouble: IncidentGroup) -> bool:
    is_near = abs(line.step - trouble.lines[-1].step) <= _FAR_STEPS
    return is_near and line.kind in ("discard", "redo", "rollback", "rebaseline", "halt")


def _add_episode(groups: Sequence[IncidentGroup], line: Line) -> None:
    """Add an episode to the incident whose samples it spans."""
    span = line.samples
    for trouble in reversed(groups):
        group_span = trouble.first.samples
        if span is None or group_span is None or span[0] <= group_span[0] < span[1]:
            trouble.lines.append(line)
            return


def _add_explanation(groups: Sequence[IncidentGroup], line: Line) -> None:
    """Add a verdict that came later to the incident with the same evidence."""
    number = _bundle(line)
    for trouble in reversed(groups):
        if number is not None and any(_bundle(one) == number for one in trouble.lines):
            trouble.lines.append(line)
            return


def _bundle(line: Line) -> object:
    cause = line.detail.get("cause")
    return cause.get("bundle") if isinstance(cause, dict) else None


def _text(value: Any) -> str:
    return str(value)[:_MOST_CHARACTERS] if value is not None else ""


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _count(value: Any) -> int:
    return value if type(value) is int and value >= 0 else 0


def _seconds(value: Any) -> float:
    is_valid = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e11
    return float(value) if is_valid else 0.0


def _span(value: Any) -> tuple[int, int] | None:
    if isinstance(value, list) and len(value) == 2 and all(type(at) is int for at in value):
        return value[0], value[1]
    return None
