"""Writes docs/configuration.md from the schema: python scripts/docs.py

A test fails where the page is out of date.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from runner.config.compose import documented, fields, packaged_configs, type_name
from runner.config.schema import RunConfig

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
_HEAD = """\
# Configuration

<!-- Made by scripts/docs.py from runner/config/schema.py and configs/: change those and run it. -->

Give a key as `key=value` after the command, for example `optim.lr=1e-3`.
`python -m runner --help all` prints the same list, `--help GROUP` a part of it, and
`python -m runner --cfg job key=value ...` the resolved settings of a run.

**A key marked \\* changes what the run computes.** A command that resumes a run with another value
is refused, unless `resume.allow` names the key or `resume.allow_change=true`.

**Code of your own** stands in a group's `_target_`. It is called with the keys of the group that
are not in its table; one that is in the table is given as `GROUP.arguments.KEY=value`.
"""


def page() -> str:
    """The whole page."""
    config = RunConfig()
    top_level = [entry for entry in fields(config) if "." not in entry[0]]
    parts = [_HEAD, "## The run\n", *_table(top_level)]
    for spec in dataclasses.fields(config):
        group = getattr(config, spec.name)
        if dataclasses.is_dataclass(group):
            description = inspect.cleandoc(group.__doc__ or "").replace("``", "`")
            parts += ["", f"## {spec.name}", "", description, "", *_presets(spec.name)]
            parts += _table([e for e in documented(config) if e[0].startswith(f"{spec.name}.")])
    return "\n".join(parts) + "\n"


def _table(entries: list[tuple[str, dataclasses.Field[Any], Any]]) -> Iterator[str]:
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for name, spec, value in entries:
        mark = " \\*" if spec.metadata["trajectory"] else ""
        kind = _cell(type_name(spec)).replace("<", "&lt;").replace(">", "&gt;")
        yield f"| `{name}`{mark} | {kind} | `{_shown(value)}` | {_cell(spec.metadata['help'])} |"


def _shown(value: Any) -> str:
    value = value.value if isinstance(value, Enum) else value
    if isinstance(value, bool) or value is None:
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def _presets(group: str) -> Iterator[str]:
    """The group's presets: what each is for, in the words of its file, and what it sets."""
    files = sorted((packaged_configs() / group).glob("*.yaml"))
    if not files:
        return
    yield "| preset | what it is | sets |"
    yield "|---|---|---|"
    for file in files:
        lines = [ln for ln in file.read_text().splitlines() if not ln.startswith("# @package")]
        description = " ".join(line[1:].strip() for line in lines if line.startswith("#"))
        values = [line.partition("  #")[0].strip() for line in lines if not line.startswith("#")]
        shown = ", ".join(
            f"`{value}`"
            for value in values
            if value not in ("", "{}", f"kind: {file.stem}") and value[-1] != ":"
        )
        yield f"| `{group}={file.stem}` | {_cell(description)} | {shown} |"
    yield ""


if __name__ == "__main__":
    PAGE.write_text(page())
