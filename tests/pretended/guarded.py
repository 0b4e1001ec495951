"""``guard.ok`` of a loop of somebody's own that reads late: what makes the host wait, as JSON.

``guarded.py VARIANTS``: "late"; "at once", where the numbers are read before the update; or
"spinning", where no event lets the waiting host sleep.
"""

from __future__ import annotations

import json
import sys
from typing import Any

# Before torch.
from tests.pretended.rig import GPU, start  # isort: skip

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from runner.checkpoint.jobs import JobProgress
from runner.distributed.agreement import Ranks
from runner.embed.gate import DeviceGate, HostSide
from runner.embed.measure import Measurer
from runner.embed.state import LoopState
from runner.policy.decision.signals import Limits
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
        measurer = Measurer(LoopState([model], [optimizer], ranks, GPU), ranks, clip=1.0)
        gate = DeviceGate([optimizer])
        batch = torch.ones(4, 8, device=GPU)
        for number in range(STEPS):
            loss = model(batch).square().mean()
            loss.backward()
            trace.begin(f"step {number}")
            agreed = measurer.launch(
                loss,
                step=number + 1,
                batches=(number, number + 1),
                limits=Limits(loss=10.0, grad_norm=10.0),
                identity={"step": number},
                flags=(False, False, 0, False),
                progress=JobProgress(counts=(0.0, 0.0), jobs=(0,)),
                began=0.0,
            )
            if variant == "at once":
                agreed.numbers.read()
            measurer.clip(agreed.grad_norm)
            gate.closed = agreed.closed
            HostSide([optimizer], [scheduler])
            optimizer.step()
            scheduler.step()
        found = {"waits": list(trace.waits), "copies": sum(dict(trace.copies).values())}
        agreed.numbers.read()
    return {**found, "races": sorted(set(trace.races)), "spins": sorted(set(trace.spins))}


def main() -> None:
    start(WORLD)
    print(json.dumps({variant: waits(variant) for variant in sys.argv[1].split(",")}))


if __name__ == "__main__":
    main()
