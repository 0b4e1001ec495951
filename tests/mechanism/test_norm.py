"""The norm of gradients is right however many elements there are."""

from __future__ import annotations

import math

import pytest
import torch

from runner.engine.forward import squared_norm
from tests.rows import full

CPU = torch.device("cpu")


@pytest.mark.parametrize("numel", [1, 1000, (1 << 16) + 1, full(1 << 26, id="2^26")])
def test_no_element_is_lost(numel: int) -> None:
    """In one FP32 sum of squares 0.5 % of the norm go missing at 2^26 elements."""
    generator = torch.Generator().manual_seed(numel)
    gradient = torch.rand(numel, generator=generator).mul_(1e-3)
    square = squared_norm([gradient], CPU)
    assert square.dtype == torch.float64 and square.dim() == 0
    exact = sum(float(part.double().square().sum()) for part in torch.split(gradient, 1 << 20))
    assert math.sqrt(square.item()) == pytest.approx(math.sqrt(exact), rel=2e-6)


def test_roundings_that_all_go_one_way_stay_small() -> None:
    square = squared_norm([torch.full((1 << 22,), 0.7e-3)], CPU)
    exact = float(torch.tensor(0.7e-3).double().square()) * (1 << 22)
    assert math.sqrt(square.item()) == pytest.approx(math.sqrt(exact), rel=1e-4)


def test_it_is_of_all_gradients_together() -> None:
    parts = [torch.randn(shape) for shape in [(3, 5), (70_000,), (), (0,), (300, 300)]]
    exact = float(sum(part.double().square().sum() for part in parts))
    assert squared_norm(parts, CPU).item() == pytest.approx(exact, rel=1e-6)
    turned = [part.t() if part.dim() == 2 else part for part in parts]
    assert squared_norm(turned, CPU).item() == pytest.approx(exact, rel=1e-6)
    assert squared_norm([], CPU).item() == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_what_is_not_finite_or_overflows_shows(bad: float) -> None:
    """AdamW's second moments are FP32 and hold squares: 1e30 would end as Inf there."""
    gradient = torch.zeros(100_000)
    gradient[77_777] = bad
    assert not squared_norm([torch.ones(3), gradient], CPU).isfinite()
