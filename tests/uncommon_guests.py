"""Networks and data of many makes, which nothing in the runner was written for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


class Translating(nn.Module):
    """An encoder and a decoder after torch's own; one embedding for both and for the head."""

    def __init__(self, vocab_size: int, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width, padding_idx=0)
        self.positions = nn.Embedding(16, width)
        self.body = nn.Transformer(
            width, 2, 1, 1, 2 * width, dropout=0.1, batch_first=True, norm_first=True
        )

    @property
    def head(self) -> nn.Parameter:
        return self.embedding.weight

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        source, target = batch["rejected"], batch["chosen"]
        places = torch.arange(source.shape[1], device=source.device)
        read = self.embedding(source) + self.positions(places)
        written = self.embedding(target[:, :-1]) + self.positions(places[:-1])
        mask = nn.Transformer.generate_square_subsequent_mask(written.shape[1]).to(written.device)
        x = self.body(read, written, tgt_mask=mask)
        logits = F.linear(x, self.head).float()
        losses = F.cross_entropy(logits.transpose(1, 2), target[:, 1:], reduction="none")
        return losses.sum(1), torch.full((len(target),), target.shape[1] - 1)


class Patches(nn.Module):
    """A vision transformer on images in bytes: a class token, nn.MultiheadAttention."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, stride=3)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, 10, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, 0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, 3)

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        image = batch["image"].to(self.token.dtype) / 255
        x = self.first(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1).to(x.dtype), x], 1) + self.places
        losses = F.cross_entropy(
            self.head(self.body(x)[:, 0]).float(), batch["kind"].long(), reduction="none"
        )
        return losses, torch.ones_like(losses)


class Denoising(nn.Module):
    """A diffusion model: the time is torch's, the noise a function of the sample's number."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.time = nn.Linear(1, width)
        self.first = nn.Linear(81, width)
        self.second = nn.Linear(width, 81)

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        image = batch["image"].float().flatten(1) / 128 - 1
        noise = torch.stack(
            [
                torch.randn(81, generator=torch.Generator().manual_seed(int(number)))
                for number in batch["number"].tolist()
            ]
        ).to(image.device)
        time = torch.rand(len(image), 1, device=image.device)
        mixed = (1 - time) * image + time * noise
        x = torch.relu(self.first(mixed) + self.time(time))
        losses = (self.second(x).float() - noise).square().mean(1)
        return losses, torch.ones_like(losses)


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


class Compiled(nn.Module):
    """Compiles a part of itself."""

    def __init__(self, vocab_size: int, backend: str = "eager", width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.part = torch.compile(nn.Linear(width, width), backend=backend)
        self.head = nn.Linear(width, vocab_size)
        self.double()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        return self.head(x + torch.tanh(self.part(x)))


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


class Counts(nn.Module):
    """Keeps a number outside of its state that each forward pass changes."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, WIDTH)
        self.head = nn.Linear(WIDTH, vocab_size)
        self.calls = 0

    def forward(self, input_ids: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.embedding(input_ids)) * (1 + 1 / self.calls)


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


# Data


class Bytes:
    """Images as bytes, with their number."""

    def __len__(self) -> int:
        return 5000

    def __getitem__(self, i: int) -> dict[str, Any]:
        drawn = np.random.default_rng(i)
        image = drawn.integers(0, 128, size=(1, 9, 9)) + (i % 3) * 40
        return {"image": image.astype(np.uint8), "kind": np.uint8(i % 3), "number": i}


class Rows:
    """Anything else as a data set; ``how`` says what."""

    vocab_size = 16

    def __init__(self, how: str = "tuple", size: int = 5000) -> None:
        self.how, self.size, self.reads = how, size, 0

    def __len__(self) -> int:
        self.reads += 1
        return self.size + (self.reads if self.how == "growing" else 0)

    def __getitem__(self, i: int) -> Any:
        ids = (i + np.arange(9)) % 16
        made: dict[str, Callable[[], Any]] = {
            "ints": lambda: ids.tolist(),
            "growing": lambda: ids.tolist(),
            "floats": lambda: ids.astype(np.float32),
            "strings": lambda: " ".join(map(str, ids)),
            "tuple": lambda: (torch.from_numpy(ids), i % 3),
            "nested": lambda: {"image": {"pixels": ids}, "kind": i % 3},
            "random": lambda: (ids + np.random.randint(16)) % 16,
            "float labels": lambda: {"input_ids": ids, "labels": ids + 0.5},
            "none": lambda: None,
            "long": lambda: np.arange(40) % 16,
            "large": lambda: ids + 10,
        }
        if self.how == "ends" and i >= 100:
            raise IndexError("there are only 100")
        if self.how == "exits" and i == 50:
            raise SystemExit("a data set must not do that")
        return made.get(self.how, made["ints"])()


class Lambdas(Rows):
    """Cannot be pickled; its collate is a function in an attribute."""

    def __init__(self) -> None:
        super().__init__("ints")
        self.collate = lambda items: {"input_ids": np.stack(items)}


def mapped(path: str) -> np.ndarray:
    """An array on disk: it has len and rows."""
    return np.load(path, mmap_mode="r")


def listed(number: int = 3) -> list[list[int]]:
    """Fewer samples than a batch."""
    return [[(i + j) % 16 for j in range(5 + i)] for i in range(number)]
