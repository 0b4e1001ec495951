"""Training written down from the formulas, in one process: what every engine is held against.

Only the decoder's forward pass (and autograd through it) is the runner's. The loss and its
normalisation, the norm, clipping, AdamW and the schedule stand here a second time, in FP64, so
that a mistake in the runner's is not made twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runner.config.schema import ParallelKind, Precision, RunConfig, ScheduleKind
from runner.data.dataset import Dataset, Sample
from runner.model.decoder import Decoder, DecoderShape
from tests.mechanism.weights import set_initial_weights

UNCOUNTED = -1


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One step: nats per counted token, the norm before clipping, the rate, counted tokens."""

    loss: float
    grad_norm: float
    rate: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Some sequences: int64 ``tokens`` and ``targets`` [B, T], ``segments`` [B, T] or None."""

    tokens: Tensor
    targets: Tensor
    segments: Tensor | None


class Reference:
    """The same run as ``config`` asks for, on one process.

    In FP32 a step is one forward pass over the whole batch. DeepSpeed knows BF16 only: there
    the micro-batches are those of the ranks, since BF16 rounds each of them by itself, and each
    micro-batch's loss is ``world_size`` times its own, since DeepSpeed averages over ranks
    (stage 2 in BF16, the others in FP32).
    """

    def __init__(
        self, config: RunConfig, shape: DecoderShape, dataset: Dataset, world_size: int
    ) -> None:
        self._config = config
        self._dataset = dataset
        self._world_size = world_size
        self._bf16 = config.compute.precision is Precision.bf16
        self._averages_in_bf16 = config.parallel.kind is ParallelKind.zero2
        self._model = Decoder(shape)
        set_initial_weights(self._model, seed=config.seed)
        self._names = {
            name: not any(word in name for word in config.compute.frozen)
            for name, _ in self._model.named_parameters()
        }
        self.weights = {n: p.detach().double() for n, p in self._model.named_parameters()}
        self.first = {n: torch.zeros_like(w) for n, w in self.weights.items() if self._names[n]}
        self.second = {n: torch.zeros_like(w) for n, w in self.weights.items() if self._names[n]}
        if self._bf16:
            self._model.bfloat16()
            self._model.reset_buffers()
        self.updates = 0

    def step(self, indices: Sequence[int]) -> Trained:
        """One update on these samples of the data set."""
        self._set_weights()
        loss, tokens = 0.0, 0
        gradients = {name: torch.zeros_like(self.weights[name]) for name in self.first}
        for rows, factor in self._batches(indices):
            part, counted = self._backward(rows, factor)
            loss, tokens = loss + part, tokens + counted
            for name, parameter in self._model.named_parameters():
                if name in gradients and parameter.grad is not None:
                    gradient = parameter.grad
                    gradient = gradient if self._averages_in_bf16 else gradient.double()
                    gradients[name] += gradient / factor
        # The loss of a step is the mean over the counted tokens of all ranks and micro-batches.
        gradients = {name: gradient / tokens for name, gradient in gradients.items()}
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        clip, rate = self._config.optim.clip, rate_of(self._config, self.updates)
        shrink = min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0
        self._update({name: g * shrink for name, g in gradients.items()}, rate)
        return Trained(loss=loss / tokens, grad_norm=norm, rate=rate, tokens=tokens)

    def take(self, state: Mapping[str, Tensor]) -> None:
        """Go on from these weights and moments, by shard.

        For BF16: two FP32 weights that differ in their last bit may round to neighbours, and then
        nothing is near any more.
        """
        for name, tensor in self.state().items():
            tensor.copy_(state[name])

    def _set_weights(self) -> None:
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                # Through FP32, which is what the engines hold.
                parameter.copy_(self.weights[name].float())

    def _batches(self, indices: Sequence[int]) -> Iterator[tuple[Rows, float]]:
        if not self._bf16:
            yield self._rows(indices), 1.0
            return
        world, size = self._world_size, self._config.batch.micro_size
        per_rank = -(-len(indices) // world)
        padded = [*indices, *[None] * (per_rank * world - len(indices))]
        for rank in range(world):
            own = padded[rank::world]
            for at in range(0, per_rank, size):
                yield self._rows(own[at : at + size]), float(world)

    def _rows(self, indices: Sequence[int | None]) -> Rows:
        length = self._config.data.seq_len
        tokens = torch.zeros(len(indices), length, dtype=torch.int64)
        targets = torch.full_like(tokens, UNCOUNTED)
        segments = torch.zeros_like(tokens)
        samples = [None if index is None else self._dataset[index] for index in indices]
        for row, sample in enumerate(samples):
            if sample is None:
                continue
            tokens[row] = torch.from_numpy(sample.tokens[:-1])
            targets[row] = torch.from_numpy(sample.tokens[1:])
            if sample.segments is not None:
                documents = torch.from_numpy(sample.segments).long()
                segments[row] = documents[:-1]
                # What begins a document is not told by the end of the one before.
                targets[row][documents[1:] != documents[:-1]] = UNCOUNTED
        has_segments = any(sample is not None and sample.segments is not None for sample in samples)
        return Rows(tokens=tokens, targets=targets, segments=segments if has_segments else None)

    def _backward(self, rows: Rows, factor: float) -> tuple[float, int]:
        """(summed cross-entropy, counted tokens); gradients of ``factor`` times the loss."""
        self._model.zero_grad()
        segments = None if rows.segments is None else rows.segments.int()
        logits = self._model(rows.tokens, segments).float()
        counted = rows.targets != UNCOUNTED
        log_z = torch.logsumexp(logits, dim=-1)
        wanted = logits.gather(-1, rows.targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        entropy = torch.where(counted, log_z - wanted, 0.0)
        penalty = self._config.model.z_loss * torch.where(counted, log_z.square(), 0.0)
        ((entropy + penalty).sum() * factor).backward()
        return float(entropy.detach().double().sum()), int(counted.sum())

    def _update(self, gradients: dict[str, Tensor], rate: float) -> None:
        """AdamW (Loshchilov & Hutter 2019, algorithm 2); decay on matrices only."""
        optim = self._config.optim
        self.updates += 1
        for name, gradient in gradients.items():
            weight = self.weights[name]
            if weight.dim() >= 2:
                weight *= 1 - rate * optim.weight_decay
            self.first[name] = optim.beta1 * self.first[name] + (1 - optim.beta1) * gradient
            self.second[name] = (
                optim.beta2 * self.second[name] + (1 - optim.beta2) * gradient.square()
            )
            mean = self.first[name] / (1 - optim.beta1**self.updates)
            variance = self.second[name] / (1 - optim.beta2**self.updates)
            weight -= rate * mean / (variance.sqrt() + optim.eps)

    def state(self) -> dict[str, Tensor]:
        """By the names that an engine gives its shards; FP64."""
        kinds = {"param": self.weights, "exp_avg": self.first, "exp_avg_sq": self.second}
        return {f"{kind}/{name}": t for kind, held in kinds.items() for name, t in held.items()}


def rate_of(config: RunConfig, updates: int) -> float:
    """Of the update that follows ``updates`` ones: linear warm-up, then half a cosine."""
    schedule, peak = config.schedule, config.optim.lr
    assert schedule.kind is ScheduleKind.cosine
    if updates < schedule.warmup:
        return peak * (updates + 1) / schedule.warmup
    total = schedule.total or config.steps
    done = (updates - schedule.warmup) / (total - schedule.warmup)
    low = schedule.floor * peak
    return low + (peak - low) * 0.5 * (1 + math.cos(math.pi * done))


def is_bf16_only(kind: ParallelKind) -> bool:
    return kind.value.startswith("zero")


class Documents:
    """Made up windows; every other one is cut into so many documents that little of it counts."""

    def __init__(self, *, vocab_size: int, seq_len: int, samples: int = 97) -> None:
        self.vocab_size = vocab_size
        self._seq_len = seq_len
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Sample:
        generator = torch.Generator().manual_seed(1000 + index)
        width = self._seq_len + 1
        tokens = torch.randint(self.vocab_size, (width,), generator=generator)
        starts = torch.rand(width, generator=generator) < (0.8 if index % 2 else 0.1)
        starts[0] = False
        return Sample(tokens=tokens.numpy(), segments=starts.cumsum(0).int().numpy())

    def describe(self, index: int) -> str:
        return f"window {index}"

    def fingerprint(self) -> str:
        return "made up"
