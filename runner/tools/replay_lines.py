"""What ``holdfast replay`` prints of the evidence of a bad step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.run_dir.paths import SAMPLES, RunDir

_MOST_CHARACTERS = 2000  # of one text


def incident_line(number: int, evidence: Mapping[str, Any]) -> str:
    """One incident in the list of all."""
    finding = evidence["finding"]
    return f"{number:6d}  step {evidence['step']}: {_text(finding, 'cause')}"


def incident_lines(number: int, evidence: Mapping[str, Any], run_dir: RunDir) -> list[str]:
    """Verdict, why, what was tried, and the probes."""
    finding = evidence["finding"]
    ranks = ", ".join(map(str, _list(finding, "ranks")))
    hosts = ", ".join(map(str, _list(finding, "hosts")))
    positions = _list(finding, "positions")
    tried = "tested: not so" if finding.get("is_tried") is True else "not tested"
    lines = [
        f"incident {number}, step {evidence['step']}: {_text(finding, 'cause')}",
        f"  why          {_text(finding, 'why')}",
        f"  remedy       {_text(finding, 'remedy')}",
        *([_shown(f"  rank         {ranks} on {hosts}")] if ranks else []),
        *([_shown(f"  samples      {', '.join(map(str, positions[:64]))}")] if positions else []),
        *([f"  module       {_text(finding, 'module')}"] if finding.get("module") else []),
        *(
            [f"  refuted if   {_text(finding, 'refutation')} ({tried})"]
            if finding.get("refutation")
            else []
        ),
        *(_shown(f"  not tried    {one}") for one in _list(finding, "not_tried")),
        f"  cost         {_text(finding, 'steps')} computations of a step",
        "",
        "  probe                          loss    grad norm  NaN or Inf on",
    ]
    for name, probe in evidence["probes"].items():
        if isinstance(probe, dict):
            bad = ", ".join(map(str, _list(probe, "nonfinite_ranks")))
            loss, norm = _number(probe.get("loss")), _number(probe.get("grad_norm"))
            lines.append(f"  {_shown(name)[:26]:26} {loss:>10} {norm:>12}  {bad or '-'}")
    return [*lines, "", f"samples: {run_dir.explanation(number) / SAMPLES}"]


def repeated_lines(
    number: int, evidence: Mapping[str, Any], step: int, finding: Mapping[str, Any] | None
) -> list[str]:
    """Both verdicts of a step that was computed once more from the checkpoint of ``step``.

    Args:
        finding: what was found now; None if the step is good.
    """
    recorded = evidence["finding"]
    lines = [
        f"incident {number}, step {evidence['step']}: {_text(recorded, 'cause')}",
        f"  then         {_text(recorded, 'why')}",
        f"  again        from the checkpoint of step {step}, in one process",
    ]
    if finding is None:
        is_state = _text(recorded, "cause") == "state corrupted"
        good = (
            f"the state was spoilt later than the checkpoint of step {step}, and not here"
            if is_state
            else "neither weights nor samples made it bad, but what computed it then"
        )
        return [*lines, f"  here         the step is good: {good}"]
    lines.append(f"  here         {_text(finding, 'cause')}: {_text(finding, 'why')}")
    for name, label in (("positions", "samples"), ("ranks", "rank")):
        if _list(finding, name):
            named = ", ".join(map(str, _list(finding, name)[:64]))
            lines.append(_shown(f"  {label:12} {named}"))
    if finding.get("module"):
        lines.append(f"  module       {_text(finding, 'module')}")
    return lines


def _number(value: Any) -> str:
    try:
        return f"{value:.5g}" if isinstance(value, int | float) else "NaN or Inf"
    except OverflowError:  # a whole number beyond any double
        return "NaN or Inf"


def _list(tree: Mapping[str, Any], name: str) -> list[Any]:
    value = tree.get(name)
    return value if isinstance(value, list) else []


def _text(tree: Mapping[str, Any], name: str) -> str:
    return _shown(str(tree.get(name, "")))


def _shown(text: str) -> str:
    """The text for a terminal: bounded, and without control characters."""
    return "".join(
        character if character.isprintable() else " " for character in text[:_MOST_CHARACTERS]
    )
