"""On the ranks: the runner and another loop take turns on the same model and data.

    torchrun --nproc-per-node=2 -m scripts.bench.pair --against bare-fsdp --folder DIR \\
        [--block K] [--pairs N] [key=value ...]

Writes DIR/result.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runner.config.schema import RunConfig
from runner.config.validate import check
from runner.distributed.env import RankEnv
from runner.model.decoder import num_parameters
from scripts.bench.bare import BareLoop
from scripts.bench.fair import refuse_other_losses
from scripts.bench.ours import first_losses, make_task, opened, settings
from scripts.bench.process import MeasureError
from scripts.bench.task import Task, read_task, write_task
from scripts.bench.turns import Turns, on_this_rank

# The other side is the runner itself, but for a setting.
_ITSELF = {"guard-off": "guard=off", "layers-off": "track.layers_every=0"}


def main() -> None:
    options = _options()
    with on_this_rank() as (place, device):
        config = settings(options.folder / "ours", options.overrides)
        check(config, world_size=place.world_size)
        file, is_shared = options.folder / "task.json", options.against not in _ITSELF
        if place.is_first:
            write_task(make_task(config, options.folder, is_shared=is_shared), file)
        dist.barrier()
        result = _in_turn(options, config, read_task(file), place, device)
        if place.is_first:
            (options.folder / "result.json").write_text(json.dumps(result))


def _in_turn(
    options: argparse.Namespace, config: RunConfig, task: Task, place: RankEnv, device: torch.device
) -> dict[str, Any]:
    with opened(config, place, device) as run:
        for _ in range(options.phase):
            run.loop.step()
        turns = Turns(
            run.loop.step,
            device=device,
            block=options.block,
            warmup=options.warmup,
            pairs=options.pairs,
            settle=run.ring.drain if options.phase else lambda: None,
            check=lambda theirs: _refuse_other_training(config, theirs, place),
        )
        if options.against in _ITSELF:
            words = [*options.overrides, _ITSELF[options.against]]
            with opened(settings(options.folder / "other", words), place, device) as other:
                turns.drive(other.loop.step)
        else:
            turns.drive(BareLoop(task, options.against.removeprefix("bare-"), device).step)
        pairs = [(ours, theirs) for theirs, ours in turns.pairs()]
        losses = turns.losses()
    dist.barrier()  # the first rank has closed its metrics
    return {
        "pairs": pairs,
        "losses": {"ours": first_losses(Path(config.out), len(losses)), "theirs": losses},
        "tokens_per_step": task.tokens_per_step,
        "parameters": num_parameters(task.shape),
        "ranks": place.world_size,
        "precision": task.precision,
    }


def _refuse_other_training(config: RunConfig, theirs: list[float], place: RankEnv) -> None:
    """Before anything is timed. Collective.

    Raises:
        MeasureError: the first losses of the two differ; alike on all ranks.
    """
    if not theirs:  # of the runner itself
        return
    refusal: list[str | None] = [None]
    if place.is_first:
        try:
            ours = first_losses(Path(config.out), len(theirs))
            refuse_other_losses(ours, theirs, config.compute.precision.value)
        except MeasureError as error:
            refusal = [str(error)]
    dist.broadcast_object_list(refusal, src=0)
    if refusal[0] is not None:
        raise MeasureError(refusal[0])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", choices=[*_ITSELF, "bare-fsdp", "bare-ddp"], required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--block", type=int, default=2, help="steps of one side in a row")
    parser.add_argument(
        "--warmup", type=_at_least_one, default=10, help="blocks before; arms the guard"
    )
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument(
        "--phase", type=int, default=0, help="steps of ours before; then ours waits for its saves"
    )
    parser.add_argument("overrides", nargs="*")
    return parser.parse_args()


def _at_least_one(text: str) -> int:
    return max(1, int(text))  # losses are compared after it


if __name__ == "__main__":
    main()
