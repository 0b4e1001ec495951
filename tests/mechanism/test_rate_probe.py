"""Probe G on a made-up world: a rate is blamed only if other samples are bad at it too."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runner.data.cursor import BatchPlan
from runner.explain.reading import Reading, SampleRow
from runner.explain.repeated_steps import RateProbe, RateResult
from runner.policy.decision.history import History
from runner.policy.decision.skip_ledger import Ledger
from runner.train.state import TrainState
from tests.observed import observers
from tests.policy.steps import BATCH, attempted, guard_settings

FROM, BAD = 10, 30  # the checkpoint's step and the bad one
CULPRIT = (BAD - 1) * BATCH + 3
PLAN = BatchPlan(positions=np.arange(BATCH), indices=np.arange(BATCH))

# Whether a step is bad: its number, samples and rate.
IsBad = Callable[[int, Collection[int], float], bool]


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The part of a step's plan that is looked at."""

    batch: BatchPlan
    step: int
    learning_rate: float = 1.0


def plan(cursor: int, ledger: Ledger) -> BatchPlan:
    free = (position for position in range(cursor, cursor + 10_000) if position not in ledger)
    positions = np.array([next(free) for _ in range(BATCH)])
    return BatchPlan(positions=positions, indices=positions)


def tried(
    is_bad: IsBad,
    *,
    without: tuple[int, ...] = (),
    most_steps: int = 300,
    known_level: Callable[[int, float], float] = lambda step, rate: 2.0,
    older_is_good: bool | None = None,
) -> RateResult:
    """
    Args:
        older_is_good: whether all is well from the older checkpoint; None without one.
        known_level: the loss of known samples after the step of this number and rate.
    """
    newest = [Planned(batch=PLAN, step=FROM)]
    is_older: list[bool] = []

    def known() -> Reading:
        level = known_level(newest[0].step, newest[0].learning_rate)
        return Reading(rows={-1: SampleRow(0, level, 1.0, 1)}, shares=(), tokens=1.0)

    def restore(records: Any) -> Any:
        state = TrainState(guard_settings())
        state.updates, state.cursor = FROM, FROM * BATCH
        newest[0] = Planned(batch=PLAN, step=FROM)
        is_older.append(records[0].step < FROM)
        return SimpleNamespace(train_state=state.to_json())

    def planned(batch: BatchPlan, updates: int, bounds: Any) -> Planned:
        return Planned(batch=batch, step=updates + 1)

    def read(step: Planned) -> Any:
        newest[0] = step
        positions = set(step.batch.positions.tolist())
        signals = attempted(
            step.step,
            start=step.batch.start,
            stop=step.batch.stop,
            gated=is_bad(step.step, positions, step.learning_rate)
            and not (is_older[-1] and older_is_good),
        )
        return SimpleNamespace(signals=signals, unreadable=())

    parts: Any = SimpleNamespace
    stop = parts(now=lambda: None, over=list)
    run = parts(
        engine=parts(
            shards=list, update_counts=dict, buffers=dict, finish_load=lambda counts: None
        ),
        stepper=parts(
            aside=lambda looked_at: nullcontext(), launch=lambda plan, ledger: plan, read=read
        ),
        ring=parts(restore=restore, before_update=lambda: None),
        history=History(),
        observers=observers(),
        group=parts(stop_look=parts(through=lambda ranks: stop)),
    )
    probe = RateProbe(guard_settings(), run, parts(stream=parts(plan=plan), plan=planned), known)
    record: Any = SimpleNamespace(step=FROM, cursor=FROM * BATCH)
    older: Any = None if older_is_good is None else SimpleNamespace(step=FROM - 10, cursor=0)
    return probe.try_rates(
        record, attempted(BAD), without=without, most_steps=most_steps, older=older
    )


def test_a_rate_is_known_to_a_factor_of_three() -> None:
    result = tried(lambda step, positions, rate: step >= BAD and rate > 0.05)
    assert result.factor == pytest.approx(1 / 27) and not result.control_cures
    # By halving: 1/27, 1/3, 1/9, and the control; all but the first end at the bad step.
    assert result.steps == (BAD + 2 - FROM) + 3 * (BAD - FROM) + 1  # the known samples, once
    none = tried(lambda step, positions, rate: step >= BAD)
    assert none.factor is None and "no tested lower rate" in none.shortfall
    few = tried(lambda step, positions, rate: step >= BAD, most_steps=91)
    assert few.factor is None and "up to 92 computations, 91" in few.shortfall


@pytest.mark.parametrize(
    ("is_bad", "control_cures"),
    [
        pytest.param(lambda step, seen, rate: CULPRIT in seen, True, id="the sample"),
        pytest.param(
            lambda step, seen, rate: any(CULPRIT <= p < CULPRIT + 50 for p in seen),
            True,
            id="a range of samples, of which one was found",
        ),
        pytest.param(
            lambda step, seen, rate: CULPRIT in seen or step >= BAD + 6, False, id="the weights"
        ),
    ],
)
def test_a_sample_that_a_lower_rate_cures_as_well(is_bad: IsBad, control_cures: bool) -> None:
    """It is not at fault if the steps without it become bad too, and so do those far away."""
    result = tried(lambda *step: step[2] > 0.2 and is_bad(*step), without=(CULPRIT,))
    assert result.factor == pytest.approx(1 / 9) and result.control_cures is control_cures


def test_known_samples_tell_of_bad_weights_before_the_gate() -> None:
    result = tried(
        lambda step, positions, rate: CULPRIT in positions and rate > 0.2,
        without=(CULPRIT,),
        known_level=lambda step, rate: 9.0 if step >= BAD + 4 and rate > 0.5 else 2.0,
    )
    assert result.factor == pytest.approx(1 / 9) and not result.control_cures
    few = tried(lambda *step: False, without=(CULPRIT,), most_steps=185)
    assert "up to 186 computations" in few.shortfall


@pytest.mark.parametrize("older_is_good", [None, True, False])
def test_a_checkpoint_with_wrong_moments_is_no_rate(older_is_good: bool | None) -> None:
    """A lower rate cures that as well; but the same steps from an older one are good."""
    result = tried(lambda s, positions, rate: s >= BAD and rate > 0.05, older_is_good=older_is_good)
    assert result.factor and not result.control_cures
    assert result.older_cures is bool(older_is_good)
    assert result.shortfall == (
        "G: there is no older checkpoint to compare with" if older_is_good is None else ""
    )
