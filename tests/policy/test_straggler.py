"""A rank that holds the others up is named once, and not before it has done so for long."""

from __future__ import annotations

from runner.policy.outlier_ranks import RankPace, Straggler, Stragglers


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
