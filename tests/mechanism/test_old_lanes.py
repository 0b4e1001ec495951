"""Checkpoints of user loops from before element types were stored as they are load bit for bit.

``tests/data/lanes.tar.gz`` was written by the commit before, on two ranks, by :func:`make`:

    torchrun --standalone --nproc-per-node=2 -m tests.mechanism.test_old_lanes OUT

``expected.json`` in it has the bytes of each tensor as they were when the runs were closed.
"""

from __future__ import annotations

import json
import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from runner import Guard, Ring

ARCHIVE = Path(__file__).parents[1] / "data" / "lanes.tar.gz"
STEPS = 4
TYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int16),
    *(torch.int32, torch.int64, torch.float8_e4m3fnuz),
)


class Net(nn.Module):
    """Parameters and buffers of many types; the buffers differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(3, 5)
        self.wide = nn.Parameter(torch.randn(5, 1, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(7, dtype=torch.bfloat16))
        self.turned = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("last", torch.zeros(2, dtype=torch.float16))
        self.register_buffer("bytes", torch.zeros(5, dtype=torch.uint8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen[:2] |= x.sum(0)[:2] > 0
            self.last.copy_(x[0, :2])
            self.bytes += 51
        hidden = self.norm(self.first(x)).double() @ self.wide
        return hidden.mean().float() + self.narrow.float().sum() + self.turned.abs().sum()


class Values:
    """One tensor of each type, with the bits of all kinds of numbers; ``own`` differs by rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.tensors: dict[str, torch.Tensor] = {}

    def fill(self) -> None:
        """Any bits; of types that FP32 holds, none that are no number."""
        for dtype in TYPES:
            data = torch.arange(2 * 16 * 5, dtype=torch.int64).mul(151 + 2 * self.rank) % 256
            data = (data % 120) if dtype.is_floating_point or dtype.is_complex else data
            data = data % 2 if dtype is torch.bool else data
            values = data.to(torch.uint8)[: 10 * dtype.itemsize].view(dtype).reshape(2, 5)
            self.tensors[f"own {dtype}"] = values.clone()
            same = data.mul(0).add(7 if dtype is not torch.bool else 1)
            same[::3] = 1
            values = same.to(torch.uint8)[: 10 * dtype.itemsize].view(dtype).reshape(5, 2)
            self.tensors[f"same {dtype}"] = values.clone()

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self.tensors = dict(state)


def guarded(out: Path) -> tuple[Guard, Net, torch.optim.Optimizer]:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    guard = Guard(out, model=net, optimizer=optimizer, every=2, memory_every=0, stale_seconds=5)
    return guard, net, optimizer


def ringed(out: Path, rank: int) -> tuple[Ring, Values]:
    values = Values(rank)
    return Ring(out, {"values": values}, memory=False), values


def contents(net: Net, optimizer: torch.optim.Optimizer, values: Values) -> dict[str, str]:
    """The type, shape and bytes of each tensor, by name."""

    def named() -> Iterator[tuple[str, torch.Tensor]]:
        yield from net.state_dict().items()
        for name, parameter in net.named_parameters():
            yield f"momentum of {name}", optimizer.state[parameter]["momentum_buffer"]
        yield from values.tensors.items()

    return {
        name: f"{t.dtype} {list(t.shape)} {bytes(t.contiguous().view(-1).view(torch.uint8)).hex()}"
        for name, t in ((name, t.detach()) for name, t in named())
    }


def train(guard: Guard, net: Net, optimizer: torch.optim.Optimizer, rank: int) -> None:
    torch.manual_seed(7)
    batches = [torch.randn(6, 3) for _ in range(STEPS)]
    for batch in guard.over(batches):
        loss = net(batch + rank)
        loss.backward()
        for parameter in net.parameters():
            if dist.is_initialized():
                dist.all_reduce(parameter.grad)
        if guard.ok(loss):
            optimizer.step()
        optimizer.zero_grad()


def make(out: Path) -> None:
    """Write the archive's runs."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    guard, net, optimizer = guarded(out / "guard")
    train(guard, net, optimizer, rank)
    guard.close()
    ring, values = ringed(out / "ring", rank)
    values.fill()
    ring.save(5)
    ring.close()
    if rank == 0:
        (out / "expected.json").write_text(json.dumps(contents(net, optimizer, values), indent=0))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture
def old(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def types_in(ring: Path) -> dict[str, str]:
    tensors = json.loads((max(ring.iterdir()) / "manifest.json").read_text())["tensors"]
    return {name: one.get("dtype", "float32") for name, one in tensors.items()}


def test_a_checkpoint_with_lanes_loads_bit_for_bit(old: Path) -> None:
    """And so does the next one, with native types."""
    expected: dict[str, Any] = json.loads((old / "expected.json").read_text())
    for steps, passes in (((STEPS, 5), 2), ((2 * STEPS, 6), 0)):
        guard, net, optimizer = guarded(old / "guard")
        ring, values = ringed(old / "ring", 0)
        assert (guard.resumed_step, ring.step) == steps
        assert contents(net, optimizer, values) == expected
        for _ in range(passes):
            train(guard, net, optimizer, 0)
        expected = contents(net, optimizer, values)
        ring.save(6)
        guard.close()
        ring.close()
    types = types_in(old / "guard" / "ring")
    assert types["param/narrow"] == "bfloat16"
    assert types["buffer/norm.num_batches_tracked"] == "int64"
    types = types_in(old / "ring" / "ring")
    assert types["values.own torch.bool"] == "bool"
    assert types["values.same torch.complex128"] == "float64"
    assert types["values.same torch.float8_e4m3fnuz"] == "uint8"


if __name__ == "__main__":
    make(Path(sys.argv[1]))
