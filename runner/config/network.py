"""Which network ``model`` names, and its mappings with keys outside of the dataclass.

Pure: reads settings, touches no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from runner.config.schema import DECODER_KEYS, ModelConfig, RunConfig
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
        r=rank,
        targets=tuple(names) or "all-linear",
        alpha=alpha,
        dropout=dropout,
        rslora=rslora,
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
