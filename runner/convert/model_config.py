"""Llama's layout, as Hugging Face has it: ``config.json`` and parameter names, in and out.

Reading sets our decoder by a ``config.json``; writing is the inverse. With normalised queries and
keys the layout is Qwen3's, which adds these to Llama's.

Weights alone do not show their rotary base, their epsilon or their number of heads:
loaded into another decoder they compute something else. So every key is either turned
into a setting of ours, known to change nothing, or refused by name; none is ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from runner.config.mappings import ROPE_SIZES  # their keys are called as ours
from runner.system.error import ConfigError
from runner.system.files import read_bounded
from runner.system.parsing import parse_json, whole

NAME: Final = "config.json"
_MOST_BYTES = 4 << 20
_LARGEST = 1 << 31
_SHOWN = 100
_MOST_TOLD = 20

# Decoders that equal ours, and their classes.
_KINDS = {"llama": "Llama", "mistral": "Mistral", "qwen3": "Qwen3"}
_SIZES = {
    "hidden_size": "model.dim",
    "num_hidden_layers": "model.layers",
    "num_attention_heads": "model.heads",
    "intermediate_size": "model.ffn_dim",
    "vocab_size": "model.vocab_size",
}
# Keys that must have one of these values (a missing key means the first), and why.
_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu", "swish"), "the feed-forward layers here are SwiGLU"),
    "attention_bias": ((False,), "attention has no biases here"),
    "mlp_bias": ((False,), "feed-forward layers have no biases here"),
    "attention_dropout": ((0, 0.0), "attention weights are not dropped here; model.dropout is"),
    "partial_rotary_factor": ((1, 1.0), "all of a head is rotated here"),
    "pruned_heads": (({},), "every layer has the same heads here"),
    "is_encoder_decoder": ((False,), "there is no encoder here"),
    "add_cross_attention": ((False,), "there is no encoder here"),
}
# Keys that do not change the computation: its layout, generation, names of tokens and files.
# fmt: off
_HARMLESS = frozenset((
    "bos_token_id", "eos_token_id", "pad_token_id", "tokenizer_class", "id2label", "label2id",
    "torch_dtype", "dtype", "transformers_version", "use_cache", "torchscript", "return_dict",
    "output_attentions", "output_hidden_states", "initializer_range", "pretraining_tp",
    "max_window_layers", "chunk_size_feed_forward", "problem_type", "task_specific_params",
    "is_decoder", "do_sample", "max_length", "temperature", "top_k", "top_p",
))
# fmt: on

_BLOCK: Final = re.compile(r"blocks\.(\d+)\.(.+)\.weight")
_IN_BLOCK: Final = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
_OUTSIDE: Final = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
# Patterns of their names, and ours; an empty one is computed, not stored.
RENAMES: Final[Sequence[tuple[str, str]]] = (
    (r"^.*\.rotary_emb\.inv_freq$", ""),
    *(
        (rf"^(?:model\.)?{theirs.split('.')[-2]}\.", f"{ours.split('.')[0]}.")
        for ours, theirs in _OUTSIDE.items()
    ),
    *(
        (rf"^(?:model\.)?layers\.(\d+)\.{re.escape(theirs)}\.", rf"blocks.\1.{ours}.")
        for ours, theirs in _IN_BLOCK.items()
    ),
)


Setting = int | float | bool | dict[str, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignModel:
    """The contents of a ``config.json``: our settings by dotted key, without ignored ones."""

    path: Path
    settings: Mapping[str, Setting]


def config_beside(source: Path) -> Path | None:
    """The ``config.json`` of the weights at ``source``: in their directory, or the one above.

    Trainers write a directory of shards into the model's own (``global_step100/``).
    """
    folders = [source, source.parent] if source.is_dir() else [source.parent]
    return next((folder / NAME for folder in folders if (folder / NAME).is_file()), None)


def read_model(path: Path, *, seq_len: int, ignored: Sequence[str] = ()) -> ForeignModel:
    """Our settings for the model that ``path`` describes.

    Args:
        seq_len: sequence length of the run to begin, in tokens; the model must allow it.
        ignored: keys, dotted if nested, that the user chose to ignore.

    Raises:
        ConfigError: no such file, not JSON, or keys whose values are not supported: all of them,
            one a line.
    """
    keys = _ConfigReader(path, _tree(path), ignored)
    kind = _kind(keys)
    settings: dict[str, Setting] = {ours: keys.size(key) for key, ours in _SIZES.items()}
    heads = settings["model.heads"]
    # Missing or null: one for each head. If the model's own code has another default, the shapes of
    # the weights do not fit.
    settings["model.kv_heads"] = keys.size("num_key_value_heads", needed=False) or heads
    settings["model.tied_head"] = keys.flag("tie_word_embeddings")
    settings["model.norm_eps"] = keys.positive("rms_norm_eps", missing=1e-6)
    settings["model.rope_theta"], scaling = _rope(keys)
    settings["model.qk_norm"] = kind == "qwen3"
    _check_sizes(keys, settings["model.dim"], heads, seq_len)
    _check_windows(keys, seq_len, kind)
    for key, (allowed, why) in _ONLY.items():
        keys.only(key, allowed, why)
    keys.refuse_rest()
    keys.raise_problems()
    known: dict[str, Setting] = {k: value for k, value in settings.items() if value is not None}
    if not any(keys.is_ignored(key) for key in ("rope_scaling", "rope_parameters")):
        known["model.rope_scaling"] = scaling  # none is one, too: a preset may have another
    return ForeignModel(path=path, settings=known)


def _tree(path: Path) -> dict[str, Any]:
    try:
        tree = parse_json(read_bounded(path, _MOST_BYTES, follow=True))
    except (OSError, ValueError, RecursionError) as error:
        cause = " ".join(str(error).split())[:300]
        raise ConfigError(f"{path}: no readable JSON ({type(error).__name__}: {cause})") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a JSON {type(tree).__name__}, not an object with keys")
    return tree


class _ConfigReader:
    """The keys of a file, taken one by one; errors are collected."""

    def __init__(self, path: Path, tree: Mapping[str, Any], ignored: Sequence[str]) -> None:
        self.problems: list[str] = []
        self._path = path
        self._ignored = set(ignored)
        self._left = {key: value for key, value in tree.items() if key not in self._ignored}
        names = tree.keys() | {f"{key}.{k}" for key, v in tree.items() if _is_map(v) for k in v}
        if unknown := sorted(self._ignored - names):
            raise ConfigError(f"--ignore {unknown[0]}: {path} has no such key")

    def __contains__(self, key: str) -> bool:
        """Whether the file has the key, and it was neither taken nor ignored."""
        return key in self._left

    def is_ignored(self, key: str) -> bool:
        return key in self._ignored

    def refuse(self, key: str, value: Any, why: str) -> None:
        name = key if key.isprintable() else repr(key)
        self.problems.append(f"{name[:_SHOWN]}={repr(value)[:_SHOWN]}: {why}")

    def raise_problems(self) -> None:
        if not self.problems:
            return
        more = len(self.problems) - _MOST_TOLD
        raise ConfigError(
            "\n".join(f"{self._path}: {problem}" for problem in self.problems[:_MOST_TOLD])
            + (f"\nand {more} more" if more > 0 else "")
            + "\nThis decoder would compute something else. --ignore KEY takes your word that a "
            "key changes nothing; --model-config none leaves the file unread, and then every "
            "model.* is yours to give"
        )

    def take(self, key: str) -> Any:
        """Take a value; None if it is missing, null or ignored."""
        return self._left.pop(key, None)

    def size(self, key: str, *, needed: bool = True) -> int | None:
        value = self.take(key)
        if value is None:
            if needed and key not in self._ignored:
                self.problems.append(f"{key} is missing: the sizes of the model must be there")
            return None
        try:
            number = whole(value, key, below=_LARGEST)
        except ValueError:
            number = 0
        if number < 1:
            self.refuse(key, value, f"must be a whole number from 1 to {_LARGEST - 1}")
            return None
        return number

    def flag(self, key: str) -> bool | None:
        value = self.take(key)
        if value is not None and not isinstance(value, bool):
            self.refuse(key, value, "must be true or false")
            return None
        return None if key in self._ignored else bool(value)

    def positive(self, key: str, *, missing: float) -> float | None:
        value = self.take(key)
        if value is None:
            return None if key in self._ignored else missing
        return self.number(key, value)

    def number(self, key: str, value: Any) -> float | None:
        """``value`` as a positive finite number."""
        try:
            number = float(value) if type(value) in (int, float) else math.nan
        except OverflowError:
            number = math.inf
        if not (math.isfinite(number) and number > 0):
            self.refuse(key, value, "must be a finite number above 0")
            return None
        return number

    def only(self, key: str, allowed: tuple[Any, ...], why: str) -> None:
        value = self.take(key)
        # By type as well: in Python True == 1.
        kinds = {type(choice) for choice in allowed}
        if value is not None and (type(value) not in kinds or value not in allowed):
            self.refuse(key, value, f"must be {allowed[0]!r}: {why}")

    def inner(self, key: str) -> dict[str, Any]:
        """A mapping's keys, without ignored ones."""
        value = self.take(key)
        if value is None:
            return {}
        if not _is_map(value):
            self.refuse(key, value, "must be an object with keys, or null")
            return {}
        return {name: item for name, item in value.items() if f"{key}.{name}" not in self._ignored}

    def refuse_rest(self) -> None:
        for key, value in self._left.items():
            # null is "not set" everywhere; a leading "_" is the library's own bookkeeping.
            if key not in _HARMLESS and not key.startswith("_") and value is not None:
                self.refuse(key, value, "is not known, and may change what the model computes")


