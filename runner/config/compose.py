"""Turns command-line overrides into one checked :class:`RunConfig`, and back into text.

Owns everything that knows Hydra and OmegaConf. Nothing behind it sees a ``DictConfig``.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import ConfigCompositionException, HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config.foreign_keys import our_key
from runner.config.schema import DECODER_KEYS, DataKind, RunConfig, former_key
from runner.config.unknown_key import answer, suggestion
from runner.system.environment import redacted
from runner.system.error import ConfigError

# Of a stored config: ours have some kilobytes and three levels.
_YAML_BYTES = 4 << 20
_YAML_DEPTH = 32
# Groups of Hydra's own that nothing uses here; they take a quarter of the time of a composition.
_UNUSED = ("~hydra/job_logging", "~hydra/hydra_logging")
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")

# One element of an unquoted faults=[...]: Hydra's grammar has no "=" inside a list, so the
# elements are quoted for the user. A comma separates faults only where "name@" follows it.
_NEXT_FAULT = re.compile(r",\s*(?=[a-z_]+@)")


def packaged_configs() -> Path:
    """The directory of our YAML groups: inside an installed wheel, or beside the checkout."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def compose(overrides: Sequence[str], *, config_dir: str | None = None) -> RunConfig:
    """Compose the packaged configs (and a user's own) with ``overrides``.

    Raises:
        ConfigError: an unknown key or group, a value of the wrong type, a broken override.
    """
    _store_schema()
    is_guest = any(re.match(r"\+*model\._target_=(?!null$)", text) for text in overrides)
    arguments = [_quote_faults(_as_argument(text) if is_guest else text) for text in overrides]
    for text in arguments:
        _reject_launcher_keys(text)
        _reject_deletion(text)
        _reject_whole_group(text)
        key, _, value = text.lstrip("+").partition("=")
        if (what := former_key(key)) is not None:
            raise ConfigError(f"{key}={value}: {what}")
    if config_dir is not None:
        if not Path(config_dir).is_dir():
            raise ConfigError(f"--config-dir {config_dir}: no such directory")
        folder = str(Path(config_dir).resolve()).replace("'", r"\'")
        arguments.append(f"hydra.searchpath=['file://{folder}']")
    try:
        with initialize_config_dir(str(packaged_configs()), version_base="1.3"):
            tree = hydra_compose("config", overrides=[*arguments, *_UNUSED])
        _gather_arguments(tree, arguments, config_dir)
        config = OmegaConf.to_object(tree)
    except ConfigError:
        raise
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error, arguments)) from None
    except AttributeError:
        # "+key=value" gets past the merge; only the slots of the schema stop it.
        added = ", ".join(text for text in arguments if text.startswith("+")) or "your configs"
        raise ConfigError(f"{added}: adds a key that does not exist; see `--help all`") from None
    except Exception as error:
        # Hydra does not wrap YAML's errors, ValueError and AssertionError.
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"cannot compose {' '.join(overrides)}: {cause}") from None
    # A YAML without "- schema" would switch all type checking off in silence.
    assert isinstance(config, RunConfig), "configs/config.yaml must begin with the schema"
    if isinstance(config.data.path, str):
        config.data.path = [config.data.path]
    config.data.val_path = _listed(config.data.val_path)
    _settle_tokenizer(config)
    _refuse_two_lengths(config, arguments)
    return config


def _refuse_two_lengths(config: RunConfig, overrides: Sequence[str]) -> None:
    if config.epochs is not None and "steps" in map(_key_of, overrides):
        raise ConfigError(f"epochs={config.epochs:g}: is given in place of steps; leave one out")


def _listed(paths: Any) -> Any:
    """A path as a list of one; of named sets each."""
    if isinstance(paths, dict):
        return {name: _listed(path) for name, path in paths.items()}
    return [paths] if isinstance(paths, str) else paths


def _settle_tokenizer(config: RunConfig) -> None:
    """Use the tokenizer in a Hugging Face model's folder, if no other is set."""
    model, data = config.model, config.data
    is_read = model._target_ is None and model.kind == "hf" and isinstance(model.path, str)
    if not is_read or data._target_ is not None or data.kind not in (DataKind.text, DataKind.hf):
        return
    folder = Path(model.path).expanduser()
    if data.tokenizer is None and any((folder / name).is_file() for name in _TOKENIZERS):
        data.tokenizer = model.path


def open_groups() -> list[str]:
    """Groups that may name the user's own code: their other keys are its arguments."""
    groups = (
        (spec.name, getattr(RunConfig(), spec.name)) for spec in dataclasses.fields(RunConfig)
    )
    return [name for name, group in groups if hasattr(group, "_target_")]


