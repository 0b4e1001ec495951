"""A pre-norm decoder: RMSNorm, rotary positions, SwiGLU, grouped-query attention.

Owns the network, its parameter count and its FLOPs. Must not know the configuration (a
:class:`DecoderShape` comes in), initial values, sharding or precision policy; of the loss only
that large logits become it at once.

Parameters may be FP32, BF16, FP32 under autocast, or gathered by FSDP2 with a mixed precision
policy: activations follow the embedding's dtype, statistics and rotations are FP32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.config.mappings import head_problem
from runner.model.loss import HeadLosses, TokenTap
from runner.model.recompute import NONE, SELECTIVE, recomputed
from runner.model.segments import Documents, attend, document_attention, documents_of
from runner.system.error import ConfigError

_FFN_MULTIPLE = 64


def _require(holds: bool, key: str, value: float, allowed: str) -> None:
    if not holds:
        raise ConfigError(f"{key}={value} does not work: it must be {allowed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Rotary frequencies stretched for long sequences, as in Llama 3.1 and later models.

    Field names are those of Hugging Face's ``rope_scaling`` with ``rope_type: llama3``, and the
    keys under ``model.rope_scaling``. Raises :class:`ConfigError` where they do not fit.

    Args:
        factor: low frequencies are divided by it.
        low_freq_factor, high_freq_factor: a rotation with fewer turns than the first within
            ``original_max_position_embeddings`` positions is of low frequency; one with more than
            the second is left alone; between them both are blended.
        original_max_position_embeddings: sequence length before the stretching, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        where = "model.rope_scaling"
        _require(self.factor >= 1, f"{where}.factor", self.factor, "at least 1")
        low, high = self.low_freq_factor, self.high_freq_factor
        _require(low > 0, f"{where}.low_freq_factor", low, "above 0")
        _require(high > low, f"{where}.high_freq_factor", high, f"above low_freq_factor={low}")
        length = self.original_max_position_embeddings
        _require(length >= 1, f"{where}.original_max_position_embeddings", length, "at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Everything that fixes the network. Field names are the keys under ``model.``.

    ``seq_len`` is the largest number of positions. Raises :class:`ConfigError` where the
    fields do not fit each other.
    """

    vocab_size: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn_dim: int
    seq_len: int
    tied_head: bool = True
    qk_norm: bool = False
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    dropout: float = 0.0
    recompute: str = NONE
    document_attention: str = "auto"
    init_std: float = 0.02

    def __post_init__(self) -> None:
        # What a setting alone must be, the schema says.
        if problem := head_problem(self.dim, self.heads, self.kv_heads):
            raise ConfigError(problem)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads


def default_ffn_dim(dim: int) -> int:
    """8/3 ``dim`` rounded up to a multiple of 64: SwiGLU at the cost of a 4 ``dim`` ReLU layer
    (Shazeer 2020, "GLU Variants Improve Transformer", section 2)."""
    return -(-8 * dim // (3 * _FFN_MULTIPLE)) * _FFN_MULTIPLE


def num_parameters(shape: DecoderShape) -> int:
    """Learned elements of a :class:`Decoder`, a tied head counted once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(shape).parameters())


def flops_per_token(network: Decoder) -> float:
    """Training FLOPs (forward and backward) a token needs at full ``seq_len``.

    PaLM (Chowdhery et al. 2022), appendix B: ``6 N + 12 L H Q T``. ``N`` are the elements of the
    matrices multiplied by, the head included (tied or not), the embedding look-up not. Unlike
    PaLM the attention term is halved, ``6 L H Q T``: a causal decoder needs no more. What
    activation checkpointing computes twice is not counted. Elements of ``N`` that are not
    trained take 4 instead of 6: the gradient passes through them, theirs is not computed.
    """
    shape = network.shape
    looked_up = None if network.head is None else network.embedding.weight
    matrices = [p for p in network.parameters() if p.dim() >= 2 and p is not looked_up]
    flops = sum((6.0 if p.requires_grad else 4.0) * p.numel() for p in matrices)
    return flops + 6.0 * shape.layers * shape.dim * shape.seq_len


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Rotations of positions: ``cos`` and ``sin``, FP32 ``[positions, head_dim / 2]``."""

    cos: Tensor
    sin: Tensor

    def first(self, length: int) -> Rotary:
        """The rotations of positions 0 to ``length`` - 1."""
        return Rotary(cos=self.cos[:length], sin=self.sin[:length])


def rotary_table(shape: DecoderShape, device: torch.device) -> Rotary:
    """Rotations for all ``shape.seq_len`` positions on ``device``.

    Su et al. 2021 (RoFormer), section 3.2.2. Computed in FP64 on the CPU, so every device gets
    the same bytes.
    """
    # The constructor may run under torch.device("meta"): name the device of every factory.
    steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float64, device="cpu")
    positions = torch.arange(shape.seq_len, dtype=torch.float64, device="cpu")
    frequencies = shape.rope_theta ** (-steps / shape.head_dim)
    if shape.rope_scaling is not None:
        frequencies = _stretched(frequencies, shape.rope_scaling)
    angles = torch.outer(positions, frequencies)
    return Rotary(cos=angles.cos().float().to(device), sin=angles.sin().float().to(device))


