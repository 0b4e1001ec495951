"""Architectures of transformers: read, trained on two ranks, exported, loaded, the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from runner.__main__ import main
from tests import hf_folder
from tests.run import finish

pytest.importorskip("transformers")
pytestmark = [pytest.mark.full, pytest.mark.usefixtures("leaves_nothing")]

WORDS = len(hf_folder.LETTERS)
MARKS = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
# The names of most configs, of GPT-2's, and of Bloom's.
NEW: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
OLD: dict[str, Any] = {
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4,
}  # fmt: skip
STATES = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
HEADS = {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": OLD,
    "gptj": OLD | {"rotary_dim": 4},
    "gpt_neox": NEW,
    "opt": NEW | {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "pad_token_id": 1},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "mistral": NEW,
    "qwen2": NEW,
    "qwen3": NEW | {"head_dim": 8},
    "gemma": NEW | {"head_dim": 8},
    "gemma2": NEW | HEADS,
    "gemma3_text": NEW | HEADS,
    "phi": NEW,
    "phi3": NEW | {"original_max_position_embeddings": 64, "pad_token_id": 1},
    "olmo2": NEW,
    "cohere": NEW,
    "glm4": NEW | {"pad_token_id": 1},
    "llama4_text": NEW | {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48,
                          "attention_chunk_size": 16},
    "qwen2_moe": NEW | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "deepseek_v3": NEW | EXPERTS | LATENT | {"n_group": 1, "topk_group": 1,
                                             "first_k_dense_replace": 1},
    "gpt_oss": NEW | {"head_dim": 8, "num_local_experts": 4, "sliding_window": 8,
                      "num_experts_per_tok": 2},
    "mamba": STATES,
    "mamba2": STATES | {"num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8},
    "rwkv": {"hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32,
             "intermediate_size": 48, "context_length": 64},
    "lfm2": NEW | {"pad_token_id": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_comes_in_and_goes_out(tmp_path: Path, name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    config = AutoConfig.for_model(name, vocab_size=WORDS, **MARKS | ARCHITECTURES[name])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    words = ("model=hf", f"model.path={tmp_path / 'model'}", "data=synthetic", "steps=3")
    words += (f"data.vocab_size={WORDS}", "data.seq_len=32", "compute.precision=fp32")
    # So little that no weight changes, but for zeros.
    run = finish(tmp_path / "run", *words, "optim.lr=1e-30", "optim.weight_decay=0")
    assert main(["export", str(run.out), str(tmp_path / "out"), "--format", "hf"]) == 0
    before, after = (hf_folder.loaded(tmp_path / one) for one in ("model", "out"))
    with torch.no_grad():
        far = (before(hf_folder.ids()).logits - after(hf_folder.ids()).logits).abs().max()
    assert float(far) < 1e-20
