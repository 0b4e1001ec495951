"""What tells of commands, settings and pages: ``--help [GROUP]``, ``completion`` and ``docs``."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from runner.command import COMMANDS
from runner.command.arguments import Parser
from runner.config.compose import documented, fields, packaged_configs, type_name
from runner.config.schema import RunConfig
from runner.config.unknown_key import suggestion
from runner.system.error import (
    EXIT_CONFIG,
    EXIT_DONE,
    EXIT_HALTED,
    EXIT_NO_CHECKPOINT,
    EXIT_PREEMPTED,
    ConfigError,
)

_USAGE = """\
Holdfast: a training runner that survives NaNs, loss spikes, bad data and crashes by itself.

  torchrun --nproc-per-node=8 -m runner out=runs/a key=value ...   train, or resume out=runs/a
  holdfast train key=value ...       the same with one process (holdfast is python -m runner)
  holdfast launch key=value ...      torchrun on this node, well set, started again after a crash
  holdfast supervise -- COMMAND      the same for your own torchrun command; run: for any script
  holdfast prove-resume -- COMMAND   does your script really resume? kills it, and compares
  holdfast slurm --nodes 4 key=value ...   the batch script, or its job; k8s; nodes: who failed
  holdfast check-model key=value ... what exactness asks of your model and data; preflight: more
  holdfast ring DIR|URL [--verify]   list and verify checkpoints
  holdfast export OUT DIR            weights as safetensors; import: begin a run from others'
  holdfast replay OUT                why steps were bad; bisect: which commit or data file did it
  holdfast report OUT                the page of a run; live, top: while it runs; read: of any curve
  holdfast watch OUT...              tells you when a run dies, halts or recovers
  holdfast backtest FILE...          what the guard would have done to recorded runs
  holdfast plan ...                  memory of a rank, goodput of a large run; profile: a step
  holdfast demo                      poison a range, kill a rank, and show that neither left a trace
  holdfast docs [PAGE|KEY|WORD]      these pages; completion SHELL: the Tab key
  holdfast COMMAND --help            the options of a command

  --help GROUP      the keys and presets of a group, such as --help guard; --help all: every key
  --version         print the version
  --cfg job         print the resolved settings and stop
  --get KEY         check the settings, print one of them and stop (for scripts)
  --config FILE     settings from a YAML file; what stands after it replaces them
  --config-dir DIR  your own presets, beside the packaged ones
"""

_CODES = f"""\
exit codes: {EXIT_DONE} done, {EXIT_CONFIG} settings or data, {EXIT_HALTED} halted by the guard, \
{EXIT_NO_CHECKPOINT} no loadable checkpoint,
            {EXIT_PREEMPTED} stopped on request and saved (start again), else crash (start again)
