"""Writes scripts/requirements.lock from what is installed: python scripts/lock.py

Exact versions of the project's dependencies, its development tools, and what these need. Run it in
an environment that passes the tests; pyproject.toml keeps the ranges that users get.
"""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
HEAD = """\
# Exact versions of what the scripts and CI install; made by scripts/lock.py. Users get the ranges
# of pyproject.toml. Versions are without build tags: on a machine with GPUs the same line of torch
# brings the CUDA build, which names its own libraries.
"""


def locked(wanted: list[str], *, project: str) -> dict[str, str]:
    """Name to version of everything that ``wanted`` needs, as installed; without ``project``."""
    versions: dict[str, str] = {}
    todo = [Requirement(text) for text in wanted]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in versions and not requirement.extras:
            continue
        distribution = importlib.metadata.distribution(requirement.name)
        if name != project:  # "dev" names our own extras: what they need is locked, not ourselves
            versions[name] = Version(distribution.version).public
        for text in distribution.requires or ():
            needed = Requirement(text)
            extras = {"", *requirement.extras}
            if needed.marker is None or any(needed.marker.evaluate({"extra": e}) for e in extras):
                todo.append(needed)
    return versions


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    versions = locked(wanted, project=project["name"])
    lines = [f"{name}=={version}\n" for name, version in sorted(versions.items())]
    (ROOT / "scripts" / "requirements.lock").write_text(HEAD + "".join(lines))


if __name__ == "__main__":
    main()
