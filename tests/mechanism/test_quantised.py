"""Quantised weights under a guard: found, held by a digest, refused.

torch's own tensor of two tensors stands for those of a library.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from runner import Guard, Ring
from runner.model.quantised import QuantisedWeight, inexact, keep_layout, quantised_weights
from runner.system.error import ConfigError

NUM = 8


class Net(nn.Module):
    """A frozen weight of two tensors, and an adapter."""

    def __init__(self, value: float = 0.5, *, is_frozen: bool = True) -> None:
        super().__init__()
        weight = TwoTensor(torch.full((4, 4), value), torch.full((4, 4), value))
        self.weight = nn.Parameter(weight, requires_grad=not is_frozen)
        torch.manual_seed(0)
        self.adapter = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        return x @ weight.a + self.adapter(x)


class Packed(nn.Module):
    """As layers of GPTQ and AWQ: integers and scales in buffers; a bias."""

    def __init__(self, value: int = 0x12345678) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.full((4, 1), value, dtype=torch.int32))
        self.register_buffer("scales", torch.full((4,), 0.1))
        self.bias = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held: Any = self
        wide = (held.qweight >> torch.arange(0, 16, 4)) & 15
        return x @ (wide * held.scales).T + self.bias


def train(out: Path, net: nn.Module, num: int = NUM, *, merge_at: int = -1) -> Guard:
    # As many scripts do: all parameters, also the frozen ones.
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    guard = Guard(out, model=net, optimizer=optimizer, every=2)
    for count, batch in enumerate(guard.over([torch.ones(2, 4)] * num)):
        loss = net(batch).square().mean()
        loss.backward()
        if guard.ok(loss):
            optimizer.step()
        optimizer.zero_grad()
        if count == merge_at:
            with torch.no_grad():
                net.weight.add_(1.0)
    guard.close()
    return guard


def test_a_checkpoint_holds_the_adapter_and_a_digest(tmp_path: Path) -> None:
    first = train(tmp_path, Net(), 4)
    assert sorted(first._sharded.parameters) == ["adapter.bias", "adapter.weight"]
    again = train(tmp_path, Net())
    assert again.resumed_step == 4 and again.updates == NUM


def test_another_base_is_refused(tmp_path: Path) -> None:
    first = train(tmp_path, Net(), 4)._sharded._base.digest
    with pytest.raises(ConfigError) as refused:
        train(tmp_path, Net(0.25))
    other = quantised_weights([("", Net(0.25))])
    assert f"have digest {first}, those of this model " in str(refused.value)
    assert len(other) == 1 and "Load the model that the run began with" in str(refused.value)


def test_integers_in_buffers_are_a_base(tmp_path: Path) -> None:
    """No checkpoint has them, nor another copy; another base is refused."""

    def net(*value: int) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), Packed(*value))

    first = train(tmp_path, net(), 4)._sharded
    assert sorted(first.parameters) == ["0.bias", "0.weight", "1.bias"]
    assert "1.qweight" not in first.buffers and "1.scales" not in first.buffers
    assert train(tmp_path, net()).resumed_step == 4
    for value in (0x12345679, 0):
        with pytest.raises(ConfigError, match=r"have digest .* Load the model that the run began"):
            train(tmp_path, net(value), 10)


def test_no_base_where_there_was_one_is_refused(tmp_path: Path) -> None:
    train(tmp_path, Net(), 4)
    plain = Net()
    plain.weight = nn.Parameter(torch.full((4, 4), 0.5), requires_grad=False)
    plain.weight.a = plain.weight.data  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="those of this model none"):
        train(tmp_path, plain)


def test_a_base_that_the_loop_changes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'weight', a quantised weight, and no checkpoint holds"):
        train(tmp_path, Net(), merge_at=2)


def test_a_base_that_is_trained_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"freeze it .* and train adapters"):
        train(tmp_path, Net(is_frozen=False))


def test_a_base_that_is_not_quantised_yet_is_refused(tmp_path: Path) -> None:
    net = nn.Linear(4, 4)
    kind = type("Params4bit", (nn.Parameter,), {})  # as bitsandbytes' before it is moved
    net.weight = kind(torch.ones(4, 4), requires_grad=False)
    with pytest.raises(ConfigError, match=r"is not quantised yet; .*: model\.to\("):
        train(tmp_path, net)


def test_a_ring_refuses_what_could_not_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"state\['net'\] has quantised weights"):
        Ring(tmp_path, {"net": Net()})


def test_digests_are_of_contents() -> None:
    def of(net: Net) -> str:
        return quantised_weights([("", net)])["weight"].digest("weight")

    assert of(Net()) == of(Net()) != of(Net(0.25))


def test_a_start_says_what_is_not_exact(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, Net(), 2)
    assert (
        "the base has 1 quantised weight:" in caplog.text
        and "same version of their library" in caplog.text
    )
    module: Any = Net()
    module.state = SimpleNamespace(threshold=6.0)
    of_gpu = QuantisedWeight(module, "weight", torch.empty(2, device="meta"), 0)
    assert "llm_int8_threshold=0.0 avoids it" in inexact({"weight": of_gpu})[1]


def test_evaluations_do_not_repack_four_bits() -> None:
    layer: Any = Net()
    layer.support_avx512bf16_for_cpu = 1
    keep_layout(quantised_weights([("", layer)]).values())
    assert layer.support_avx512bf16_for_cpu is False
