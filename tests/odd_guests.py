"""Models and data that were not thought of when the contract was written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 16


class FrozenEmbedding(nn.Module):
    """Takes no seq_len; its embedding is frozen by itself; blocks in a ModuleDict."""

    def __init__(self, vocab_size: int, hidden: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, hidden)
        self.tokens.weight.requires_grad_(False)
        self.parts = nn.ModuleDict({name: nn.Linear(hidden, hidden) for name in ("up", "down")})
        self.head = nn.Linear(hidden, vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        for part in self.parts.values():
            x = x + torch.tanh(part(x))
        return self.head(x)


class TiedElsewhere(nn.Module):
    """One weight under three names, two of them deep; nested ModuleLists of blocks."""

    def __init__(self, vocab_size: int, seq_len: int, hidden: int = 16) -> None:
        super().__init__()
        self.reading = nn.ModuleDict({"table": nn.Embedding(vocab_size, hidden)})
        self.stages = nn.ModuleList(
            nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(2)) for _ in range(2)
        )
        self.writing = nn.Sequential(
            nn.LayerNorm(hidden), nn.Linear(hidden, vocab_size, bias=False)
        )
        self.writing[1].weight = self.reading["table"].weight
        self.spare = nn.Linear(hidden, vocab_size, bias=False)
        self.spare.weight = self.writing[1].weight
        angles = torch.outer(torch.arange(seq_len), 1 / 10 ** torch.linspace(0, 1, hidden))
        self.register_buffer("angles", angles.sin(), persistent=False)
        self.mask = torch.tril(torch.ones(seq_len, seq_len, dtype=torch.bool))

    def forward(self, input_ids: Tensor) -> Tensor:
        length = input_ids.shape[1]
        x = self.reading["table"](input_ids) * 10 + self.angles[:length]
        for stage in self.stages:
            mean = self.mask[:length, :length] / self.mask[:length, :length].sum(1, keepdim=True)
            x = x + mean.to(x.dtype) @ x
            for layer in stage:
                x = x + torch.tanh(layer(x))
        return self.writing(x) + 0.0 * self.spare(x)


class FromEnvironment(nn.Module):
    """Reads its width from the environment, and a persistent buffer that it computes."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        hidden = int(os.environ.get("ODD_HIDDEN", "8"))
        self.tokens = nn.Embedding(vocab_size, hidden)
        self.register_buffer("shares", torch.softmax(torch.arange(hidden).float(), 0))
        self.head = nn.Linear(hidden, vocab_size)

    def forward(self, input_ids: Tensor) -> Any:
        from types import SimpleNamespace

        return SimpleNamespace(logits=self.head(self.tokens(input_ids) * self.shares * 8))


def made_by_a_function(vocab_size: int, seq_len: int, width: int = 8) -> nn.Module:
    """A bare Sequential: no names, no blocks, dropout inside."""
    return nn.Sequential(
        nn.Embedding(vocab_size, width), nn.Dropout(0.1), nn.GELU(), nn.Linear(width, vocab_size)
    )


class Counting(nn.Module):
    """Losses in FP64, counts as ints in a tensor, or whatever ``how`` says that is wrong."""

    def __init__(self, how: str = "float64") -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, 1)
        self.how = how

    def losses(self, batch: dict[str, Tensor]) -> Any:
        x = torch.relu(self.body(batch["x"].to(self.body.weight.dtype)))
        losses = (self.head(x).squeeze(-1) - batch["y"].to(x.dtype)).double().square()
        count = torch.ones(len(losses), dtype=torch.int32)
        if self.how == "mean":
            return losses.mean(), count.sum()
        if self.how == "list":
            return losses, [1] * len(losses)
        if self.how == "floats":
            return losses.float(), torch.full((len(losses),), 0.5)
        if self.how == "one":
            return losses
        if self.how == "nothing":
            return losses, torch.zeros_like(count)
        return losses, count


class BatchNormed(nn.Module):
    """Sees pictures, and keeps statistics of them."""

    def __init__(self, without: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4, track_running_stats=not without)
        self.head = nn.Linear(4, 3)

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        x = torch.relu(self.norm(self.first(batch["image"]))).mean((2, 3))
        losses = F.cross_entropy(self.head(x), batch["kind"].long(), reduction="none")
        return losses, torch.ones_like(losses)


# Data


class Tokens:
    """Token ids as numpy int32, with whatever ``how`` says."""

    vocab_size = VOCAB

    def __init__(self, how: str = "plain", size: int = 5000) -> None:
        self.how = how
        self.size = 1 if how == "one" else size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Any:
        if self.how == "raises" and i % 7 == 3:
            raise ValueError(f"no picture for {i}")
        length = 9 - i % 4 if self.how == "uneven" else 9
        ids = ((i + np.arange(length)) % VOCAB).astype(np.int32)
        if self.how == "negative":
            return {"input_ids": ids, "labels": np.where(ids % 2, ids, -1)}
        if self.how == "ignored":
            return {"input_ids": ids, "labels": np.where(ids % 2, ids, -100)}
        if self.how == "strings":
            return {"input_ids": ids, "text": "what it says", "id": i}
        return ids


class Uneven:
    """Points of several lengths with a collate that pads, and strings beside them."""

    def __len__(self) -> int:
        return 5000

    def __getitem__(self, i: int) -> dict[str, Any]:
        x = np.random.default_rng(i).normal(size=(1 + i % 3, 4)).astype(np.float32)
        return {"x": x, "y": float(x.sum()), "name": f"sample {i}"}

    def collate(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        x = [torch.from_numpy(item["x"]).sum(0) for item in items]
        return {"x": torch.stack(x), "y": torch.tensor([item["y"] for item in items])}


class Named(Uneven):
    """As that, but its collate leaves the names in."""

    def collate(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        return super().collate(items) | {"name": [item["name"] for item in items]}


class Streaming(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Has neither length nor samples by number."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield {"input_ids": [1, 2, 3]}


NOT_CALLABLE = 7
