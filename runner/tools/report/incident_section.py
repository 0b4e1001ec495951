"""The sections of signatures, warnings and incidents."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from runner.tools.reading.signature import SIGNATURES
from runner.tools.report.drawing import number
from runner.tools.report.evidence import Probe, StepEvidence, number_of
from runner.tools.report.formatting import ranks_of, status_class, took, when
from runner.tools.report.incident import (
    REMARK_KINDS,
    IncidentGroup,
    Line,
    group_incidents,
    notices,
    readings,
    verdicts,
)
from runner.tools.report.markup import Html, join, table, tag
from runner.tools.report.run_reader import RunReader

MOST_INCIDENTS = 300
_MOST_EVIDENCE = 40  # the newest incidents are shown with their samples
_MOST_NAMES, _FEW_NAMES = 16, 4  # for the newest incidents, and for the others
_MOST_CHARACTERS, _FEW_CHARACTERS = 2000, 400
_MOST_POSITIONS = 16
_MOST_WARNINGS = 300


def warnings(run: RunReader) -> Html | None:
    """Signatures found in the curve, and warnings that do not belong to a step."""
    signatures = readings(run.fold.lines)
    warned = notices(run.fold.lines)
    if not warned and not signatures:
        return None
    rows = [
        [when(one.time), one.kind.replace("_", " "), f"{one.step:,}", ranks_of(one), one.reason]
        for one in warned[-_MOST_WARNINGS:]
    ]
    more = f"The first {len(warned) - len(rows):,} are left out; journal.jsonl has them all."
    return tag(
        "section",
        tag("h3", "Signatures and warnings"),
        _signatures(signatures) if signatures else None,
        table(["when", "what", "step", "ranks", "why"], rows) if rows else None,
        tag("p", more, cls="note") if len(warned) > len(rows) else None,
        cls="warnings",
    )


def _signatures(lines: Sequence[Line]) -> Html:
    """Signatures that the run found in its own curve; no action was taken."""
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
    """Each incident: what happened, why, on which rank, its cost, and the action taken."""
    groups = group_incidents(run.fold.lines)
    if not groups:
        return None
    spans = _attempt_spans(run, groups)
    left_out = len(groups) - MOST_INCIDENTS
    shown = groups[-MOST_INCIDENTS:]
    more = f"The first {left_out:,} of {len(groups):,} are left out; journal.jsonl has them all."
    items = []
    for index, group in enumerate(shown):
        is_late = len(shown) - index <= _MOST_EVIDENCE
        items.append(_incident(run, group, spans.get(id(group)), with_evidence=is_late))
    return tag(
        "section",
        tag("h3", f"Incidents ({len(groups):,})"),
        tag("p", more, cls="note") if left_out > 0 else None,
        tag("ol", *items, start=max(1, left_out + 1)),
        cls="incidents",
    )


def _attempt_spans(run: RunReader, groups: Sequence[IncidentGroup]) -> dict[int, tuple[int, int]]:
    """First and last attempt of each incident."""
    if not len(run.fold.attempts):  # without attempts there are no curves to show them in
        return {}
    at = {id(mark.line): mark.attempt for mark in run.marks()}
    spans = {}
    for group in groups:
        attempts = [
            at[id(line)] for line in group.lines if id(line) in at and line.kind not in REMARK_KINDS
        ]
        if attempts:
            spans[id(group)] = min(attempts), max(attempts)
    return spans


def _incident(
    run: RunReader, trouble: IncidentGroup, place: tuple[int, int] | None, *, with_evidence: bool
) -> Html:
    lines = [line for line in trouble.lines if line.kind not in REMARK_KINDS]
    last, causes = lines[-1], verdicts(trouble)
    kinds = [line.kind for line in lines]
    summary = " then ".join(_count_kind(kind, kinds.count(kind)) for kind in dict.fromkeys(kinds))
    numbers = [number for one in causes if (number := number_of(one)) is not None]
    evidence = run.evidence(numbers[0]) if numbers and with_evidence else None
    names = list(dict.fromkeys(name for line in lines for name in line.sample_ids))
    most_characters = _MOST_CHARACTERS if with_evidence else _FEW_CHARACTERS
    zoom = None
    if place is not None:
        zoom = tag(
            "button", "show in the curves", type="button", cls="zoom",
            data_from=place[0], data_to=place[1], hidden=True,
        )  # fmt: skip
    title = [tag("span", f"Step {trouble.first.step:,}: {summary}")]
    if causes:
        title.append(tag("span", str(causes[0].get("cause", ""))[:60], cls="verdict"))
    return tag(
        "li",
        tag("h4", tag("span", *title), zoom),
        _facts(_incident_facts(run, trouble, lines, causes, numbers, most_characters)),
        _names(names, _MOST_NAMES if with_evidence else _FEW_NAMES),
        *(_evidence(evidence) if evidence is not None else []),
        cls=f"incident {status_class(last.kind)}",
        data_step=trouble.first.step,
    )


def _incident_facts(
    run: RunReader,
    trouble: IncidentGroup,
    lines: Sequence[Line],
    causes: Sequence[Mapping[str, Any]],
    numbers: Sequence[int],
    most_characters: int,
) -> list[tuple[str, object]]:
    """Name and value of each fact; a fact may be empty."""
    episode, cause = trouble.last_of("episode"), causes[0] if causes else None
    shape = episode.reason.partition("; suspected")[0].partition("; cause:")[0] if episode else ""
    suspected = "" if causes or episode is None else str(episode.detail.get("cause", ""))
    spans = [line.samples for line in lines if line.samples]
    steps = sum(line.cost_steps for line in lines)
    seconds = sum(line.cost_seconds for line in lines)
    return [
        ("when", when(trouble.first.time)),
        ("why", str(cause.get("why", ""))[:most_characters] if cause is not None else ""),
        ("refuted if", _refutation(cause) if cause is not None else ""),
        ("not tried", "; ".join(_texts(cause.get("not_tried"))) if cause is not None else ""),
        ("seen" if causes else "why", _reasons(lines, causes, most_characters)),
        ("suspected cause", suspected),
        ("shape", shape),
        ("who", _who(lines, causes)),
        ("samples", _samples(spans, cause)),
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
    return f"{refutation} ({'tested: not so' if verdict.get('is_tried') is True else 'not tested'})"


def _who(lines: Sequence[Line], causes: Sequence[Mapping[str, Any]]) -> str:
    """The ranks that a cause names, or else those of the journal lines."""
    named = sorted({rank for cause in causes for rank in _ints(cause.get("ranks"))})
    ranks = named or sorted({rank for line in lines for rank in line.ranks})
    if not ranks:
        return ""
    hosts = list(dict.fromkeys(host for cause in causes for host in _texts(cause.get("hosts"))))
    host = next((str(line.detail["host"])[:100] for line in lines if line.detail.get("host")), "")
    host_text = f" on {', '.join(hosts[:8])}" if hosts else f" on {host}" if host else ""
    return f"rank {', '.join(map(str, ranks[:32]))}{host_text}"


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
    """The directory of the ranks' reports about a crashed start."""
    for line in lines:
        incarnation = line.detail.get("incarnation")
        if line.kind == "crash" and type(incarnation) is int and 0 <= incarnation < 10**7:
            return tag("code", str(run.run_dir.incident(incarnation)))
    return ""


