"""The runner's ZeRO engines against a bare DeepSpeed loop."""

from __future__ import annotations

from scripts.bench.compared import compared
from scripts.bench.plan import Plan
from scripts.bench.report import Row

AIM = 1.01


def measure(plan: Plan) -> list[Row]:
    stages = (2,) if plan.quick else (1, 2, 3)
    return [
        compared(
            plan,
            f"step, guard on, zero{stage}",
            f"bare DeepSpeed loop, stage {stage}",
            f"parallel=zero{stage}",
            opponent=f"zero{stage}",
            pairs=plan.pairs(40),
            aim=AIM,
        )
        for stage in stages
    ]
