"""Optimizers over shards: their formulas, the gate, and what of others is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from runner.engine.adamw import AdamWSettings
from runner.engine.found_state import found_kinds, require_elementwise
from runner.engine.muon import is_hidden_matrix, orthogonalised
from runner.engine.optimizer import OptimizerSettings, ParameterRule, ShardOptimizer
from runner.system.error import ConfigError

ADAMW = AdamWSettings(beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)
CPU = torch.device("cpu")
SHAPES = {"blocks.0.weight": (6, 4), "embedding.weight": (5, 4), "norm.weight": (4,)}
BUILT_IN = ["adamw", "sgd", "lion", "muon"]


class PerTensor(torch.optim.Optimizer):
    """As LARS: a step of the gradient's norm."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


def settings(kind: str, **more: Any) -> OptimizerSettings:
    makes: dict[str, Any] = {
        "nadam-like": lambda groups: torch.optim.Adam(groups, lr=1.0),
        "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1.0),
        "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1.0, initial_accumulator_value=2),
    }
    if kind in makes:
        more |= {"make": makes[kind], "name": kind}
        kind = "other"
    return OptimizerSettings(kind=kind, adamw=ADAMW, momentum=0.9, **more)


def made(told: OptimizerSettings) -> tuple[dict[str, Tensor], ShardOptimizer]:
    torch.manual_seed(0)
    shards = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    dims = {name: len(shape) for name, shape in SHAPES.items()}
    return shards, ShardOptimizer(shards, dims, told, CPU, lambda name, local: (local, 0))


