"""What a step tells the other ranks, and when its gate is closed; a made up engine computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from runner.checkpoint.jobs import JobProgress
from runner.data.cursor import BatchPlan
from runner.distributed.agreement import Ranks
from runner.engine.protocol import LocalSums, MicroStep
from runner.health.heartbeat import Heartbeat
from runner.policy.decision.signals import Bounds, Limits
from runner.policy.decision.skip_ledger import Ledger
from runner.system.error import RankError
from runner.train.agreed_step import FINGERPRINT, JOBS
from runner.train.step import Stepper, StepPlan, StepRules
from tests.mechanism.test_late import BATCH, Batches, Names, OneNumber, Story

pytestmark = pytest.mark.usefixtures("alone")

CPU = torch.device("cpu")
PLAN = StepPlan(
    batch=BatchPlan(positions=np.arange(BATCH), indices=np.arange(BATCH)),
    step=1,
    bounds=Bounds(usual=Limits(), after_high=Limits()),
    learning_rate=0.1,
    stop=False,
    keeps_lines=False,
    progress=JobProgress((), ()),
    decisions="none",
)
SETTINGS = {"config_digest": "a", "code": "b"}


class Flagging(OneNumber):
    """Its numbers are finite; what its own backward pass met was not."""

    flag = 1.0

    def accumulate(self, works: list[MicroStep]) -> LocalSums:  # type: ignore[override]
        sums = super().accumulate(works)
        return replace(sums, nonfinite=torch.tensor(self.flag, dtype=torch.float64))


class LongBatches(Batches):
    """Another shape of the same samples."""

    def fetch(self, plan: BatchPlan, ledger: Ledger) -> Any:
        fetched = super().fetch(plan, ledger)
        (batch,) = fetched.micro_batches
        nothing = torch.zeros(BATCH, 2, dtype=torch.int64)
        return replace(fetched, micro_batches=(replace(batch, tokens=nothing, targets=nothing),))


def stepper(engine: OneNumber, feed: type[Batches] = Batches, **settings: str) -> Stepper:
    parts: dict[str, Any] = {"engine": engine, "feed": feed(Story()), "dataset": Names()}
    return Stepper(
        **parts,
        ranks=Ranks(CPU),
        rules=StepRules(seed=0, clip=1.0, guarded=True, **(SETTINGS | settings)),
        heart=Heartbeat(),
    )


@pytest.mark.parametrize("flag", [0.0, 1.0])
def test_a_rank_that_met_nan_closes_the_gate_though_the_sums_are_finite(flag: float) -> None:
    engine = Flagging(Story())
    engine.flag = flag
    made = stepper(engine)
    outcome = made.read(made.launch(PLAN, Ledger()))
    assert outcome.signals.loss == outcome.signals.loss < 10
    assert outcome.signals.gated is bool(flag)
    assert engine.count.item() == 1 - flag


class Twins(Ranks):
    """Two ranks that tell the same, but for the gate of the step before."""

    others_gate: float | None = None

    def __init__(self) -> None:
        super().__init__(CPU)
        self.world_size = 2

    def all_reduce(self, packed: torch.Tensor) -> None:
        own = packed[4].clone()
        packed.mul_(2)
        packed[4] = own + (own if self.others_gate is None else self.others_gate)


@pytest.mark.parametrize(
    ("own", "other", "differs"),
    [(1.0, 1.0, False), (0.0, 0.0, False), (1.0, 0.0, True), (0.0, 1.0, True)],
)
def test_a_gate_that_closed_on_one_rank_alone_ends_the_run(
    own: float, other: float, differs: bool
) -> None:
    """It would train on with weights that differ, and no later number would say so for sure."""
    engine, ranks, distrusted = Flagging(Story()), Twins(), list[int]()
    made = stepper(engine)
    made._ranks, made._distrust = ranks, distrusted.append
    engine.flag = own
    made.read(made.launch(replace(PLAN, step=7), Ledger()))
    engine.flag, ranks.others_gate = 0.0, other
    after = made.launch(replace(PLAN, step=8), Ledger())
    if not differs:
        assert not made.read(after).signals.gated and not distrusted
        return
    with pytest.raises(RankError, match="1 of 2 ranks withheld the update before step 8"):
        made.read(after)
    assert distrusted == [6]


def fingerprint(plan: StepPlan, feed: type[Batches] = Batches, **settings: str) -> Any:
    """What the ranks compare."""
    made = stepper(OneNumber(Story()), feed, **settings)
    told = made.launch(plan, Ledger()).numbers.tolist()
    return tuple(told[FINGERPRINT:JOBS])


def test_ranks_that_differ_in_anything_tell_different_fingerprints() -> None:
    same = fingerprint(PLAN)
    assert len(same) == 6 and fingerprint(PLAN) == same
    later = BatchPlan(positions=np.arange(BATCH) + 1, indices=np.arange(BATCH))
    longer = BatchPlan(positions=np.array([0, 1, 2, 9]), indices=np.arange(BATCH))
    others = {
        "step": fingerprint(replace(PLAN, step=2)),
        "first sample": fingerprint(replace(PLAN, batch=later)),
        "last sample": fingerprint(replace(PLAN, batch=longer)),
        "decisions": fingerprint(replace(PLAN, decisions="one")),
        "settings": fingerprint(PLAN, config_digest="c"),
        "code": fingerprint(PLAN, code="c"),
        "shapes": fingerprint(PLAN, LongBatches),
    }
    assert [name for name, other in others.items() if other == same] == []
