"""Optimizers over flat partitions, as DeepSpeed cuts them: the same updates, counts and state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.engine.optimizer import OptimizerSettings, ShardOptimizer
from runner.engine.partitions import PartitionOptimizer
from runner.system.error import ConfigError
from tests.mechanism.test_optimizer import CPU, OPTIM, SHAPES, PerTensor, Together, give, settings

pytestmark = pytest.mark.usefixtures("alone")

ELEMENTWISE = ["adamw", "sgd", "lion", "adam", "rmsprop", "adagrad", "nadam", "schedule-free"]
DIMS = {name: len(shape) for name, shape in SHAPES.items()}
RULES = [{"match": "embedding", "rate": 0.5, "weight_decay": 0.2}]
Place = tuple[Tensor, int]  # the partition, and where the parameter begins in it


def both(
    how: OptimizerSettings,
) -> tuple[dict[str, Tensor], ShardOptimizer, dict[str, Place], PartitionOptimizer]:
    """One over parameters in their shapes, one over a partition for each group, padded."""
    torch.manual_seed(0)
    shards = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    shaped = ShardOptimizer(shards, SHAPES, how, CPU, lambda name, local: (local, 0))
    flat = PartitionOptimizer(shards, DIMS, how, CPU)
    flats, places = [], {}
    for number, of_group in enumerate(flat.handed.param_groups):
        names = [n for n, shard in shards.items() if any(shard is p for p in of_group["params"])]
        parts = [shards[name].reshape(-1) for name in names]
        one = torch.cat([*parts, torch.zeros(3)])
        starts = [sum(part.numel() for part in parts[:at]) for at in range(len(parts))]
        places |= {name: (one, start) for name, start in zip(names, starts, strict=True)}
        flats.append(one)
        flat.handed.param_groups[number]["params"] = [one]
    flat.take(flats, range(len(flats)))
    return shards, shaped, places, flat


def part(shard: Tensor, place: Place, values: Tensor | None = None) -> Tensor:
    whole = place[0] if values is None else values
    return whole[place[1] : place[1] + shard.numel()].view(shard.shape)


def step(
    shards: dict[str, Tensor],
    shaped: ShardOptimizer,
    places: dict[str, Place],
    flat: PartitionOptimizer,
    *,
    skip: bool = False,
) -> None:
    for one, _ in places.values():
        one.grad = torch.zeros_like(one)
    for name, shard in shards.items():
        grads, start = places[name][0].grad, places[name][1]
        assert grads is not None and shard.grad is not None
        grads[start : start + shard.numel()] = shard.grad.reshape(-1)
    gate: dict[str, Any] = {"skip": torch.tensor(float(skip)), "grad_scale": torch.tensor(2.0)}
    flat.prepare(**gate, learning_rate=0.01)
    flat.handed.step()
    shaped.step(**gate, learning_rate=0.01)


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_they_update_as_shaped_ones_do_and_keep_the_same(kind: str) -> None:
    told = settings(kind, groups=RULES, ema=0.9)
    shards, shaped, places, flat = both(told)
    assert flat.waits_for_host == shaped.waits_for_host
    for seed in range(20):
        give(shards, seed, scale=float("nan") if seed == 7 else 1.0)
        step(shards, shaped, places, flat, skip=seed == 7)
    assert flat.update_counts() == set(shaped.update_counts().values()) == {19}
    expected = shaped.tensors() | shaped.uncut()
    kept = flat.uncut()
    for name, shard in shards.items():
        torch.testing.assert_close(part(shard, places[name]), shard, rtol=1e-6, atol=1e-7)
        for kind_of_state, values in flat.tensors(name, places[name][0]).items():
            kept[f"{kind_of_state}/{name}"] = part(shard, places[name], values)
    assert kept.keys() == expected.keys()
    for name, values in kept.items():
        torch.testing.assert_close(values, expected[name], rtol=1e-6, atol=1e-7, msg=name)
        assert values.dtype == expected[name].dtype
    with flat.averaged() as is_other, shaped.averaged():
        assert is_other
        for name, shard in shards.items():
            torch.testing.assert_close(part(shard, places[name]), shard, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["rmsprop", "schedule-free"])
def test_a_loaded_state_goes_on(kind: str) -> None:
    told = settings(kind, groups=RULES)
    runs = [both(told) for _ in range(2)]
    for seed in range(5):
        give(runs[0][0], seed)
        step(*runs[0])
    states = []
    for _, _, places, flat in runs:
        state = {name: held for name, (held, _) in places.items()} | flat.uncut()
        for name, (held, _) in places.items():
            state |= {f"{kind}/{name}": held for kind, held in flat.tensors(name, held).items()}
        states.append(state)
    for name, values in states[1].items():
        values.copy_(states[0][name])
    other = runs[1][3]
    other.set_update_count(5)
    for seed in range(5, 25):
        for of_run in runs:
            give(of_run[0], seed)
            step(*of_run)
    for name in SHAPES:
        assert torch.equal(runs[0][2][name][0], runs[1][2][name][0]), name


class ByDimensions(torch.optim.Optimizer):
    """Decays matrices alone."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.9 if p.dim() > 1 else 1.0).sub_(p.grad, alpha=group["lr"])


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (settings("adafactor"), "optim._target_=adafactor: needs whole parameters"),
        (settings("eight-bit"), "needs whole parameters"),
        (PerTensor, "needs whole parameters"),
        (Together, "updates a parameter by the others too"),
        (ByDimensions, "treats matrices and vectors differently"),
    ],
)
def test_what_needs_more_than_elements_is_refused_with_what_to_use(how: Any, words: str) -> None:
    if not isinstance(how, OptimizerSettings):
        make = how
        how = OptimizerSettings(replace(OPTIM, _target_="x"), lambda groups: make(groups, lr=0.1))
    shards = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    with pytest.raises(ConfigError, match=f"{words}.*use parallel=fsdp, which shards as zero3"):
        PartitionOptimizer(shards, DIMS, how, CPU)
