"""Slow ranks, slow runs and frequent spikes are told once, and not before they last."""

from __future__ import annotations

import math
import random

from runner.policy.decision.early import SpikeScore
from runner.policy.outlier_ranks import RankPace, SlowRuns, Straggler, Stragglers


def rows(host: list[float], device: list[float] | None = None, step: float = 1.0) -> list[RankPace]:
    device = device or [0.001] * len(host)
    return [RankPace(host=h, device=d, step=step) for h, d in zip(host, device, strict=True)]


def told(found: list[Straggler]) -> list[tuple[int, str]]:
    return [(straggler.rank, straggler.what) for straggler in found]


def test_named_after_so_many_checks_in_a_row_and_once() -> None:
    watch = Stragglers(factor=2.0, checks=3)
    slow = rows([0.01, 0.01, 0.3, 0.01])
    assert [told(watch.note(slow)) for _ in range(5)] == [[], [], [(2, "host")], [], []]
    watch.note(rows([0.01] * 4))
    assert [told(watch.note(slow)) for _ in range(3)] == [[], [], [(2, "host")]]


def test_a_single_slow_check_begins_anew() -> None:
    watch = Stragglers(factor=2.0, checks=2)
    slow, even = rows([0.5, 0.01]), rows([0.01, 0.01])
    assert [told(watch.note(paces)) for paces in (slow, even, slow, even)] == [[], [], [], []]


def test_what_costs_little_is_no_trouble() -> None:
    watch = Stragglers(factor=2.0, checks=1)
    assert not watch.note(rows([0.0001, 0.0009], step=1.0)), "nine times slower, 0.1 % of a step"
    assert told(watch.note(rows([0.0001, 0.0009], step=0.01))) == [(1, "host")]
    watch = Stragglers(factor=1.1, checks=1)
    assert not watch.note(rows([5.0]))


def test_a_slow_device_is_told_apart() -> None:
    watch = Stragglers(factor=1.5, checks=1)
    found = watch.note(rows([0.01] * 3, device=[0.002, 0.001, 0.001]))
    assert told(found) == [(0, "device")]
    assert "rank 0" in found[0].sentence and "0.0020 s" in found[0].sentence


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