def _evidence(evidence: StepEvidence) -> list[Html]:
    details = []
    if evidence.samples:
        details.append(
            tag(
                "details",
                tag("summary", "Text of the samples"),
                tag("pre", evidence.samples),
            )
        )
    if evidence.probes:
        heads = ["computed again", "loss", "gradient norm", "NaN or Inf on"]
        rows = [_probe(probe) for probe in evidence.probes]
        summary = tag("summary", "The same step, computed again in variations")
        details.append(tag("details", summary, table(heads, rows)))
    return details


def _probe(probe: Probe) -> list[str]:
    ranks = ", ".join(map(str, probe.nonfinite_ranks)) or "-"
    numbers = [
        "not finite" if value is None else number(value) for value in (probe.loss, probe.grad_norm)
    ]
    return [probe.name, *numbers, ranks]


def _names(names: Sequence[str], most: int) -> Html | None:
    if not names:
        return None
    items = [tag("li", name) for name in names[:most]]
    if len(names) > most:
        items.append(tag("li", f"and {len(names) - most} more in journal.jsonl"))
    summary = "1 suspected sample" if len(names) == 1 else f"{len(names)} suspected samples"
    return tag("details", tag("summary", summary), tag("ul", *items))


def _reasons(
    lines: Sequence[Line], causes: Sequence[Mapping[str, Any]], most_characters: int
) -> Html:
    """The distinct reasons of the lines, without text that the causes repeat."""
    known_texts = [f"{one.get('cause', '')}: {one.get('why', '')}" for one in causes]
    distinct = dict.fromkeys(_without_known(line.reason, known_texts) for line in lines)
    reasons = [reason for reason in distinct if reason]
    more = f"and {len(reasons) - 4} more" if len(reasons) > 4 else None
    paragraphs = [tag("p", reason_text[:most_characters]) for reason_text in reasons[:4]]
    return join([*paragraphs, tag("p", more) if more else ""])


def _without_known(reason: str, known_texts: Sequence[str]) -> str:
    for known_text in known_texts:
        if reason.startswith(known_text):
            return reason[len(known_text) :].lstrip("; ")
    return reason


def _count_kind(kind: str, count: int) -> str:
    label = kind.replace("_", " ")
    return label if count == 1 else f"{label} x{count}"


def _cost(steps: int, seconds: float) -> str:
    costs = [
        *(["1 step" if steps == 1 else f"{steps:,} steps"] if steps else []),
        *([took(seconds)] if seconds else []),
    ]
    return ", ".join(costs)


def _ints(value: object) -> list[int]:
    items = value if isinstance(value, list) else []
    return [one for one in items if type(one) is int]


def _texts(value: object) -> list[str]:
    items = value if isinstance(value, list) else []
    return [str(one)[:300] for one in items[:16]]
