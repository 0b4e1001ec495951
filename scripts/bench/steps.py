"""Step time in turns with another loop: bare ones, DeepSpeed's, or the runner without a part."""

from __future__ import annotations

from scripts.bench.compared import compared
from scripts.bench.plan import Plan
from scripts.bench.report import Row

_GUARD_AIM, _CHECKPOINT_AIM, _ZERO_AIM = 1.005, 1.02, 1.01
# The runner's ddp is FSDP2 on a mesh with a replicated dimension; people write torch's DDP.
AGAINST = {"fsdp": "bare FSDP2 loop", "ddp": "bare DistributedDataParallel loop"}
# A look in every step: what one in track.layers_every costs is less than two blocks differ by.
_USUAL = 50  # track.layers_every
_LAYERS_AIM = 1 + 0.002 * _USUAL
_LAYERS_BLOCK = 8  # steps: every fourth look takes in the moments, too
# A pair is 100 steps of each side, taken 25 by 25, so that each has one save and its proof. It is
# saved 15 steps before a turn's end, which ends when the background has ended too: it cannot be
# charged to the other side.
_BLOCK, _EVERY, _PHASE = 25, 100, 15
_GROUP = _EVERY // _BLOCK


def step(plan: Plan) -> list[Row]:
    """The runner with its guard against a hand-written loop."""
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
                    aim=_GUARD_AIM,
                )
            )
    return rows


def guard(plan: Plan) -> list[Row]:
    """``guard=default`` against ``guard=off``, and the noise of two equal halves."""
    cases = [("step, guard on", (), 40, _GUARD_AIM)]
    if not plan.quick:
        cases.append(("step, guard off (the noise alone)", ("guard=off",), 20, None))
    return [
        compared(
            plan,
            label,
            "the runner, guard=off",
            *settings,
            opponent="guard-off",
            pairs=plan.pairs(pairs),
            aim=aim,
        )
        for label, settings, pairs, aim in cases
    ]


def layers(plan: Plan) -> list[Row]:
    """A look into the layers in each step against none."""
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
            block=_LAYERS_BLOCK,
            aim=_LAYERS_AIM,
        )
        for size, settings, ranks in cases
    ]


def checkpoint(plan: Plan) -> list[Row]:
    """Guard and checkpoints together against a hand-written loop that saves nothing."""
    cases = [(", short steps", plan.short, 1 if plan.quick else 8)]
    if not plan.quick:
        cases.insert(0, ("", [], 2))
    return [
        compared(
            plan,
            f"step, guard and checkpoints (memory by cost, disk every {_EVERY}), fsdp{size}",
            "bare FSDP2 loop that saves nothing",
            f"checkpoint.every={_EVERY}",
            "checkpoint.memory_every=null",
            *settings,
            opponent="bare-fsdp",
            block=_BLOCK,
            pairs=_GROUP * cycles,
            warmup=2,
            group=_GROUP,
            pair_options=("--settle", f"--phase={_PHASE}"),
            aim=_CHECKPOINT_AIM,
        )
        for size, settings, cycles in cases
    ]


def zero(plan: Plan) -> list[Row]:
    """The runner's ZeRO engines against a bare DeepSpeed loop."""
    return [
        compared(
            plan,
            f"step, guard on, zero{stage}",
            f"bare DeepSpeed loop, stage {stage}",
            f"parallel=zero{stage}",
            opponent=f"zero{stage}",
            pairs=plan.pairs(40),
            aim=_ZERO_AIM,
        )
        for stage in ((2,) if plan.quick else (1, 2, 3))
    ]
