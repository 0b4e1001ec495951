"""The decoder in Llama's layout, as Hugging Face names it: ``config.json`` and parameter names.

The inverse is :mod:`runner.convert.model_config`. With normalised queries and keys it is Qwen3's
layout, which adds these to Llama's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from runner.convert.model_config import ROPE_SCALING
from runner.system.error import ConfigError

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
    scaling = {name: settings[f"model.rope_scaling.{name}"] for name in ROPE_SCALING}
    scaling["original_max_position_embeddings"] = original = int(scaling[ROPE_SCALING[-1]])
    return {
        "max_position_embeddings": max(length, int(factor * original)),
        "rope_scaling": {"rope_type": "llama3", **scaling},
    }
