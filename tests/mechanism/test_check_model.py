"""What exactness asks of a model: each trial fails for the model that was made to fail it."""

from __future__ import annotations

import pytest

from runner.startup.checks import Check, exactness_checks, refuse_or_say, running_buffers, works_of
from runner.system.error import ConfigError
from tests.mechanism.test_guest_model import CPU, batch, blueprint, build

pytestmark = pytest.mark.usefixtures("alone")

FIRST_FOUR = [
    "same seed, same weights",
    "builds without memory",
    "same step twice, bit for bit",
    "buffers belong to the state",
]
INDEPENDENT = ["samples are independent"]  # where a step can be repeated


def checks(target: str, *more: str) -> list[Check]:
    network, engine = blueprint(target, *more), build(target, *more)
    works = works_of(batch(target, [0, 1]), 1, CPU)
    engine.running.keep(running_buffers(engine, works))
    return exactness_checks(network, engine, works)


@pytest.mark.parametrize(
    ("target", "more", "fails"),
    [
        ("Convolved", "seed=0", set()),
        ("Seeing", "seed=0", set()),
        ("Looking", "seed=0", {"builds without memory"}),
        ("Normed", "seed=0", set()),
        ("Drawing", "seed=0", {"same step twice, bit for bit"}),
        ("Drawing", "model.where=constructor", {"same seed, same weights"}),
    ],
)
def test_each_trial_fails_for_what_it_is_there_for(target: str, more: str, fails: set[str]) -> None:
    found = checks(target, more)
    more_rows = [] if fails & set(FIRST_FOUR[2:]) else INDEPENDENT
    assert [check.name for check in found] == [*FIRST_FOUR, *more_rows]
    assert {check.name for check in found if not check.holds} == fails
    assert all(check.remedy for check in found if not check.holds)


def test_what_must_hold_is_refused_and_the_rest_is_said() -> None:
    said: list[str] = []
    refuse_or_say(checks("Looking"), "Looking", said.append)
    assert len(said) == 1 and "the constructor needs values" in said[0]
    with pytest.raises(ConfigError) as error:
        refuse_or_say(checks("Drawing", "model.where=constructor"), "Drawing", said.append)
    assert "two builds with one seed begin with other weights" in str(error.value)


def test_no_trial_and_no_evaluation_changes_a_mode() -> None:
    """A part that its owner keeps in evaluation mode stays there."""
    target = "PartlyFrozen"
    network, engine = blueprint(target), build(target)
    modes = {name: module.training for name, module in engine.network.named_modules()}
    assert {modes["encoder.1"], modes["drop"]} == {False, True}
    assert all(
        check.holds
        for check in exactness_checks(network, engine, works_of(batch(target, [0, 1]), 1, CPU))
    )
    engine.evaluate([batch(target)])
    assert modes == {name: module.training for name, module in engine.network.named_modules()}
