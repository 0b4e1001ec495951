"""A ring over a tensor that begins to differ between ranks: torchrun differing_script.py OUT."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

from runner import Ring
from tests.ranked import ranked

if __name__ == "__main__":
    with ranked() as rank:
        out = Path(sys.argv[1])
        module = nn.Module()
        module.register_buffer("own", torch.zeros(3))
        with Ring(out / "run", {"module": module}) as ring:
            end = {"step": ring.step, "value": float(module.own[0])}  # type: ignore[arg-type, index]
            if ring.step == 0:
                ring.save(1)
                module.own.fill_(float(rank))  # type: ignore[operator, union-attr]
                ring.save(2)
        (out / f"rank{rank}.json").write_text(json.dumps(end))
