"""Turns command-line overrides into one checked :class:`RunConfig`, and back into text.

Owns everything that knows Hydra and OmegaConf. Nothing behind it sees a ``DictConfig``.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import ConfigCompositionException, HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config import RunConfig
from runner.error import ConfigError
from runner.redact import redacted

# Of a stored config: ours have some kilobytes and three levels.
_YAML_BYTES = 4 << 20
_YAML_DEPTH = 32

# One element of an unquoted faults=[...]: Hydra's grammar has no "=" inside a list, so the
# elements are quoted for the user. A comma separates faults only where "name@" follows it.
_NEXT_FAULT = re.compile(r",\s*(?=[a-z_]+@)")


def packaged_configs() -> Path:
    """The directory of our YAML groups: inside an installed wheel, or beside the checkout."""
    inside = Path(__file__).parent / "configs"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "configs"


def compose(overrides: Sequence[str], *, config_dir: str | None = None) -> RunConfig:
    """Compose the packaged configs (and a user's own) with ``overrides``.

    Raises:
        ConfigError: an unknown key or group, a value of the wrong type, a broken override.
    """
    ConfigStore.instance().store(name="schema", node=RunConfig)
    arguments = [_quote_faults(text) for text in overrides]
    for text in arguments:
        _reject_launcher_keys(text)
    if config_dir is not None:
        if not Path(config_dir).is_dir():
            raise ConfigError(f"--config-dir {config_dir}: no such directory")
        folder = str(Path(config_dir).resolve()).replace("'", r"\'")
        arguments.append(f"hydra.searchpath=['file://{folder}']")
    try:
        with initialize_config_dir(str(packaged_configs()), version_base="1.3"):
            tree = hydra_compose("config", overrides=arguments)
        made = OmegaConf.to_object(tree)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error, arguments)) from None
    except AttributeError:
        # "+key=value" gets past the merge; only the slots of the schema stop it.
        added = ", ".join(text for text in arguments if text.startswith("+")) or "your configs"
        raise ConfigError(f"{added}: adds a key that does not exist. `--help` lists all.") from None
    except Exception as error:
        # Hydra lets YAML's errors, ValueError and AssertionError out as they are.
        words = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"cannot compose {' '.join(overrides)}: {words}") from None
    # A YAML without "- schema" would switch all type checking off in silence.
    assert isinstance(made, RunConfig), "configs/config.yaml must begin with the schema"
    if isinstance(made.data.path, str):
        made.data.path = [made.data.path]
    return made


def _quote_faults(text: str) -> str:
    match = re.fullmatch(r"(faults=)\[(.*)\]", text, re.DOTALL)
    if match is None or not match[2].strip() or "'" in match[2] or '"' in match[2]:
        return text
    quoted = ",".join(f"'{part.strip()}'" for part in _NEXT_FAULT.split(match[2]))
    return f"{match[1]}[{quoted}]"


def _reject_launcher_keys(text: str) -> None:
    if text.lstrip("+~").startswith("hydra"):
        raise ConfigError(
            f"{text!r}: Hydra's own settings are not used here; the run's directory is "
            "out=DIR, your own configs are --config-dir DIR"
        )


def _explain(error: Exception, overrides: Sequence[str]) -> str:
    text = str(error)
    if isinstance(error, OverrideParseException):
        return (
            f"cannot read the override {error.override!r}: {text.splitlines()[0]}. "
            "Write key=value; quote values with spaces or '=' as key='\"...\"'"
        )
    cause = error.__cause__ if isinstance(error, ConfigCompositionException) else None
    full = text if cause is None else f"{text}\n{cause}"
    key = _unknown_key(full)
    if key is not None:
        return f"unknown key {key!r}. {_suggest(key)}"
    missing = re.search(
        r"Could not find '([^/']+)/([^']+)'.*Available options in '[^']+':\n(.*?)\n"
        r"(?:Config|$)",
        full,
        re.DOTALL,
    )
    if missing is not None:
        choices = ", ".join(missing[3].split())
        return f"{missing[1]}={missing[2]}: no such preset. Allowed: {choices}."
    named = re.search(r"full_key: (\S+)", full)
    if named is not None:
        reason = str(cause or error).splitlines()[0]
        value = _given_value(named[1], overrides)
        return f"{named[1]}{value}: {reason.rstrip('.')}. {_allowed(named[1])}".rstrip()
    return " ".join(line.strip() for line in full.splitlines() if line.strip())


def _unknown_key(text: str) -> str | None:
    match = re.search(r"Key '([^']+)' (?:is )?not in", text)
    if match is None:
        return None
    full = re.search(r"full_key: (\S+)", text)
    return full[1] if full else match[1]


def _given_value(key: str, overrides: Sequence[str]) -> str:
    values = [text.split("=", 1)[1] for text in overrides if text.lstrip("+").startswith(f"{key}=")]
    return f"={values[-1]}" if values else ""


def _suggest(key: str) -> str:
    known = [name for name, _, _ in fields(RunConfig())]
    groups = sorted({name.split(".")[0] for name in known})
    close = difflib.get_close_matches(key, groups, n=1, cutoff=0.7)
    if close and "." not in key:
        return f"Did you mean {close[0]}? `--help` lists all keys."
    parent, _, _ = key.rpartition(".")
    close = difflib.get_close_matches(key, known, n=3, cutoff=0.6)
    siblings = [name for name in known if name.rpartition(".")[0] == parent]
    if close:
        return f"Did you mean {' or '.join(close)}? `--help` lists all keys."
    return f"Allowed here: {', '.join(siblings or known[:8])}. `--help` lists all keys."


def _allowed(key: str) -> str:
    for name, spec, _ in fields(RunConfig()):
        if name == key:
            return f"Allowed: {type_name(spec)} ({spec.metadata['help']})."
    return ""


def type_name(spec: dataclasses.Field[Any]) -> str:
    """The type of a config field in words, with its bounds."""
    kind = spec.type if isinstance(spec.type, str) else spec.type.__name__
    if isinstance(spec.default, Enum):
        kind = " | ".join(member.value for member in type(spec.default))
    words = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [f"{words[name]} {spec.metadata[name]:g}" for name in words if name in spec.metadata]
    kind = kind.replace("None", "null").replace("Any", "list")
    if spec.metadata["words"]:
        kind = kind.replace("str", " | ".join(spec.metadata["words"]))
    return " ".join([kind, ", ".join(bounds)]).strip()


def fields(config: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Every leaf of a config as (dotted key, dataclass field, value), in schema order."""
    for spec in dataclasses.fields(config):
        value = getattr(config, spec.name)
        if dataclasses.is_dataclass(value):
            yield from fields(value, f"{prefix}{spec.name}.")
        else:
            yield f"{prefix}{spec.name}", spec, value


def to_plain(config: RunConfig) -> dict[str, Any]:
    """Nested dict of JSON values, without secrets."""
    made: dict[str, Any] = redacted(dataclasses.asdict(config, dict_factory=_plain_dict))
    return made


def _plain_dict(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value.value if isinstance(value, Enum) else value for key, value in items}


def flat(config: RunConfig) -> dict[str, Any]:
    """Dotted key to JSON value, every leaf, without secrets."""
    made: dict[str, Any] = redacted(
        {
            name: value.value if isinstance(value, Enum) else value
            for name, _, value in fields(config)
        }
    )
    return made


def value_of(config: RunConfig, key: str) -> str:
    """One resolved setting as text.

    Raises:
        ConfigError: there is no such key.
    """
    values = flat(config)
    if key not in values:
        raise ConfigError(f"unknown key {key!r}. {_suggest(key)}")
    return str(values[key])


def trajectory(config: RunConfig) -> dict[str, Any]:
    """The leaves that decide what the run computes, by dotted key.

    ``steps`` is among them only through the schedule's length: a longer run of the same
    schedule is the same run, longer.
    """
    leaves = {name for name, spec, _ in fields(config) if spec.metadata["trajectory"]}
    values = {name: value for name, value in flat(config).items() if name in leaves}
    constant = config.schedule.kind.value == "constant"
    values["schedule.total"] = None if constant else (config.schedule.total or config.steps)
    return values


def digest(values: dict[str, Any]) -> str:
    """SHA-256 (hex) of settings in canonical JSON."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def to_yaml(config: RunConfig) -> str:
    """The resolved settings as YAML text."""
    return OmegaConf.to_yaml(OmegaConf.create(to_plain(config)))


def from_yaml(text: str, *, source: Path) -> dict[str, Any]:
    """Dotted keys of a stored config; plain values only, nothing is resolved or built.

    Raises:
        ConfigError: the file is not such a mapping.
    """
    try:
        _refuse_bombs(text)
        tree = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except Exception as error:
        words = " ".join(str(error).split())[:300]
        raise ConfigError(f"{source}: not a settings file ({words})") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: not a settings file")
    return dict(_flatten(tree))


def _refuse_bombs(text: str) -> None:
    """An alias is copied where it stands, so a few lines of them unfold to any size."""
    if len(text) > _YAML_BYTES:
        raise ValueError(f"{len(text)} characters, at most {_YAML_BYTES} are read")
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("holds a YAML alias")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _YAML_DEPTH:
            raise ValueError(f"more than {_YAML_DEPTH} levels deep")


def _flatten(tree: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
