"""Reads the evidence of bad steps in ``OUT/explanations``, which a run leaves there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runner.system.files import read_bounded
from runner.system.parsing import parse_json, whole

INCIDENT, SAMPLES = "incident.json", "samples.txt"
MOST_JSON = 16 << 20  # bytes
VERSION = 1


def read_explanation(folder: Path) -> dict[str, Any]:
    """Read what a run left in a folder of a bad step.

    Raises:
        ValueError: it is not a bundle of this version.
        OSError: it cannot be read, or is too large.
    """
    tree = parse_json(read_bounded(folder / INCIDENT, MOST_JSON))
    if not isinstance(tree, dict) or tree.get("version") != VERSION:
        raise ValueError(f"{folder / INCIDENT} is not evidence of version {VERSION}")
    finding = tree.get("finding")
    if not isinstance(finding, dict) or not isinstance(tree.get("probes"), dict):
        raise ValueError(f"{folder / INCIDENT} has no finding")
    whole(tree.get("step"), "step")
    return tree


def explanations(*folders: Path) -> list[int]:
    """The numbers of the bundles in ``OUT/explanations``, oldest first.

    Takes several folders, because earlier releases wrote to ``OUT/incidents``.
    """
    names = {path.parent.name for folder in folders for path in folder.glob(f"*/{INCIDENT}")}
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())