def _is_map(value: Any) -> bool:
    return isinstance(value, dict)


def _kind(settings: _ConfigReader) -> str:
    value = settings.take("model_type")
    if not isinstance(value, str) or value not in _KINDS:
        settings.refuse("model_type", value, f"must be one of {', '.join(_KINDS)}")
        return ""
    classes = settings.take("architectures")
    known = [_KINDS[value] + ending for ending in ("ForCausalLM", "Model")]
    if not _all_in(classes, known):
        settings.refuse("architectures", classes, f"must be [{known[0]!r}]")
    return value


def _all_in(values: Any, known: Sequence[str]) -> bool:
    """Whether it is a list of known words, or None."""
    if values is None:
        return True
    return isinstance(values, list) and all(isinstance(v, str) and v in known for v in values)


def _rope(settings: _ConfigReader) -> tuple[float | None, dict[str, float] | None]:
    """Base and scaling of the rotary frequencies.

    From ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before).
    """
    given: dict[str, float | None] = {}
    stretched: dict[str, dict[str, float]] = {}
    value = settings.take("rope_theta")
    if value is not None:
        given["rope_theta"] = settings.number("rope_theta", value)
    for key in ("rope_parameters", "rope_scaling"):
        inner = settings.inner(key)
        if "rope_theta" in inner:
            name = f"{key}.rope_theta"
            given[name] = settings.number(name, inner.pop("rope_theta"))
        if scaling := _rope_scaling(settings, key, inner):
            stretched[key] = scaling
    for values in (given, stretched):
        if len({str(value) for value in values.values()}) > 1:
            words = " and ".join(f"{name}={value}" for name, value in values.items())
            settings.problems.append(f"{words} contradict each other")
    theta = next(iter(given.values()), None if settings.is_ignored("rope_theta") else 10_000.0)
    return theta, next(iter(stretched.values()), None)


