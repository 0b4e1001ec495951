"""What the runner costs over bare DeepSpeed: the same model and data, a step of each in turn.

    torchrun --nproc-per-node=2 scripts/bench_zero.py --stage 2 [--pairs N] [key=value ...]

The bare side is the loop of DeepSpeed's own tutorial: initialize, forward, backward, step, with
its clipping, the same fused AdamW and the same data loading, and no guard.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from paired import compare, open_loop, settings, shared_folder
from torch.utils.data import DataLoader

from runner import assemble
from runner.config import RunConfig
from runner.dist.group import choose_device, end_group, leave, start_group
from runner.dist.launcher import Place, place_from
from runner.engine.zero import ZeroPlan, build_module, deepspeed_settings
from runner.model.decoder import Decoder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, choices=[1, 2, 3], default=2)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--warmup", type=int, default=60, help="pairs before; arms the guard")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    place = place_from(os.environ)
    device = choose_device("auto", place)
    start_group(place, device, timeout_seconds=300)
    overrides = [*options.overrides, f"parallel=zero{options.stage}"]
    config = settings(shared_folder(device) / "ours", overrides)
    ours = open_loop(config, place, device)
    bare = bare_step(config, options.stage, place, device)
    result = compare(ours.step, bare, warmup=options.warmup, pairs=options.pairs)
    if place.is_first:
        print(json.dumps({"compared": f"runner / bare DeepSpeed, stage {options.stage}"} | result))
    end_group()
    leave(0)


def bare_step(
    config: RunConfig, stage: int, place: Place, device: torch.device
) -> Callable[[], None]:
    """One optimizer step of a hand-written DeepSpeed loop."""
    import deepspeed

    dataset = assemble.open_dataset(config)
    shape = assemble.model_shape(config, dataset)
    num_micro = -(-config.batch.global_size // (place.world_size * config.batch.micro_size))
    plan = ZeroPlan(stage=stage, num_micro_batches=num_micro, extra={})
    module = build_module(lambda: Decoder(shape), plan, device)
    module.reset_buffers(device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=config.optim.lr, fused=True)
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        config=deepspeed_settings(plan) | {"gradient_clipping": config.optim.clip},
        dist_init_required=False,
    )
    batches = _batches(config, dataset, place)

    def step() -> None:
        for _ in range(num_micro):
            _forward_backward(engine, next(batches).to(device))
            engine.step()

    return step


def _forward_backward(engine: Any, tokens: torch.Tensor) -> None:
    logits: torch.Tensor = engine(tokens[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    engine.backward(loss)


def _batches(config: RunConfig, dataset: Any, place: Place) -> Iterator[torch.Tensor]:
    """Micro-batches of tokens, int64 [B, T + 1], as the runner's own loader settings have it."""
    mine = range(place.rank, len(dataset), place.world_size)
    loader: DataLoader[torch.Tensor] = DataLoader(
        list(mine),
        batch_size=config.batch.micro_size,
        num_workers=config.data.workers,
        collate_fn=_Collate(dataset),
        drop_last=True,
    )
    return itertools.chain.from_iterable(itertools.repeat(loader))


class _Collate:
    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __call__(self, indices: list[int]) -> torch.Tensor:
        return torch.stack([torch.from_numpy(self._dataset[index].tokens) for index in indices])


if __name__ == "__main__":
    main()
