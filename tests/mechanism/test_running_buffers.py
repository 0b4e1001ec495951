"""Buffers that forward passes change: the rule, the gate, and who must leave no trace in them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn

from runner.data.feed import MicroBatch
from runner.engine.buffers import RunningBuffers
from runner.engine.protocol import Engine, MicroStep
from runner.session import parts
from runner.startup.checks import repeated_step, running_buffers, works_of
from runner.system.error import ConfigError
from tests.guests import Residual
from tests.mechanism.test_guest_model import (
    ALONE,
    CPU,
    batch,
    blueprint,
    build,
    same,
    settings,
    state,
    step,
)

pytestmark = pytest.mark.usefixtures("alone")

TARGET = "Residual"


made = lru_cache(blueprint)


def engine(*more: str) -> Engine:
    built = parts.engine(settings(TARGET, *more), made(TARGET, *more), ALONE, CPU)
    built.running.keep(running_buffers(built, works_of(batch(TARGET, [0, 1]), 1, CPU)))
    return built


def buffers(built: Engine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in built.network.named_buffers()}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    differing = [name for name in one if not torch.equal(one[name], other[name])]
    assert one.keys() == other.keys() and not differing, differing


def test_the_trial_finds_what_changes_and_leaves_it_as_it_was() -> None:
    fresh, built = build(TARGET), engine()
    assert_equal(buffers(built), buffers(fresh))
    names = built.running.names
    assert "num_seen" in names and "spread" in names and "stages.1.layers.4.running_var" in names
    assert "stem.1.running_var" in names and "offset" in names and "cache" not in names
    kinds = {name.partition("/")[0] for name in state(built)} - {"param", "exp_avg", "exp_avg_sq"}
    assert kinds == {"buffer", "unsaved_buffer"}
    assert all(check.holds for check in repeated_step(built, works_of(batch(TARGET), 1, CPU)))


def test_a_step_is_that_of_a_plain_loop() -> None:
    built = engine("optim=sgd", "optim.momentum=0.0", "optim.clip=0.0", "optim.weight_decay=0.0")
    plain = Residual()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(built.full(f"param/{name}"))
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.01)
    for seed in range(5):
        step(built, batch(TARGET), seed=seed)
        torch.manual_seed(seed)
        losses, counts = plain.losses(batch(TARGET).inputs())
        optimizer.zero_grad()
        (losses.sum() / counts.sum()).backward()
        optimizer.step()
    others = dict(plain.named_buffers())
    for name, buffer in buffers(built).items():
        torch.testing.assert_close(buffer, others[name], rtol=1e-5, atol=1e-6, msg=name)
    assert int(buffers(built)["num_seen"]) == 5


def test_of_several_micro_batches_it_is_the_mean_by_samples_and_counts_once() -> None:
    parts = [batch(TARGET, [0, 1]), batch(TARGET, [2, 3, 1, None])]
    alone = [engine() for _ in parts]
    for built, part in zip(alone, parts, strict=True):
        step(built, part)
    together = engine()
    before = buffers(together)
    step(together, *parts)
    one, other = (buffers(built) for built in alone)
    for name, buffer in buffers(together).items():
        if buffer.is_floating_point():
            mean = (2 * one[name].double() + 3 * other[name].double()) / 5
            torch.testing.assert_close(buffer, mean.to(buffer.dtype), rtol=1e-6, atol=1e-7)
        else:
            assert buffer == before[name] + (not name.startswith("stem.")), name


def padded() -> MicroBatch:
    return batch(TARGET, [None, None])


def test_a_micro_batch_of_padding_counts_for_nothing() -> None:
    one, other = engine(), engine()
    step(one, batch(TARGET), seed=3)
    step(other, batch(TARGET), padded(), seed=3)
    assert_equal(buffers(one), buffers(other))


@pytest.mark.parametrize("where", ["loss", "buffers alone"])
def test_a_step_that_is_not_applied_leaves_every_bit(where: str) -> None:
    built, bad = engine(), batch(TARGET)
    step(built, batch(TARGET))
    before, shards = buffers(built), state(built)
    if where == "loss":
        bad.fields["image"][0, 0, 0, 0] = float("nan")
    else:
        network = built.network

        def overflow(*_: object) -> None:
            network.get_buffer("spread").fill_(float("inf"))

        network.get_submodule("head").register_forward_hook(overflow)
    assert step(built, bad, skip=True).nonfinite == 1
    assert_equal(before, buffers(built))
    assert same(shards, state(built))


def test_forward_passes_do_not_touch_the_state() -> None:
    """A snapshot on CUDA is still being copied then (P16)."""
    built = engine()
    step(built, batch(TARGET))
    before, seen = state(built), []

    def look(*_: object) -> None:
        seen.append(same(before, state(built)))

    built.network.get_submodule("head").register_forward_hook(look)
    built.accumulate([MicroStep(batch=batch(TARGET), seed=0) for _ in range(2)])
    assert seen == [True, True] and same(before, state(built))


def probe(built: Engine) -> None:
    step(built, batch(TARGET), batch(TARGET, [0, 1]), skip=True, seed=9)


def evaluation(built: Engine) -> None:
    built.evaluate([batch(TARGET)])


def failed_probe(built: Engine) -> None:
    def refuse(module: nn.Module, inputs: object) -> None:
        raise RuntimeError("a kernel that is not there")

    handle = built.network.head.register_forward_pre_hook(refuse)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError):
        step(built, batch(TARGET), skip=True)
    handle.remove()
    built.recover()


def trial(built: Engine) -> None:
    repeated_step(built, works_of(batch(TARGET), 1, CPU))


def before_213() -> pytest.MarkDecorator:
    is_old = Version(torch.__version__) < Version("2.13")
    return pytest.mark.skipif(is_old, reason="torch before 2.13 cannot go on after it")


@pytest.mark.parametrize(
    "look", [probe, evaluation, pytest.param(failed_probe, marks=before_213()), trial]
)
def test_whoever_looks_leaves_no_trace(look: Callable[[Engine], None]) -> None:
    one, other = engine(), engine()
    for seed in range(4):
        step(one, batch(TARGET), seed=seed)
        look(other)
        step(other, batch(TARGET), seed=seed)
    look(other)
    evaluation(other)
    assert_equal(buffers(one), buffers(other))
    assert same(state(one), state(other))


def test_activations_that_are_computed_again_change_nothing() -> None:
    one, other = engine(), engine("compute.recompute=blocks")
    for seed in range(3):
        step(one, batch(TARGET), seed=seed)
        step(other, batch(TARGET), seed=seed)
    assert_equal(buffers(one), buffers(other))


def test_a_loaded_state_goes_on_alike() -> None:
    one, other = engine(), engine("parallel=ddp")
    step(one, batch(TARGET))
    for shard, saved in zip(other.shards(), one.shards(), strict=True):
        shard.local.copy_(saved.local)
    other.finish_load(one.update_counts())
    assert_equal(buffers(one), buffers(other))
    for seed in range(5):
        assert (
            step(one, batch(TARGET), seed=seed).loss == step(other, batch(TARGET), seed=seed).loss
        )
    assert_equal(buffers(one), buffers(other))


def test_a_buffer_that_changes_later_is_refused_in_words() -> None:
    network = nn.Module()
    network.register_buffer("offset", torch.zeros(1))
    network.register_buffer("cache", torch.zeros(1), persistent=False)
    running = RunningBuffers(network)
    assert running.written_by(lambda: None) == []
    network.cache = torch.ones(3)  # grows with the samples
    running.take(torch.ones(1))
    network.get_buffer("offset").add_(1.0)
    with pytest.raises(ConfigError, match=r"changes the buffer offset.*keep its module in eval"):
        running.take(torch.ones(1))
    old = build(TARGET)  # of a run that began with the layer in eval(), by an older version
    with pytest.raises(ConfigError, match=r"changes the buffer num_seen"):
        step(old, batch(TARGET))


class Odd(nn.Module):
    """Buffers of any type, shared, replaced instead of written, empty."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("small", torch.zeros(2, dtype=torch.bfloat16))
        self.register_buffer("wide", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("strided", torch.zeros(4, 3).t())
        self.register_buffer("nothing", torch.zeros(0))
        self.register_buffer("constant", torch.ones(2))
        self.other = nn.Module()
        self.other.register_buffer("shared", self.small)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen | torch.tensor([True, False, True])  # replaced
        self.small += 1
        self.wide += 0.1
        self.strided += x.sum()
        return x * self.small.float().sum() * self.constant.sum()


def test_buffers_of_any_kind() -> None:
    network = Odd()
    running = RunningBuffers(network)
    found = running.written_by(lambda: network(torch.ones(2)))
    assert found == ["constant", "nothing", "seen", "small", "strided", "wide"]
    assert not network.seen.any() and not network.small.any()
    running.keep(found)
    for expected in (1, 2):
        running.drop()
        running.restore()
        network(torch.ones(2))
        running.take(torch.ones(2))
        running.update(torch.zeros(()))
        assert network.small.tolist() == [expected] * 2 and network.seen.tolist()[0]
        assert network.wide.tolist() == [0.1 * expected] * 2
        assert network.strided.stride() == (1, 3) and network.strided[2, 3] == 2 * expected
    assert running.tensors()["buffer/strided"].is_contiguous()


class Making(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.register_buffer("mean", x.mean())
        return x


def test_what_cannot_be_kept_is_told() -> None:
    making = Making()
    with pytest.raises(ConfigError, match="makes the buffer mean"):
        RunningBuffers(making).written_by(lambda: making(torch.ones(2)))
    turned = nn.Module()
    turned.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
    with pytest.raises(ConfigError, match=r"phase is torch\.complex64"):
        RunningBuffers(turned).keep(["phase"])
    with pytest.raises(ConfigError, match=r"hold the buffer other\.mean"):
        RunningBuffers(turned).keep(["other.mean"])


def test_a_wider_step_makes_the_same_of_them() -> None:
    """The twin computes in FP64 on a CPU; its statistics come back."""
    one, other = engine(), engine()
    parts.give_twin(other, settings(TARGET), made(TARGET), ALONE)
    for _ in range(3):
        step(one, batch(TARGET))
        sums = other.accumulate_wider([MicroStep(batch=batch(TARGET), seed=0)])
        scale = torch.tensor(float(sums.count))
        other.apply(skip=torch.zeros(()), grad_scale=scale, learning_rate=0.01)
    for name, buffer in buffers(one).items():
        torch.testing.assert_close(buffers(other)[name], buffer, rtol=1e-4, atol=1e-5)
    assert int(buffers(other)["num_seen"]) == 3
