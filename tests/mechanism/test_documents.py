"""Attention within documents without a mask of all pairs, and what is computed again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.attention.flex_attention as torchs
from torch import Tensor, nn

from runner.model.decoder import Decoder, DecoderShape
from runner.model.recompute import recompute_units
from runner.model.segments import (
    FLEX,
    MASK,
    attend,
    block_mask,
    document_attention,
    documents_of,
    segment_mask,
)

SHAPE = DecoderShape(vocab_size=32, dim=32, layers=2, heads=2, kv_heads=1, ffn_dim=64, seq_len=300)


@pytest.fixture(autouse=True)
def trains_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses flex attention with gradients on a CPU, where it computes them all the same."""
    monkeypatch.setattr(torchs, "_validate_device", lambda *tensors: None)


def documents(rows: int, length: int, seed: int = 0) -> Tensor:
    """Numbers of documents of random lengths, int32 ``[rows, length]``."""
    generator = torch.Generator().manual_seed(seed)
    begins = torch.rand(rows, length, generator=generator) < 4 / length
    return begins.cumsum(dim=1).to(torch.int32)


@pytest.mark.parametrize("length", [1, 40, 128, 300])
@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_both_ways_are_equal_and_so_are_their_gradients(length: int, heads: int) -> None:
    torch.manual_seed(length)
    query = torch.randn(2, heads, length, 16, requires_grad=True)
    key, value = (torch.randn(2, 2, length, 16, requires_grad=True) for _ in range(2))
    upstream = torch.randn_like(query)
    found = []
    for kind in (MASK, FLEX):
        mixed = attend(query, key, value, documents_of(documents(2, length), kind))
        grads = torch.autograd.grad(mixed, (query, key, value), upstream)
        found.append((mixed, *grads))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [1, 127, 128, 129, 700])
@pytest.mark.parametrize("seed", range(4))
def test_no_block_is_left_out_and_full_ones_are_full(length: int, seed: int) -> None:
    """On a CPU the blocks are not looked at: they are held against the mask here."""
    segments = documents(3, length, seed)
    if seed == 3:  # numbers that come again, and fall
        segments = segments % 3
    made = block_mask(segments)
    num = -(-length // 128)
    pairs = torch.zeros(3, num * 128, num * 128, dtype=torch.bool)
    pairs[:, :length, :length] = segment_mask(segments)[:, 0]
    blocks = pairs.view(3, num, 128, num, 128)
    partial = listed(made.kv_num_blocks, made.kv_indices)
    assert made.full_kv_num_blocks is not None and made.full_kv_indices is not None
    full = listed(made.full_kv_num_blocks, made.full_kv_indices)
    assert not (partial & full).any()
    inside = torch.zeros(num * 128, dtype=torch.bool)
    inside[:length] = True
    # Of a full block nothing is asked, but for what lies behind the end.
    is_full = (blocks | ~(inside[:, None] & inside).view(num, 128, num, 128)).all(dim=4).all(dim=2)
    assert not (full & ~is_full).any()
    assert torch.equal(blocks.any(dim=4).any(dim=2) & ~(partial | full), torch.zeros_like(full))
    if seed != 3:
        assert torch.equal(blocks.any(dim=4).any(dim=2), partial | full), "none too many"


def listed(counts: Tensor, which: Tensor) -> Tensor:
    """Bool ``[B, N, N]`` of what a block mask lists."""
    found = torch.zeros(which.shape[0], *which.shape[2:], dtype=torch.bool)
    for row in range(which.shape[0]):
        for query in range(which.shape[2]):
            found[row, query, which[row, 0, query, : counts[row, 0, query]].long()] = True
    return found


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_decoder_takes_either() -> None:
    found = []
    for kind in (MASK, FLEX):
        torch.manual_seed(0)
        decoder = Decoder(replace(SHAPE, document_attention=kind))
        tokens = torch.arange(600).view(2, 300) % 32
        logits = decoder(tokens, documents(2, 300))
        logits.square().mean().backward()
        found.append([logits.detach(), *(p.grad for p in decoder.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_what_auto_means() -> None:
    assert document_attention("auto", "cpu", 64) == MASK
    assert document_attention("auto", "cuda", 8) == MASK, "too few for its kernels"
    assert document_attention(FLEX, "cpu", 64) == FLEX


class Net(nn.Module):
    """Blocks from elsewhere, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16))
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def kept_bytes(work: Iterator[Tensor]) -> int:
    """What is kept for backward while ``work`` makes one tensor, without parameters."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        next(work)
    return sum(kept.values())


def test_blocks_from_elsewhere_are_computed_again_bit_for_bit() -> None:
    found = []
    for kind in ("none", "blocks", "selective"):
        torch.manual_seed(0)
        net = Net()
        names = [name for name, _ in net.named_parameters()]
        if kind != "none":
            recompute_units(net.layers, selective=kind == "selective")
        assert [name for name, _ in net.named_parameters()] == names
        x = torch.randn(8, 16, requires_grad=True)
        torch.manual_seed(1)
        made = net(x)
        made.square().sum().backward()
        found.append([made.detach(), x.grad, *(p.grad for p in net.parameters())])
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_selective_changes_no_bit_and_keeps_less(dropout: float) -> None:
    kinds = ["none", "selective", "blocks"]
    found, kept = [], []
    for recompute in kinds:
        torch.manual_seed(0)
        shape = replace(SHAPE, dropout=dropout, recompute=recompute)
        decoder = Decoder(shape)
        torch.manual_seed(1)
        tokens = torch.arange(600).view(2, 300) % 32
        made: list[Tensor] = []
        kept.append(kept_bytes(made.append(decoder(tokens)) or made[0] for _ in range(1)))
        made[0].square().mean().backward()
        found.append([made[0].detach(), *(p.grad for p in decoder.parameters())])
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))
    assert kept[2] < kept[0], "blocks keep their inputs alone"
