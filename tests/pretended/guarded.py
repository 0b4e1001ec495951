"""``guard.ok`` of a loop of somebody's own that reads late: what makes the host wait, as JSON.

``guarded.py VARIANTS``: "late"; "at once", where the numbers are read before the update; or
"spinning", where no event lets the waiting host sleep. "Guard" and "Ring" copy the loop's state
after an update, as these classes do; "Guard overlapping" as the runner does, which asks before
each update, and a loop cannot.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

# Before torch.
from tests.pretended.rig import GPU, start  # isort: skip

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from runner.checkpoint.jobs import JobProgress
from runner.checkpoint.memory.snapshot import Memory, SlotLayout, _CudaCopier
from runner.distributed.agreement import Ranks
from runner.embed.loop.device_gate import DeviceGate, HostSide
from runner.embed.loop.measure import Logged, Measurer
from runner.embed.opening import SingleProcessRanks
from runner.embed.ring import TreeState
from runner.embed.state.loop_state import LoopState
from runner.policy.decision.signals import Bounds, Limits
from runner.train.agreed_step import CLOSED, GRAD_NORM, RankReport
from tests.pretended.device import Event
from tests.pretended.trace import Trace

WORLD, STEPS = 8, 3


class Spinning(Event):
    """An event as it is made where nobody asks for another."""

    def __new__(cls, *args: Any, **named: Any) -> Event:
        return Event.__new__(cls)


def waits(variant: str) -> dict[str, Any]:
    """Of a few steps, from the backward pass to the end of the update."""
    trace = Trace(order=True)
    torch.cuda.Event = Spinning if variant == "spinning" else Event  # type: ignore[misc]
    with FakeTensorMode(allow_non_fake_inputs=True), trace:
        model = nn.Sequential(nn.Linear(8, 8, device=GPU), nn.Linear(8, 8, device=GPU))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        ranks = Ranks(GPU)
        alone: Any = SingleProcessRanks()  # a state agrees on numbers as it is made
        state = LoopState([model], [optimizer], alone, GPU)
        measurer = Measurer(state, ranks, Logged(), clip=1.0)
        gate = DeviceGate([optimizer])
        batch = torch.ones(4, 8, device=GPU)
        limits = Limits(loss=10.0, grad_norm=10.0)
        for number in range(STEPS):
            loss = model(batch).square().mean()
            loss.backward()
            trace.begin(f"step {number}")
            agreed = measurer.launch(
                loss,
                step=number + 1,
                batches=(number, number + 1),
                tokens=0,
                bounds=Bounds(usual=limits, after_high=limits),
                report=RankReport(
                    identity={"step": number},
                    progress=JobProgress(counts=(0.0, 0.0), jobs=(0,)),
                    stop=False,
                    keeps_lines=False,
                ),
            )
            if variant == "at once":
                agreed.on_host()
            measurer.clip(agreed.numbers[GRAD_NORM])
            gate.closed = agreed.numbers[CLOSED].float()
            HostSide([optimizer], [scheduler])
            optimizer.step()
            scheduler.step()
        found = {"waits": list(trace.waits), "copies": sum(dict(trace.copies).values())}
        agreed.on_host()
    return {**found, "races": sorted(set(trace.races)), "spins": sorted(set(trace.spins))}


class Statistics(nn.Module):
    """Its forward pass changes a buffer, as batch norm's does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8, device=GPU))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


def snapshots(variant: str) -> dict[str, Any]:
    """What overtakes the copy of a loop's state: updates, and forward passes."""
    trace = Trace(order=True)
    torch.cuda.Event = Event  # type: ignore[misc]
    with FakeTensorMode(allow_non_fake_inputs=True), trace:
        model = nn.Sequential(
            *(nn.Linear(8, 8, device=GPU), Statistics()),
            nn.Linear(8, 8, device=GPU, dtype=torch.bfloat16),
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        ranks: Any = SingleProcessRanks()
        if variant == "Ring":
            tree = TreeState({"model": model, "optimizer": optimizer}, ranks, GPU)
            state, capture = tree, tree.to_json
        else:
            loop = LoopState([model], [optimizer], ranks, GPU)
            state, capture = loop, loop.capture  # type: ignore[assignment]
        memory = Memory.__new__(Memory)
        memory._copier, memory.invalidate = _CudaCopier(GPU), lambda slot: None  # type: ignore[method-assign]
        batch = torch.ones(4, 8, device=GPU)
        for number in range(STEPS):
            model[2](model[:2](batch).bfloat16()).float().square().mean().backward()
            trace.begin(f"step {number}")
            optimizer.step()
            if number == 0:
                capture()
                memory.layout = SlotLayout(state.shards())
                values = torch.empty(memory.layout.num_bytes // 4)
                memory._buffers = {0: SimpleNamespace(values=values)}  # type: ignore[dict-item]
                memory.fill(0, state.shards(), overlap=variant.endswith("overlapping"))
                waits = list(trace.waits)
    return {"races": sorted(set(trace.races)), "waits": waits}


def main() -> None:
    start(WORLD)
    outcomes = {
        variant: (snapshots if variant[0] in "GR" else waits)(variant)
        for variant in sys.argv[1].split(",")
    }
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
