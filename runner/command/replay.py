"""``holdfast replay OUT``: why steps were bad, on which samples and ranks, from evidence in OUT.

Lists every incident that was explained, and shows one in full: the repeated computations and their
results, what would refute the verdict, and what was not tried. The run's settings may follow after
``--``, as on its command line: then the steps up to the incident and the probes are computed once
more, in this process. Does not write to OUT.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.command.arguments import Parser
from runner.command.bar import Bar
from runner.run_dir.paths import SAMPLES, RunDir, explanations, read_explanation
from runner.system.error import ConfigError
from runner.system.parsing import json_text
from runner.tools.report.follow import number as number_of
from runner.tools.report.incident import list_of
from runner.tools.report.markup import plain

_MOST_CHARACTERS = 2000  # of one text


def replay_command(arguments: Sequence[str]) -> int:
    """Parse and print; returns the exit code."""
    parser = Parser("replay", __doc__)
    parser.add_argument("out", help="the run's directory (out)")
    parser.add_argument("--incident", type=int, metavar="N", help="this one; default: the newest")
    parser.flag("--json", "all of it, for a script")
    options, settings = parser.of_command(arguments)
    run_dir = RunDir(Path(options.out))
    if not Path(options.out).is_dir():
        raise ConfigError(f"{options.out}: no such run directory")
    numbers = explanations(run_dir.explanations)
    if not numbers:
        raise ConfigError(
            f"{run_dir.explanations}: has no evidence; a run leaves some for each bad step that it "
            "looks into (explain=quick, guard.remedy=verdict)"
        )
    number = numbers[-1] if options.incident is None else options.incident
    if number not in numbers:
        some_numbers = ", ".join(map(str, numbers[-20:]))
        raise ConfigError(f"--incident {number}: no such incident; there are {some_numbers}")
    evidence = _read(run_dir, number)
    if "--" in arguments:
        return _replay_again(run_dir, number, evidence, settings)
    if options.json:
        sys.stdout.write(json_text({"incident": number, **evidence}) + "\n")
        return 0
    if options.incident is None:
        with Bar("reading", len(numbers), unit="incidents") as bar:
            lines = []
            for one in numbers:
                lines.append(_incident_line(one, _read(run_dir, one)))
                bar.add(1)
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.write("\n")
    sys.stdout.write("\n".join(_incident_lines(number, evidence, run_dir)) + "\n")
    return 0


def _replay_again(
    run_dir: RunDir, number: int, evidence: Mapping[str, Any], settings: list[str]
) -> int:
    """Compute the step once more, and print both verdicts."""
    # Imported here: it needs torch and the whole runner.
    from runner.command.replay_again import replay_again

    with tempfile.TemporaryDirectory(prefix="holdfast-replay-") as folder:
        step, finding = replay_again(run_dir, number, evidence, settings, Path(folder) / "copy")
    lines = repeated_lines(number, evidence, step, finding)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _read(run_dir: RunDir, number: int) -> dict[str, Any]:
    try:
        return read_explanation(run_dir.explanation(number))
    except (ValueError, OSError, RecursionError) as error:
        raise ConfigError(f"incident {number} cannot be read: {error}") from None


def _incident_line(number: int, evidence: Mapping[str, Any]) -> str:
    """One incident in the list of all."""
    finding = evidence["finding"]
    return f"{number:6d}  step {evidence['step']}: {_text(finding, 'cause')}"


def _incident_lines(number: int, evidence: Mapping[str, Any], run_dir: RunDir) -> list[str]:
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
    for name in ("module", "operation"):
        if finding.get(name):
            lines.append(f"  {name:12} {_text(finding, name)}")
    return lines


def _number(value: Any) -> str:
    finite = number_of(value)
    return "NaN or Inf" if math.isnan(finite) else f"{finite:.5g}"


def _list(tree: Mapping[str, Any], name: str) -> list[Any]:
    return list_of(tree.get(name))


def _text(tree: Mapping[str, Any], name: str) -> str:
    return _shown(str(tree.get(name, "")))


def _shown(text: str) -> str:
    """The text for a terminal: bounded, and without control characters."""
    return plain(text[:_MOST_CHARACTERS]).replace("\n", " ")
