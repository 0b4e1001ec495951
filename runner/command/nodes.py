"""``holdfast nodes DIR``: what is remembered of each host."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from runner.command.arguments import Parser
from runner.launch.node_memory import NodeFolder
from runner.policy.nodes import PASSED, REMEMBER_DAYS, NodeEvent, standing
from runner.system.error import ConfigError


def nodes_command(arguments: Sequence[str]) -> int:
    """``holdfast nodes DIR [clear HOST]``: what happened to each host, in any run; or forget it.

    DIR is that of cluster.nodes. The worst come first.
    """
    parser = Parser("nodes", nodes_command.__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="as cluster.nodes")
    parser.add_argument("action", nargs="?", choices=["clear"])
    parser.add_argument("host", nargs="?", help="to forget, as when it was mended")
    options = parser.parse_args(arguments)
    folder = NodeFolder(options.folder)
    if (options.action is None) != (options.host is None):
        raise ConfigError("nodes: write: nodes DIR clear HOST")
    if not options.folder.is_dir():
        raise ConfigError(f"nodes: {options.folder} is no folder; name that of cluster.nodes")
    try:
        if options.host:
            sys.stdout.write(f"{options.host}: {folder.clear(options.host)} events forgotten\n")
            return 0
        events = folder.events()
    except OSError as error:
        raise ConfigError(f"nodes: {error}") from None
    if events:
        Console(soft_wrap=True).print(_table(events, time.time()))
    else:
        sys.stdout.write(f"{options.folder}: nothing has happened to any host\n")
    return 0


def _table(events: Sequence[NodeEvent], now: float) -> Table:
    """Standings are those of the default memory."""
    table = Table("host", "standing", "faults", "last", "kind", "run", "reason")
    by_host = defaultdict[str, list[NodeEvent]](list)
    for event in sorted(events, key=lambda event: (event.kind != PASSED, event.time)):
        by_host[event.host].append(event)
    known = {host: standing(of, now=now) for host, of in by_host.items()}
    for host in sorted(by_host, key=lambda host: (-known[host].faults, host)):
        one, last = known[host], by_host[host][-1]
        words = "trusted"
        if one.faults:
            until = f"others first until {_at(last.time + REMEMBER_DAYS * 86400)}"
            words = until if one.is_tested else f"{until}, to be checked"
        cells = (host, words, f"{one.faults:g}", _at(last.time), last.kind, last.run, last.reason)
        table.add_row(*map(Text, cells))
    return table


def _at(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(when))
