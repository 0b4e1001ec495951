"""A look into the layers: the runner with ``track.layers_every=1`` against itself with 0.

A look in every step, because what one look in fifty costs is less than two blocks of the same side
differ by. One in ``track.layers_every`` steps costs that part of what is seen here.
"""

from __future__ import annotations

from scripts.bench.compared import compared
from scripts.bench.plan import Plan
from scripts.bench.report import Row

_USUAL = 50  # track.layers_every
AIM = 1 + 0.002 * _USUAL
_BLOCK = 8  # steps: every fourth look takes in the moments, too


def measure(plan: Plan) -> list[Row]:
    tiny = ["model=tiny", "batch.global_size=16", "batch.micro_size=16", "data.seq_len=64"]
    cases = [(", tiny", tiny, 1)]
    if not plan.quick:
        cases += [(", short steps", plan.short, plan.ranks), ("", [], plan.ranks)]
    return [
        compared(
            plan,
            f"step, a look into the layers in each (at one in {_USUAL}: a {_USUAL}th){size}",
            "the runner, track.layers_every=0",
            "track.layers_every=1",
            *settings,
            opponent="layers-off",
            ranks=ranks,
            pairs=plan.pairs(40),
            block=_BLOCK,
            aim=AIM,
        )
        for size, settings, ranks in cases
    ]
