"""``holdfast report OUT [OUT2 ...]``: writes what a run did as one HTML page.

The page is a single file that loads nothing else. It is made from the files in OUT, of a run
that is running or has ended. Several runs are shown side by side.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from runner.command.arguments import Parser
from runner.observe.bar import Bar
from runner.observe.page_writer import NAME
from runner.system.beside import add_options, stay_beside
from runner.system.error import ConfigError
from runner.system.files import write_durably
from runner.tools.report.page import page, read_runs


def report_command(arguments: Sequence[str]) -> int:
    """Parse and run; returns the exit code."""
    options = _parser().parse_args(arguments)
    is_beside = stay_beside(options)
    outs = [Path(name) for name in options.out]
    target = Path(options.output) if options.output else outs[0] / NAME
    try:
        with Bar("reading", 0) as bar:
            text = page(read_runs(outs, on_progress=lambda out, done, total: bar.at(done, total)))
        write_durably(target, text.encode())
    except OSError as error:
        raise ConfigError(f"report: {error}; choose another file with -o FILE") from None
    if not is_beside:
        sys.stdout.write(f"wrote {target} ({len(text.encode()) / 1024:,.0f} KiB)\n")
    return 0


def _parser() -> Parser:
    parser = Parser(prog="holdfast report", description=__doc__)
    parser.add_argument("out", nargs="+", help="a run's directory (out); several are compared")
    parser.add_argument("-o", "--output", metavar="FILE", help=f"default: {NAME} in the first OUT")
    add_options(parser)
    return parser
