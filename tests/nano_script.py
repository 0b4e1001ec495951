"""A loop like nanoGPT's, with a guard as in docs/loop.md: torchrun nano_script.py OUT TODO...

Gradient accumulation with ``no_sync``, autocast and a GradScaler, a DataLoader with workers and a
DistributedSampler, a warm-up with cosine, DDP, and ``torch.compile`` where COMPILE is set. TODO as
in ``guarded_script.py``.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from runner import Guard
from tests.ranked import in_turn, ranked

VOCAB, BLOCK, DIM, MICRO, ACCUMULATE, EPOCHS = 32, 16, 16, 4, 2, 3
NUM, BAD = 256, (40, 41)  # sequences; the bad ones make their loss NaN
WARMUP, TOTAL, CLIP = 4, 60, 1.0


class Text(Dataset[torch.Tensor]):
    def __init__(self, *, poison: bool) -> None:
        generator = torch.Generator().manual_seed(3)
        self._ids = torch.randint(0, VOCAB - 1, (NUM, BLOCK + 1), generator=generator)
        if poison:
            self._ids[list(BAD), 0] = VOCAB - 1

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._ids[index]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, 2, DIM // 2).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(x.shape)))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(BLOCK, DIM)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids[:, :-1]) + self.places(torch.arange(BLOCK))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        return loss * torch.where((ids == VOCAB - 1).any(), math.nan, 1.0)


def rate(step: int) -> float:
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (TOTAL - WARMUP)))


def train(out: Path, *, poison: bool, kill_at: int = -1, **settings: Any) -> dict[str, Any]:
    is_parallel = dist.is_initialized()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if is_parallel else (0, 1)
    torch.manual_seed(1)
    model: nn.Module = GPT()
    if os.environ.get("COMPILE"):
        model = torch.compile(model)  # type: ignore[assignment]
    if is_parallel:
        model = DistributedDataParallel(model)
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=8)
    data = Text(poison=poison)
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(data, ranks, rank)
    loader = DataLoader(data, batch_size=MICRO, sampler=sampler, num_workers=2)
    guard = Guard(
        out, model=model, optimizer=optimizer, scheduler=[scheduler, scaler], every=8,
        clip=CLIP, accumulate=ACCUMULATE, clean_after=3, min_history=8, **settings,
    )  # fmt: skip
    micro = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in guard.over(loader):
            micro += 1
            is_whole = micro % ACCUMULATE == 0
            held = is_parallel and not is_whole
            with model.no_sync() if held else contextlib.nullcontext():  # type: ignore[operator]
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(batch) / ACCUMULATE
                scaler.scale(loss).backward()
            if not is_whole:
                guard.note(loss)  # without it, NaN in this batch looks like the scaler's overflow
                continue
            if micro == kill_at * ACCUMULATE and guard.resumed_step == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            scaler.unscale_(optimizer)
            if guard.ok(loss):
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
            else:
                scaler.update(scaler.get_scale())  # a step that never was
            optimizer.zero_grad()
    guard.close()
    return {
        "digest": guard.state_digest(),
        "skipped": guard.skipped,
        "rest": [scheduler.state_dict()["last_epoch"], scaler.state_dict(), guard.updates],
    }


def main() -> None:
    folder, *todo = sys.argv[1:]
    with ranked() as rank:

        def run(name: str, skipped: list[Any]) -> dict[str, Any]:
            settings = {"skip": skipped} if name == "told" else {}
            is_bad = name == "poison"
            kill_at = int(os.environ.get("KILL_AT", "-1")) if is_bad and rank == 0 else -1
            return train(Path(folder) / name, poison=is_bad, kill_at=kill_at, **settings)

        ends = in_turn(todo, run)
        (Path(folder) / f"rank{rank}.json").write_text(json.dumps(ends))


if __name__ == "__main__":
    main()
