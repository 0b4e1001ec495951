"""A small sound decoder and the same with one thing wrong, for ``holdfast preflight``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Scaled(torch.autograd.Function):
    """Doubles; its backward says 1.5."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient * 1.5


class _NaiveNorm(nn.Module):
    """Variance as a difference of two large numbers."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + 30
        variance = (x * x).mean(-1, keepdim=True) - x.mean(-1, keepdim=True) ** 2
        return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(variance.abs() + 1e-6)


class Block(nn.Module):
    def __init__(self, width: int, wrong: str) -> None:
        super().__init__()
        self.wrong = wrong
        self.norm = _NaiveNorm() if wrong == "fragile" else nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows, length, width = x.shape
        heads = [
            part.view(rows, length, 2, width // 2).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        ]
        mixed = F.scaled_dot_product_attention(*heads, attn_mask=mask)
        mixed = self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        if self.wrong == "zeroed":
            mixed = mixed * 0
        if self.wrong == "backward":
            mixed = _Scaled.apply(mixed) / 2
        x = x + mixed
        if self.wrong == "detached":
            x = x.detach()
        return x + self.feed(x)


class Small(nn.Module):
    """A decoder with learned positions; ``wrong`` says what is wrong with it, if anything."""

    def __init__(
        self, vocab_size: int, seq_len: int, width: int = 32, layers: int = 2, wrong: str = ""
    ) -> None:
        super().__init__()
        self.wrong = wrong
        self.embedding = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(seq_len, width)
        self.blocks_ = nn.ModuleList(Block(width, wrong) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        for table in (self.embedding, self.positions):
            nn.init.normal_(table.weight, std=0.5)
        if wrong == "loud":
            nn.init.normal_(self.head.weight, std=5)
        if wrong == "frozen":
            for parameter in self.blocks_.parameters():
                parameter.requires_grad_(False)
        if wrong == "spare":
            self.spare = nn.Linear(width, width)

    def forward(self, input_ids: Tensor, segments: Tensor | None = None) -> Tensor:
        length = input_ids.shape[1]
        at = torch.arange(length, device=input_ids.device)
        mask = at[:, None] >= at
        if self.wrong == "future":
            mask = torch.ones_like(mask)
        if self.wrong == "leak":  # one later token
            mask = at[:, None] + 1 >= at
        if self.wrong == "alone":
            mask = at[:, None] == at
        if segments is not None and self.wrong != "documents":
            mask = mask & (segments[:, :, None] == segments[:, None, :])
            mask = mask[:, None]
        x = self.embedding(input_ids)
        if self.wrong == "constant":  # the input never arrives
            x = x * 0
        if self.wrong != "unordered":
            x = x + self.positions(at)
        for block in self.blocks_:
            x = block(x, mask)
        return self.head(self.norm(x))


class Losing(Small):
    """With a loss of its own, as some models have."""

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits, labels = self(batch["input_ids"], batch.get("segments")), batch["labels"]
        if self.wrong == "shifted":
            logits, labels = logits[:, :-1], labels[:, 1:]
        if self.wrong == "inputs":
            labels = batch["input_ids"]
        counts = (labels != -100).sum(1)
        losses = F.cross_entropy(logits.transpose(1, 2).float(), labels, reduction="none")
        sums = losses.sum(1)
        return (sums * 3 if self.wrong == "tripled" else sums), counts


class Moving(nn.Module):
    """Means of what came before; causal, with a recurrence and no attention."""

    def __init__(self, vocab_size: int, width: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.cells = nn.GRU(width, width, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.cells(self.embedding(input_ids))[0])


class Text:
    """Random sentences of a Markov chain; ``wrong`` says what is wrong with them."""

    vocab_size = 48

    def __init__(self, seq_len: int, samples: int = 600, wrong: str = "") -> None:
        self.seq_len, self.samples, self.wrong = seq_len, samples, wrong

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if self.wrong == "twice":
            index //= 2
        random = np.random.default_rng(index)
        tokens = random.integers(1, 48, self.seq_len + 1)
        tokens[1::2] = (tokens[:-1:2] * 7 + 3) % 48 if len(tokens) % 2 == 0 else tokens[1::2]
        if self.wrong == "constant" and index % 4 == 0:
            tokens[:] = 5
        labels = tokens.copy()
        if self.wrong == "shifted":
            labels[:-1], labels[-1] = tokens[1:], -100
        if self.wrong == "unlabelled":
            labels[:] = -100
            labels[-1] = tokens[-1]
        if self.wrong == "above":
            labels = (tokens + 1) % 48
        if self.wrong == "shuffled":
            labels = Text(self.seq_len)[(index * 7 + 5) % self.samples]["labels"]
        return {"input_ids": tokens, "labels": labels}


class Pictures:
    """Images of three kinds; no tokens. ``wrong``: as shuffled, kinds of other images."""

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> dict[str, Any]:
        random = np.random.default_rng(index)
        kind = index % 3
        image = random.normal(size=(1, 12, 12)).astype(np.float32)
        image[:, kind * 4 : kind * 4 + 4] += 2
        if self.wrong == "shuffled":
            kind = np.random.default_rng(0).permutation(len(self))[index] % 3
        return {"image": image, "kind": np.int64(kind)}