def _stretched(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Radians a token, FP64 ``[head_dim / 2]``, as Llama 3.1's published models have them.

    Grattafiori et al. 2024 (The Llama 3 Herd of Models) and the code that came with its weights.
    """
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # 1: a high frequency, left alone
    return share * frequencies + (1 - share) * frequencies / scaling.factor


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate ``x`` ``[B, heads, T, head_dim]``; FP32 result of the same shape.

    Element ``i`` is paired with ``i + head_dim / 2``, as Llama's published weights in the
    Hugging Face layout are.
    """
    left, right = x.float().chunk(2, dim=-1)
    turned = (left * rotary.cos - right * rotary.sin, right * rotary.cos + left * rotary.sin)
    return torch.cat(turned, dim=-1)


class Norm(nn.Module):
    """RMSNorm over the last dimension (Zhang & Sennrich 2019); statistics in FP32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """``x`` ``[..., dim]`` to the same shape."""
        # A weight of another dtype than x (autocast) would leave the fused kernel.
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and, where asked, normalised queries/keys."""

    def __init__(self, shape: DecoderShape, rotary: Rotary) -> None:
        super().__init__()
        # HAZARD: neither a registered buffer nor an argument of forward. model.to(bfloat16)
        # rounds buffers and to_empty leaves them undefined; FSDP2 casts every floating tensor
        # among a block's arguments to BF16, also inside dataclasses.
        self.rotary = rotary
        width = shape.heads * shape.head_dim
        kv_width = shape.kv_heads * shape.head_dim
        self.head_dim = shape.head_dim
        self.query = nn.Linear(shape.dim, width, bias=False)
        self.key = nn.Linear(shape.dim, kv_width, bias=False)
        self.value = nn.Linear(shape.dim, kv_width, bias=False)
        self.output = nn.Linear(width, shape.dim, bias=False)
        self.query_norm = Norm(shape.head_dim, shape.norm_eps) if shape.qk_norm else None
        self.key_norm = Norm(shape.head_dim, shape.norm_eps) if shape.qk_norm else None

    def forward(self, x: Tensor, documents: Documents) -> Tensor:
        """``x`` ``[B, T, dim]`` to the same shape."""
        query, key, value = (self._heads(part(x)) for part in (self.query, self.key, self.value))
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        rotary = self.rotary.first(x.shape[1])
        query = rotate(query, rotary).to(value.dtype)
        key = rotate(key, rotary).to(value.dtype)
        mixed = attend(query, key, value, documents)
        result: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return result

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.dim, shape.ffn_dim, bias=False)
        self.up = nn.Linear(shape.dim, shape.ffn_dim, bias=False)
        self.down = nn.Linear(shape.ffn_dim, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` ``[..., dim]`` to the same shape."""
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class Block(nn.Module):
    """One layer: attention, then feed-forward, each added to the residual stream.

    The unit to shard and to compile.
    """

    def __init__(self, shape: DecoderShape, rotary: Rotary) -> None:
        super().__init__()
        self.attention_norm = Norm(shape.dim, shape.norm_eps)
        self.attention = Attention(shape, rotary)
        self.ffn_norm = Norm(shape.dim, shape.norm_eps)
        self.ffn = FeedForward(shape)
        self.dropout = shape.dropout
        self.recompute = shape.recompute

    def forward(self, x: Tensor, documents: Documents = None) -> Tensor:
        """``x`` ``[B, T, dim]`` to the same shape."""
        # Checkpointing sits inside the module, so FSDP2's gathering stays outside of the
        # recomputed part.
        if self.recompute == NONE or not (self.training and torch.is_grad_enabled()):
            return self._layer(x, documents)
        result: Tensor = recomputed(
            self._layer,
            x,
            documents,
            selective=self.recompute == SELECTIVE,
            is_random=self.dropout > 0,
        )
        return result

    def _layer(self, x: Tensor, documents: Documents) -> Tensor:
        x = x + self._drop(self.attention(self.attention_norm(x), documents))
        return x + self._drop(self.ffn(self.ffn_norm(x)))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout > 0 else x


class Decoder(nn.Module):
    """Token ids to logits.

    May be built under ``torch.device("meta")``, sharded, and then given memory by ``to_empty``;
    its weights are undefined until :mod:`runner.model.blueprint` or a checkpoint sets them.
    There are no registered buffers.
    """

    def __init__(self, shape: DecoderShape, head_losses: HeadLosses | None = None) -> None:
        super().__init__()
        self.shape = shape
        self._head_losses = head_losses
        self.tap: TokenTap | None = None  # looks at tokens whose logits are never held
        self.embedding = nn.Embedding(shape.vocab_size, shape.dim)
        self._rotary = rotary_table(shape, self.embedding.weight.device)
        self.blocks = nn.ModuleList(Block(shape, self._rotary) for _ in range(shape.layers))
        self.norm = Norm(shape.dim, shape.norm_eps)
        # HAZARD: a tied head is no second owner of the embedding's Parameter. to_empty and
        # fully_shard would give each owner its own memory, and the tie would be silently gone.
        self.head = None if shape.tied_head else nn.Linear(shape.dim, shape.vocab_size, bias=False)

    def reset_buffers(self, device: torch.device | None = None) -> None:
        """Remake what is computed, not learned, on ``device`` (default: the embedding's).

        Safe at any time. ``forward`` does it by itself when its tokens are on another device.
        """
        self._rotary = rotary_table(self.shape, device or self.embedding.weight.device)
        for module in self.modules():
            if isinstance(module, Attention):
                module.rotary = self._rotary

    def forward(
        self, tokens: Tensor, segments: Tensor | None = None, targets: Tensor | None = None
    ) -> Tensor:
        """Logits ``[B, T, vocab_size]`` in the compute dtype.

        Where they are too large to be held, and ``targets`` are given, ``[2, B]`` instead: see
        :class:`runner.model.loss.HeadLosses`.

        ``tokens``: int64 ``[B, T]``, ``T`` at most ``shape.seq_len``. ``segments``: int32
        ``[B, T]``, the document of each token; with it attention does not leave the document.
        Raises ValueError when ``T`` is too large.
        """
        self._prepare(tokens)
        x: Tensor = self.embedding(tokens)
        shape = self.shape
        kind = document_attention(shape.document_attention, tokens.device.type, shape.head_dim)
        documents = documents_of(segments, kind)
        for block in self.blocks:
            x = block(x, documents)
        x = self.norm(x)
        # Inside the root's forward, where FSDP2 has the embedding gathered.
        weight = self.embedding.weight if self.head is None else self.head.weight
        losses = self._head_losses
        if targets is not None and losses is not None and losses.is_wanted(x, weight):
            return losses(x.to(weight.dtype), weight, targets, self.tap)  # as autocast casts it
        return F.linear(x, weight)

    def _prepare(self, tokens: Tensor) -> None:
        length = tokens.shape[1]
        if length > self.shape.seq_len:
            raise ValueError(
                f"{length} tokens a sequence, but data.seq_len={self.shape.seq_len} positions"
            )
        if self._rotary.cos.device != tokens.device:
            self.reset_buffers(tokens.device)
