"""Optimizers over shards: their formulas, the gate, and what of others is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.config.compose import compose
from runner.config.schema import OptimConfig, OptimKind
from runner.engine.builtin_optimizer import is_hidden_matrix, orthogonalised
from runner.engine.optimizer import OptimizerSettings, ShardOptimizer
from runner.engine.user_optimizer import probe_traits
from runner.session import parts
from runner.session.corpus import open_dataset
from runner.session.parts import rules_matched
from runner.system.error import ConfigError
from tests.optimizers import EightBit, ScheduleFree

OPTIM = OptimConfig(beta1=0.9, beta2=0.99, momentum=0.9)
CPU = torch.device("cpu")
SHAPES = {"blocks.0.weight": (6, 4), "embedding.weight": (5, 4), "norm.weight": (4,)}
BUILT_IN = ["adamw", "sgd", "lion", "muon"]
FOREIGN = ["adam", "rmsprop", "adagrad", "nadam", "adafactor", "eight-bit", "schedule-free"]


class Odd(torch.optim.Optimizer):
    """Keeps what a checkpoint has no place for."""

    def __init__(self, params: Any, kind: str) -> None:
        super().__init__(params, {"lr": 0.1, "odd": []})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if self.kind == "group":
                group["odd"].append(1)
            for p in group["params"]:
                self.state[p]["odd"] = [1] if self.kind == "list" else 1
        if self.kind == "other":
            self.state["other"]["x"] = 1  # type: ignore[index]


class Together(torch.optim.Optimizer):
    """A step of the norm of all gradients."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.nn.utils.get_total_norm([p.grad for p in params])
        for p in params:
            p.sub_(p.grad / norm, alpha=self.param_groups[0]["lr"])


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
        "adam": lambda groups: torch.optim.Adam(groups, lr=1.0),
        "nadam": lambda groups: torch.optim.NAdam(groups, lr=1.0),
        "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1.0),
        "eight-bit": lambda groups: EightBit(groups, lr=1.0),
        "schedule-free": lambda groups: ScheduleFree(groups, lr=1.0),
        "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1.0),
        "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1.0, initial_accumulator_value=2),
    }
    if kind in makes:
        return OptimizerSettings(replace(OPTIM, _target_=kind, **more), makes[kind])
    return OptimizerSettings(replace(OPTIM, kind=OptimKind(kind), **more))


def made(told: OptimizerSettings) -> tuple[dict[str, Tensor], ShardOptimizer]:
    torch.manual_seed(0)
    shards = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    return shards, ShardOptimizer(shards, SHAPES, told, CPU, lambda name, local: (local, 0))


def state_of(optimizer: ShardOptimizer) -> dict[str, Tensor]:
    return optimizer.tensors() | optimizer.uncut()


def give(shards: dict[str, Tensor], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for shard in shards.values():
        shard.grad = torch.randn(shard.shape, generator=generator) * scale


def step(optimizer: ShardOptimizer, *, skip: bool = False, scale: float = 1.0) -> None:
    optimizer.step(
        skip=torch.tensor(float(skip)), grad_scale=torch.tensor(scale), learning_rate=0.01
    )


@pytest.mark.parametrize("kind", [*BUILT_IN, *FOREIGN])
def test_a_gated_step_changes_no_bit_and_a_restored_one_goes_on(kind: str) -> None:
    shards, optimizer = made(settings(kind))
    for seed in range(3):
        give(shards, seed)
        step(optimizer)
    state = {n: t.clone() for n, t in (shards | state_of(optimizer)).items()}
    counts = optimizer.update_counts()
    assert set(counts.values()) == {3}
    give(shards, 3, scale=float("nan"))
    step(optimizer, skip=True)
    for name, tensor in (shards | state_of(optimizer)).items():
        assert torch.equal(tensor, state[name]), name
    assert optimizer.update_counts() == counts
    # Another process loads it.
    others, again = made(settings(kind))
    for name, tensor in (others | state_of(again)).items():
        assert tensor.dtype == state[name].dtype
        tensor.copy_(state[name])
    again.set_update_counts(counts)
    for seed in range(4, 24):
        for of, one in ((shards, optimizer), (others, again)):
            give(of, seed, scale=2.0)
            step(one, scale=2.0)
    for name, tensor in (shards | state_of(optimizer)).items():
        assert torch.equal(tensor, (others | state_of(again))[name]), name
    assert again.update_counts() == optimizer.update_counts()


@pytest.mark.parametrize("kind", FOREIGN)
def test_it_does_what_it_does_in_a_loop_of_its_own(kind: str) -> None:
    told = settings(kind)
    shards, optimizer = made(told)
    plain = {name: shard.clone() for name, shard in shards.items()}
    assert told.make is not None
    own = told.make([{"params": list(plain.values()), "names": list(plain)}])
    for group in own.param_groups:
        group["lr"] = 0.01
    for seed in range(20):
        for one in (shards, plain):
            give(one, seed)
        step(optimizer)
        own.step()
    for name, shard in shards.items():
        assert torch.equal(shard, plain[name]), name


@pytest.mark.parametrize("kind", FOREIGN)
def test_gone_back_to_the_beginning_it_begins_anew(kind: str) -> None:
    shards, optimizer = made(settings(kind))
    begin = {name: shard.clone() for name, shard in shards.items()}
    state = {name: tensor.clone() for name, tensor in state_of(optimizer).items()}
    counts = optimizer.update_counts()  # as a checkpoint of step 0 has them
    ends = []
    for _ in range(2):
        for seed in range(5):
            give(shards, seed)
            step(optimizer)
        ends.append(torch.cat([shard.flatten() for shard in shards.values()]))
        for name, tensor in (shards | state_of(optimizer)).items():
            tensor.copy_((begin | state)[name])
        optimizer.set_update_counts(counts)
    assert torch.equal(*ends)


@pytest.mark.parametrize("kind", [*BUILT_IN, "rmsprop", "adafactor"])
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
        {"match": "embedding", "rate": 0.0},
        {"match": r"\.0\.", "rate": 0.5, "weight_decay": 0.0},
    ]
    shards, optimizer = made(settings("sgd", groups=rules))
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
        (lambda groups: torch.optim.LBFGS(groups[0]["params"]), "closure"),
        (lambda groups: Odd(groups, "list"), "keeps 'odd' for a parameter, which is list"),
        (lambda groups: Odd(groups, "group"), "keeps odd for all parameters together"),
        (lambda groups: Odd(groups, "other"), "keeps other for all parameters together"),
    ],
)
def test_state_that_a_checkpoint_cannot_hold_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"optim._target_=x.*{words}"):
        probe_traits(make, frozenset({2}), "x")


