"""The sections of signatures, warnings and incidents."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from runner.system.units import name_ranks
from runner.tools.reading.curve import SIGNATURES
from runner.tools.report.drawing import MOST_INCIDENTS, number
from runner.tools.report.episode import Episode, rank_list
from runner.tools.report.follow import number as number_of
from runner.tools.report.follow import whole
from runner.tools.report.incident import Line, ints, notices, readings, texts, verdicts
from runner.tools.report.markup import (
    Html,
    details,
    join,
    note,
    section,
    status_class,
    table,
    tag,
    when,
)
from runner.tools.report.run_reader import RunReader

_MOST_OPEN = 12  # newest incidents whose lines are shown at once
_MOST_EVIDENCE = 40  # the newest incidents are shown with their samples
_MOST_NAMES, _FEW_NAMES = 16, 4  # for the newest incidents, and for the others
_MOST_CHARACTERS, _FEW_CHARACTERS = 2000, 400
_MOST_POSITIONS = 16
_MOST_WARNINGS = 300
_MOST_PROBES = 16


def warnings(run: RunReader) -> Html | None:
    """Signatures found in the curve, and warnings that do not belong to a step."""
    signatures = [_signature(line) for line in readings(run.fold.lines)[-_MOST_WARNINGS:]]
    warned = notices(run.fold.lines)
    if not warned and not signatures:
        return None
    rows = [
        [
            when(one.time),
            one.kind.replace("_", " "),
            f"{one.step:,}",
            rank_list(one.ranks),
            one.reason,
        ]
        for one in warned[-_MOST_WARNINGS:]
    ]
    return section(
        "warnings",
        "Signatures and warnings",
        tag("ol", *signatures, cls="signatures") if signatures else None,
        table(["when", "what", "step", "ranks", "why"], rows) if rows else None,
        _left_out(len(warned) - len(rows), ""),
    )


def _signature(line: Line) -> Html:
    """A signature that the run found in its own curve; no action was taken."""
    name = str(line.detail.get("signature", ""))[:60]
    sure = str(line.detail.get("confidence", ""))[:20]
    facts = {
        "seen": line.reason.removeprefix(f"{name}: "),
        "to try": str(line.detail.get("try", ""))[:2000],
        "when": f"step {line.step:,}" + (f", confidence {sure}" if sure else ""),
    }
    title = f"{name.replace('_', ' ')}: {SIGNATURES.get(name, '')}".strip(": ")
    return tag("li", tag("h4", tag("span", title)), _facts(facts.items()), cls="signature")


def _left_out(count: int, of: str) -> Html | None:
    text = f"The first {count:,}{of} are left out; journal.jsonl has them all."
    return note(text) if count > 0 else None


def incidents(run: RunReader, found: Sequence[Episode], place: int) -> Html | None:
    """One line for each incident, newest first; opened, it says all that is known of it."""
    if not found:
        return None
    shown = found[: -MOST_INCIDENTS - 1 : -1]
    items = [
        _incident(run, one, place, is_late=index < _MOST_EVIDENCE)
        for index, one in enumerate(shown)
    ]
    older = len(items) - _MOST_OPEN
    kinds = sorted({kind for one in shown for kind in one.kinds})
    heads = ("", "when", "step", "what was done", "verdict", "rank", "cost", "recovered")
    return section(
        "incidents",
        f"Incidents ({len(found):,})",
        _filter(kinds) if len(kinds) > 1 else None,
        tag("div", *(tag("span", head) for head in heads), cls="line heads", aria_hidden="true"),
        tag("ol", *items[:_MOST_OPEN]),
        details(f"{older:,} older", tag("ol", *items[_MOST_OPEN:]), cls="older")
        if older > 0
        else None,
        _left_out(len(found) - len(shown), f" of {len(found):,}"),
    )


def _filter(kinds: Sequence[str]) -> Html:
    """Chooses a kind; the script shows it."""
    options = (tag("option", kind.replace("_", " "), value=kind) for kind in kinds)
    chosen = tag("select", tag("option", "all kinds", value=""), *options)
    return tag("label", "Show ", chosen, cls="filter", hidden=True)


def _incident(run: RunReader, one: Episode, place: int, *, is_late: bool) -> Html:
    """One incident.

    Args:
        place: of the run on the page.
        is_late: whether it is shown in full.
    """
    group, lines = one.group, one.lines
    causes = verdicts(group)
    bundles = (cause.get("bundle") for cause in causes)
    numbers = [number for number in bundles if type(number) is int and 0 <= number < 10**12]
    evidence = run.evidence(numbers[0]) if numbers and is_late else None
    names = list(dict.fromkeys(name for line in lines for name in line.sample_ids))
    at = one.attempts
    zoom = {"data_from": at[0], "data_to": at[1]} if at else {}
    button = tag("button", "show in the curves", type="button", cls="zoom", **zoom, hidden=True)
    most_characters = _MOST_CHARACTERS if is_late else _FEW_CHARACTERS
    facts = [
        *_why(group, lines, causes, most_characters),
        ("who", one.who()),
        ("samples", _samples(lines, causes)),
        ("cost", one.cost()),
        ("done", lines[-1].decision),
        ("replay", _commands(run, numbers)),
        ("reports", _reports(run, lines)),
    ]
    cells = (
        str(one.number),
        when(group[0].time),
        f"step {group[0].step:,}",
        one.deeds,
        tag("span", one.verdict, cls="verdict") if one.verdict else "",
        name_ranks(one.ranks(), 4) if one.ranks() else "",
        one.cost(),
        one.recovered,
    )
    return tag(
        "li",
        details(
            tag("span", *(tag("span", cell) for cell in cells), cls="line"),
            button if at else None,
            _facts(facts),
            _names(names, _MOST_NAMES if is_late else _FEW_NAMES),
            *(_evidence(*evidence) if evidence is not None else []),
        ),
        cls=f"incident {status_class(lines[-1].kind)}",
        id=one.anchor(place),
        data_step=group[0].step,
        data_kinds=" ".join(one.kinds),
    )


def _why(
    group: Sequence[Line],
    lines: Sequence[Line],
    causes: Sequence[Mapping[str, Any]],
    most_characters: int,
) -> list[tuple[str, object]]:
    """Time, reasons, and the shape of the episode; any may be empty."""
    episode = next((line for line in reversed(group) if line.kind == "episode"), None)
    shape = episode.reason.partition("; suspected")[0].partition("; cause:")[0] if episode else ""
    suspected = "" if causes or episode is None else str(episode.detail.get("cause", ""))
    facts: list[tuple[str, object]] = [("when", when(group[0].time))]
    for cause in causes[:1]:
        refutation = str(cause.get("refutation", ""))[:500]
        tested = "tested: not so" if cause.get("is_tried") is True else "not tested"
        facts += [
            ("why", str(cause.get("why", ""))[:most_characters]),
            ("refuted if", f"{refutation} ({tested})" if refutation else ""),
            ("not tried", "; ".join(texts(cause.get("not_tried")))),
        ]
    seen = _reasons(lines, causes, most_characters)
    facts.append(("seen" if causes else "why", seen))
    return [*facts, ("suspected cause", suspected), ("shape", shape)]


def _facts(facts: Iterable[tuple[str, object]]) -> Html:
    """Those of the facts that are not empty."""
    return tag("dl", *(join([tag("dt", name), tag("dd", value)]) for name, value in facts if value))


def _samples(lines: Sequence[Line], causes: Sequence[Mapping[str, Any]]) -> str:
    positions = ints(causes[0].get("positions")) if causes else []
    if positions:
        more = f" and {len(positions) - _MOST_POSITIONS} more" * (len(positions) > _MOST_POSITIONS)
        return f"positions {', '.join(f'{one:,}' for one in positions[:_MOST_POSITIONS])}{more}"
    spans = [line.samples for line in lines if line.samples]
    if not spans:
        return ""
    return f"positions {min(a for a, _ in spans):,} to {max(b for _, b in spans) - 1:,}"


def _commands(run: RunReader, numbers: Sequence[int]) -> Html:
    out = shlex.quote(str(run.run_dir.out))
    commands = (f"holdfast replay {out} --incident {number}" for number in numbers[:3])
    return join(tag("p", tag("code", command)) for command in commands)


def _reports(run: RunReader, lines: Sequence[Line]) -> Html | None:
    """The directory of the ranks' reports about a crashed start."""
    for line in lines:
        incarnation = whole(line.detail.get("incarnation"))
        if line.kind == "crash" and 0 < incarnation < 10**7:
            return tag("code", str(run.run_dir.incident(incarnation)))
    return None


