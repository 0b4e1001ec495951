"""The first step that tells other numbers than the first time is named; a doubtful one never."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from runner.policy.decision.finding import Outcome, Recorded, StepComparison, from_rows, recorded_in
from runner.policy.decision.history import History, Incident


def recorded(step: int, loss: float = 2.0, norm: float = 1.0, rate: float = 0.1) -> Recorded:
    samples = (32 * step, 32 * step + 32)
    return Recorded(step=step, samples=samples, loss=loss, grad_norm=norm, learning_rate=rate)


def way(*, is_exact: bool = True) -> StepComparison:
    """Steps 21 to 26 were clean, 27 was not."""
    known = {step: recorded(step) for step in range(21, 27)}
    return StepComparison(known | {27: recorded(27, math.nan, math.inf)}, bad=27, is_exact=is_exact)


def test_the_step_that_differs_is_named() -> None:
    assert way().compare(recorded(21), gated=False) is None
    assert way().compare(recorded(24, loss=2.0000001), gated=False) is Outcome.differs
    assert way().compare(recorded(24, norm=1.0000001), gated=False) is Outcome.differs
    assert way().compare(recorded(27), gated=False) is Outcome.differs, "good this time"
    assert way().compare(recorded(27, math.nan, math.nan), gated=True) is Outcome.repeated


@pytest.mark.parametrize("factor", [1 + 1e-6, 0.99])
def test_noise_is_no_difference(factor: float) -> None:
    assert way(is_exact=False).compare(recorded(24, loss=2.0 * factor), gated=False) is None
    assert way(is_exact=False).compare(recorded(24, loss=2.2), gated=False) is Outcome.differs


def test_another_step_proves_nothing() -> None:
    """Another rate, other samples, a step that nobody has recorded, another trouble."""
    assert way().compare(recorded(24, loss=9.0, rate=0.05), gated=False) is Outcome.lost
    for samples in ((5, 37), (24 * 32, 25 * 32 + 7)):  # also: some are skipped by now
        moved = replace(recorded(24, loss=9.0), samples=samples)
        assert way().compare(moved, gated=False) is Outcome.lost
    assert way().compare(recorded(20, loss=9.0), gated=False) is Outcome.lost
    assert way().compare(recorded(28, loss=9.0), gated=False) is Outcome.lost
    assert way().compare(recorded(24, loss=9.0), gated=True) is None, "it is tried once more"
    assert way().compare(recorded(27, loss=9.0), gated=True) is Outcome.lost


def test_lines_of_the_metrics() -> None:
    def line(step: Any, action: str, loss: Any = 2.0) -> dict[str, Any]:
        samples = [32, 64]
        return {"step": step, "action": action, "samples": samples, "loss": loss} | {
            "grad_norm": 1.0,
            "lr": 0.1,
        }

    lines = [line(3, "apply"), line(4, "apply"), line(4, "discard", None), line(4, "apply", 3.0)]
    lines += [line(5, "apply", None), line("6", "apply"), {}, line(9, "apply")]
    found = from_rows(recorded_in(lines, 4, 9))
    assert list(found) == [4] and found[4].loss == 3.0


def test_a_rate_that_was_shown_to_cure_is_cut_from_the_checkpoint_on() -> None:
    detail = {
        "onset_step": 30, "to_step": 20, "cursor": 640, "serial": 3, "next_serial": 4, "repeat": 1,
        "metrics_bytes": 0, "cut_steps": 100, "cut_factor": 1 / 3, "read_again": True,
    }  # fmt: skip
    starts = []
    for more in ({}, {"cut_start": 20}):
        history = History()
        history.add(
            Incident(
                kind="rollback", step=30, decision="", reason="", samples=(640, 960),
                detail=detail | more,
            )
        )  # fmt: skip
        assert not list(history.ledger)
        starts.append(history.cuts[0].start)
    assert starts == [29, 20]
