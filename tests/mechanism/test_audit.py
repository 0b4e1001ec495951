"""What the bits of several ranks speak for, and who may be named."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runner.train.audit import Auditor, AuditRules, Opinion, named, opinion_on

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


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_reading_samples_again_leaves_no_trace_in_any_generator() -> None:
    """A data set of the user's may draw from each when it is asked for a sample."""

    def read_again(plan: Any, rank: int) -> tuple[Any, ...]:
        drawn()
        return (SimpleNamespace(unreadable=["so that nothing is computed"]),)

    one: Any = SimpleNamespace
    auditor = Auditor(
        engine=one(device=torch.device("cpu"), network=torch.nn.Identity()),
        feed=one(read_again=read_again),
        steps=one(newest_plan=object()),
        ranks=one(world_size=2, sum=lambda numbers: numbers),
        heart=one(enter=lambda phase: None),
        rules=AuditRules(
            every=1, takes_whole_step=False, repeats_bits=True, seed=0, host="", kind="",
            incarnation=1,
        ),
        report=[].append,
        distrust=[].append,
    )  # fmt: skip
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    usual = drawn()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    auditor.look(1)
    assert drawn() == usual
