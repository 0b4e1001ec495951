"""``--config FILE``: the settings of a YAML file, as the overrides that say the same."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.config.compose import read_yaml
from runner.config.schema import DECODER_KEYS
from runner.system.error import ConfigError

OPTION = "--config"
_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?([eE][-+]?\d+)?")  # PyYAML reads 1e-3 as text


def expanded(arguments: Sequence[str]) -> list[str]:
    """The arguments with each ``--config FILE`` replaced by the settings in the file.

    What follows ``--`` belongs to another command, and stays as it is. A setting that is given
    after the file replaces the file's.

    Raises:
        ConfigError: there is no such file, or it is no mapping of settings.
    """
    given = list(arguments)
    end = given.index("--") if "--" in given else len(given)
    words, result = iter(given[:end]), list[str]()
    for word in words:
        if word == OPTION or word.startswith(f"{OPTION}="):
            name = word.partition("=")[2] or next(words, "")
            result += _overrides(name)
        else:
            result.append(word)
    return result + given[end:]


def _overrides(name: str) -> list[str]:
    path = Path(name).expanduser()
    if not name or not path.is_file():
        raise ConfigError(
            f"{OPTION} {name}: no such file; it is a YAML file of settings, such as that of a run, "
            f"OUT/config.yaml; a folder of presets is --config-dir DIR"
        )
    settings = read_yaml(path.read_text(errors="replace"), source=path)
    return [f"{key}={override_text(value)}" for key, value in _leaves(settings)]


def _leaves(settings: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Groups become dotted keys; a mapping within a group is one value."""
    for name, value in settings.items():
        if not isinstance(value, Mapping):
            yield str(name), value
            continue
        inner = dict(value)
        if "arguments" in inner:  # a run's own file, in which the decoder's sizes are always
            unused = DECODER_KEYS if value.get("_target_") else ()
            inner = {key: item for key, item in inner.items() if key not in unused}
            inner |= inner.pop("arguments") or {}  # as they were given
        for key, item in inner.items():
            yield f"{name}.{key}", item


def override_text(value: Any) -> str:
    """A value in the grammar of Hydra's overrides."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(override_text, value))}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{override_text(item)}" for key, item in value.items()) + "}"
    text = str(value)
    if not isinstance(value, str) or _NUMBER.fullmatch(text) or re.fullmatch(r"[\w./-]+", text):
        return text if text.lower() not in ("null", "true", "false") else f'"{text}"'
    return '"' + re.sub(r'(\\*)"', r'\1\1\\"', re.sub(r"(\\+)$", r"\1\1", text)) + '"'
