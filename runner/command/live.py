"""``holdfast live OUT [--port N]``: serves the page of a running run to this machine's browser.

It listens on 127.0.0.1 only, reads the files in OUT and writes nothing. From another machine:
``ssh -L 8765:127.0.0.1:8765 HOST``, then open http://127.0.0.1:8765/ there. Any user of
this machine can open the page as well.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from runner.command.arguments import Parser
from runner.tools.report.live_server import ADDRESS, server

_PORT = 8765


def live_command(arguments: Sequence[str]) -> int:
    """Parse and serve until Ctrl-C; returns the exit code."""
    options = _parser().parse_args(arguments)
    live_server = server(Path(options.out), options.port)
    port = live_server.server_address[1]
    sys.stdout.write(
        f"http://{ADDRESS}:{port}/ shows {options.out}; Ctrl-C ends it\n"
        f"from another machine: ssh -L {port}:{ADDRESS}:{port} HOST\n"
    )
    sys.stdout.flush()
    with live_server, contextlib.suppress(KeyboardInterrupt):
        live_server.serve_forever()
    return 0


def _parser() -> Parser:
    parser = Parser(prog="holdfast live", description=__doc__)
    parser.add_argument("out", help="the run's directory (out)")
    parser.add_argument("--port", type=int, default=_PORT, help=f"default: {_PORT}; 0: any")
    return parser
