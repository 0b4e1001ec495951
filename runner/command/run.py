"""``python -m runner run -- COMMAND``: supervises any script and restarts it while it helps.

The script is not changed. Its progress is read from its output; when it prints nothing for
``--quiet`` seconds its ranks are asked where they are, and it is restarted. The cause of a crash is
read from tracebacks, torchrun's summary and error file, signals and NCCL's flight recorder.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from runner.command.arguments import Parser
from runner.command.supervise import add_restart_options, rules_of
from runner.launch.script import ScriptSupervisor, Watched
from runner.launch.script_output import PROGRESS
from runner.launch.supervisor import new_launch_id
from runner.system.environment import variables
from runner.system.error import ConfigError

_log = logging.getLogger(__name__)
_BUSY = 3.0  # times --quiet
_START_SECONDS = 600.0  # for imports, weights, compilation


def run_command(arguments: Sequence[str]) -> int:
    """Parse and run; returns the exit code of the script.

    Raises:
        ConfigError: there is no command, or an option is invalid.
    """
    given = list(arguments)
    separator = given.index("--") if "--" in given else len(given)
    options = _parser().parse_args(given[:separator])
    command = given[separator + 1 :]
    if not command:
        raise ConfigError("run: no command; write: run [options] -- torchrun train.py ...")
    try:
        re.compile(options.progress)
    except re.error as error:
        raise ConfigError(
            f"--progress {options.progress!r}: is not a valid pattern ({error})"
        ) from None
    if re.compile(options.progress).groups < 1:
        raise ConfigError(f"--progress {options.progress!r}: needs a group, such as step (\\d+)")
    if not options.quiet >= 0:
        raise ConfigError(f"--quiet {options.quiet}: must be at least 0 seconds; 0: never")
    start = options.quiet_start
    if start is None:
        start = max(_START_SECONDS, options.quiet) if options.quiet else 0.0
    if not start >= 0:
        raise ConfigError(f"--quiet-start {start:g}: must be at least 0 seconds; 0: never")
    busy = _BUSY * options.quiet if options.quiet_busy is None else options.quiet_busy
    if not busy >= options.quiet:
        raise ConfigError(
            f"--quiet-busy {busy:g}: must be at least --quiet, which is {options.quiet:g}"
        )
    rules = replace(rules_of(options, diagnose=False), measure="step")
    environment = variables()
    supervisor = ScriptSupervisor(
        command,
        dict(environment),
        watched=Watched(
            quiet_seconds=options.quiet,
            busy_seconds=busy,
            start_seconds=start,
            progress=options.progress,
            folder=options.out,
        ),
        rules=rules,
        launch_id=new_launch_id(environment),
        say=lambda text: _log.info("run: %s", text),
    )
    end = supervisor.run()
    if end.code:
        _log.info("run: %s", end.reason)
    return end.code


def _parser() -> Parser:
    parser = Parser(prog="python -m runner run", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("holdfast-run"),
        metavar="DIR",
        help="for the evidence and the list of attempts; default holdfast-run",
    )
    parser.add_argument(
        "--quiet",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="without output or work on its GPUs before it counts as hung; 0: never; default 600",
    )
    parser.add_argument(
        "--quiet-start",
        type=float,
        metavar="SECONDS",
        help="the same before its first step (imports, weights, compilation); 0: never; "
        "default the larger of 600 and --quiet",
    )
    parser.add_argument(
        "--quiet-busy",
        type=float,
        metavar="SECONDS",
        help="without output while its GPUs are busy, as they are in a hung collective; "
        "default three times --quiet",
    )
    parser.add_argument(
        "--progress",
        default=PROGRESS,
        metavar="PATTERN",
        help="finds the step in a line of output, as its first group; default: step 12, "
        "iter: 12, 12/500 [",
    )
    add_restart_options(parser, restarts=5)
    return parser
