"""A guarded loop in which a rank dies: torchrun crashing_script.py OUT [WHO HOW [HOW_OFTEN]].

WHO: the rank that dies, HOW: ``kill`` (SIGKILL) or ``raise``, at its step 13 of the first start.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from runner import Guard
from tests.ranked import ranked

STEPS, AT = 24, 13


def die(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("the tokens of this batch are out of range")


def main() -> None:
    out = Path(sys.argv[1])
    who, how = (int(sys.argv[2]), sys.argv[3]) if sys.argv[2:] else (-1, "")
    with ranked() as rank:
        torch.manual_seed(1)
        model: torch.nn.Module = torch.nn.Linear(4, 4)
        model = DistributedDataParallel(model) if dist.is_initialized() else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(rank)
        batches = [torch.randn(8, 4, generator=generator) for _ in range(STEPS)]
        guard = Guard(out / "run", model=model, optimizer=optimizer, every=4)
        for number, batch in enumerate(guard.over(batches)):
            loss = model(batch).square().mean()
            loss.backward()
            if rank == who and number == AT and not guard.resumed_step:
                die(how)
            if guard.ok(loss):
                optimizer.step()
                print(f"step {guard.updates} loss {loss.item():.4f}", flush=True)
            optimizer.zero_grad()
        guard.close()
        (out / f"rank{rank}.json").write_text(json.dumps({"digest": guard.state_digest()}))


if __name__ == "__main__":
    main()
