"""Step time of the runner with its guard against a hand-written loop; and the noise alone."""

from __future__ import annotations

from scripts.bench.compared import compared
from scripts.bench.plan import Plan
from scripts.bench.report import Row

AIM = 1.005
# The runner's ddp is FSDP2 on a mesh with a replicated dimension; people write torch's DDP.
AGAINST = {"fsdp": "bare FSDP2 loop", "ddp": "bare DistributedDataParallel loop"}


def measure(plan: Plan) -> list[Row]:
    rows = []
    for kind, against in AGAINST.items():
        sizes = [("", []), (", short steps", plan.short)]
        if plan.has_gpu:
            sizes.append((", 1 B compiled", plan.large))
        for size, settings in sizes:
            rows.append(
                compared(
                    plan,
                    f"step, guard on, {kind}{size}",
                    against,
                    f"parallel={kind}",
                    *settings,
                    opponent=f"bare-{kind}",
                    pairs=plan.pairs(40),
                    block=10 if settings else None,
                    aim=AIM,
                )
            )
    return rows
