"""A user's model and data, made of the traits that a case names."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 32
_EVAL_PARTS = ("eval_norm", "eval_drop")


class Net(nn.Module):
    """A causal network over tokens.

    Traits: ``dropout``; ``batchnorm`` (in training mode); ``eval_norm``, ``eval_drop`` (a part that
    its owner keeps in evaluation mode); ``tied``; ``frozen`` (its embedding); ``half`` (an
    operation that takes BF16 and FP32 only, as FlashAttention takes half precisions only).

    Raises:
        RuntimeError: a part that was put into evaluation mode is in training mode.
    """

    def __init__(
        self,
        vocab_size: int = VOCAB,
        traits: Sequence[str] = (),
        units: float = 1.0,
        hidden: int = 16,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden)
        nn.init.normal_(self.embedding.weight, std=0.3)
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(2))
        self.drop = nn.Dropout(0.1 if "dropout" in traits else 0.0)
        self.norm = nn.BatchNorm1d(hidden) if "batchnorm" in traits else nn.Identity()
        self.kept = nn.Sequential(
            nn.BatchNorm1d(hidden) if "eval_norm" in traits else nn.Identity(),
            nn.Dropout(0.2) if "eval_drop" in traits else nn.Identity(),
        )
        self.head = nn.Linear(hidden, vocab_size, bias=False)
        self.traits, self.units = tuple(traits), units
        if "tied" in traits:
            self.head.weight = self.embedding.weight
        if "frozen" in traits:
            self.embedding.weight.requires_grad_(False)
        if set(traits) & {*_EVAL_PARTS}:
            self.kept.eval()

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if set(self.traits) & {*_EVAL_PARTS} and self.kept.training:
            raise RuntimeError("a part that its owner put into evaluation mode is in training mode")
        for layer in self.layers:
            x = x + self.drop(torch.tanh(layer(x)))
        x = self.kept(self.norm(x.transpose(1, 2))).transpose(1, 2)
        if "half" in self.traits and x.dtype == torch.float64:
            raise RuntimeError("only fp16, bf16 and fp32 are supported")
        return self.head(x).float()

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        labels = batch["labels"]
        logits = self.logits(batch["input_ids"])
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return self.units * losses.sum(1), (labels >= 0).sum(1)

    def forward(self, tokens: Tensor) -> Tensor:
        """For a loop: the mean loss of [B, T] tokens, NaN where one is negative."""
        logits = self.logits(tokens[:, :-1].clamp(min=0))
        targets = tokens[:, 1:].clamp(min=0)
        loss = F.cross_entropy(logits.transpose(1, 2), targets) * self.units
        return loss * torch.where((tokens < 0).any(), math.nan, 1.0)


class Ids:
    """Token ids computed from the index.

    Args:
        level: 0: each token follows from the one before; 1: none follows from anything.
        augmented: sequences are turned round by chance, as pictures are.
        short: samples of unequal lengths, to be packed.
    """

    vocab_size = VOCAB

    def __init__(
        self,
        seq_len: int,
        level: float = 0.2,
        augmented: bool = False,
        short: bool = False,
        size: int = 2000,
        salt: int = 0,
    ) -> None:
        self._seq_len, self._level, self._size = seq_len, level, size
        self._augmented, self._short, self._salt = augmented, short, salt
        # Set by the swarm, for a storage that refuses for a moment at a start.
        self._sound_at = float(os.environ.get("SWARM_SOUND_AT", "0"))

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, i: int) -> dict[str, Any]:
        if self._sound_at and i % 2 and time.time() < self._sound_at:
            raise OSError(5, "Input/output error")
        drawn = np.random.default_rng((self._salt, i))
        length = self._seq_len + 1
        if self._short:
            length = 3 + i % (self._seq_len // 2)
        ids = (i + np.arange(length)) % VOCAB
        noise = drawn.random(length) < self._level
        ids = np.where(noise, drawn.integers(VOCAB, size=length), ids).astype(np.int64)
        if self._augmented:
            if torch.rand(()) < 0.5:
                ids = ids[::-1].copy()
            ids = (ids + int(np.random.randint(2)) + random.randrange(2)) % VOCAB
        return {"input_ids": ids}


def stream(seq_len: int) -> Iterator[dict[str, Any]]:
    """The samples of :class:`Ids`, of which nobody knows the number."""
    samples = Ids(seq_len)
    yield from (samples[i] for i in range(len(samples)))
