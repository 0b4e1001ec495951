"""The sections of signatures, warnings and incidents."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from runner.reading.finding import SIGNATURES
from runner.report.drawing import number
from runner.report.evidence import Evidence, Probe, number_of
from runner.report.incident import REMARKS, Line, Trouble, notices, readings, troubles, verdicts
from runner.report.markup import Html, join, table, tag
from runner.report.run import RunReader
from runner.report.words import ranks_of, status_class, took, when

MOST_TROUBLES = 300
_MOST_EVIDENCE = 40  # the newest ones are told with their samples
_MOST_NAMES, _FEW_NAMES = 16, 4  # of the newest ones, and of the others
_MOST_WORDS, _FEW_WORDS = 2000, 400
_MOST_POSITIONS = 16
_MOST_WARNINGS = 300


def warnings(run: RunReader) -> Html | None:
    """What was read in the curve, and what the run warned of beside steps."""
    read = readings(run.fold.lines)
    noticed = notices(run.fold.lines)
    if not noticed and not read:
        return None
    rows = [
        [when(one.time), one.kind.replace("_", " "), f"{one.step:,}", ranks_of(one), one.reason]
        for one in noticed[-_MOST_WARNINGS:]
    ]
    more = f"The first {len(noticed) - len(rows):,} are left out; journal.jsonl has them all."
    return tag(
        "section",
        tag("h3", "Signatures and warnings"),
        _signatures(read) if read else None,
        table(["when", "what", "step", "ranks", "why"], rows) if rows else None,
        tag("p", more, cls="note") if len(noticed) > len(rows) else None,
        cls="warnings",
    )


def _signatures(lines: Sequence[Line]) -> Html:
    """What the run read in its own curve; nothing was done about it."""
    items = []
    for line in lines[-_MOST_WARNINGS:]:
        name = str(line.detail.get("signature", ""))[:60]
        evidence = line.reason.removeprefix(f"{name}: ")
        remedy = str(line.detail.get("try", ""))[:2000]
        sure = str(line.detail.get("confidence", ""))[:20]
        facts = [
            ("seen", evidence),
            ("to try", remedy),
            ("when", f"step {line.step:,}" + (f", confidence {sure}" if sure else "")),
        ]
        meaning = SIGNATURES.get(name, "")
        items.append(
            tag(
                "li",
                tag("h4", tag("span", f"{name.replace('_', ' ')}: {meaning}".strip(": "))),
                _facts(facts),
                cls="signature",
            )
        )
    return tag("ol", *items, cls="signatures")


def incidents(run: RunReader) -> Html | None:
    """Each trouble: what it was, why, who, what it cost, what was done."""
    found = troubles(run.fold.lines)
    if not found:
        return None
    places = _places(run, found)
    left_out = len(found) - MOST_TROUBLES
    shown = found[-MOST_TROUBLES:]
    more = f"The first {left_out:,} of {len(found):,} are left out; journal.jsonl has them all."
    items = []
    for at, one in enumerate(shown):
        is_late = len(shown) - at <= _MOST_EVIDENCE
        items.append(_incident(run, one, places.get(id(one)), with_evidence=is_late))
    return tag(
        "section",
        tag("h3", f"Incidents ({len(found):,})"),
        tag("p", more, cls="note") if left_out > 0 else None,
        tag("ol", *items, start=max(1, left_out + 1)),
        cls="incidents",
    )


def _places(run: RunReader, found: Sequence[Trouble]) -> dict[int, tuple[int, int]]:
    """First and last attempt of each trouble."""
    if not len(run.fold.places):  # then there are no curves to show them in
        return {}
    at = {id(mark.line): mark.attempt for mark in run.marks()}
    made = {}
    for one in found:
        known = [at[id(line)] for line in one.lines if id(line) in at and line.kind not in REMARKS]
        if known:
            made[id(one)] = min(known), max(known)
    return made


def _incident(
    run: RunReader, trouble: Trouble, place: tuple[int, int] | None, *, with_evidence: bool
) -> Html:
    lines = [line for line in trouble.lines if line.kind not in REMARKS]
    last, found = lines[-1], verdicts(trouble)
    kinds = [line.kind for line in lines]
    what = " then ".join(_counted(kind, kinds.count(kind)) for kind in dict.fromkeys(kinds))
    numbers = [number for one in found if (number := number_of(one)) is not None]
    evidence = run.evidence(numbers[0]) if numbers and with_evidence else None
    names = list(dict.fromkeys(name for line in lines for name in line.sample_ids))
    most_words = _MOST_WORDS if with_evidence else _FEW_WORDS
    zoom = None
    if place is not None:
        zoom = tag(
            "button", "show in the curves", type="button", cls="zoom",
            data_from=place[0], data_to=place[1], hidden=True,
        )  # fmt: skip
    title = [tag("span", f"Step {trouble.first.step:,}: {what}")]
    if found:
        title.append(tag("span", str(found[0].get("cause", ""))[:60], cls="verdict"))
    return tag(
        "li",
        tag("h4", tag("span", *title), zoom),
        _facts(_told(run, trouble, lines, found, numbers, most_words)),
        _names(names, _MOST_NAMES if with_evidence else _FEW_NAMES),
        *(_evidence(evidence) if evidence is not None else []),
        cls=f"incident {status_class(last.kind)}",
        data_step=trouble.first.step,
    )


def _told(
    run: RunReader,
    trouble: Trouble,
    lines: Sequence[Line],
    found: Sequence[Mapping[str, Any]],
    numbers: Sequence[int],
    most_words: int,
) -> list[tuple[str, object]]:
    """Name and value of each fact; the empty ones are left out."""
    episode, best = trouble.last_of("episode"), found[0] if found else None
    shape = episode.reason.partition("; suspected")[0].partition("; cause:")[0] if episode else ""
    suspected = "" if found or episode is None else str(episode.detail.get("cause", ""))
    spans = [line.samples for line in lines if line.samples]
    steps = sum(line.cost_steps for line in lines)
    seconds = sum(line.cost_seconds for line in lines)
    return [
        ("when", when(trouble.first.time)),
        ("why", str(best.get("why", ""))[:most_words] if best is not None else ""),
        ("refuted if", _refutation(best) if best is not None else ""),
        ("not tried", "; ".join(_words(best.get("not_tried"))) if best is not None else ""),
        ("seen" if found else "why", _reasons(lines, found, most_words)),
        ("suspected cause", suspected),
        ("shape", shape),
        ("who", _who(lines, found)),
        ("samples", _samples(spans, best)),
        ("cost", _cost(steps, seconds)),
        ("done", lines[-1].decision),
        ("replay", _commands(run, numbers)),
        ("reports", _reports(run, lines)),
    ]


def _facts(facts: Iterable[tuple[str, object]]) -> Html:
    return tag("dl", *(join([tag("dt", name), tag("dd", value)]) for name, value in facts if value))


def _refutation(verdict: Mapping[str, Any]) -> str:
    refutation = str(verdict.get("refutation", ""))[:500]
    if not refutation:
        return ""
    return (
        f"{refutation} ({'tried, and not so' if verdict.get('is_tried') is True else 'not tried'})"
    )


def _who(lines: Sequence[Line], found: Sequence[Mapping[str, Any]]) -> str:
    """The ranks that a verdict names, else those that the lines have."""
    named = sorted({rank for one in found for rank in _ints(one.get("ranks"))})
    ranks = named or sorted({rank for line in lines for rank in line.ranks})
    if not ranks:
        return ""
    hosts = list(dict.fromkeys(host for one in found for host in _words(one.get("hosts"))))
    host = next((str(line.detail["host"])[:100] for line in lines if line.detail.get("host")), "")
    on = f" on {', '.join(hosts[:8])}" if hosts else f" on {host}" if host else ""
    return f"rank {', '.join(map(str, ranks[:32]))}{on}"


def _samples(spans: Sequence[tuple[int, int]], verdict: Mapping[str, Any] | None) -> str:
    positions = _ints(verdict.get("positions")) if verdict is not None else []
    if positions:
        more = f" and {len(positions) - _MOST_POSITIONS} more" * (len(positions) > _MOST_POSITIONS)
        return f"positions {', '.join(f'{one:,}' for one in positions[:_MOST_POSITIONS])}{more}"
    if not spans:
        return ""
    return f"positions {min(a for a, _ in spans):,} to {max(b for _, b in spans) - 1:,}"


def _commands(run: RunReader, numbers: Sequence[int]) -> Html | str:
    out = shlex.quote(str(run.run_dir.out))
    commands = [f"holdfast replay {out} --incident {one}" for one in numbers[:3]]
    return join(tag("p", tag("code", one)) for one in commands) if commands else ""


def _reports(run: RunReader, lines: Sequence[Line]) -> Html | str:
    """Where the ranks of a start that crashed have written what they saw."""
    for line in lines:
        incarnation = line.detail.get("incarnation")
        if line.kind == "crash" and type(incarnation) is int and 0 <= incarnation < 10**7:
            return tag("code", str(run.run_dir.incident(incarnation)))
    return ""


def _evidence(evidence: Evidence) -> list[Html]:
    made = []
    if evidence.samples:
        made.append(
            tag(
                "details",
                tag("summary", "What the samples say"),
                tag("pre", evidence.samples),
            )
        )
    if evidence.probes:
        heads = ["computed again", "loss", "gradient norm", "NaN or Inf on"]
        rows = [_probe(one) for one in evidence.probes]
        summary = tag("summary", "The same step, computed again in variations")
        made.append(tag("details", summary, table(heads, rows)))
    return made


def _probe(one: Probe) -> list[str]:
    ranks = ", ".join(map(str, one.nonfinite_ranks)) or "-"
    numbers = [
        "not finite" if value is None else number(value) for value in (one.loss, one.grad_norm)
    ]
    return [one.name, *numbers, ranks]


def _names(names: Sequence[str], most: int) -> Html | None:
    if not names:
        return None
    items = [tag("li", name) for name in names[:most]]
    if len(names) > most:
        items.append(tag("li", f"and {len(names) - most} more in journal.jsonl"))
    summary = "1 suspected sample" if len(names) == 1 else f"{len(names)} suspected samples"
    return tag("details", tag("summary", summary), tag("ul", *items))


def _reasons(lines: Sequence[Line], found: Sequence[Mapping[str, Any]], most_words: int) -> Html:
    """What was seen in the steps; what a verdict says already stands beside it."""
    heads = [f"{one.get('cause', '')}: {one.get('why', '')}" for one in found]
    different = dict.fromkeys(_without(line.reason, heads) for line in lines)
    reasons = [reason for reason in different if reason]
    more = f"and {len(reasons) - 4} more" if len(reasons) > 4 else None
    told = [tag("p", words[:most_words]) for words in reasons[:4]]
    return join([*told, tag("p", more) if more else ""])


def _without(reason: str, heads: Sequence[str]) -> str:
    for head in heads:
        if reason.startswith(head):
            return reason[len(head) :].lstrip("; ")
    return reason


def _counted(kind: str, count: int) -> str:
    words = kind.replace("_", " ")
    return words if count == 1 else f"{words} x{count}"


def _cost(steps: int, seconds: float) -> str:
    costs = [
        *(["1 step" if steps == 1 else f"{steps:,} steps"] if steps else []),
        *([took(seconds)] if seconds else []),
    ]
    return ", ".join(costs)


def _ints(value: object) -> list[int]:
    found = value if isinstance(value, list) else []
    return [one for one in found if type(one) is int]


def _words(value: object) -> list[str]:
    found = value if isinstance(value, list) else []
    return [str(one)[:300] for one in found[:16]]
