"""Scripts that cannot be judged, or not easily: python odd.py KIND, with the usual arguments.

=============  ===============================================================================
asks           waits for an answer from the terminal
busy_gpu       fails as where another process holds the GPU for itself
fails          ends with an error before its first step
fails_again    trains, but ends with an error when there is a checkpoint
hangs          waits for ever in its fifth step
never_ends     goes on training after its last step, and saves
never_saves    writes no checkpoint within its steps
no_optimizer   updates its weights by hand
relative       keeps its checkpoints in ./checkpoints, whatever it is told
=============  ===============================================================================
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

import parts
import torch

KINDS = {
    *("asks", "busy_gpu", "fails", "fails_again", "hangs", "never_ends", "never_saves"),
    *("no_optimizer", "relative"),
}


def main() -> None:
    kind = sys.argv.pop(1)
    if kind not in KINDS:
        raise ValueError(f"KIND {kind}: one of {', '.join(sorted(KINDS))}")
    arguments = parts.settings(defects=())
    if kind == "fails":
        raise FileNotFoundError("data/train.bin: run prepare.py first")
    if kind == "busy_gpu":
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")
    if kind == "asks" and input("Overwrite the results? [y/n] ") != "y":
        sys.exit("not overwritten")
    train(kind, arguments.out, arguments.steps, arguments.save_every)


def train(kind: str, out: Path, steps: int, every: int) -> None:
    torch.manual_seed(0)
    model, samples = torch.nn.Linear(8, 4), parts.Samples()
    optimizer = None if kind == "no_optimizer" else torch.optim.SGD(model.parameters(), lr=0.1)
    folder = Path("checkpoints") if kind == "relative" else out
    folder.mkdir(parents=True, exist_ok=True)
    path, first = folder / "last.pt", 0
    if path.exists():
        if kind == "fails_again":
            raise RuntimeError("Error(s) in loading state_dict for Linear: size mismatch")
        state = parts.read(path)
        model.load_state_dict(state["model"])
        first = state["step"]
    for step in itertools.count(first + 1):
        if kind == "hangs" and step == 5:
            time.sleep(3600)
        loss = torch.nn.functional.cross_entropy(model(samples.inputs), samples.labels)
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        else:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
        model.zero_grad()
        parts.report(step, loss)
        if step % every == 0 and kind != "never_saves":
            parts.write({"model": model.state_dict(), "step": step}, path)
        if step >= steps and kind != "never_ends":
            break
    parts.report_digest(model.state_dict())


if __name__ == "__main__":
    main()
