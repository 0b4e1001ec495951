"""Order among streams: late steps with a snapshot between them, as JSON by variant.

``order.py VARIANTS KEY=VALUE...``: variants with commas between them; all but "as it is" leave out
one thing that keeps order.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

# Before torch.
from tests.pretended.rig import GPU, Rig, require_used, start  # isort: skip

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from runner.checkpoint.jobs import JobProgress
from runner.checkpoint.memory.snapshot import _CudaCopier
from runner.data.cursor import BatchPlan
from runner.data.feed import RankBatch
from runner.distributed.agreement import Ranks
from runner.health.heartbeat import Heartbeat
from runner.policy.decision.signals import Bounds, Limits
from runner.policy.decision.skip_ledger import Ledger
from runner.train.step import InFlightStep, Stepper, StepPlan, StepRules
from tests.pretended.device import Stream
from tests.pretended.trace import Trace

WORLD, MICRO_BATCHES, STEPS, SNAPSHOT_BEFORE = 8, 2, 3, 1
SETTINGS = [
    *("model=nano", "model.layers=2", "model.vocab_size=256", "data.seq_len=64"),
    *("batch.micro_size=2", "batch.global_size=32"),
]
NOTHING = "as it is"


class Feed:
    """Micro-batches of no tokens in particular, page-locked as far as a fake tensor can be."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    def fetch(self, plan: BatchPlan, ledger: Ledger) -> RankBatch:
        micro_batches = [self._rig.batch(torch.device("cpu")) for _ in range(MICRO_BATCHES)]
        return RankBatch(micro_batches=tuple(micro_batches), wait_seconds=0.0)

    def own_positions(self, plan: BatchPlan) -> list[int | None]:
        return [int(position) for position in plan.positions]


def plan(number: int) -> StepPlan:
    limits = Limits(loss=10.0, grad_norm=10.0)
    return StepPlan(
        batch=BatchPlan(positions=np.arange(32), indices=np.arange(32)),
        step=number,
        bounds=Bounds(usual=limits, after_high=limits, high=5.0),
        learning_rate=1e-3,
        stop=False,
        keeps_lines=False,
        progress=JobProgress(counts=(0.0, 0.0), jobs=(0,)),
        decisions="",
    )


@contextmanager
def left_out(variant: str, copier: _CudaCopier) -> Iterator[None]:
    """What is patched away for the time of the steps."""
    kept = Stream.wait_stream, Stream.wait_event
    if variant == "the copy waits for the step":
        copier._stream.wait_stream = lambda other: None  # type: ignore[method-assign]
    if variant == "FSDP2 waits for the optimizer":
        Stream.wait_stream = _unless_at_the_root(kept[0])  # type: ignore[method-assign]
        Stream.wait_event = _unless_at_the_root(kept[1])  # type: ignore[method-assign]
    yield
    Stream.wait_stream, Stream.wait_event = kept  # type: ignore[method-assign]


def _unless_at_the_root(wait: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def waits(self: Any, other: Any) -> None:
        frame = sys._getframe(1)
        for _ in range(4):
            if "root_pre_forward" in frame.f_code.co_name:
                return
            assert frame.f_back is not None
            frame = frame.f_back
        wait(self, other)

    return waits


def outcome_of(rig: Rig, variant: str) -> dict[str, Any]:
    """What a few steps and one snapshot tell."""
    trace = Trace(order=True)
    with FakeTensorMode(allow_non_fake_inputs=True), trace:
        engine = rig.engine()
        copier = _CudaCopier(GPU)
        slot = [torch.empty(len(shard.local)) for shard in engine.shards()]
        is_asked = variant != "the update waits for the copy"
        stepper = Stepper(
            engine=engine,
            feed=cast(Any, Feed(rig)),
            dataset=cast(Any, None),
            ranks=Ranks(GPU),
            rules=StepRules(seed=0, clip=1.0, guarded=True, config_digest="c", code="c"),
            heart=Heartbeat(),
            before_update=copier.before_update if is_asked else lambda: None,
        )
        newest: InFlightStep | None = None
        launched: dict[str, Any] = {}
        with left_out(variant, copier):
            for number in range(STEPS):
                if number == SNAPSHOT_BEFORE:
                    copier.copy(0, slot, [shard.local.detach() for shard in engine.shards()])
                trace.begin(f"step {number}")
                newest = stepper.launch(plan(number + 1), Ledger(), after=newest)
                launched = {"waits": list(trace.waits), "copies": dict(trace.copies)}
            if variant != "the digest waits for the copy":
                copier.finish(0)
            slot[0].sum()  # what the digest does first
            assert newest is not None
            if variant == "the host waits for the numbers":
                newest._on_host._arrived = None
            newest.on_host()
        trace.begin("counts")
        engine.update_counts()
    return {
        "races": sorted(set(trace.races)),
        "spins": sorted(set(trace.spins)),
        **launched,
        "count_waits": sorted(set(trace.waits)),
    }


def main() -> None:
    start(WORLD)
    rig = Rig(WORLD, [*SETTINGS, *sys.argv[2:]])
    by_variant = {variant: outcome_of(rig, variant) for variant in sys.argv[1].split(",")}
    require_used()
    print(json.dumps(by_variant))


if __name__ == "__main__":
    main()