def _rope_scaling(settings: _ConfigReader, key: str, inner: dict[str, Any]) -> dict[str, float]:
    """RoPE scaling of kind llama3, empty for none; any other is refused."""
    kinds = {kind: inner.pop(kind) for kind in ("rope_type", "type") if kind in inner}
    for at, kind in kinds.items():
        if kind not in ("default", "llama3", None):
            # Its further keys belong to it: one message is enough.
            settings.refuse(f"{key}.{at}", kind, "must be default or llama3, which are known here")
            return {}
    if inner.get("partial_rotary_factor") in (1, 1.0, None):  # all of a head is rotated here
        inner.pop("partial_rotary_factor", None)
    scaling: dict[str, float] = {}
    if "llama3" in kinds.values():
        for name in ROPE_SIZES:
            number = settings.number(f"{key}.{name}", inner.pop(name, None))
            scaling |= {} if number is None else {name: number}
    for name, value in inner.items():
        settings.refuse(f"{key}.{name}", value, "rotary positions are not scaled so here")
    return scaling


def _check_sizes(settings: _ConfigReader, dim: Any, heads: Any, seq_len: int) -> None:
    head_dim = settings.size("head_dim", needed=False)
    if None not in (head_dim, dim, heads) and head_dim * heads != dim:
        must = f"must be hidden_size / num_attention_heads = {dim / heads:g}"
        settings.refuse("head_dim", head_dim, must)
    most = settings.size("max_position_embeddings", needed=False)
    if most is not None and most < seq_len:
        why = f"the sequences are longer; use data.seq_len<={most}"
        settings.refuse("max_position_embeddings", most, why)


