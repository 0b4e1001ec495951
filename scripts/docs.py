"""Writes docs/configuration.md and docs/coming-from.md from the code: python scripts/docs.py

A test fails where a page is out of date.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from runner.config.compose import documented, fields, packaged_configs, type_name
from runner.config.foreign_keys import answers
from runner.config.schema import RunConfig

DOCS = Path(__file__).parent.parent / "docs"
_HEAD = """\
# Configuration

<!-- Made by scripts/docs.py from runner/config/schema.py and configs/: change those and run it. -->

`holdfast --help GROUP` and `holdfast docs KEY` print the same, and `holdfast --cfg job key=value
...` the resolved settings of a run. **A key marked \\*
changes what the run computes**: at a resume another value is [refused unless
allowed](running.md#resuming-and-changing-settings).

**Code of your own** stands in a group's `_target_`. It is called with the keys of the group that
are not listed; one that is listed is given as `GROUP.arguments.KEY=value`.
"""
_COMING_FROM = """\
# Coming from another trainer

<!-- Made by scripts/docs.py from runner/config/foreign_keys.yaml: change that and run it. -->

You can stay: [one line](integrations.md) puts the guard under the Hugging Face Trainer, TRL,
Lightning, Accelerate or torchtitan. Composer and loops of your own take [`Guard`](loop.md), and
`holdfast run -- COMMAND` needs [no line](any-script.md).

To move to `holdfast launch`:

* **Hugging Face Trainer**: `model=hf model.path=FOLDER data=hf data.path=FILES`; [its
  page](hugging-face.md). A collator becomes `collate` of [a data
  set](data.md#a-data-set-of-your-own), `compute_metrics` the metrics of
  [`losses(batch)`](models.md#a-model-of-your-own).
* **Lightning**: the module gets `losses(batch)` in place of `training_step`, and
  `model._target_=pkg.Module`; `self.log` becomes its metrics; the data module becomes a data set.
* **torchtitan**: TOML tables become groups. `training.steps` is `steps`; `parallel=fsdp` or
  `hsdp`. Tensor, context and pipeline parallelism stay in your own loop.
* **Composer**: `max_duration="3ep"` is `epochs=3`. Algorithms have no counterpart. MosaicML
  Streaming works under `Guard`.

## Keys

One usual name for each. The command line answers these and other names in the same words,
whatever the group before them (`trainer.`, `training.`).

"""


def coming_from() -> str:
    """The page for users of other trainers: their usual keys and what each is here."""
    usual: dict[str, str] = {}  # of several names with one answer the most usual comes first
    for name, ours in answers().items():
        usual.setdefault(ours, name)
    rows = (f"* `{name}`: {_cell(ours.replace('docs/', ''))}" for ours, name in usual.items())
    return _COMING_FROM + "\n".join(rows) + "\n"


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
    for name, spec, value in entries:
        mark = "\\*" if spec.metadata["trajectory"] else ""
        told = _kind(spec) if value is None else re.sub(r"^(int|float) ", "", _kind(spec))
        kind = f" ({told})" if told else ""
        told = spec.metadata["help"].replace("*", "\\*")
        yield f"* `{name}={_shown(value)}`{mark}{_html(kind)}: {_html(told)}"


def _kind(spec: dataclasses.Field[Any]) -> str:
    """The type, where the default may not show it: bounds, words, and what null stands for."""
    told = type_name(spec).replace(" | null", "").replace(" | ", ", ")
    plain = ("bool", "str", "int", "float", "list[str]", "list", "mapping")
    return "" if told in plain else re.sub(r"([<>]=?) ", r"\1", told)


def _html(text: str) -> str:
    return text.replace("<", "&lt;").replace(">", "&gt;")


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
    for file in files:
        lines = [ln for ln in file.read_text().splitlines() if not ln.startswith("# @package")]
        description = " ".join(line[1:].strip() for line in lines if line.startswith("#"))
        values = [line.partition("  #")[0].strip() for line in lines if not line.startswith("#")]
        shown = ", ".join(
            f"`{value}`"
            for value in values
            if value not in ("", "{}", f"kind: {file.stem}") and value[-1] != ":"
        )
        sets = f" It sets {shown}." if shown else ""
        yield f"* **`{group}={file.stem}`** " + f"{description}{sets}".replace("*", "\\*")
    yield "\nKeys:\n"


PAGES = {"configuration.md": page, "coming-from.md": coming_from}

if __name__ == "__main__":
    for name, made in PAGES.items():
        (DOCS / name).write_text(made())
