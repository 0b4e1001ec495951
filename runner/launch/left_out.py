"""Leaving a node out of a run that can go on without it, because its device computes wrongly.

Without a scheduler nobody else can: the node's own supervisor and torchrun agent have to leave.
"""

from __future__ import annotations

from pathlib import Path

from runner.launch.bad_nodes import BadNodes
from runner.launch.crash_evidence import evidence
from runner.policy.restart import HARDWARE
from runner.run_dir.paths import RunDir
from runner.system.error import ConfigError
from runner.system.json_lines import read_lines


def has_to_leave(out: Path, *, node: str, least: int, since: int) -> bool:
    """Whether this node leaves the run for good.

    It does if the first crash after line ``since`` of the journal is the fault of its hardware, and
    that start had ``least`` other nodes: without them nothing could go on.
    """
    crash = evidence(out, since=since)
    if crash.cause != HARDWARE or _short(crash.host) != _short(node):
        return False
    others = {_short(host) for host in _hosts(out)} - {_short(node)}
    return len(others) >= least


def refuse_listed(out: Path, node: str) -> None:
    """
    Raises:
        ConfigError: this node is listed in ``out/bad_nodes``.
    """
    bad = BadNodes(out)
    reason = bad.read().get(_short(node))
    if reason is not None:
        raise ConfigError(
            f"{node} is listed in {bad.path} ({reason}), and the run can go on without it: delete "
            "its line when it is mended, or start on another node"
        )


def _hosts(out: Path) -> list[str]:
    """The hosts of the newest start."""
    lines, _ = read_lines(RunDir(out).journal)
    starts = [line["detail"] for line in lines if line.get("kind") == "start"]
    hosts = starts[-1].get("hosts") if starts else None
    return list(hosts) if isinstance(hosts, dict) else []


def _short(host: str) -> str:
    return host.partition(".")[0]
