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

from runner.command.arguments import Parser, at_least
from runner.launch.node_memory import NodeFolder
from runner.policy.nodes import PASSED, NodeEvent, NodeRules, standing
from runner.system.error import ConfigError


def nodes_command(arguments: Sequence[str]) -> int:
    """``holdfast nodes DIR [clear HOST]``: what happened to each host, in any run; or forget it.

    DIR is that of cluster.nodes. The worst come first.
    """
    parser = Parser("nodes", nodes_command.__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="as cluster.nodes")
    parser.add_argument("action", nargs="?", choices=["clear"])
    parser.add_argument("host", nargs="?", help="to forget, as when it was mended")
    rules = NodeRules()
    words = "as cluster.probation_hours"
    parser.option("--probation-hours", rules.probation_hours, words, metavar="HOURS")
    options = parser.parse_args(arguments)
    at_least(0, probation_hours=options.probation_hours)
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
    rules = NodeRules(probation_hours=options.probation_hours)
    Console(soft_wrap=True).print(_table(events, rules, time.time()))
    return 0


def _table(events: Sequence[NodeEvent], rules: NodeRules, now: float) -> Table:
    table = Table()
    for title in ("host", "standing", "faults", "last", "kind", "run"):
        table.add_column(title, no_wrap=True)
    table.add_column("reason", overflow="fold")
    by_host: dict[str, list[NodeEvent]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.time):
        by_host[event.host].append(event)
    known = {host: standing(of, now=now, rules=rules) for host, of in by_host.items()}
    for host in sorted(by_host, key=lambda host: (-known[host].badness(now), host)):
        one = known[host]
        words = "trusted"
        if not one.is_trusted(now):
            words = f"probation until {_at(one.until)}" if one.is_tested else "to be checked"
        last = [event for event in by_host[host] if event.kind != PASSED][-1:]
        for event in last or by_host[host][-1:]:
            cells = (f"{one.faults:g}", _at(event.time), event.kind, event.run, event.reason)
            table.add_row(*map(Text, (host, words, *cells)))
    return table


def _at(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(when))