@pytest.mark.parametrize(
    ("make", "elementwise", "separable", "numbers"),
    [
        (lambda groups: torch.optim.RMSprop(groups, lr=0.1), True, True, ()),
        (lambda groups: torch.optim.Rprop(groups, lr=0.1), True, True, ()),
        (lambda groups: torch.optim.NAdam(groups, lr=0.1), True, True, ()),
        (lambda groups: ScheduleFree(groups, lr=0.1), True, True, ("k", "weight_sum")),
        (lambda groups: PerTensor(groups, lr=0.1), False, True, ()),
        (lambda groups: torch.optim.Adafactor(groups, lr=0.1), False, True, ()),
        (lambda groups: EightBit(groups, lr=0.1), False, True, ()),
        (lambda groups: Together(groups, lr=0.1), True, False, ()),
    ],
)
def test_how_it_works_is_found_out(
    make: Any, elementwise: bool, separable: bool, numbers: tuple[str, ...]
) -> None:
    found = probe_traits(make, frozenset({1, 2}), "x")
    assert (found.is_elementwise, found.is_separable) == (elementwise, separable)
    assert found.numbers == numbers


def test_what_needs_all_parameters_is_refused_on_shards() -> None:
    told = OptimizerSettings(replace(OPTIM, _target_="x"), lambda groups: Together(groups, lr=0.1))
    shards = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    ShardOptimizer(shards, SHAPES, told, CPU, lambda name, local: (local, 0))
    with pytest.raises(ConfigError, match="updates a parameter from others as well"):
        ShardOptimizer(shards, SHAPES, told, CPU, lambda name, local: (local, 0), is_cut=True)


def test_what_it_keeps_has_the_types_and_shapes_that_it_gave_it() -> None:
    _, optimizer = made(settings("eight-bit"))
    told = {name: (t.dtype, tuple(t.shape)) for name, t in state_of(optimizer).items()}
    assert told["codes/blocks.0.weight"] == (torch.uint8, (6, 4))
    assert told["scale/blocks.0.weight"] == (torch.float32, ())
    assert told["rows/blocks.0.weight"] == (torch.float64, (6, 1))
    assert told["exp_avg/norm.weight"] == (torch.float32, (4,)) and "codes/norm.weight" not in told


def test_who_has_to_wait_for_the_host() -> None:
    assert not made(settings("muon"))[1].waits_for_host
    assert made(settings("rmsprop"))[1].waits_for_host


def test_a_rule_that_takes_nothing_is_refused_and_the_others_are_counted() -> None:
    def matched(*rules: str) -> list[tuple[str, int]]:
        config = compose(["model=tiny", "data=synthetic", f"optim.groups=[{', '.join(rules)}]"])
        return rules_matched(config.optim, parts.blueprint(config, open_dataset(config)))

    assert matched("{match: embedding, rate: 2}", "{match: norm, rate: 3}") == [
        ("embedding", 1),
        ("norm", 5),
    ]
    with pytest.raises(ConfigError, match=r"groups\[0\]: match='embeding' takes no tensor.*no tr"):
        matched("{match: embeding, rate: 2}")
    with pytest.raises(ConfigError, match=r"groups\[1\]: match='norm' .* an earlier rule takes"):
        matched("{match: '', rate: 2}", "{match: norm, rate: 3}")
