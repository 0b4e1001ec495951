"""Creates folders of Hugging Face models with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

LETTERS = ["~", *"abcdefghijklmnopqrstuvwxyz0123456789 +=:?"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + ': ' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a: ' }}{% endif %}"
)


def llama(folder: Path, *, seed: int = 0, **more: Any) -> Path:
    """A small Llama; ``shard`` is the most that one file may have, such as ``"20KB"``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shard = more.pop("shard", "1GB")
    settings = {
        "vocab_size": len(LETTERS),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
        "initializer_range": 0.1,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**{**settings, **more}))
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def gpt2(folder: Path) -> Path:
    """A small GPT-2: a tied head, learned positions, weights the other way round."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=len(LETTERS), n_embd=32, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=0, initializer_range=0.1,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(1)
        GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def experts(folder: Path) -> Path:
    """A small mixture of experts, Mixtral; its config alone."""
    from transformers import AutoConfig

    sizes = {
        "vocab_size": len(LETTERS), "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": 0,
        "pad_token_id": None, "initializer_range": 0.1, "num_experts_per_tok": 2,
        "num_local_experts": 4,
    }  # fmt: skip
    AutoConfig.for_model("mixtral", **sizes).save_pretrained(folder)
    return folder


def tokenizer(folder: Path) -> Path:
    """Single characters, with a chat template that marks answers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = Tokenizer(models.WordLevel({c: i for i, c in enumerate(LETTERS)}, unk_token="?"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="~")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


def loaded(folder: Path) -> Any:
    """Load a folder with transformers, in FP32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def ids(rows: int = 3, length: int = 24) -> torch.Tensor:
    """Token ids ``[rows, length]``."""
    return torch.randint(
        1, len(LETTERS), (rows, length), generator=torch.Generator().manual_seed(3)
    )
