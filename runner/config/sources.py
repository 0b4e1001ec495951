"""``data.sources``: parses the user's list into a name, a weight and data settings each."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from runner.config.compose import suggestion
from runner.config.schema import DataConfig
from runner.system.error import ConfigError

# Keys that a source may set for itself; all other keys of the group apply to all sources.
OWN_KEYS: Final = (
    "path", "kind", "suffixes", "field", "messages", "token_dtype", "end_token", "begin_token",
    "vocab_size", "samples", "_target_", "arguments",
)  # fmt: skip
_ALL_KEYS: Final = ("name", "weight", "seed", *OWN_KEYS)
EMPTY_PATH: Final = "is empty; give the corpus (a shell variable that is not set?)"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSettings:
    """One source; ``weight`` is its share of the samples, in proportion to the others' weights.

    ``seed``: of a synthetic language; None: the run's.
    """

    name: str
    weight: float
    data: DataConfig
    seed: int | None = None


def held_out_sets(data: DataConfig) -> dict[str, DataConfig]:
    """The sets of ``data.val_path`` by name, in the order of names; "" is the name of a lone one.

    Empty where it is not set.
    """
    setting = data.val_path
    if setting is None:
        return {}
    by_name = setting if isinstance(setting, dict) else {"": setting}
    return {
        name: dataclasses.replace(data, path=by_name[name], val_path=None)
        for name in sorted(by_name)
    }


def is_source_name(name: object) -> bool:
    """Whether it can be part of a column's name."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def sources_of(data: DataConfig) -> list[SourceSettings]:
    """The sources of a mixture; empty where there is none.

    Raises:
        ConfigError: an entry is not valid; names it and what is allowed.
    """
    if data.sources is None:
        return []
    if not isinstance(data.sources, list) or not data.sources:
        raise ConfigError(
            f"data.sources={str(data.sources)[:200]}: must be a list such as "
            "[{path: web.bin, weight: 0.7, name: web}, ...]"
        )
    if data.path:
        raise ConfigError(
            f"data.path={data.path}: each of data.sources has its own path; remove this one"
        )
    sources = [_source(data, number, given) for number, given in enumerate(data.sources)]
    names = [source.name for source in sources]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"data.sources: two are called {twice[0]!r}; give each its own name")
    if not math.fsum(source.weight for source in sources) > 0:
        raise ConfigError("data.sources: all weights are 0; one at least must be greater")
    return sources


def unsteady_samples(data: DataConfig) -> str:
    """Why equal files may have another fingerprint, to end a message; empty without own code."""
    targets = [one._target_ for one in (data, *(source.data for source in sources_of(data)))]
    own = next((target for target in targets if target is not None), None)
    if own is None:
        return ""
    return (
        f". If the files are the same, {own} gives other samples in another process: by hash() of "
        "a string, the order of a set or a folder, the clock, or a generator that is neither "
        "torch's, NumPy's nor Python's global one; holdfast check-model names such a sample"
    )


def _source(data: DataConfig, number: int, given: Any) -> SourceSettings:
    place = f"data.sources[{number}]"
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{place}={str(given)[:100]}: must be a mapping such as {{path: web.bin, weight: 0.7}}"
        )
    for key in given:
        if key not in _ALL_KEYS:
            raise ConfigError(
                f"{place}: unknown key {str(key)!r}{suggestion(str(key), _ALL_KEYS)}. Allowed: "
                f"{', '.join(_ALL_KEYS)}"
            )
    path = given.get("path", [])
    paths = [path] if isinstance(path, str) else path
    if not isinstance(paths, list) or not all(isinstance(one, str) for one in paths):
        raise ConfigError(f"{place}.path={path}: must be a path or a list of paths")
    if not all(one.strip() for one in paths):
        raise ConfigError(f"{place}.path={path}: {EMPTY_PATH}")
    name = given.get("name") or (Path(paths[0]).stem if paths else "")
    if not is_source_name(name):
        raise ConfigError(
            f"{place}.name={name!r}: must be letters, digits, '_', '.' and '-', as it heads a "
            "column of metrics.jsonl" + ("" if "name" in given else "; give it a name")
        )
    weight, seed = given.get("weight", 1.0), given.get("seed")
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not math.isfinite(weight) or not 0 <= weight <= 1e9:
        raise ConfigError(f"{place}.weight={weight}: must be a number from 0 to 1e9")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or seed < 0):
        raise ConfigError(f"{place}.seed={seed}: must be a whole number of at least 0")
    own = {key: given[key] for key in OWN_KEYS if key in given and key != "path"}
    return SourceSettings(
        name=name,
        weight=float(weight),
        data=dataclasses.replace(data, sources=None, path=paths, **_typed(place, own)),
        seed=seed,
    )


def _typed(place: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values to the types of the group's fields."""
    typed: dict[str, Any] = {}
    usual = DataConfig()
    for key, value in own.items():
        default = getattr(usual, key)
        if isinstance(default, Enum):
            choices = [member.value for member in type(default)]
            if value not in choices:
                raise ConfigError(f"{place}.{key}={value}: must be one of {', '.join(choices)}")
            value = type(default)(value)
        elif isinstance(default, list) and not isinstance(value, list):
            raise ConfigError(f"{place}.{key}={value}: must be a list")
        elif isinstance(default, int) and (not isinstance(value, int) or value < 1):
            raise ConfigError(f"{place}.{key}={value}: must be a whole number of at least 1")
        typed[key] = value
    return typed
