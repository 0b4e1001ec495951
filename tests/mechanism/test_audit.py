"""What the bits of several ranks speak for, and who may be named."""

from __future__ import annotations

import pytest

from runner.train.audit import Opinion, named, opinion_on

GOOD, BAD, WORSE = [1.0, 2.0], [1.0, 2.0000000001], [1.5, 2.0]


def told(*numbers: list[float], kinds: str = "") -> list[list[object]]:
    return [[kinds[at : at + 1] or "x", one] for at, one in enumerate(numbers)]


@pytest.mark.parametrize(
    ("numbers", "odd", "is_clear"),
    [
        ((GOOD, GOOD, GOOD), (), True),
        ((GOOD, BAD, GOOD), (1,), True),
        ((GOOD, BAD), (0, 1), False),
        ((GOOD, GOOD, BAD, BAD), (0, 1, 2, 3), False),
        ((GOOD, BAD, WORSE, GOOD, GOOD), (1, 2), True),
        (([float("nan")] * 2, GOOD, GOOD), (0,), True),
    ],
)
def test_opinions(numbers: tuple[list[float], ...], odd: tuple[int, ...], is_clear: bool) -> None:
    assert opinion_on(told(*numbers), exactly=True) == Opinion(odd=odd, is_clear=is_clear)


def test_only_devices_of_one_kind_are_compared() -> None:
    assert opinion_on(told(GOOD, BAD, kinds="ab"), exactly=True).agrees
    assert opinion_on(told(GOOD, GOOD, BAD, BAD, WORSE, kinds="aabbb"), exactly=True).odd == (4,)


def test_noise_is_no_fault_where_bits_do_not_repeat() -> None:
    noisy = told(GOOD, [1.0001, 2.0], [1.0, 2.0001])
    assert opinion_on(noisy, exactly=False).agrees
    assert opinion_on(told(GOOD, WORSE, GOOD), exactly=False).odd == (1,)


@pytest.mark.parametrize(
    ("rounds", "ranks"),
    [
        ([(GOOD, BAD, GOOD)] * 3, (1,)),
        ([(GOOD, BAD, GOOD), (GOOD, GOOD, GOOD), (GOOD, GOOD, GOOD)], (1,)),
        ([(GOOD, BAD)] * 3, ()),
        ([(GOOD, BAD), (GOOD, WORSE), (GOOD, BAD)], (1,)),
        ([(GOOD, BAD), (WORSE, WORSE), (GOOD, BAD)], ()),
        ([(GOOD, BAD, GOOD), (BAD, GOOD, GOOD), (GOOD, GOOD, GOOD)], ()),
        ([(GOOD, BAD, WORSE, GOOD, GOOD)] * 3, ()),
    ],
)
def test_who_is_named(rounds: list[tuple[list[float], ...]], ranks: tuple[int, ...]) -> None:
    every = [told(*numbers) for numbers in rounds]
    assert named(every, [opinion_on(one, exactly=True) for one in every]) == ranks
