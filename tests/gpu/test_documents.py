"""Flex attention's kernels against the mask of all pairs."""

from __future__ import annotations

import pytest
import torch

from runner.model.segments import FLEX, MASK, attend, document_attention, documents_of
from tests.mechanism.test_documents import documents


@pytest.mark.parametrize(("dtype", "apart"), [(torch.float32, 2e-2), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("length", [128, 1000])
def test_both_ways_are_equal_and_so_are_their_gradients(
    dtype: torch.dtype, apart: float, length: int
) -> None:
    if document_attention("auto", "cuda", 64) != FLEX:
        pytest.skip("needs Triton, with which torch makes flex attention's kernels")
    torch.manual_seed(0)
    query = torch.randn(2, 8, length, 64, device="cuda", dtype=dtype, requires_grad=True)
    key, value = (
        torch.randn(2, 4, length, 64, device="cuda", dtype=dtype, requires_grad=True)
        for _ in range(2)
    )
    upstream = torch.randn_like(query)
    segments = documents(2, length).cuda()
    found = []
    for kind in (MASK, FLEX):
        mixed = attend(query, key, value, documents_of(segments, kind))
        grads = torch.autograd.grad(mixed, (query, key, value), upstream)
        found.append((mixed, *grads))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=apart, atol=apart)
