"""Frequent spikes are told once; rare ones and slow runs' waves are not."""

from __future__ import annotations

import math
import random

from runner.policy.decision.early import SpikeScore
from runner.policy.outlier_ranks import RankPace, SlowRuns


def shares(spikes_per_window: int, windows: int = 5, drift: float = 0.0) -> list[float]:
    dice, score, told = random.Random(0), SpikeScore(), []
    for step in range(1000 * windows):
        loss = 3.0 - drift * step + dice.gauss(0, 0.05)
        place = step % 1000
        if step >= 1000 and place % 100 == 50 and place // 100 < spikes_per_window:
            loss += 2.0 if place else math.nan
        share = score.note(loss)
        told += [] if share is None else [share]
    return told


def test_frequent_spikes_are_told_once_and_rare_ones_not() -> None:
    assert shares(3) == [0.003]
    assert shares(1) == [] and shares(0, drift=3e-4) == []


def paces(seconds: float, host: float = 0.01) -> list[RankPace]:
    return [
        RankPace(host=0.01, device=0.1, step=seconds),
        RankPace(host=host, device=0.1, step=seconds),
    ]


def test_a_run_that_becomes_slow_is_told_until_it_is_fast_again() -> None:
    slow = SlowRuns()
    assert [slow.note(paces(1.0)) for _ in range(4)] == [None] * 4
    assert slow.note(paces(1.2)) is None
    told = slow.note(paces(1.3, host=0.31))
    assert told is not None and "0.77" in told.sentence and "rank 1" in told.sentence
    assert slow.note(paces(1.4)) is None
    assert slow.note(paces(1.0)) is None
    assert slow.note(paces(1.5)) is not None
    slow = SlowRuns()
    assert slow.note(paces(0.1)) is None and slow.note(paces(5.0)) is None, "the first looks"
