"""Journal lines, told as what they are together: a trouble with its steps, or a notice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# What a person reads of first; all other kinds are notices or belong to the settings.
TROUBLE = frozenset(
    {"discard", "redo", "rollback", "rebaseline", "halt", "crash", "unreadable", "evaluation"}
)
READING = "reading"  # a signature that the run found in its own curve
CHANGES = frozenset({"setting_changed", "mixture", "interval"})
# No trouble, and nothing to warn of.
CALM = frozenset({"start", "restored", "episode", "explained", "stable", READING}) | CHANGES
# What is said of a trouble, beside the lines that are it.
REMARKS = frozenset({"episode", "explained"})
_NAMES_NOTHING = ("unclear", "not reproducible")
_FAR_STEPS = 30  # where no episode tells, trouble so much later is another
_WORDS = 2000  # of one text of a line
_NAMES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One journal line as it is shown: texts are bounded, what is missing is empty."""

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
class Trouble:
    """Lines that are one incident, in their order; ``place`` is the attempt where it began."""

    lines: list[Line]
    place: int | None = None

    @property
    def first(self) -> Line:
        return self.lines[0]

    def last_of(self, kind: str) -> Line | None:
        return next((line for line in reversed(self.lines) if line.kind == kind), None)


def line_of(told: Mapping[str, Any]) -> Line | None:
    """A journal line; None for what is none."""
    kind, step = told.get("kind"), told.get("step")
    if not isinstance(kind, str) or type(step) is not int:
        return None
    detail = told.get("detail")
    return Line(
        time=_seconds(told.get("time")),
        attempt_number=_count(told.get("attempt")),
        kind=kind[:40],
        step=step,
        decision=_text(told.get("decision")),
        reason=_text(told.get("reason")),
        ranks=tuple(rank for rank in _list(told.get("ranks")) if type(rank) is int),
        samples=_span(told.get("samples")),
        sample_ids=tuple(_text(name) for name in _list(told.get("sample_ids"))[:_NAMES]),
        cost_steps=_count(told.get("cost_steps")),
        cost_seconds=_seconds(told.get("cost_seconds")),
        detail=detail if isinstance(detail, dict) else {},
    )


def troubles(lines: Iterable[Line]) -> list[Trouble]:
    """Lines of trouble, grouped: those up to the episode that tells what they were."""
    found: list[Trouble] = []
    open_: Trouble | None = None
    for line in lines:
        if line.kind == "episode":
            _conclude(found, line)
            open_ = None if line.decision != "persistent" else open_
        elif line.kind == "explained":
            _explain(found, line)
        elif line.kind not in TROUBLE:
            open_ = None if line.kind == "start" else open_
        elif open_ is not None and _belongs(line, open_):
            open_.lines.append(line)
            open_ = None if line.kind == "rollback" else open_
        else:
            open_ = Trouble(lines=[line])
            found.append(open_)
            if line.kind not in ("discard", "redo"):
                open_ = None
    return found


def verdicts(trouble: Trouble) -> list[Mapping[str, Any]]:
    """What replays found of a trouble, the newest first; those that name something before others.

    Equal ones once.
    """
    found = [line.detail.get("cause") for line in reversed(trouble.lines)]
    told: dict[tuple[str, str, str], Mapping[str, Any]] = {}
    for one in found:
        if isinstance(one, dict) and one.get("cause"):
            names = (str(one.get("cause")), str(one.get("why")), str(one.get("positions")))
            told.setdefault(names, one)
    return sorted(told.values(), key=lambda one: one.get("cause") in _NAMES_NOTHING)


def readings(lines: Iterable[Line]) -> list[Line]:
    """Signatures that the run read in its own curve."""
    return [line for line in lines if line.kind == READING]


def notices(lines: Iterable[Line]) -> list[Line]:
    """Lines that warn of something beside the steps, the same ones once."""
    known = TROUBLE | CALM
    told: dict[tuple[str, str], Line] = {}
    for line in lines:
        if line.kind not in known:
            told.setdefault((line.kind, line.reason), line)
    return list(told.values())


def _belongs(line: Line, trouble: Trouble) -> bool:
    is_near = abs(line.step - trouble.lines[-1].step) <= _FAR_STEPS
    return is_near and line.kind in ("discard", "redo", "rollback", "rebaseline", "halt")


def _conclude(found: Sequence[Trouble], line: Line) -> None:
    """An episode tells of the trouble whose samples it spans."""
    span = line.samples
    for trouble in reversed(found):
        mine = trouble.first.samples
        if span is None or mine is None or span[0] <= mine[0] < span[1]:
            trouble.lines.append(line)
            return


def _explain(found: Sequence[Trouble], line: Line) -> None:
    """Add a verdict that came later to the trouble of the same evidence."""
    number = _bundle(line)
    for trouble in reversed(found):
        if number is not None and any(_bundle(one) == number for one in trouble.lines):
            trouble.lines.append(line)
            return


def _bundle(line: Line) -> object:
    cause = line.detail.get("cause")
    return cause.get("bundle") if isinstance(cause, dict) else None


def _text(value: Any) -> str:
    return str(value)[:_WORDS] if value is not None else ""


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _count(value: Any) -> int:
    return value if type(value) is int and value >= 0 else 0


def _seconds(value: Any) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e11
    return float(value) if good else 0.0


def _span(value: Any) -> tuple[int, int] | None:
    if isinstance(value, list) and len(value) == 2 and all(type(at) is int for at in value):
        return value[0], value[1]
    return None
