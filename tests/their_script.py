"""A training script that knows nothing of us: python their_script.py HOW (raise, kill, hang)."""

import os
import signal
import sys
import time
from pathlib import Path


def broken_step(how: str) -> None:
    if how == "raise":
        raise ValueError("boom 17")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def main() -> None:
    how, state = sys.argv[1], Path(sys.argv[2])
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
    first = int(state.read_text()) if state.exists() else 0
    for step in range(first, 12):
        is_bad = step in (4, 8) and not (state.parent / f"done-{step}").exists()
        if is_bad and rank == int(os.environ.get("WORLD_SIZE", "1")) - 1:
            (state.parent / f"done-{step}").touch()
            broken_step(how)
        if "RANK" in os.environ:
            dist.all_reduce(torch.ones(1))
        if rank == 0:
            state.write_text(str(step))
            print(f"step {step} loss 0.5")
    if "RANK" in os.environ:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