@functools.cache
def _store_schema() -> None:
    """Register the schema: fully typed, except unknown keys of open groups.

    Once per process: it takes a fifth of a composition, and Hydra copies what is stored.
    """
    schema: DictConfig = OmegaConf.structured(RunConfig)
    for group in open_groups():
        OmegaConf.set_struct(schema[group], False)
    ConfigStore.instance().store(name="schema", node=schema)


def _gather_arguments(tree: DictConfig, overrides: Sequence[str], config_dir: str | None) -> None:
    """Turn unknown keys of an open group into ``arguments`` of its ``_target_``.

    So do keys of the decoder's sizes that the user gave beside ``model._target_``.

    Raises:
        ConfigError: there is no ``_target_`` to take them.
    """
    for group in open_groups():
        node = tree[group]
        known = {spec.name for spec in dataclasses.fields(getattr(RunConfig(), group))}
        if group == "model" and node._target_ is not None:
            known -= _given_by_user(group, overrides, config_dir) & DECODER_KEYS
        extra = [key for key in node if key not in known]
        if not extra:
            continue
        if node._target_ is None:
            raise ConfigError(unknown(_as_typed(f"{group}.{extra[0]}", overrides)))
        node.arguments = OmegaConf.merge(
            node.arguments or {}, OmegaConf.masked_copy(OmegaConf.create(dict(node)), extra)
        )
        for key in extra:
            if key in DECODER_KEYS and group == "model":
                node[key] = getattr(RunConfig().model, key)
            else:
                del node[key]


def _given_by_user(group: str, overrides: Sequence[str], config_dir: str | None) -> set[str]:
    """Keys of a group that the command line or the user's own preset sets."""
    given = set()
    for text in overrides:
        name, _, value = text.lstrip("+").partition("=")
        if name.startswith(f"{group}."):
            given.add(name.split(".")[1])
        elif name == group and config_dir is not None:
            preset = Path(config_dir) / group / f"{value}.yaml"
            tree = OmegaConf.load(preset) if preset.is_file() else OmegaConf.create()
            given |= {str(key) for key in tree}
    return given


def _as_argument(text: str) -> str:
    """A key of the decoder beside ``model._target_``: an argument of any type."""
    match = re.match(r"\+*model\.(\w+)([.=].*)", text, re.DOTALL)
    if match is None or match[1] not in DECODER_KEYS:
        return text
    return f"++model.arguments.{match[1]}{match[2]}"


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


def _reject_deletion(text: str) -> None:
    """Refuse ``~key``: Hydra takes it for a group, and silently keeps the key."""
    if text.startswith("~"):
        key = text[1:].partition("=")[0].partition("@")[0]
        known = _specs().keys() | {name.partition(".")[0] for name in _specs()}
        hint = "" if key in known else suggestion(key, known)
        off = ", or eval.every=0 for no evaluation" if key == "eval" else ""
        raise ConfigError(
            f"{text!r}: keys cannot be removed, a run has all of them{hint}; omit it for the "
            f"default{off}"
        )


def _reject_whole_group(text: str) -> None:
    """``eval=false`` and ``guard=null``: what Hydra says of them names its own types."""
    group, _, value = text.partition("=")
    keys = [name for name in _specs() if name.startswith(f"{group}.")]
    if not keys or value.startswith("{"):
        return
    folder = packaged_configs() / group
    has_presets = folder.is_dir()
    if has_presets and not re.fullmatch(r"(?i:true|false|null|none|[-+.\d]+|)", value):
        return
    presets = ", ".join(sorted(f"{group}={path.stem}" for path in folder.glob("*.yaml")))
    raise ConfigError(
        f"{text}: {group} is a group of settings, not one: "
        + (f"take a preset ({presets}), or " if has_presets else "")
        + f"set a key of it, such as {keys[0]}=... ; `--help {group}` lists all"
        + (f". To go on with a run: {our_key('auto_resume')}" if group == "resume" else "")
    )


