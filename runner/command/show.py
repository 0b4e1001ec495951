"""Commands that show a run from its files: ``report``, ``top`` and ``live``."""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, RenderableType

from runner.command.arguments import Parser, at_least
from runner.command.bar import Bar
from runner.observe.page_writer import NAME
from runner.system.error import ConfigError, is_installed, lacking
from runner.system.files import open_regular, write_durably
from runner.system.process import add_options, stay_beside
from runner.tools.report.live_server import ADDRESS, server
from runner.tools.report.page import page, read_runs
from runner.tools.report.run_reader import RunReader
from runner.tools.report.terminal import drawn_runs, frame
from runner.tools.report.vitals import Runs, is_run

_COMPARISON = "comparison.html"
_HEAD_BYTES = 1 << 16  # the title comes before the style


def report_command(arguments: Sequence[str]) -> int:
    """``holdfast report OUT [OUT2 ...]``: writes what a run did as one HTML page.

    The page is a single file that loads nothing else. It is made from the files in OUT, of a run
    that is running or has ended. Several runs are shown side by side.
    """
    parser = Parser("report", report_command.__doc__)
    parser.add_argument("out", nargs="+", help="a run's directory (out); several are compared")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help=f"default: {NAME} in OUT, of several {_COMPARISON} in the first",
    )
    add_options(parser)
    options = parser.parse_args(arguments)
    is_beside = stay_beside(options)
    outs = [Path(name) for name in options.out]
    name = NAME if len(outs) == 1 else _COMPARISON
    target = Path(options.output) if options.output else outs[0] / name
    _refuse_to_replace(target)
    for out in outs:
        if not out.exists():
            raise ConfigError(f"report: {out}: there is no such folder; give a run's out")
    if not target.parent.is_dir():
        raise ConfigError(f"report: -o {target}: there is no folder {target.parent}")
    try:
        with Bar("reading", 0) as bar:
            text = page(read_runs(outs, on_progress=lambda out, done, total: bar.at(done, total)))
    except OSError as error:
        raise ConfigError(f"report: {error}; nothing was written") from None
    try:
        write_durably(target, text.encode())
    except OSError as error:
        with contextlib.suppress(OSError):
            target.with_name(f"{target.name}.tmp").unlink()
        raise ConfigError(f"report: {error}; choose another file with -o FILE") from None
    if not is_beside:
        sys.stdout.write(f"wrote {target} ({len(text.encode()) / 1024:,.0f} KiB)\n")
    return 0


def _refuse_to_replace(target: Path) -> None:
    """
    Raises:
        ConfigError: ``target`` exists and is no page of ours.
    """
    if not os.path.lexists(target):
        return
    try:
        with open_regular(target) as file:
            begin = file.read(_HEAD_BYTES)
    except OSError as error:
        raise ConfigError(f"report: {error}; choose another file with -o FILE") from None
    if begin and not (begin.startswith(b"<!doctype html>") and b" - holdfast</title>" in begin):
        raise ConfigError(
            f"report: {target}: is no page of holdfast, and is not replaced; choose another file "
            "with -o FILE, or remove this one"
        )


def top_command(arguments: Sequence[str]) -> int:
    """``holdfast top OUT``: shows a run, or a folder of runs, in the terminal; ``?``: keys.

    Only reads. With --once, or if the output is no terminal, it prints one screen and ends.
    """
    parser = Parser("top", top_command.__doc__)
    parser.add_argument("out", help="a run's directory (out), or a folder of runs")
    parser.flag("--once", "one screen, then end")
    parser.option("--seconds", 2.0, "between updates")
    options = parser.parse_args(arguments)
    at_least(0.05, seconds=options.seconds)
    out, console = Path(options.out), Console(highlight=False)
    try:
        is_folder = out.is_dir() and not is_run(out)
        if options.once or not console.is_terminal:
            width = console.width
            console.print(
                drawn_runs(Runs([out]).update(), width) if is_folder else _run(out, width)
            )
            return 0
        if not is_folder:
            RunReader(out)  # or a sentence, before the screen is taken
        if not is_installed("top"):
            raise ConfigError(f"{lacking('top', 'top')}; or give --once, which needs none")
        # Textual is an extra, and takes longer to import than one screen to print.
        screen = importlib.import_module("runner.tools.report.screen")
        screen.Top(out, options.seconds).run()
    except OSError as error:
        raise ConfigError(f"top: {error}") from None
    return 0


def _run(out: Path, width: int) -> RenderableType:
    run = RunReader(out, columns=256)
    run.update()
    return frame(run, width=width)


def live_command(arguments: Sequence[str]) -> int:
    """``holdfast live OUT [--port N]``: serves the page of a run, or of all in a folder.

    It listens on 127.0.0.1 only, reads the files in OUT and writes nothing. From another machine:
    ``ssh -L 8765:127.0.0.1:8765 HOST``, then open the printed address there. It has a token, which
    other users of this machine lack.
    """
    parser = Parser("live", live_command.__doc__)
    parser.add_argument("out", help="a run's directory (out), or a folder of runs")
    parser.option("--port", 8765, "0: any")
    parser.flag("--no-token", "any user of this machine may look")
    options = parser.parse_args(arguments)
    token = "" if options.no_token else secrets.token_urlsafe(16)
    live_server = server(Path(options.out), options.port, token)
    port = live_server.server_address[1]
    query = f"?token={token}" if token else ""
    sys.stdout.write(
        f"http://{ADDRESS}:{port}/{query} shows {options.out}; Ctrl-C ends it\n"
        f"from another machine: ssh -L {port}:{ADDRESS}:{port} HOST\n"
    )
    sys.stdout.flush()
    with live_server, contextlib.suppress(KeyboardInterrupt):
        live_server.serve_forever()
    return 0