"""
_ALL, _RUN = "all", "run"  # every group; the keys of none


def help_text(group: str = "") -> str:
    """The text of ``--help``, or of ``--help GROUP``.

    Raises:
        ConfigError: there is no such group.
    """
    group = group.partition(".")[0]
    groups = {_RUN: ""} | {
        spec.name: inspect.cleandoc(value.__doc__ or "").replace("``", "`")
        for spec in dataclasses.fields(RunConfig)
        if dataclasses.is_dataclass(value := getattr(RunConfig(), spec.name))
    }
    if not group:
        return "\n".join([_USAGE, *_overview(groups), "", _CODES])
    if group == _ALL:
        return "\n".join(line for name in groups for line in _keys(name))
    if group not in groups:
        raise ConfigError(
            f"--help {group}: is no group of settings{suggestion(group, groups)}. Groups: "
            f"{', '.join(groups)}; {_ALL} for every key"
        )
    presets = [f"presets: {_presets(group)}"] if _presets(group) else []
    return "\n".join([*filter(None, [groups[group], *presets]), "", *_keys(group)])


def _overview(groups: Iterable[str]) -> Iterator[str]:
    helps = {spec.name: spec.metadata["help"] for spec in dataclasses.fields(RunConfig)}
    yield "groups of settings (GROUP.KEY=VALUE), with presets (GROUP=PRESET):"
    for name in groups:
        keys = [key for key, _, _ in fields(RunConfig()) if "." not in key]
        presets = f" ({_presets(name)})" if _presets(name) else ""
        yield f"  {name:<11}{helps[name] if name in helps else ', '.join(keys)}{presets}"


def _presets(group: str) -> str:
    return ", ".join(sorted(file.stem for file in (packaged_configs() / group).glob("*.yaml")))


def _keys(group: str) -> Iterator[str]:
    for name, spec, value in documented(RunConfig()):
        if (name.rpartition(".")[0] or _RUN) != group:
            continue
        yield f"  {_line(name, spec, value)}"


def key_line(name: str) -> str | None:
    """What ``--help`` says of a key; None if there is no such key."""
    return next((_line(*entry) for entry in fields(RunConfig()) if entry[0] == name), None)


def _line(name: str, spec: dataclasses.Field[Any], value: Any) -> str:
    shown = value.value if isinstance(value, Enum) else value
    default = "null" if shown is None else shown
    return f"{name}={default}  ({type_name(spec)}) {spec.metadata['help']}"


# -- completion ------------------------------------------------------------------------------

# bash: eval "$(holdfast completion bash)"    in ~/.bashrc
# zsh:  eval "$(holdfast completion zsh)"     in ~/.zshrc, after compinit
# fish: holdfast completion fish | source     in ~/.config/fish/config.fish
#
# The words stand in the scripts: a Python process at each Tab would take half a second.
# In bash "=" separates words, so what stands before it is taken off the answers.
_BASH = """\
_holdfast() {
  local typed="${COMP_LINE:0:COMP_POINT}"
  typed="${typed##* }"
  COMPREPLY=($(compgen -W '%s' -- "$typed"))
  if [[ "$typed" == *=* ]]; then COMPREPLY=("${COMPREPLY[@]#"${typed%%=*}="}"); fi
  if [[ "${COMPREPLY[0]-}" == *= ]]; then compopt -o nospace 2>/dev/null; fi
}
complete -o default -F _holdfast holdfast
"""
_ZSH = """\
_holdfast() {
  local -a words_of=(%s)
  compadd -S '' -- ${(M)words_of:#*=}
  compadd -- ${words_of:#*=}
  _files
}
compdef _holdfast holdfast
"""
_FISH = "complete -c holdfast -a '%s'\n"
_SHELLS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def completion_command(arguments: Sequence[str]) -> int:
    """Print the script that completes commands, settings and presets in a shell."""
    parser = Parser("completion", completion_command.__doc__)
    parser.add_argument("shell", choices=_SHELLS)
    sys.stdout.write(_SHELLS[parser.parse_args(arguments).shell] % " ".join(words()))
    return EXIT_DONE


def words() -> list[str]:
    """All that can stand in a command line: commands, presets, ``key=``."""
    presets = (f"{path.parent.name}={path.stem}" for path in packaged_configs().glob("*/*.yaml"))
    keys = (f"{name}=" for name, _, _ in fields(RunConfig()))
    return ["train", *COMMANDS, *sorted({*presets, *keys})]


# -- pages, for who has no checkout --------------------------------------------------------------


def docs_command(arguments: Sequence[str]) -> int:
    """Print the pages' names, a page, or where a setting or a word is told of."""
    parser = Parser("docs", docs_command.__doc__)
    parser.add_argument("word", nargs="?", help="a page (loop), a setting (optim.lr), or any word")
    word = parser.parse_args(arguments).word
    pages = {path.stem: path.read_text() for path in sorted(_folder().glob("*.md"))}
    name = (word or "").removeprefix("docs/").removesuffix(".md")
    text = pages.get(name) or (_found(word, pages) if word else _list(pages))
    sys.stdout.write(text)
    return EXIT_DONE


def _folder() -> Path:
    """``docs/``: inside an installed wheel, or beside the checkout."""
    package = Path(__file__).parents[1]
    inside = package / "docs"
    return inside if inside.is_dir() else package.parent / "docs"


def _list(pages: dict[str, str]) -> str:
    lines = (f"  {name:<14} {_title(text)}" for name, text in pages.items())
    return "\n".join(["holdfast docs PAGE prints one of:", *lines, ""])


def _title(text: str) -> str:
    return text.partition("\n")[0].lstrip("# ")


def _found(word: str, pages: dict[str, str]) -> str:
    """What a setting does, and the lines that tell of a word."""
    lines = [line] if (line := key_line(word)) else []
    whole = re.compile(rf"(?<![\w.]){re.escape(word)}(?![\w])", re.IGNORECASE)
    for name, text in pages.items():
        told = [line.strip() for line in text.splitlines() if whole.search(line)]
        if told and name != "configuration":
            lines += [f"\nholdfast docs {name}   ({_title(text)})", *(f"  {t}" for t in told[:3])]
    if not lines:
        raise ConfigError(
            f"docs {word}: neither a page nor a setting, and no page tells of it"
            f"{suggestion(word, pages)}; `holdfast docs` lists the pages"
        )
    return "\n".join([*lines, ""])
