"""``prove-resume`` of a script on a GPU: what is digested lies there, and so does a generator."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from runner.prove.drive import Plan, prove

_SCRIPT = """
import os, sys, torch
from torch import nn
out, lost, device = sys.argv[1:]
os.makedirs(out, exist_ok=True)
path = os.path.join(out, "last.pt")
torch.manual_seed(0)
data = torch.randn(64, 16)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 16)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
parts = {"model": model, "optimizer": optimizer}
generators = torch.cuda if device == "cuda" else torch
first = 0
if os.path.exists(path):
    state = torch.load(path)
    for name, part in parts.items():
        if name != lost:
            part.load_state_dict(state[name])
    if lost != "random":
        generators.set_rng_state(state["random"].cpu())
    first = state["step"]
for step in range(first, 40):
    batch = data[step % 8 * 8 : step % 8 * 8 + 8].to(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = (model(batch) - batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if (step + 1) % 5 == 0:
        state = {name: part.state_dict() for name, part in parts.items()}
        state |= {"random": generators.get_rng_state(), "step": step + 1}
        torch.save(state, path + ".new")
        os.replace(path + ".new", path)
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("lost", "named"),
    [("nothing", "equal"), ("random", "random"), ("optimizer", "optimizer_state")],
)
def test_a_script_on_a_gpu(lost: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)
    command = [sys.executable, "train.py", "out", lost, "cuda"]
    plan = Plan(command=command, steps=30, out="out")
    verdict = prove(plan, environment=os.environ, home=tmp_path)
    assert (verdict.first.kind if verdict.first else "equal") == named, verdict.text()