def give(shards: dict[str, Tensor], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for shard in shards.values():
        shard.grad = torch.randn(shard.shape, generator=generator) * scale


def step(optimizer: ShardOptimizer, *, skip: bool = False, scale: float = 1.0) -> None:
    optimizer.step(
        skip=torch.tensor(float(skip)), grad_scale=torch.tensor(scale), learning_rate=0.01
    )


@pytest.mark.parametrize("kind", [*BUILT_IN, "nadam-like", "rmsprop", "adagrad"])
def test_a_gated_step_changes_no_bit_and_a_restored_one_goes_on(kind: str) -> None:
    shards, optimizer = made(settings(kind))
    for seed in range(3):
        give(shards, seed)
        step(optimizer)
    state = {n: t.clone() for n, t in (shards | optimizer.tensors()).items()}
    counts = optimizer.update_counts()
    assert set(counts.values()) == {3}
    give(shards, 3, scale=float("nan"))
    step(optimizer, skip=True)
    for name, tensor in (shards | optimizer.tensors()).items():
        assert torch.equal(tensor, state[name]), name
    assert optimizer.update_counts() == counts
    # Another process loads it.
    others, again = made(settings(kind))
    for name, tensor in (others | again.tensors()).items():
        tensor.copy_(state[name])
    again.set_update_counts(counts)
    for seed in range(4, 24):
        for of, one in ((shards, optimizer), (others, again)):
            give(of, seed, scale=2.0)
            step(one, scale=2.0)
    for name, tensor in (shards | optimizer.tensors()).items():
        assert torch.equal(tensor, (others | again.tensors())[name]), name
    assert again.update_counts() == optimizer.update_counts()


@pytest.mark.parametrize("kind", [*BUILT_IN, "rmsprop"])
def test_the_divisor_is_that_of_the_gradients(kind: str) -> None:
    found = []
    for scale in (1.0, 4.0):  # a power of two: the same bits
        shards, optimizer = made(settings(kind))
        for seed in range(5):
            give(shards, seed, scale)
            step(optimizer, scale=scale)
        found.append(torch.cat([shard.flatten() for shard in shards.values()]))
    assert torch.equal(*found)


def test_lion_is_the_papers() -> None:
    shards, optimizer = made(settings("lion"))
    expected = {name: (shard.clone(), torch.zeros_like(shard)) for name, shard in shards.items()}
    for seed in range(20):
        give(shards, seed)
        for name, (p, m) in expected.items():
            grad = shards[name].grad
            assert grad is not None
            decay = 0.1 if p.dim() > 1 else 0.0
            p -= 0.01 * (torch.sign(0.9 * m + 0.1 * grad) + decay * p)
            m.mul_(0.99).add_(grad, alpha=1 - 0.99)
        step(optimizer)
    for name, (p, _) in expected.items():
        torch.testing.assert_close(shards[name], p, rtol=1e-5, atol=1e-6)


def test_muon_is_torchs_for_matrices_of_layers_and_adamw_for_the_rest() -> None:
    shards, optimizer = made(settings("muon"))
    matrix = torch.nn.Parameter(shards["blocks.0.weight"].clone())
    torchs = torch.optim.Muon(
        [matrix], lr=0.01, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    others, same = made(settings("adamw"))
    for seed in range(20):
        give(shards, seed)
        give(others, seed)
        matrix.grad = shards["blocks.0.weight"].grad
        torchs.step()
        step(optimizer)
        step(same)
    # torch iterates in BF16.
    torch.testing.assert_close(shards["blocks.0.weight"], matrix.data, rtol=0.02, atol=0.01)
    assert torch.equal(shards["norm.weight"], others["norm.weight"])
    assert torch.equal(shards["embedding.weight"], others["embedding.weight"])
    assert set(optimizer.tensors()) == {
        "momentum_buffer/blocks.0.weight",
        *(f"{kind}/{name}" for kind in ("exp_avg", "exp_avg_sq") for name in list(SHAPES)[1:]),
    }


def test_the_average_follows_applied_steps_alone_and_can_stand_in() -> None:
    shards, optimizer = made(settings("adamw", ema=0.75))
    with optimizer.averaged() as is_there:
        assert not is_there, "it has not begun"
    expected: dict[str, Tensor] = {}
    for seed in range(20):
        give(shards, seed)
        step(optimizer, skip=seed % 5 == 3)
        if seed % 5 == 3:
            continue
        for name, shard in shards.items():
            before = expected.get(name, shard)
            expected[name] = before + (shard - before) * 0.25
    weights = {name: shard.clone() for name, shard in shards.items()}
    with optimizer.averaged() as is_there:
        assert is_there
        for name, shard in shards.items():
            torch.testing.assert_close(shard, expected[name])
            assert torch.equal(shard, optimizer.tensors()[f"ema/{name}"])
    for name, shard in shards.items():
        assert torch.equal(shard, weights[name]), name


@pytest.mark.parametrize("shape", [(8, 8), (4, 16), (16, 4)])
def test_singular_values_come_to_lie_near_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    values = torch.linalg.svdvals(orthogonalised(torch.randn(shape)))
    assert float(values.min()) > 0.5 and float(values.max()) < 1.3


@pytest.mark.parametrize(
    ("name", "dims", "expected"),
    [
        ("blocks.0.attention.query.weight", 2, True),
        ("model.layers.11.mlp.up_proj.weight", 2, True),
        ("0.weight", 2, True),
        ("blocks.0.norm.weight", 1, False),
        ("embedding.weight", 2, False),
        ("lm_head.weight", 2, False),
    ],
)
def test_which_matrices_are_for_muon(name: str, dims: int, expected: bool) -> None:
    assert is_hidden_matrix(name, dims) is expected


def test_rules_set_rate_and_decay_by_name() -> None:
    rules = [
        ParameterRule(match="embedding", rate=0.0),
        ParameterRule(match=r"\.0\.", rate=0.5, weight_decay=0.0),
    ]
    shards, optimizer = made(settings("sgd", rules=rules))
    before = {name: shard.clone() for name, shard in shards.items()}
    give(shards, 0)
    step(optimizer)
    assert torch.equal(shards["embedding.weight"], before["embedding.weight"])
    for name, factor in (("blocks.0.weight", 0.5), ("norm.weight", 1.0)):
        grad = shards[name].grad
        assert grad is not None
        torch.testing.assert_close(shards[name], before[name] - 0.01 * factor * grad)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda groups: torch.optim.NAdam(groups, lr=1.0), "keeps 'mu_product'"),
        (lambda groups: torch.optim.Adafactor(groups, lr=1.0), "keeps 'row_var'"),
        (lambda groups: torch.optim.Rprop(groups, lr=1.0), ""),
        (lambda groups: torch.optim.LBFGS(groups[0]["params"]), "closure"),
    ],
)
def test_state_that_a_checkpoint_cannot_hold_is_refused(make: Any, words: str) -> None:
    if not words:
        assert found_kinds(make, 2, "x") == ("prev", "step_size")
        return
    with pytest.raises(ConfigError, match=f"optim._target_=x.*{words}"):
        found_kinds(make, 2, "x")


def test_what_looks_at_neighbours_is_refused_on_shards() -> None:
    require_elementwise(lambda groups: torch.optim.RMSprop(groups, lr=0.1), "rmsprop")
    with pytest.raises(ConfigError, match="updates an element by its neighbours"):
        require_elementwise(lambda groups: PerTensor(groups, lr=0.1), "lars")


def test_who_has_to_wait_for_the_host() -> None:
    assert not made(settings("muon"))[1].waits_for_host
    assert made(settings("rmsprop"))[1].waits_for_host
