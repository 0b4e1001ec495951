"""Copies on a GPU have the same checksum as on a CPU."""

from __future__ import annotations

import pytest
import torch

from runner.health.checks import checksum


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_has_the_same_numbers(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    copy = [torch.randn(size, generator=generator).to(dtype) for size in (1, 1000, 1 << 20)]
    assert checksum([tensor.cuda() for tensor in copy]) == checksum(copy)
