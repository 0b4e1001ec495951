"""The list of nodes that failed (``out/bad_nodes``), and the choice of nodes to train on."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from runner.system.error import ConfigError


class BadNodes:
    """``out/bad_nodes``: a node a line, with the time and the reason. A person may edit it."""

    def __init__(self, out: Path) -> None:
        self.path = out / "bad_nodes"

    def read(self) -> dict[str, str]:
        """Each listed node, with the time and reason of its newest line."""
        if not self.path.exists():
            return {}
        lines = (line.split(maxsplit=1) for line in self.path.read_text().splitlines())
        return {row[0]: " ".join(row[1:]) for row in lines if row and row[0][0] != "#"}

    def add(self, nodes: Iterable[str], reason: str) -> None:
        """Append those that are not listed yet."""
        known = self.read()
        when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        text = "".join(f"{node} {when} {reason}\n" for node in nodes if node not in known)
        if text:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(text)


def choose(
    nodes: Sequence[str], *, count: int, bad: Collection[str], lost: Collection[str]
) -> list[str] | None:
    """Choose ``count`` of ``nodes``, in their order: no lost ones, and bad ones only if needed.

    Returns None if too few nodes are left.
    """
    usable = [node for node in nodes if node not in lost]
    if len(usable) < count:
        return None
    good_first = sorted(usable, key=lambda node: node in bad)
    chosen = set(good_first[:count])
    return [node for node in usable if node in chosen]


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


def short_name(host: str) -> str:
    """The name by which ``out/bad_nodes`` lists a host."""
    return host.partition(".")[0]
