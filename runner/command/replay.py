"""``holdfast replay OUT``: why steps were bad, which samples and whose, from the evidence in OUT.

Lists every incident that was looked into, and tells all of one: what was computed again and what
came of it, what would refute the verdict, and what was not tried. Behind ``--`` the settings of the
run may follow, as on its command line: then the steps up to the incident are computed once more, in
this process, and the probes with them. Only reads.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.command.arguments import Parser
from runner.explain.bundle import SAMPLES, bundles, read
from runner.observe.bar import Bar
from runner.run_dir.paths import RunDir
from runner.system.error import ConfigError
from runner.system.parsing import json_text

_WORDS = 2000  # of one text


def replay_command(arguments: Sequence[str]) -> int:
    """Parse and print; returns the exit code."""
    words = list(arguments)
    place = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:place])
    run_dir = RunDir(Path(options.out))
    if not Path(options.out).is_dir():
        raise ConfigError(f"{options.out}: no such run directory")
    numbers = bundles(run_dir.explanations, run_dir.incidents)
    if not numbers:
        raise ConfigError(
            f"{run_dir.explanations}: has no evidence; a run leaves some for each bad step that it "
            "looks into (explain=quick, guard.remedy=verdict)"
        )
    number = numbers[-1] if options.incident is None else options.incident
    if number not in numbers:
        known = ", ".join(map(str, numbers[-20:]))
        raise ConfigError(f"--incident {number}: there is none; known are {known}")
    evidence = _read(run_dir, number)
    if place < len(words):
        return _again(run_dir, number, evidence, words[place + 1 :])
    if options.json:
        sys.stdout.write(json_text({"incident": number, **evidence}) + "\n")
        return 0
    if options.incident is None:
        with Bar("reading", len(numbers), unit="incidents") as bar:
            lines = []
            for one in numbers:
                lines.append(_line(one, _read(run_dir, one)))
                bar.add(1)
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.write("\n")
    sys.stdout.write("\n".join(_story(number, evidence, run_dir)) + "\n")
    return 0


def _again(run_dir: RunDir, number: int, told: Mapping[str, Any], settings: list[str]) -> int:
    """Compute it once more, and set both verdicts side by side."""
    # Only here: it takes torch and all of a run.
    from runner.command.replay_again import replay_again

    with tempfile.TemporaryDirectory(prefix="holdfast-replay-") as folder:
        step, found = replay_again(run_dir, number, told, settings, Path(folder) / "copy")
    said = told["finding"]
    sys.stdout.write(f"incident {number}, step {told['step']}: {_text(said, 'cause')}\n")
    sys.stdout.write(f"  then         {_text(said, 'why')}\n")
    sys.stdout.write(f"  again        from the checkpoint of step {step}, in one process\n")
    if found is None:
        sys.stdout.write(
            "  here         the step is good: neither weights nor samples made it bad, but what "
            "computed it then\n"
        )
        return 0
    sys.stdout.write(f"  here         {_text(found, 'cause')}: {_text(found, 'why')}\n")
    for name, what in (("positions", "samples"), ("ranks", "rank")):
        if _list(found, name):
            named = ", ".join(map(str, _list(found, name)[:64]))
            sys.stdout.write(_shown(f"  {what:12} {named}") + "\n")
    if found.get("module"):
        sys.stdout.write(f"  module       {_text(found, 'module')}\n")
    return 0


def _read(run_dir: RunDir, number: int) -> dict[str, Any]:
    try:
        return read(run_dir.explanation(number))
    except (ValueError, OSError, RecursionError) as error:
        raise ConfigError(f"incident {number} cannot be read: {error}") from None


def _line(number: int, evidence: Mapping[str, Any]) -> str:
    finding = evidence["finding"]
    return f"{number:6d}  step {evidence['step']}: {_text(finding, 'cause')}"


def _story(number: int, evidence: Mapping[str, Any], run_dir: RunDir) -> list[str]:
    """Verdict, why, what was tried, and the probes."""
    finding = evidence["finding"]
    ranks = ", ".join(map(str, _list(finding, "ranks")))
    hosts = ", ".join(map(str, _list(finding, "hosts")))
    positions = _list(finding, "positions")
    tried = "was tried, and did not" if finding.get("is_tried") is True else "was not tried"
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


def _number(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, int | float) else "NaN or Inf"


def _list(tree: Mapping[str, Any], name: str) -> list[Any]:
    found = tree.get(name)
    return found if isinstance(found, list) else []


def _text(tree: Mapping[str, Any], name: str) -> str:
    return _shown(str(tree.get(name, "")))


def _shown(text: str) -> str:
    """On a terminal: bounded, and without control characters."""
    return "".join(sign if sign.isprintable() else " " for sign in text[:_WORDS])


def _parser() -> Parser:
    parser = Parser(prog="holdfast replay", description=__doc__)
    parser.add_argument("out", help="the run's directory (out)")
    parser.add_argument("--incident", type=int, metavar="N", help="this one; default: the newest")
    parser.add_argument("--json", action="store_true", help="all of it, for a script")
    return parser
