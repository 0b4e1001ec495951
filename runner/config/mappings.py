"""Settings that are mappings: which network ``model`` names, and the list ``data.sources``.

Pure: reads settings, touches no file.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from runner.config.schema import DECODER_KEYS, DataConfig, ModelConfig, RunConfig
from runner.config.unknown_key import suggestion
from runner.system.error import ConfigError

_HF_KEYS: Final = ("path", "init", "lora", "quantize")
ROPE_SIZES: Final = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)
_LORA_KEYS: Final = ("r", "targets", "alpha", "dropout", "rslora")
_QUANTISED: Final = ("nf4", "fp4", "int8")
_LARGEST_RANK: Final = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """``model.lora``: of PEFT's ``LoraConfig``, with its names in full where they differ.

    Args:
        r: rank of the adapters.
        targets: ends of the names of layers that get one, or "all-linear".
        alpha: the adapters' product is multiplied by ``alpha / r``, or ``alpha / sqrt(r)`` with
            ``rslora``.
        dropout: of an adapter's input.
    """

    r: int
    targets: tuple[str, ...] | str
    alpha: float
    dropout: float
    rslora: bool


def is_hf(model: ModelConfig) -> bool:
    """Whether the network is a Hugging Face model from a folder."""
    return model._target_ is None and model.kind == "hf"


def rope_scaling_of(value: Any) -> dict[str, float] | None:
    """``model.rope_scaling`` as four numbers by name; None where it is null.

    Raises:
        ConfigError: it is not such a mapping.
    """
    if value is None:
        return None
    shown = f"model.rope_scaling={str(value)[:200]}"
    if not isinstance(value, Mapping):
        raise ConfigError(f"{shown}: must be a mapping of {', '.join(ROPE_SIZES)}, or null")
    given = dict(value)
    kind = given.pop("rope_type", "llama3")
    if kind != "llama3":
        raise ConfigError(f"{shown}: rope_type must be llama3, the one kind that is known here")
    _refuse_keys(shown, given, ROPE_SIZES)
    if lacking := [name for name in ROPE_SIZES if name not in given]:
        raise ConfigError(f"{shown}: lacks {', '.join(lacking)}")
    for name, number in given.items():
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ConfigError(f"{shown}: {name}={str(number)[:50]} must be a number")
    return given


def lora_of(value: Any) -> LoraSettings | None:
    """``model.lora`` with its defaults; None where it is null.

    Raises:
        ConfigError: a key is missing, unknown, or has an invalid value.
    """
    if value is None:
        return None
    shown = f"model.lora={str(value)[:200]}"
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{shown}: must be a mapping such as {{r: 8, targets: [q_proj, v_proj]}}, or null"
        )
    _refuse_keys(shown, value, _LORA_KEYS)
    rank, targets = value.get("r"), value.get("targets")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= _LARGEST_RANK:
        raise ConfigError(f"{shown}: r must be a whole number from 1 to {_LARGEST_RANK}")
    names = targets if isinstance(targets, list) else []
    if targets != "all-linear" and not (names and all(isinstance(n, str) and n for n in names)):
        raise ConfigError(
            f"{shown}: targets must be a list of layers' names, such as [q_proj, v_proj], or "
            "all-linear"
        )
    alpha = _number(shown, "alpha", value.get("alpha", 2 * rank))
    dropout = _number(shown, "dropout", value.get("dropout", 0.0))
    rslora = value.get("rslora", False)
    if alpha <= 0 or not 0 <= dropout < 1 or not isinstance(rslora, bool):
        raise ConfigError(
            f"{shown}: alpha must be above 0, dropout in [0, 1), rslora true or false"
        )
    return LoraSettings(
        r=rank, targets=tuple(names) or "all-linear", alpha=alpha, dropout=dropout, rslora=rslora
    )


def _number(shown: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{shown}: {name} must be a number")
    return float(value)


def _refuse_keys(shown: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    if unknown := [str(key)[:50] for key in given if key not in known]:
        raise ConfigError(f"{shown}: {unknown[0]} is not known; these are: {', '.join(known)}")


def network_problems(config: RunConfig) -> list[str]:
    """Sentences about settings that contradict each other."""
    model = config.model
    if model._target_ is not None:
        return []
    if model.kind not in ("decoder", "hf"):
        return [f"model.kind={str(model.kind)[:50]}: must be decoder or hf"]
    problems = _misread(model)
    if not is_hf(model):
        sizes = model.dim, model.heads, model.kv_heads or model.heads
        heads = head_problem(*sizes) if min(sizes) > 0 else ""
        problems += [heads] if heads else []
        return problems + [
            f"model.{name}={str(getattr(model, name))[:100]}: is for model=hf"
            for name in _set_in(model, _HF_KEYS)
        ]
    if not isinstance(model.path, str) or not model.path:
        problems.append("model=hf: needs model.path, the folder that has the model's config.json")
    if model.init not in ("weights", "random"):
        problems.append(f"model.init={str(model.init)[:50]}: must be weights or random")
    problems += _quantize_problems(config)
    problems += [
        f"model.{name}={str(getattr(model, name))[:100]}: is a decoder setting; with model=hf the "
        "folder's config.json sets it: remove it"
        for name in _set_in(model, sorted(DECODER_KEYS - {"kind", *_HF_KEYS}))
    ]
    return problems


def head_problem(dim: int, heads: int, kv_heads: int) -> str:
    """Why these sizes make no attention; empty if they do."""
    key, value, allowed = "model.heads", heads, ""
    if dim % heads:
        allowed = f"a divisor of model.dim={dim}"
    elif dim // heads % 2:
        allowed = f"one that leaves an even model.dim / model.heads; it is {dim // heads}"
    elif heads % kv_heads:
        key, value, allowed = "model.kv_heads", kv_heads, f"a divisor of model.heads={heads}"
    return allowed and f"{key}={value} does not work: it must be {allowed}"


def _quantize_problems(config: RunConfig) -> list[str]:
    model, kind = config.model, config.model.quantize
    if kind is None:
        return []
    shown = f"model.quantize={str(kind)[:50]}"
    if kind not in _QUANTISED:
        remedy = "; bitsandbytes' int4 is nf4" if str(kind) in ("int4", "4bit") else ""
        return [f"{shown}: must be one of {', '.join(_QUANTISED)}, or null{remedy}"]
    rules = [
        (
            model.lora is None,
            "quantised weights cannot be trained; train adapters on them, "
            "model.lora={r: 8, targets: all-linear}",
        ),
        (
            model.init == "random",
            "is made from the weights of model.path; leave model.init=random out",
        ),
        (
            config.parallel.kind.value.startswith("zero"),
            f"parallel={config.parallel.kind.value}: DeepSpeed would have to know the quantised "
            "layers; use parallel=ddp, or fsdp, which shards the rest and holds them whole on "
            "every rank",
        ),
        (config.compute.compile, "cannot be compiled; leave compute.compile out"),
    ]
    return [f"{shown}: {sentence}" for is_wrong, sentence in rules if is_wrong]


def _misread(model: ModelConfig) -> list[str]:
    problems = []
    for read, value in ((rope_scaling_of, model.rope_scaling), (lora_of, model.lora)):
        try:
            read(value)
        except ConfigError as error:
            problems.append(str(error))
    return problems


def _set_in(model: ModelConfig, names: Iterable[str]) -> list[str]:
    """The keys that differ from their defaults."""
    usual = ModelConfig()
    return [name for name in names if getattr(model, name) != getattr(usual, name)]


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