def _explain(error: Exception, overrides: Sequence[str]) -> str:
    text = str(error)
    if isinstance(error, OverrideParseException):
        if error.override.startswith("faults="):
            given = error.override.partition("=")[2]
            return f"{error.override}: faults are a list, in quotes: 'faults=[{given.strip('[]')}]'"
        name, equals, value = error.override.partition("=")
        name = re.sub(r"\[\d+\]", "", name)
        if equals and _is_in_no_group(name):
            return unknown(name)
        is_plain = equals and not set(value) & set("'\"[]{}")
        usual = "key=value; quote values with spaces or '=' as key='\"...\"'"
        return f"cannot read the override {error.override!r}. Write " + (
            f"'{name}=\"{value}\"'" if is_plain else usual
        )
    cause = error.__cause__ if isinstance(error, ConfigCompositionException) else None
    full = text if cause is None else f"{text}\n{cause}"
    key = _unknown_key(full)
    if key is not None:
        return unknown(_as_typed(key, overrides))
    several = re.search(r"Ambiguous value for argument '([^=']+)=(.*?)'\n", full, re.DOTALL)
    if several is not None:
        return _told_of_several(*several.groups())
    missing = re.search(
        r"Could not find '([^/']+)/([^']+)'.*Available options in '[^']+':\n(.*?)\n"
        r"(?:Config|$)",
        full,
        re.DOTALL,
    )
    if missing is not None:
        choices = ", ".join(missing[3].split())
        path = {
            "data": f" Files are data=text data.path={missing[2]}.",
            "model": " One of Hugging Face is model=hf model.path=FOLDER, after "
            f"`hf download {missing[2]} --local-dir FOLDER`.",
        }.get(missing[1], "")
        close = difflib.get_close_matches(missing[2].lower(), missing[3].split(), n=1)
        meant = f" Did you mean {missing[1]}={close[0]}?" if close else ""
        return f"{missing[1]}={missing[2]}: no such preset.{meant} Allowed: {choices}.{path}"
    named = re.search(r"full_key: (\S+)", full)
    if named is not None:
        if (typed := _as_typed(named[1], overrides)) != named[1]:
            return unknown(typed)  # checkpoint.keep.every: a part of a number
        reason = _plain_reason(str(cause or error).splitlines()[0])
        value = _given_value(named[1], overrides)
        whole = _whole_of(named[1], value)
        if whole is not None:
            return f"{named[1]}{value}: must be written as a whole number: {named[1]}={whole}"
        return f"{named[1]}{value}: {reason.rstrip('.')}. {_allowed(named[1])}".rstrip()
    return " ".join(line.strip() for line in full.splitlines() if line.strip())


def _told_of_several(key: str, value: str) -> str:
    if _is_in_no_group(key):
        return unknown(key)
    first = value.split(",")[0]
    kind = _kind_of(key)
    return (
        f"{key}={value}: is several values, and one command is one run: start one for each, "
        f"such as {key}={first} with an out of its own"
        + (f"; a list is {key}=[{value}]" if re.search(r"list|Any", kind) else "")
        + (f"; text with a comma is quoted, '{key}=\"{value}\"'" if "str" in kind else "")
    )


def _is_in_no_group(key: str) -> bool:
    first = key.partition(".")[0]
    return first.isidentifier() and first not in {name.partition(".")[0] for name in _specs()}


def _plain_reason(text: str) -> str:
    """What OmegaConf says of a value of the wrong type, in words that name no type of its own."""
    for its, ours in (
        ("could not be converted to Integer", "is no whole number"),
        ("could not be converted to Float", "is no number"),
        ("is not a valid bool", "is neither true nor false"),
    ):
        if its in text:
            return ours
    return text


def _as_typed(key: str, overrides: Sequence[str]) -> str:
    """The whole key: Hydra names the first part of a.b."""
    return next((k for k in map(_key_of, overrides) if k.startswith(f"{key}.")), key)


def _key_of(override: str) -> str:
    return override.lstrip("+").partition("=")[0]


def unknown(key: str) -> str:
    """What a key that does not exist may be, or what became of it."""
    former = former_key(key)
    return f"{key}: {former}" if former else answer(key, list(_specs()))


_FIRST = ("cfg", "get", "version")


def unknown_option(word: str) -> str:
    """What ``--learning_rate`` or ``--steps=9`` is here: settings have no dashes."""
    key = word.lstrip("-").partition("=")[0]
    if key in _FIRST:
        return f"{word}: comes first: holdfast {word} ..., without another command before it"
    told = f"{key}=..." if key in _specs() else answer(key, list(_specs()))
    return f"{word}: settings are written key=value, without dashes; {told}"


def _unknown_key(text: str) -> str | None:
    match = re.search(r"Key '([^']+)' (?:is )?not in", text)
    if match is None:
        return None
    full = re.search(r"full_key: (\S+)", text)
    return full[1] if full else match[1]


def _given_value(key: str, overrides: Sequence[str]) -> str:
    values = [text.split("=", 1)[1] for text in overrides if text.lstrip("+").startswith(f"{key}=")]
    return f"={values[-1]}" if values else ""


def _whole_of(key: str, value: str) -> int | None:
    """The whole number that a value like ``=1e3`` means, where the key wants one."""
    if re.search(r"\bint\b", _kind_of(key)) is None:
        return None
    match = re.fullmatch(r"=(\d{1,15}(?:\.\d{0,15})?[eE]\+?\d{1,2}|\d{1,15}\.0+)", value)
    number = Decimal(match[1]) if match else None
    if number is None or number != int(number) or number >= 1 << 63:
        return None
    return int(number)


