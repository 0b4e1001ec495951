"""The published rules of ``scripts/compare_judges.py`` do what their descriptions say."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "compare_judges.py"


@pytest.fixture(scope="module")
def judges() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_judges", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def flagged(judge: object, losses: list[float], norm: float = 1.0) -> list[int]:
    assert callable(judge)
    return [row for row, loss in enumerate(losses) if judge(loss, norm)]


WOBBLE = [3.0 + 0.01 * (row % 5) for row in range(300)]


def test_mean_and_sigma_goes_blind_and_falls_ill(judges: ModuleType) -> None:
    jump = WOBBLE[:200] + [9.0] * 100
    assert len(flagged(judges.MeanAndSigma(), jump)) < 10, "its own outliers widen it"
    sick = [*WOBBLE[:200], math.nan, *WOBBLE[:99]]
    assert flagged(judges.MeanAndSigma(), sick)[:99] == list(range(200, 299))


def test_patience_takes_five_in_a_row(judges: ModuleType) -> None:
    assert flagged(judges.RunningMeanWithPatience(), WOBBLE[:150] + [7.0] * 5) == [154]
    assert flagged(judges.RunningMeanWithPatience(), WOBBLE[:150] + [7.0] * 4 + [3.0]) == []
    assert flagged(judges.RunningMeanWithPatience(), WOBBLE[:90] + [7.0] * 9) == []


def test_ten_times_the_early_maximum_needs_thirty_nats(judges: ModuleType) -> None:
    assert flagged(judges.EarlyMaximum(), [*WOBBLE[:150], 29.0, 31.0, math.nan]) == [151, 152]


def test_the_ratio_needs_three_times_the_mean(judges: ModuleType) -> None:
    assert flagged(judges.RatioToTheLastTen(), [*WOBBLE[:150], 8.9, 3.0, 11.0]) == [152]


def test_a_z_score_of_the_norm(judges: ModuleType) -> None:
    judge = judges.ZClip()
    told = [judge(3.0, 1.0 + 0.1 * (row % 3)) for row in range(100)]
    assert not any(told[25:])
    assert judge(3.0, 2.0) == judges.DISCARD
    assert judge(3.0, math.nan) == judges.APPLY


def test_made_up_curves_are_the_same_each_time_and_runs_keep_their_half(
    judges: ModuleType,
) -> None:
    one, two = (list(judges.made_up_curves(2, 50, 3)) for _ in range(2))
    assert [named.curve.losses for named in one] == [named.curve.losses for named in two]
    assert judges.half_of("a") == judges.half_of("a")
    assert {judges.half_of(str(name)) for name in range(20)} == {"tuning", "held-out"}


def test_what_is_planted_is_where_it_is_said_to_be(judges: ModuleType) -> None:
    [named] = judges.made_up_curves(1, 3000, 3)
    for plant, _, stretch, onset in judges.plants_of(named, 2):
        before = list(stretch.losses[:onset])
        start = named.curve.losses.index(before[0])
        assert list(named.curve.losses[start : start + onset]) == before
        added = stretch.losses[onset] - named.curve.losses[start + onset]
        assert added == pytest.approx(plant.loss[0], nan_ok=True)


def test_ours_finds_every_large_jump_and_leaves_the_healthy_alone(judges: ModuleType) -> None:
    answers = judges.ours(())
    [named] = judges.made_up_curves(1, 2000, 3)  # sigma 0.02
    scores = judges.measure([named], {"ours": answers}, 2)
    assert (scores["ours"].discards, scores["ours"].rollbacks) == (0, 0)
    assert scores["ours"].found["jump 1"] == scores["ours"].planted["jump 1"] == 2
    assert scores["ours"].sent_back == 0
    assert "| ours | 100 %" in judges.table("made up", scores)
