"""The guard alone: the runner with ``guard=default`` against itself with ``guard=off``."""

from __future__ import annotations

from scripts.bench.compared import compared
from scripts.bench.plan import Plan
from scripts.bench.report import Row

AIM = 1.005


def measure(plan: Plan) -> list[Row]:
    off = "the runner, guard=off"
    guarded = compared(
        plan, "step, guard on", off, opponent="guard-off", pairs=plan.pairs(40), aim=AIM
    )
    if plan.quick:
        return [guarded]
    nothing = compared(
        plan,
        "step, guard off (the noise alone)",
        off,
        "guard=off",
        opponent="guard-off",
        pairs=plan.pairs(20),
    )
    return [guarded, nothing]
