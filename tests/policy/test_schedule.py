"""The learning rate as a table over applied updates."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from runner.config.schema import ScheduleConfig, ScheduleKind
from runner.policy.schedule import RateCut, Schedule, cut_factor

KINDS = ["cosine", "wsd", "linear", "constant"]


def schedule(kind: str, **changes: Any) -> Schedule:
    """Peak 2.0 over 100 updates, 10 of them warm-up, WSD's decay the last 20, floor 0.1."""
    total = changes.pop("total", 100)
    settings = {"warmup": 10, "floor": 0.1, "decay": 0.2} | changes
    config = ScheduleConfig(kind=ScheduleKind(kind), **settings)
    return Schedule(schedule=config, peak=2.0, total=total)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("updates", "rate"), [(0, 0.2), (4, 1.0), (9, 2.0), (10, 2.0)])
def test_warm_up_rises_from_its_first_share_to_the_peak(
    kind: str, updates: int, rate: float
) -> None:
    assert schedule(kind).rate(updates) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("kind", "updates", "rate"),
    [
        ("cosine", 55, 1.1),  # half way between peak and floor
        ("cosine", 40, 0.2 + 1.8 * 0.75),  # a third of the way: (1 + cos 60) / 2
        ("cosine", 100, 0.2),
        ("linear", 55, 1.1),
        ("linear", 40, 0.2 + 1.8 * 2 / 3),
        ("linear", 100, 0.2),
        ("wsd", 79, 2.0),
        ("wsd", 80, 2.0),
        ("wsd", 90, 1.1),
        ("wsd", 100, 0.2),
        ("constant", 55, 2.0),
        ("constant", 100, 2.0),
    ],
)
def test_shape_after_warm_up(kind: str, updates: int, rate: float) -> None:
    assert schedule(kind).rate(updates) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("kind", "rate"), [("cosine", 0.2), ("wsd", 0.2), ("linear", 0.2), ("constant", 2.0)]
)
@pytest.mark.parametrize("updates", [101, 150, 10_000])
def test_the_last_rate_holds_beyond_the_end(kind: str, rate: float, updates: int) -> None:
    assert schedule(kind).rate(updates) == pytest.approx(rate)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("warmup", [0, 1, 10])
def test_up_while_warming_then_never_up_again(kind: str, warmup: int) -> None:
    rates = [schedule(kind, warmup=warmup).rate(updates) for updates in range(130)]
    assert all(a < b for a, b in pairwise(rates[:warmup]))
    assert all(a >= b for a, b in pairwise(rates[warmup:]))
    assert max(rates) == rates[warmup] == 2.0
    assert min(rates) > 0.0


def test_wsd_decay_never_begins_before_the_warm_up_ends() -> None:
    early = schedule("wsd", decay=1.0, warmup=50)
    assert early.rate(49) == early.rate(50) == 2.0
    assert early.rate(75) == pytest.approx(1.1)


def test_a_floor_of_zero_and_of_one() -> None:
    assert schedule("cosine", floor=0.0).rate(100) == pytest.approx(0.0)
    assert schedule("linear", floor=1.0).rate(100) == 2.0


@pytest.mark.parametrize(
    ("updates", "factor"),
    [(9, 1.0), (10, 0.5), (19, 0.5), (20, 0.5 * 0.25), (29, 0.5 * 0.25), (30, 0.25), (40, 1.0)],
)
def test_cuts_are_half_open_and_multiply(updates: int, factor: float) -> None:
    cuts = [RateCut(start=10, stop=30, factor=0.5), RateCut(start=20, stop=40, factor=0.25)]
    assert cut_factor(updates, cuts) == factor
    assert cut_factor(updates, []) == 1.0
