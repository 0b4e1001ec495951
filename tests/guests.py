"""Users' models, for tests: small enough to learn in seconds."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Tied(nn.Module):
    """A head that is the embedding; values that the constructor gives; a buffer; a constant."""

    def __init__(self, vocab_size: int, seq_len: int, hidden: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden)
        self.positions = nn.Parameter(torch.randn(seq_len, hidden) * 0.02)
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))
        self.head = nn.Linear(hidden, vocab_size, bias=False)
        nn.init.trunc_normal_(self.embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, hidden), persistent=False)
        self.constant = torch.full((hidden,), 2.0)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids) * 50 + self.positions[: input_ids.shape[1]]
        for layer in self.layers:
            x = x + torch.tanh(layer(x) * self.scale) / self.constant
        return self.head(x)


class Recurrent(nn.Module):
    """No list of blocks, parameters that the module keeps in a list of its own."""

    def __init__(self, vocab_size: int, hidden: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden)
        self.gru = nn.GRU(hidden, hidden, num_layers=2, batch_first=True)
        self.head = nn.Linear(hidden, vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.gru(self.embedding(input_ids))[0])


class Convolved(nn.Module):
    """Causal convolutions over tokens, with dropout."""

    def __init__(self, vocab_size: int, hidden: int = 16, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden)
        self.stages = nn.ModuleList(nn.Conv1d(hidden, hidden, 3) for _ in range(2))
        self.head = nn.Linear(hidden, vocab_size)
        self.dropout = dropout

    def blocks(self) -> list[nn.Module]:
        return list(self.stages)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids).transpose(1, 2)
        for stage in self.stages:
            x = x + F.dropout(torch.relu(stage(F.pad(x, (2, 0)))), self.dropout, self.training)
        return self.head(x.transpose(1, 2))


class Seeing(nn.Module):
    """Images to classes, with a loss of its own; no tokens anywhere."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, stride=2)
        self.norm = nn.GroupNorm(2, 8)
        self.second = nn.Conv2d(8, 8, 3, stride=2)
        self.head = nn.Linear(8, classes)

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Any]]:
        x = torch.relu(self.norm(self.first(batch["image"])))
        logits = self.head(torch.relu(self.second(x)).mean((2, 3))).float()
        losses = F.cross_entropy(logits, batch["kind"], reduction="none")
        ones = torch.ones_like(losses, dtype=torch.int64)
        is_second = batch["kind"] == 1
        metrics = {
            "accuracy": (logits.argmax(dim=1) == batch["kind"], ones),
            "recall/second": ((logits.argmax(dim=1) == 1) & is_second, is_second),
            "mean_loss": (losses, ones),
        }
        return losses, ones, metrics


class Stage(nn.Module):
    """Two convolutions with running statistics, one of them an average over all steps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width, momentum=None),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.layers(x))


class Residual(nn.Module):
    """As vision models are, with a stem that is kept in evaluation mode, and statistics of its own.

    Writes the mode of each module at each forward pass in training into the file ``MODES``.
    """

    def __init__(self, classes: int = 3, width: int = 8, stages: int = 2) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, 2), nn.BatchNorm2d(width), nn.Dropout(0.5))
        self.stem.eval().requires_grad_(False)
        self.stages = nn.ModuleList(Stage(width) for _ in range(stages))
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, classes)
        self.register_buffer("num_seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("spread", torch.ones(()), persistent=False)
        self.register_buffer("offset", torch.zeros(()))  # a constant
        self.register_buffer("cache", torch.zeros(()), persistent=False)

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        x = self.stem(batch["image"])
        if self.training:
            self.num_seen += 1
            self.spread.lerp_(x.detach().float().std(), 0.1)
        x = x / self.spread.clone() + self.offset
        for stage in self.stages:
            x = stage(x)
        logits = self.head(self.drop(x.mean((2, 3)))).float()
        losses = F.cross_entropy(logits, batch["kind"], reduction="none")
        if torch.is_grad_enabled() and "MODES" in os.environ:
            modes = "".join("eT"[module.training] for module in self.modules())
            with Path(f"{os.environ['MODES']}.{os.environ.get('RANK', '0')}").open("a") as file:
                file.write(f"{modes}\n")
        return losses, torch.ones_like(losses, dtype=torch.int64)


class Preferring(nn.Module):
    """Two sequences a sample, as DPO has them: one is to be likelier than the other."""

    def __init__(self, vocab_size: int, hidden: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden)
        self.head = nn.Linear(hidden, vocab_size)

    def probe(self) -> nn.Module:
        return self.embedding

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        rows = len(batch["chosen"])
        tokens = torch.cat([batch["chosen"], batch["rejected"]])
        logits = self.head(self.embedding(tokens[:, :-1])).float()
        scores = logits.log_softmax(-1).gather(2, tokens[:, 1:, None]).sum((1, 2))
        losses = -F.logsigmoid(scores[:rows] - scores[rows:])
        return losses, torch.ones(rows, dtype=torch.int64, device=losses.device)


class PartlyFrozen(nn.Module):
    """Keeps a part in evaluation mode: its dropout must stay off, its statistics as they are."""

    def __init__(self, vocab_size: int, hidden: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden)
        self.encoder = nn.Sequential(nn.BatchNorm1d(hidden), nn.Dropout(0.5)).eval()
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(hidden, vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids).transpose(1, 2)
        return self.head(self.drop(x + self.encoder(x)).transpose(1, 2))


class Normed(nn.Module):
    """Has statistics that every forward pass changes."""

    def __init__(self, vocab_size: int, hidden: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.head = nn.Linear(hidden, vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.norm(self.embedding(input_ids).transpose(1, 2)).transpose(1, 2)
        return self.head(x)


class Drawing(nn.Module):
    """Draws from numpy's unseeded generator, in forward or in the constructor."""

    def __init__(self, vocab_size: int, where: str = "forward", hidden: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden)
        self.head = nn.Linear(hidden, vocab_size)
        self.where = where
        if where == "constructor":
            drawn = np.random.default_rng().normal(size=(hidden, vocab_size))
            self.head.weight.data = torch.from_numpy(drawn.T.copy()).float()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        if self.where == "forward":
            x = x * float(np.random.default_rng().uniform(0.5, 1.5))
        return self.head(x)


