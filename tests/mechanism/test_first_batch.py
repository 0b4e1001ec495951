"""The first micro-batch of a step: its gradient, alone, and what the routers in it choose."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from runner.config.schema import OptimConfig
from runner.engine.activations import QUANTILES, _quantiles
from runner.engine.first_batch import FirstBatch, routers_of
from runner.explain.layers import LayerLog, LayerTable, _balance, gradient_noise
from runner.model.loss import HeadLosses
from runner.model.objective import GuestObjective
from runner.train.agreed_step import Measured
from tests.hf_folder import experts
from tests.uncommon_guests import TopTwo

CPU = torch.device("cpu")


def objective_of(network: nn.Module) -> GuestObjective:
    return GuestObjective(
        network, head_losses=HeadLosses(fp32=True, z_loss=0.0, most_bytes=0), dtype=None
    )


def batch(seed: int, vocab_size: int) -> dict[str, Tensor]:
    ids = torch.randint(vocab_size, (3, 17), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


def seen(objective: GuestObjective, units: list[nn.Module], factor: float = 1.0) -> Tensor:
    """What is measured of a step of three micro-batches, whose gradients are ``factor`` high."""
    look = FirstBatch(objective, units, is_compiled=False, factor=factor)
    look.begin(is_inside=True)
    counts = []
    for seed in range(3):
        _, training, count, _ = objective(batch(seed, 12))
        (factor * training.sum()).backward()
        counts.append(count)
    return look.end(counts, CPU)


def test_the_gradient_of_the_first_micro_batch_alone_is_measured() -> None:
    torch.manual_seed(0)
    network = TopTwo(12)
    objective = objective_of(network)
    objective(batch(0, 12))[1].sum().backward()
    alone = sum(
        float(p.grad.double().square().sum()) for p in network.parameters() if p.grad is not None
    )
    network.zero_grad()
    square, count, *loads = seen(objective, [network.experts[0], network.attention], 4.0).tolist()
    assert (square, count) == (pytest.approx(alone, rel=1e-5), 48)
    assert len(loads) == 8 and sum(loads) == 48  # it does not tell that it takes two
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    left = [
        getattr(one, name, None)
        for one in (*objective.modules(), *network.parameters())
        for name in hooks
    ]
    assert not any(left)


def test_an_error_while_looking_ends_no_step() -> None:
    objective = objective_of(TopTwo(12))
    look = FirstBatch(objective, [], is_compiled=False, factor=1.0)
    look._at_gradient = lambda gradient: 1 / 0  # type: ignore[assignment,return-value]
    look.begin(is_inside=True)
    _, training, count, _ = objective(batch(0, 12))
    training.sum().backward()
    with pytest.raises(ZeroDivisionError):
        look.end([count], CPU)
    look.begin(is_inside=False)
    assert look.end([], CPU).tolist() == [0.0] * 10


def test_noise_and_signal_are_those_of_the_samples() -> None:
    random = np.random.default_rng(0)
    true, sizes = random.standard_normal(400) / 10, np.abs(random.standard_normal(400))
    found = []
    for _ in range(300):
        terms = true + sizes * random.standard_normal((64, 400))
        small, large = (float((part.mean(axis=0) ** 2).sum()) for part in (terms[:8], terms))
        found.append(gradient_noise(small, 8, large, 64))
    noise, signal = np.mean(found, axis=0)
    assert noise == pytest.approx((sizes**2).sum(), rel=0.03)
    assert signal == pytest.approx((true**2).sum(), rel=0.1)


def test_quantiles_are_those_of_the_absolute_values() -> None:
    values = torch.randn(1001)
    expected = torch.quantile(values.abs(), torch.tensor(QUANTILES))
    assert torch.allclose(_quantiles(values), expected)


def test_the_routers_of_a_model_of_transformers_are_known(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(experts(tmp_path))
    network = transformers.AutoModelForCausalLM.from_config(config)
    assert [(one.num_experts, one.num_chosen) for one in routers_of(network)] == [(4, 2)] * 2
    numbers = seen(objective_of(network), list(network.model.layers)).tolist()
    assert len(numbers) == 10 and sum(numbers[2:6]) == sum(numbers[6:]) == 2 * 48


def test_a_collapsed_router_is_told_once_it_stays_so() -> None:
    assert _balance([0.25] * 4, 1) == pytest.approx(1) and _balance([1.0, 0, 0, 0], 1) == 0
    assert _balance([0.5, 0.5, 0, 0], 2) == pytest.approx(0)
    told: list[Any] = []
    table = LayerTable(nn.Linear(1, 1), [], {"weight": (1, 1), "bias": (1,)}, OptimConfig(),
                       num_units=0, experts={"blocks.3.router": (4, 1)})  # fmt: skip
    log = object.__new__(LayerLog)
    log._table, log._num_collapsed = table, 0
    log._run = SimpleNamespace(written=SimpleNamespace(report=told.append))  # type: ignore[assignment]
    for step, load in enumerate(3 * [[97.0, 3, 0, 0]] + [[25.0] * 4] + 2 * [[0, 0, 1.0, 0]]):
        numbers = (0.0,) * table._first + (math.nan, math.nan, *load, 0.0, 0.0)
        measured = Measured(step=step, numbers=numbers, length=0, tokens=8, grad_norm=1.0)
        log._warn_of_collapse(measured, table.model(measured)["expert_balance"])
    (incident,) = told
    assert incident.step == 2
    assert "blocks.3.router has collapsed: 97% of its choices are expert 0" in incident.reason
    assert "2 of 4 experts got no token" in incident.reason
