"""What tells copies of the same state apart, bit by bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.health import rank_checks
from runner.health.rank_checks import PaceInspector, checksum, odd_ones

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small tensors have several of them, and a shorter one at the end."""
    monkeypatch.setattr(rank_checks, "_PIECE", 64)


def tensors(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes: list[tuple[int, ...]] = [(30, 7), (30, 7), (13,), (), (0,), (200,)]
    return [
        torch.randint(-(2**31), 2**31, shape, generator=generator).to(dtype) for shape in shapes
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_copies_are_equal_wherever_they_lie(dtype: torch.dtype) -> None:
    one = tensors(dtype)
    wide = [torch.stack([t, t.flip(0) if t.dim() else t], dim=-1)[..., 0] for t in one]
    assert any(not t.is_contiguous() for t in wide)
    assert checksum(one) == checksum([t.clone() for t in one]) == checksum(wide)
    assert checksum([]) == checksum([])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_flipped_bit_is_seen(dtype: torch.dtype) -> None:
    copy = tensors(dtype)
    before = checksum(copy)
    for tensor in copy:
        raw = tensor.view(-1).view(torch.uint8)
        for at in random.Random(0).sample(range(len(raw)), min(len(raw), 40)):
            for bit in range(8):
                raw[at] ^= 1 << bit
                assert checksum(copy) != before, f"bit {bit} of byte {at}"
                raw[at] ^= 1 << bit
    assert checksum(copy) == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_exchanged_words_are_seen(dtype: torch.dtype) -> None:
    """Neighbours, words a piece apart, and any two."""
    copy = tensors(dtype)
    before, words = checksum(copy), copy[-1]
    pairs = [(0, 1), (3, 67), (0, 64), (63, 64), (0, 199)]
    pairs += [tuple(random.Random(seed).sample(range(200), 2)) for seed in range(100)]
    for a, b in pairs:
        if words[a] != words[b]:
            words[[a, b]] = words[[b, a]]
            assert checksum(copy) != before, (a, b)
            words[[a, b]] = words[[b, a]]
    assert checksum(copy) == before


def test_exchanged_pieces_tensors_and_shapes_are_seen() -> None:
    copy = tensors()
    before = checksum(copy)
    assert checksum([copy[1], copy[0], *copy[2:]]) != before
    words = copy[-1]
    assert checksum([*copy[:-1], torch.cat([words[64:128], words[:64], words[128:]])]) != before
    assert checksum([copy[0].reshape(7, 30), *copy[1:]]) != before
    assert checksum([copy[0].view(torch.int32), *copy[1:]]) != before
    first, second = copy[0].clone(), copy[1].clone()
    first[0, 0], second[0, 0] = copy[1][0, 0], copy[0][0, 0]
    assert checksum([first, second, *copy[2:]]) != before
    assert checksum([words, torch.zeros(3)]) != checksum([words, torch.zeros(4)])


def test_the_numbers_are_the_same_on_every_machine() -> None:
    """And on every device: integers that wrap know no order of adding."""
    words = torch.arange(-300, 300, dtype=torch.int32)
    mask = (1 << 64) - 1
    total = 0
    for start in range(0, 600, 64):
        piece = 0
        for place, word in enumerate(words[start : start + 64].tolist()):
            mixed = ((word + place * rank_checks._PLACE) * rank_checks._FACTOR) & mask
            signed = mixed - (1 << 64) if mixed >> 63 else mixed
            piece += mixed ^ ((signed >> 29) & mask)
        total = (total * rank_checks._FACTOR + piece) & mask
    assert rank_checks.sum_of_words(words).item() & mask == total


def test_the_odd_one_is_named() -> None:
    assert odd_ones([(0, "a"), (0, "a"), (0, "b"), (1, "c"), (1, "c")]) == [2]
    assert odd_ones([(0, "a"), (0, "b")]) == [0, 1]


class Clock:
    """A CUDA event of a device that makes 800 TFLOP in a second."""

    flop = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Clock.flop

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Clock) -> float:
        return (other.at - self.at) / 800e12 * 1e3


def test_the_probe_of_a_gpu_is_long_against_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 25 us for a product and 15 for the way there, a GPU at 80 % would look like one at 88."""

    def mm(one: Tensor, other: Tensor, *, out: Tensor) -> None:
        Clock.flop += 2 * len(one) ** 3

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    options: Any = dict.fromkeys(("ranks", "stragglers", "take_seconds", "report"))
    inspector = PaceInspector(**options, device=torch.device("meta"))
    inspector._device = torch.device("cuda")
    inspector._matrix = torch.ones(rank_checks._PROBE["cuda"][0], 1, device="meta")
    inspector._products = rank_checks._PROBE["cuda"][1]
    assert 1e-3 < inspector._probe() < 5e-3
    assert PaceInspector(**options, device=torch.device("cpu"))._probe() >= 0
