"""Leaving a node out of a run that can go on without it, because its device computes wrongly.

Without a scheduler nobody else can: the node's own supervisor and torchrun agent have to leave.
"""

from __future__ import annotations

from pathlib import Path

from runner.launch.bad_nodes import BadNodes
from runner.launch.crash_evidence import Evidence, short_name
from runner.system.error import ConfigError


def has_to_leave(crash: Evidence, *, node: str, least: int) -> bool:
    """Whether this node leaves the run for good.

    It does if a start ended by the fault of its hardware and had ``least`` other nodes: without
    them nothing could go on.
    """
    return any(
        short_name(fault.host) == short_name(node) and fault.num_hosts - 1 >= least
        for fault in crash.hardware
    )


def refuse_listed(out: Path, node: str) -> None:
    """
    Raises:
        ConfigError: this node is listed in ``out/bad_nodes``.
    """
    bad = BadNodes(out)
    reason = bad.read().get(short_name(node))
    if reason is not None:
        raise ConfigError(
            f"{node} is listed in {bad.path} ({reason}), and the run can go on without it: delete "
            "its line when it is mended, or start on another node"
        )