def _kind_of(key: str) -> str:
    """The type of a key in the schema; empty for one that does not exist."""
    return str(_specs()[key].type) if key in _specs() else ""


def _allowed(key: str) -> str:
    spec = _specs().get(key)
    return f"Allowed: {type_name(spec)} ({spec.metadata['help']})." if spec else ""


@functools.cache
def _specs() -> dict[str, dataclasses.Field[Any]]:
    """Each key's field."""
    return {name: spec for name, spec, _ in fields(RunConfig())}


def type_name(spec: dataclasses.Field[Any]) -> str:
    """The type of a config field in words, with its bounds."""
    if spec.metadata["shown"]:
        return str(spec.metadata["shown"])
    kind = spec.type if isinstance(spec.type, str) else spec.type.__name__
    if isinstance(spec.default, Enum):
        kind = " | ".join(member.value for member in type(spec.default))
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [f"{signs[name]} {spec.metadata[name]:g}" for name in signs if name in spec.metadata]
    kind = kind.replace("None", "null").replace("Any", "list")
    if spec.metadata["choices"]:
        kind = kind.replace("str", " | ".join(spec.metadata["choices"]))
    return " ".join([kind, ", ".join(bounds)]).strip()


def fields(config: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Every leaf of a config as (dotted key, dataclass field, value), in schema order."""
    for spec in dataclasses.fields(config):
        value = getattr(config, spec.name)
        if dataclasses.is_dataclass(value):
            yield from fields(value, f"{prefix}{spec.name}.")
        else:
            yield f"{prefix}{spec.name}", spec, value


def documented(config: Any) -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """The same without ``arguments``, which holds further keys of a group with ``_target_``."""
    return (entry for entry in fields(config) if not entry[0].endswith(".arguments"))


def to_plain(config: RunConfig) -> dict[str, Any]:
    """Nested dict of JSON values, without secrets."""
    plain: dict[str, Any] = redacted(dataclasses.asdict(config, dict_factory=_plain_dict))
    return plain


def _plain_dict(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value.value if isinstance(value, Enum) else value for key, value in items}


def flat(config: RunConfig) -> dict[str, Any]:
    """Dotted key to JSON value, every leaf, without secrets."""
    plain: dict[str, Any] = redacted(
        _plain_dict([(name, value) for name, _, value in fields(config)])
    )
    return plain


def value_of(config: RunConfig, key: str) -> str:
    """One resolved setting as text.

    Raises:
        ConfigError: there is no such key.
    """
    values = flat(config)
    if key not in values:
        raise ConfigError(unknown(key))
    return str(values[key])


def trajectory(config: RunConfig) -> dict[str, Any]:
    """The leaves that decide what the run computes, by dotted key.

    ``steps`` is among them only through the schedule's length: a longer run of the same
    schedule is the same run, longer.
    """
    leaves = {name for name, spec, _ in fields(config) if spec.metadata["trajectory"]}
    # As a stored config comes back: a mapping is its own leaves.
    values = dict(_flatten({name: v for name, v in flat(config).items() if name in leaves}))
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
    return dict(_flatten(read_yaml(text, source=source)))


def read_yaml(text: str, *, source: Path) -> dict[Any, Any]:
    """A mapping of settings as it stands in a file; see :func:`from_yaml`."""
    try:
        _refuse_bombs(text)
        tree = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except Exception as error:
        cause = " ".join(str(error).split())[:300]
        raise ConfigError(f"{source}: not a settings file ({cause})") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: not a settings file")
    return tree


def _refuse_bombs(text: str) -> None:
    """Refuse aliases, which are copied on use, so that a few lines unfold to any size."""
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


OPTION = "--config"
_IN_PLACE = {"epochs": "steps", "steps": "epochs"}
_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?([eE][-+]?\d+)?")  # PyYAML reads 1e-3 as text


def expanded(arguments: Sequence[str]) -> list[str]:
    """The arguments with each ``--config FILE`` replaced by the settings in the file.

    What follows ``--`` belongs to another command, and stays as it is. A setting that is given
    after the file replaces the file's; of ``steps`` and ``epochs`` one replaces the other.

    Raises:
        ConfigError: there is no such file, or it is no mapping of settings.
    """
    given = list(arguments)
    end = given.index("--") if "--" in given else len(given)
    words, result = iter(given[:end]), list[str]()
    replaced = {_IN_PLACE.get(_key_of(word)) for word in given[:end] if word != "epochs=null"}
    for word in words:
        if word == OPTION or word.startswith(f"{OPTION}="):
            name = word.partition("=")[2] or next(words, "")
            result += [one for one in _overrides(name) if _key_of(one) not in replaced]
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
