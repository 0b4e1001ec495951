"""Bytes and collectives of one step as JSON: ``memory.py RANKS MICRO_BATCHES KEY=VALUE...``"""

from __future__ import annotations

import json
import sys

# Before torch.
from tests.pretended.rig import GPU, Rig, require_used, start  # isort: skip

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from runner.engine.protocol import MicroStep
from tests.pretended.trace import GIB, Trace


def main() -> None:
    world_size, micro_batches = int(sys.argv[1]), int(sys.argv[2])
    start(world_size)
    rig = Rig(world_size, sys.argv[3:])
    trace = Trace(order=False)
    with FakeTensorMode(allow_non_fake_inputs=True), trace:
        trace.begin("init")
        engine = rig.engine()
        result: dict[str, object] = {"state": trace.num_bytes / GIB, "made": trace.peak / GIB}
        for step in range(2):  # in the first FSDP2 makes what it keeps
            trace.begin(f"step {step}")
            works = [MicroStep(batch=rig.batch(), seed=1) for _ in range(micro_batches)]
            sums = engine.accumulate(works)
            skip, scale = torch.zeros((), device=GPU), torch.ones((), device=GPU)
            engine.apply(skip=skip, grad_scale=scale, learning_rate=1e-3)
            del sums, works
        result |= {
            "peak": trace.peak / GIB,
            "peak_at": trace.peak_at,
            "after": trace.num_bytes / GIB,
        }
        result["collectives"] = dict(trace.collectives)
        result["gib"] = {name: size / GIB for name, size in trace.collective_bytes.items()}
    require_used()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