def _check_windows(settings: _ConfigReader, seq_len: int, kind: str) -> None:
    """Refuse attention windows shorter than the sequences."""
    # Defaults of the models' own code for a missing key; null means no window.
    missing = 4096 if kind == "mistral" and "sliding_window" not in settings else None
    window = settings.size("sliding_window", needed=False) or missing
    layers = settings.take("layer_types")
    if not _all_in(layers, ("full_attention", "sliding_attention")):
        settings.refuse("layer_types", layers, "must be full_attention or sliding_attention")
    has_switch = kind == "qwen3" or "use_sliding_window" in settings
    is_used = settings.flag("use_sliding_window") if has_switch else True
    if layers is not None and "sliding_attention" not in str(layers):
        is_used = False
    if is_used and window is not None and window < seq_len:
        why = f"attention sees the whole sequence here; use data.seq_len<={window}"
        settings.refuse("sliding_window", window, why)


# -- writing ---------------------------------------------------------------------------------


def llama_name(name: str) -> str:
    """The Hugging Face name of a decoder's parameter.

    Raises:
        ConfigError: the decoder has no parameter of this name.
    """
    match = _BLOCK.fullmatch(name)
    if match and match[2] in _IN_BLOCK:
        return f"model.layers.{match[1]}.{_IN_BLOCK[match[2]]}.weight"
    if name not in _OUTSIDE:
        raise ConfigError(
            f"{name}: is no parameter of the decoder; a model of your own (model._target_) is "
            "exported without --format hf"
        )
    return _OUTSIDE[name]


def llama_config(
    settings: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], dtype: str
) -> dict[str, Any]:
    """The ``config.json`` of a decoder.

    Args:
        settings: the run's settings by dotted key; used for what shapes do not show.
        shapes: shapes of the parameters, by our names.
        dtype: type of the weights, such as ``float32``.

    Raises:
        ConfigError: the shapes are not those of the decoder.
    """
    try:
        vocab_size, dim = shapes["embedding.weight"]
        ffn_dim, _ = shapes["blocks.0.ffn.gate.weight"]
        kv_width, _ = shapes["blocks.0.attention.key.weight"]
    except (KeyError, ValueError):
        raise ConfigError("the checkpoint's tensors are not those of the decoder") from None
    heads = settings["model.heads"]
    has_norms = "blocks.0.attention.query_norm.weight" in shapes
    kind = "Qwen3" if has_norms else "Llama"
    tree = {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": kind.lower(),
        "hidden_size": dim,
        "intermediate_size": ffn_dim,
        "num_hidden_layers": len({m[1] for name in shapes if (m := _BLOCK.fullmatch(name))}),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_width * heads // dim,
        "head_dim": dim // heads,
        "vocab_size": vocab_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": settings["model.norm_eps"],
        "rope_theta": settings["model.rope_theta"],
        "initializer_range": settings["model.init_std"],
        "tie_word_embeddings": "head.weight" not in shapes,
        "torch_dtype": dtype,
        # Without them the class uses ids of its own.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    tree |= {"use_sliding_window": False} if has_norms else {"mlp_bias": False}
    return tree | _positions(settings)


def _positions(settings: Mapping[str, Any]) -> dict[str, Any]:
    length = settings["data.seq_len"]
    factor = settings.get("model.rope_scaling.factor")
    if factor is None:
        return {"max_position_embeddings": length, "rope_scaling": None}
    scaling = {name: settings[f"model.rope_scaling.{name}"] for name in ROPE_SIZES}
    scaling["original_max_position_embeddings"] = original = int(scaling[ROPE_SIZES[-1]])
    return {
        "max_position_embeddings": max(length, int(factor * original)),
        "rope_scaling": {"rope_type": "llama3", **scaling},
    }