def _evidence(probes: Mapping[str, Any], samples: str) -> list[Html]:
    rows = []
    for name, probe in probes.items():
        if isinstance(probe, dict):
            values = (number_of(probe.get(key)) for key in ("loss", "grad_norm"))
            numbers = (number(value) if value == value else "not finite" for value in values)
            bad = ", ".join(map(str, ints(probe.get("nonfinite_ranks"))[:64])) or "-"
            rows.append([name[:60], *numbers, bad])
    heads = ["computed again", "loss", "gradient norm", "NaN or Inf on"]
    repeated = table(heads, rows[:_MOST_PROBES])
    return [
        *([details("Text of the samples", tag("pre", samples))] if samples else []),
        *([details("The same step, computed again in variations", repeated)] if rows else []),
    ]


def _names(names: Sequence[str], most: int) -> Html | None:
    if not names:
        return None
    more = [f"and {len(names) - most} more in journal.jsonl"] if len(names) > most else []
    items = (tag("li", name) for name in [*names[:most], *more])
    summary = "1 suspected sample" if len(names) == 1 else f"{len(names)} suspected samples"
    return details(summary, tag("ul", *items))


def _reasons(
    lines: Sequence[Line], causes: Sequence[Mapping[str, Any]], most_characters: int
) -> Html:
    """The distinct reasons of the lines, without text that the causes repeat."""
    known_texts = [f"{one.get('cause', '')}: {one.get('why', '')}" for one in causes]
    distinct = dict.fromkeys(_without_known(line.reason, known_texts) for line in lines)
    reasons = [reason for reason in distinct if reason]
    shown = [reason[:most_characters] for reason in reasons[:4]]
    shown += [f"and {len(reasons) - 4} more"] if len(reasons) > 4 else []
    return join(tag("p", reason) for reason in shown)


def _without_known(reason: str, known_texts: Sequence[str]) -> str:
    known = next(filter(reason.startswith, known_texts), None)
    return reason if known is None else reason.removeprefix(known).lstrip("; ")
