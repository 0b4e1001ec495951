"""A user's DeepSpeed script: torchrun deepspeed_script.py OUT LAYOUT TODO...

LAYOUT: ``zero1``, ``zero2`` (FP32), ``bf16`` (stage 1 with FP32 accumulation), ``bf16-2``.
TODO as in ``guarded_script.py``; KILL_AT in the environment: the batch at which rank 1 is killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from runner import Guard
from tests.ranked import in_turn, ranked

NUM, DIM, ACCUMULATE = 96, 8, 2  # batches; two of them make a step
STOP_AT = 31
BAD = (13, 41, 59, 61, 63)  # the second batches of steps 6, 20, 29, 30, 31
RULES: dict[str, Any] = {"every": 8, "clean_after": 3, "min_history": 8}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero1": {"zero_optimization": {"stage": 1}},
    "zero2": {"zero_optimization": {"stage": 2}},
    "bf16": {
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "bf16-2": {
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True, "check_grad_overflow": True},
    },
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            nn.Linear(DIM, DIM),
            nn.Linear(DIM, 3),
            nn.Linear(3, 1),
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.first.weight.dtype)
        return self.third(torch.tanh(self.second(self.drop(self.first(x))))).square().mean()


def data(rank: int, *, poison: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randn(6, DIM, generator=generator) for _ in range(NUM)]
    for number in BAD if poison and rank == 1 else ():
        batches[number][0, 0] = float("nan")
    return batches


def engine_of(layout: str) -> tuple[Any, Any, Any]:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled for minutes
    torch.manual_seed(5)
    model = Net()
    config = {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_accumulation_steps": ACCUMULATE,
        "gradient_clipping": 0.5,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **LAYOUTS[layout],
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    engine, wrapped, _, schedule = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=config,
        dist_init_required=False,
    )  # fmt: skip
    torch.manual_seed(50 + dist.get_rank())
    return engine, wrapped, schedule


def train(out: Path, layout: str, *, poison: bool, **settings: Any) -> tuple[Guard, Any]:
    engine, optimizer, schedule = engine_of(layout)
    guard = Guard(
        out, model=engine, optimizer=optimizer, scheduler=schedule, accumulate=ACCUMULATE,
        **RULES, **settings,
    )  # fmt: skip
    for count, batch in enumerate(guard.over(data(dist.get_rank(), poison=poison))):
        loss = engine(batch)
        engine.backward(loss)
        guard.log(read=(float(batch.nan_to_num().sum()), len(batch)))
        if poison:
            end("1", count)
        if not engine.is_gradient_accumulation_boundary() or guard.ok(loss):
            engine.step()
        if count % 16 == 15:
            evaluate(engine, guard, lambda: end("0", count) if poison else None)  # noqa: B023
    return guard, engine


def end(start: str, count: int) -> None:
    """Rank 0 is asked to stop in the first start's evaluation; rank 1 is killed in the second."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") != start:
        return
    if start == "0" and count == STOP_AT and dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    if start == "1" and str(count) == os.environ.get("KILL_AT") and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def evaluate(engine: Any, guard: Guard, meet: Callable[[], None]) -> None:
    engine.eval()
    meet()
    guard.check_stop()
    with torch.no_grad():
        engine(torch.ones(6, DIM))
    engine.train()


def bare(layout: str, skipped: list[tuple[int, int]]) -> str:
    """The loop without a guard, which never sees what is skipped."""
    engine, *_ = engine_of(layout)
    for number, batch in enumerate(data(dist.get_rank(), poison=False)):
        if not any(start <= number < stop for start, stop in skipped):
            engine.backward(engine(batch))
            engine.step()
    return weights(engine)


def weights(engine: Any) -> str:
    """The bits of weights, moments and the rate, of this rank."""
    values = [p.detach().float().view(-1).tolist() for p in engine.module.parameters()]
    base = engine.basic_optimizer
    for group in base.param_groups:
        for flat in group["params"]:
            state = base.state[flat]
            moments = [state["exp_avg"], state["exp_avg_sq"]]
            values += [tensor.detach().tolist() for tensor in (flat, *moments)]
            values.append([float(state["step"]), group["lr"]])
    return repr(values)


def main() -> None:
    out, layout, *todo = sys.argv[1:]

    def run(name: str, skipped: list[Any]) -> dict[str, Any]:
        if name == "bare":
            return {"weights": bare(layout, skipped)}
        settings = {"skip": skipped} if name == "told" else {}
        folder = Path(out) / f"{layout}-{name}"
        guard, engine = train(folder, layout, poison=name != "told", **settings)
        guard.close()
        end = {"digest": guard.state_digest(), "skipped": guard.skipped}
        return end | {"weights": weights(engine)}

    with ranked() as rank:
        (Path(out) / f"rank{rank}.json").write_text(json.dumps(in_turn(todo, run)))


if __name__ == "__main__":
    main()
