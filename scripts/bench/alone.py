"""On the ranks: some steps of one side alone, to measure its memory.

    torchrun --nproc-per-node=2 -m scripts.bench.alone --folder DIR --who ours|NAME [key=value ...]

An opponent finds DIR/task.json, and nothing of the runner is loaded beside it but the decoder.
Writes DIR/result.json.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from scripts.bench import opponent
from scripts.bench.task import read_task

_STEPS = 15


class Countdown:
    """Counts steps, and tells when they are done."""

    def __init__(self) -> None:
        self._left = _STEPS

    def after_step(self, loss: torch.Tensor | None = None) -> bool:
        self._left -= 1
        if self._left == _STEPS - 2 and torch.cuda.is_available():
            # Of training, not of making the model: an opponent builds it whole on the GPU.
            torch.cuda.reset_peak_memory_stats()
        return self._left <= 0


def main() -> None:
    options = _options()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    countdown = Countdown()
    if options.who == "ours":
        _ours(options, device, countdown)
    else:
        opponent.train(
            options.who, read_task(options.folder / "task.json"), device, countdown.after_step
        )
    if dist.get_rank() == 0:
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        (options.folder / "result.json").write_text(json.dumps({"gpu_bytes": peak}))
    dist.barrier()
    os._exit(0)  # threads that gloo leaves behind abort some of the exits


def _ours(options: argparse.Namespace, device: torch.device, countdown: Countdown) -> None:
    from runner.distributed.env import place_from
    from scripts.bench.ours import opened, settings

    config = settings(options.folder / "ours", options.overrides)
    with opened(config, place_from(os.environ), device) as run:
        while not countdown.after_step():
            run.loop.step()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--who", choices=["ours", *opponent.NAMES], required=True)
    parser.add_argument("overrides", nargs="*")
    return parser.parse_args()


if __name__ == "__main__":
    main()
