"""Networks and data of many makes, which nothing in the runner was written for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Scan(nn.Module):
    """A selective scan like Mamba's: a loop over time, a depthwise convolution, a 1-D decay."""

    def __init__(self, vocab_size: int, /, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.convolution = nn.Conv1d(width, width, 3, groups=width, padding=2)
        self.log_decay = nn.Parameter(torch.log(torch.arange(1.0, width + 1)))
        self.step = nn.Linear(width, width)
        self.gate = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        length = x.shape[1]
        x = F.silu(self.convolution(x.transpose(1, 2))[..., :length].transpose(1, 2))
        step = F.softplus(self.step(x).float())
        state = torch.zeros_like(x[:, 0], dtype=torch.float32)
        outputs = []
        for t in range(length):
            state = state * torch.exp(-step[:, t] * self.log_decay.exp()) + step[:, t] * x[:, t]
            outputs.append(state)
        return self.head(torch.stack(outputs, 1) * torch.sigmoid(self.gate(x)))


class Routed(nn.Module):
    """A mixture of experts: the best two of six for each token, and a loss for the router."""

    def __init__(self, vocab_size: int, width: int = WIDTH, experts: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.head = nn.Linear(width, vocab_size)

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        ids, labels = batch["input_ids"], batch["labels"]
        x = self.embedding(ids)
        flat = x.reshape(-1, x.shape[-1])
        shares = self.router(flat).float().softmax(-1)
        best, chosen = shares.topk(2, -1)
        mixed = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, slots = (chosen == number).nonzero(as_tuple=True)
            if len(rows):  # so a rank may use other experts than its peers
                part = torch.tanh(expert(flat[rows])) * best[rows, slots, None].to(flat.dtype)
                mixed.index_add_(0, rows, part.to(mixed.dtype))
        logits = self.head(x + mixed.view_as(x)).float()
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        balance = shares.square().sum(-1).view_as(labels)
        return (losses + 0.01 * balance).sum(1), (labels != -100).sum(1)


class TopTwo(nn.Module):
    """Experts whose two best gates add to 1: the loss jumps where another becomes the second.

    At first all gates are nearly alike, so that this is within the smallest differences.
    """

    def __init__(self, vocab_size: int, width: int = WIDTH, experts: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.positions = nn.Parameter(0.5 * torch.randn(256, width))
        self.router = nn.Linear(width, experts, bias=False)
        nn.init.normal_(self.router.weight, std=1e-4)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.head = nn.Linear(width, vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        length = input_ids.shape[1]
        x = self.embedding(input_ids) + self.positions[:length]
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        x = x + self.attention(x, x, x, attn_mask=later, need_weights=False)[0]
        gates, chosen = self.router(x).softmax(-1).topk(2, -1)
        gates = gates / gates.sum(-1, keepdim=True)
        of_all = torch.stack([torch.tanh(3 * expert(x)) for expert in self.experts], -2)
        picked = of_all.gather(-2, chosen[..., None].expand(*chosen.shape, x.shape[-1]))
        return self.head(x + (gates[..., None] * picked).sum(-2))


class Stages(nn.Module):
    """Experts again, in a list that looks like layers: each would be gathered by itself."""

    def __init__(self, vocab_size: int, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.stages = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        mixed = torch.zeros_like(x)
        for number, stage in enumerate(self.stages):
            own = (input_ids[:, :1] % 4 == number).expand(input_ids.shape)
            if own.any():
                mixed[own] = torch.tanh(stage(x[own])).to(mixed.dtype)
        return self.head(x + mixed)


class Matching(nn.Module):
    """A contrastive loss like CLIP's: each sample's loss depends on the others in the batch."""

    def __init__(self, vocab_size: int, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        left = F.normalize(self.left(self.embedding(batch["chosen"]).mean(1)).float(), dim=-1)
        right = F.normalize(self.right(self.embedding(batch["rejected"]).mean(1)).float(), dim=-1)
        logits = left @ right.T * self.scale.exp()
        losses = F.cross_entropy(logits, torch.arange(len(left)), reduction="none")
        return losses, torch.ones_like(losses)


class OddShapes(nn.Module):
    """Parameters in a list, a dict, of rank 0 and 3, with one element or ``none``."""

    def __init__(self, vocab_size: int, none: bool = False, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.one = nn.Parameter(torch.ones(1))
        self.none = nn.Parameter(torch.zeros(0, 4)) if none else None
        self.cube = nn.Parameter(torch.randn(3, 5, 7) * 0.1)
        self.list = nn.ParameterList(torch.randn(width, width) * 0.1 for _ in range(3))
        self.dict = nn.ParameterDict({"bias": torch.zeros(width), "gain": torch.ones(width)})
        self.register_buffer("steps", torch.arange(width))
        self.register_buffer("turns", torch.polar(torch.ones(width), torch.arange(width) * 0.1))
        self.register_buffer("kept", torch.arange(width) % 2 == 0, persistent=False)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids) * self.scale
        for matrix in self.list:
            x = x + torch.tanh(x @ matrix)
        x = x * self.dict["gain"] * (1 + self.cube.mean()) + self.dict["bias"] * self.one
        x = x + (x * self.turns).real
        x = torch.where(self.kept, x, x * 0.5) + self.steps * 0.01
        return self.head(x)


class Strided(nn.Module):
    """Parameters that are no contiguous memory: transposed, and every other column."""

    def __init__(self, vocab_size: int, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.turned = nn.Parameter(torch.randn(2 * width, width).t())
        self.every_other = nn.Parameter(torch.randn(2 * width, 2 * width)[:, ::2])
        self.head = nn.Linear(width, vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        return self.head(x + torch.tanh(x @ self.turned * 0.1) @ self.every_other * 0.1)


class Complex(nn.Module):
    """A parameter of complex numbers."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, WIDTH)
        self.filter = nn.Parameter(torch.ones(WIDTH, dtype=torch.complex64))
        self.head = nn.Linear(WIDTH, vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        return self.head((x * self.filter).real)


class Normalised(nn.Module):
    """Weights that are computed of others: old and new weight norm, one of the user's own.

    ``how=spectral`` is spectral norm, which changes a buffer at each training step.
    """

    def __init__(self, vocab_size: int, how: str = "weight", width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        norm = parametrizations.spectral_norm if how == "spectral" else parametrizations.weight_norm
        self.first = norm(nn.Linear(width, width))
        self.second = nn.utils.weight_norm(nn.Linear(width, width)) if how == "old" else None
        self.third = nn.Linear(width, width)
        parametrize.register_parametrization(self.third, "weight", Symmetric())
        self.head = nn.Linear(width, vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        x = x + torch.tanh(self.first(x))
        if self.second is not None:
            x = x + torch.tanh(self.second(x))
        return self.head(x + torch.tanh(self.third(x)))


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class Remembering(nn.Module):
    """nn.LSTM with dropout between its layers and a projection; returns a tuple."""

    def __init__(self, vocab_size: int, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width, padding_idx=0)
        self.lstm = nn.LSTM(
            width, 2 * width, num_layers=2, dropout=0.2, proj_size=width, batch_first=True
        )
        self.head = nn.Linear(width, vocab_size)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Any]:
        x, state = self.lstm(self.embedding(input_ids))
        return self.head(x), state


class Sparse(nn.Module):
    """An embedding whose gradient is sparse."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embedding(input_ids))


class Repeated(nn.Module):
    """One block three times in a list, computed again in the backward pass by itself."""

    def __init__(self, vocab_size: int, reentrant: bool = False, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        block = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Dropout(0.1))
        self.blocks_ = nn.ModuleList([block] * 3)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size)
        self.reentrant = reentrant

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        for block in self.blocks_:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return {"logits": self.head(self.norm(x)), "hidden": x}


class _Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] * weight * 2, (grads[0] * x * 2).flatten(0, 1).sum(0).to(weight.dtype)


@dataclass
class Output:
    """What some forward functions give."""

    logits: Tensor
    hidden: Tensor | None = None


class Configured(nn.Module):
    """Nested settings, a custom autograd function, ``**more`` in forward, an own generator."""

    def __init__(
        self,
        vocab_size: int,
        *,
        layers: list[dict[str, Any]] | None = None,
        head: Mapping[str, Any] | None = None,
        name: str | None = "x",
        norm: bool = True,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.embedding = nn.Embedding(vocab_size, WIDTH)
        self.parts = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, bias=bool(layer.get("bias", True)))
            for layer in (layers or [{"bias": True}])
        )
        with torch.no_grad():
            for part in self.parts:
                part.weight.normal_(std=0.2, generator=generator)
        self.gain = nn.Parameter(torch.randn(WIDTH, generator=generator))
        self.norm = nn.LayerNorm(WIDTH) if norm else nn.Identity()
        self.head = nn.Linear(WIDTH, vocab_size, **(head or {}))
        assert name is None, "not given as null"

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **more: Any
    ) -> Output:
        x = self.embedding(input_ids)
        for part in self.parts:
            x = x + torch.tanh(part(x))
        return Output(logits=self.head(_Doubling.apply(self.norm(x), self.gain)))


class TiedBuffered(nn.Module):
    """A tied head, norms and buffers in FP32, which meet weights in BF16."""

    def __init__(self, vocab_size: int, seq_len: int, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.register_buffer("angles", torch.linspace(0, 1, seq_len * width).view(seq_len, width))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.groups = nn.GroupNorm(2, width)
        self.root = nn.RMSNorm(width)
        self.act = nn.PReLU()
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids) * 10 + self.angles[: input_ids.shape[1]]
        for layer in self.layers:
            x = x + self.act(layer(self.norm(x)))
        x = x + self.groups(x.transpose(1, 2)).transpose(1, 2)
        return self.head(self.root(x))


class Lazy(nn.Module):
    """Learns the width of a layer from its first batch."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, WIDTH)
        self.head = nn.LazyLinear(vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embedding(input_ids))


class Halved(nn.Module):
    """Made in FP16 and half of it frozen; a part is never used."""

    def __init__(self, vocab_size: int, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.spare = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab_size)
        self.layers[0].requires_grad_(False)
        self.half()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
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
            for layer in stage:  # type: ignore[attr-defined]
                x = x + torch.tanh(layer(x))
        return self.writing(x) + 0.0 * self.spare(x)


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

    vocab_size = 16

    def __init__(self, how: str = "plain", size: int = 5000) -> None:
        self.how = how
        self.size = 1 if how == "one" else size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Any:
        if self.how == "raises" and i % 7 == 3:
            raise ValueError(f"no picture for {i}")
        length = 9 - i % 4 if self.how == "uneven" else 9
        ids = ((i + np.arange(length)) % self.vocab_size).astype(np.int32)
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


class Streaming(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Has neither length nor samples by number."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield {"input_ids": [1, 2, 3]}
