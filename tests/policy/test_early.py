"""Early warnings: on a number's own past, told once, alarms where two agree."""

from __future__ import annotations

import pytest

from runner.policy.decision.early import EarlyRules, EarlyWarnings, Look, Warned
from runner.policy.decision.history import History, Incident

EVERY = 50


def course(warmup: int = 0, **values: list[float]) -> list[Warned]:
    early = EarlyWarnings(EarlyRules(every=EVERY, warmup=warmup))
    rows = zip(*values.values(), strict=True)
    noted = [
        early.note(Look(step=EVERY * at, values=dict(zip(values, row, strict=True))))
        for at, row in enumerate(rows, start=1)
    ]
    return [one for one in noted if one is not None]


def signals(warnings: list[Warned]) -> list[list[str]]:
    return [[sign.signal for sign in one.signs] for one in warnings]


def test_a_healthy_course_is_silent() -> None:
    """Of a real training: weights grow at first, the rate falls, norms part."""
    assert not course(
        weight_norm=[14.9, 18.3, 19.6, 20.0, 20.3, 20.4, 20.5, 20.6],
        residual_rms=[0.096, 0.336, 0.529, 0.667, 0.728, 0.797, 0.835, 0.821],
        grad_ratio=[27.6, 11.3, 14.7, 17.2, 22.3, 25.7, 25.5, 23.1],
        update_ratio=[0.0225, 0.041, 0.0292, 0.0162, 0.01, 0.00814, 0.00594, 0.00459],
        attention_logit=[0.797, 0.544, 0.805, 0.453, 0.574, 0.62, 0.519, 0.35],
    )


def test_a_divergence_is_told_once_and_two_signs_agree() -> None:
    warnings = course(
        weight_norm=[21.3, 22.7, 24.1, 26.6, 41.4, 56.6, 96.9],
        residual_rms=[0.05, 0.14, 0.39, 1.78, 19.4, 53.5, 876.0],
    )
    assert signals(warnings) == [["weight_norm"], ["residual_rms"], ["residual_rms", "weight_norm"]]
    assert [one.is_alarm for one in warnings] == [False, False, True]
    assert "19.4" in warnings[1].sentence and "at step 50" in warnings[1].sentence


def test_one_sign_alone_is_no_alarm() -> None:
    (warning,) = course(residual_rms=[1.0, 1.1, 1.2, 30.0, 31.0, 32.0])
    assert not warning.is_alarm and signals([warning]) == [["residual_rms"]]


def test_signs_that_rise_together_in_healthy_trainings_too_are_no_alarm() -> None:
    warnings = course(
        residual_rms=[0.6, 1.1, 1.2, 6.3, 7.0, 8.0, 9.0],
        grad_ratio=[20.0, 18.0, 19.0, 90.0, 110.0, 120.0, 115.0],
    )
    assert signals(warnings) == [["residual_rms"], ["grad_ratio"]]
    assert not any(one.is_alarm for one in warnings)


def test_two_signs_at_one_look_are_no_alarm_yet() -> None:
    """Of two numbers that jump together, and are back at the next look."""
    (warning,) = course(
        residual_rms=[1.0, 1.1, 1.2, 30.0, 1.2, 1.3], logsumexp=[5.0, 5.0, 5.0, 40.0, 5.0, 5.0]
    )
    assert not warning.is_alarm


def test_a_number_that_jumps_about_is_a_sign_at_the_second_look() -> None:
    assert not course(grad_ratio=[12.0, 9.0, 9.5, 60.0, 14.0, 70.0, 11.0])
    (warning,) = course(grad_ratio=[12.0, 9.0, 9.5, 60.0, 70.0, 80.0, 90.0])
    assert warning.signs[0].value == 70.0


@pytest.mark.parametrize(("warmup", "num"), [(0, 1), (400, 0)])
def test_weights_may_grow_faster_while_the_rate_rises(warmup: int, num: int) -> None:
    """But not as fast as the sum of the rates does, which is the square of the steps."""
    growing = [20 + (EVERY * at / 100) ** 1.8 / 2 for at in range(1, 9)]
    assert len(course(warmup, weight_norm=growing)) == num


def test_weights_that_hardly_move_may_grow_faster() -> None:
    """Adapters begin at zero."""
    growing = [1.0, 1.05, 1.15, 1.3, 1.5]
    assert course(weight_norm=growing, update_ratio=[0.02] * 5)
    assert not course(weight_norm=growing, update_ratio=[0.002] * 5)


def test_a_run_that_went_back_is_told_again() -> None:
    early = EarlyWarnings(EarlyRules(every=EVERY))
    for step, value in ((50, 1.0), (100, 1.0), (150, 1.0), (200, 30.0)):
        warned = early.note(Look(step=step, values={"residual_rms": value}))
    assert warned is not None
    assert early.note(Look(step=150, values={"residual_rms": 1.0})) is None
    assert early.note(Look(step=200, values={"residual_rms": 30.0})) is not None


def test_what_a_rollback_undid_is_no_past() -> None:
    early = EarlyWarnings(EarlyRules(every=EVERY))
    for step, value in ((50, 10.0), (100, 10.0), (150, 1.0), (150, 12.0), (200, 12.0)):
        assert early.note(Look(step=step, values={"residual_rms": value})) is None, (step, value)


def test_what_is_not_finite_or_alone_is_no_sign() -> None:
    assert not course(residual_rms=[float("nan"), float("inf"), 1.0, float("inf")])
    assert not course(residual_rms=[1e6])


def test_warnings_are_quoted_for_a_while_and_keep_checkpoints() -> None:
    history = History()
    for step, keeps in ((100, 1), (400, 2), (500, 2), (700, 4), (710, None)):
        detail = {"keeps": keeps}
        history.add(
            Incident(kind="warning", step=step, decision="", reason=f"r{step}", detail=detail)
        )
    assert history.warnings_before(650) == ["step 400: r400", "step 500: r500"]
    assert history.kept_serials() == {2, 4}


def test_nothing_is_told_before_a_whole_window() -> None:
    """In the first steps of a healthy training everything moves: looks at every fifth update."""
    early = EarlyWarnings(EarlyRules(every=5))
    told = [
        early.note(Look(step=5 * at, values={"weight_norm": 10 + at**2 / 4})) for at in range(1, 60)
    ]
    assert not any(told[:39]) and told[39] is not None


def test_a_little_faster_is_not_faster() -> None:
    """Of a healthy run of 400 steps at defaults: the second half added 1.1 % more."""
    assert not course(weight_norm=[14.2, 17.12, 20.00, 22.91, 25.8, 28.7, 31.6, 34.5])
    assert course(weight_norm=[14.2, 17.12, 20.00, 22.91, 27.0, 32.1, 38.6, 47.5])