class Looking(nn.Module):
    """A constructor that needs the values of a tensor, so that it cannot do without memory."""

    def __init__(self, vocab_size: int, hidden: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden)
        self.head = nn.Linear(hidden, vocab_size)
        self.factor = (self.head.weight.detach().abs().sum() + 1).sqrt().item()

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embedding(input_ids)) / self.factor


class Misshapen(nn.Module):
    """Returns one number per sequence instead of logits."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 4)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.embedding(input_ids).mean((1, 2))


def llama(vocab_size: int, seq_len: int, tied: bool = False) -> nn.Module:
    """Hugging Face's Llama from a config alone."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=seq_len,
        tie_word_embeddings=tied,
        **_no_marks(),
    )
    return LlamaForCausalLM(config)


def gpt2(vocab_size: int, seq_len: int, dropout: float = 0.0) -> nn.Module:
    """Hugging Face's GPT-2 from a config alone; its head is tied."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocab_size,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=seq_len,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        **_no_marks(),
    )
    return GPT2LMHeadModel(config)


def lora(vocab_size: int, seq_len: int) -> nn.Module:
    """The same Llama, of which only PEFT's adapters are trained."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    # DeepSpeed's stage 3 needs one type.
    return get_peft_model(llama(vocab_size, seq_len), settings, autocast_adapter_dtype=False)


def _no_marks() -> dict[str, Any]:
    return {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def nothing(vocab_size: int) -> str:
    """Not a model."""
    return f"a model of {vocab_size} tokens"


# Data


class Images:
    """A pattern of each of three kinds, and noise."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, i: int) -> dict[str, Any]:
        kind = i % 3
        noise = np.random.default_rng(i).normal(size=(1, 9, 9))
        pattern = np.cos(np.arange(81).reshape(1, 9, 9) * (kind + 1))
        return {"image": (noise + pattern).astype(np.float32), "kind": kind}


class Hashed(Images):
    """Images whose brightness is the hash of a string: another in each process."""

    def __getitem__(self, i: int) -> dict[str, Any]:
        sample = super().__getitem__(i)
        return {**sample, "image": sample["image"] + hash(f"image {i}") % 10**6 / 1000}


class Augmented(Images):
    """Images flipped, cut and brightened at random, as every vision data set has it."""

    def __len__(self) -> int:
        return 300

    def __getitem__(self, i: int) -> dict[str, Any]:
        image = torch.from_numpy(super().__getitem__(i)["image"])
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        row = int(np.random.randint(9))
        image[:, row : row + 2] = float(np.random.normal())
        return {"image": image * random.uniform(0.8, 1.2), "kind": i % 3}


class Remembering(Images):
    """Keeps a generator of its own, from which one image in ten is erased."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __getitem__(self, i: int) -> dict[str, Any]:
        sample = super().__getitem__(i)
        erased = self.generator.random() < 0.1
        return {**sample, "image": sample["image"] * (0 if erased else 1)}


class Keeping(Augmented):
    """Keeps each image as it was drawn when it was first read."""

    def __init__(self) -> None:
        self.kept: dict[int, Any] = {}

    def __getitem__(self, i: int) -> dict[str, Any]:
        if i not in self.kept:
            self.kept[i] = super().__getitem__(i)
        return self.kept[i]


class Babble:
    """Ids in no order at all, of so many words: the loss ends at the logarithm of their number."""

    def __init__(self, words: int, seq_len: int) -> None:
        self.words, self.seq_len, self.vocab_size = words, seq_len, 64

    def __len__(self) -> int:
        return 20_000

    def __getitem__(self, i: int) -> np.ndarray:
        return np.random.default_rng(i).integers(self.words, size=self.seq_len + 1)


class Pairs:
    """Two sequences a sample: one that counts up, and one of any numbers."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, i: int) -> dict[str, Any]:
        drawn = np.random.default_rng(i)
        first = int(drawn.integers(16))
        chosen = (first + np.arange(9, dtype=np.int64)) % 16
        return {"chosen": chosen, "rejected": drawn.integers(16, size=9)}


# Learning rates


def sawtooth(updates: int, peak: float, period: int) -> float:
    """Falls to a half of the peak, again and again."""
    return peak * (1 - updates % period / period / 2)


def falls(updates: int) -> float:
    """No rate."""
    return -1.0 - updates
