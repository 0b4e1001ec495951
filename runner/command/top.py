"""``holdfast top OUT``: shows a run in the terminal, for machines without a browser.

Follows the files in OUT until Ctrl-C; only reads. With --once, or if the output is no terminal,
it prints one screen and ends.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live

from runner.command.arguments import Parser
from runner.system.error import ConfigError
from runner.tools.report.run_reader import RunReader
from runner.tools.report.terminal import frame


def top_command(arguments: Sequence[str]) -> int:
    """Parse and show; returns the exit code."""
    options = _parser().parse_args(arguments)
    console = Console(highlight=False)
    run = RunReader(Path(options.out), columns=256)
    try:
        run.update()
        if options.once or not console.is_terminal:
            console.print(frame(run, width=console.width))
            return 0
        with (
            contextlib.suppress(KeyboardInterrupt),
            Live(
                frame(run, width=console.width), console=console, screen=True, auto_refresh=False
            ) as live,
        ):
            while True:
                time.sleep(options.seconds)
                run.update()
                live.update(frame(run, width=console.width), refresh=True)
    except OSError as error:
        raise ConfigError(f"top: {error}") from None
    return 0


def _parser() -> Parser:
    parser = Parser(prog="holdfast top", description=__doc__)
    parser.add_argument("out", help="the run's directory (out)")
    parser.add_argument("--once", action="store_true", help="one screen, then end")
    parser.add_argument("--seconds", type=float, default=2.0, help="between updates; default: 2")
    return parser
