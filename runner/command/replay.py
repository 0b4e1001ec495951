"""``holdfast replay OUT``: why steps were bad, on which samples and ranks, from evidence in OUT.

Lists every incident that was explained, and shows one in full: the repeated computations and their
results, what would refute the verdict, and what was not tried. The run's settings may follow after
``--``, as on its command line: then the steps up to the incident and the probes are computed once
more, in this process. Does not write to OUT.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.command.arguments import Parser
from runner.command.bar import Bar
from runner.run_dir.paths import RunDir, explanations, read_explanation
from runner.system.error import ConfigError
from runner.system.parsing import json_text
from runner.tools.replay_lines import incident_line, incident_lines, repeated_lines


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
                lines.append(incident_line(one, _read(run_dir, one)))
                bar.add(1)
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.write("\n")
    sys.stdout.write("\n".join(incident_lines(number, evidence, run_dir)) + "\n")
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
