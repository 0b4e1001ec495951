"""The judge: what is called what, and that trouble never enters its own measure."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.policy.decision import judge
from runner.policy.decision.judge import Baseline, Kind, Verdict
from runner.policy.decision.signals import Limits, limits_of
from tests.policy.steps import BATCH, attempted, guard_settings, held_level

NOISE = [0.0, 0.02, -0.02, 0.01, -0.01]
TIGHT = {"window": 20, "min_history": 10, "loss_sigmas": 6.0}


def steady(steps: int, *, level: float = 3.0, norm: float = 1.0, **rules: Any) -> Baseline:
    """A baseline after ``steps`` healthy steps around one level."""
    baseline = Baseline(guard_settings(**TIGHT | rules))
    for step in range(1, steps + 1):
        wobble = NOISE[step % len(NOISE)]
        baseline.accept(attempted(step, level + wobble, norm * math.exp(wobble)))
    return baseline


def watch(baseline: Baseline, losses: Iterable[float], first: int = 1) -> Verdict | None:
    """Judge and accept as the loop does, until something is not clean."""
    for step, loss in enumerate(losses, start=first):
        verdict = baseline.judge(attempted(step, loss))
        if verdict.kind is not Kind.clean:
            return verdict
        baseline.accept(attempted(step, loss))
    return None


@pytest.mark.parametrize("history", [0, 5, 30])
@pytest.mark.parametrize(
    "numbers",
    [
        {"loss": math.nan},
        {"loss": math.inf},
        {"loss": -math.inf},
        {"grad_norm": math.nan},
        {"grad_norm": math.inf},
        {"nonfinite_ranks": 2},
        {"loss": 1e30, "grad_norm": math.nan},
    ],
)
def test_non_finite_comes_first_and_needs_no_history(history: int, numbers: Any) -> None:
    verdict = steady(history).judge(attempted(history + 1, **numbers))
    assert verdict.kind is Kind.non_finite
    assert (verdict.onset_step, verdict.onset) == (history + 1, history * BATCH)
    assert "NaN or Inf" in verdict.reason


MEDIANS = "median 3.000, of the last 5 steps 3.000"


@pytest.mark.parametrize(
    ("loss", "norm", "kind", "said"),
    [
        (3.0, 1.0, Kind.clean, "within limits"),
        (3.39, 7.0, Kind.clean, "within limits"),
        (3.5, 1.0, Kind.spike, f"loss 3.500 > limit 3.400 ({MEDIANS})"),
        (3.0, 20.0, Kind.spike, "grad norm 20 > limit 7.39 (median 1)"),
        (9.0, 20.0, Kind.spike, "grad norm 20"),
        (0.1, 1e-9, Kind.clean, "within limits"),  # better than ever is no trouble
    ],
)
def test_spikes(loss: float, norm: float, kind: Kind, said: str) -> None:
    baseline = steady(30, loss_floor=0.4, norm_floor=2.0)
    verdict = baseline.judge(attempted(31, loss, norm))
    assert verdict.kind is kind
    assert said in verdict.reason
    assert (verdict.onset_step, verdict.onset) == (31, 30 * BATCH)


def test_a_spike_names_only_what_stood_out() -> None:
    baseline = steady(30)
    assert "grad norm" not in baseline.judge(attempted(31, 9.0)).reason
    assert "loss" not in baseline.judge(attempted(31, 3.0, 99.0)).reason


def test_the_limit_is_sigmas_or_the_floor_whichever_is_more() -> None:
    wild = Baseline(guard_settings(**TIGHT, loss_floor=0.1, norm_floor=0.1))
    for step in range(1, 41):
        # Any five in a row have the median zero, so both levels are 3.
        spread = [0.0, 0.5, -0.5, 0.25, -0.25][step % 5]
        wild.accept(attempted(step, 3.0 + spread, math.exp(spread)))
    sigma = 1.4826 * 0.25
    assert wild.limits.loss == pytest.approx(3.0 + 6.0 * sigma)
    assert wild.limits.grad_norm == pytest.approx(math.exp(13.0 * sigma))
    calm = steady(30, loss_floor=0.7, norm_floor=3.0)
    assert calm.limits.loss == pytest.approx(3.7)
    assert calm.limits.grad_norm == pytest.approx(math.exp(3.0))


def test_not_armed_before_min_history() -> None:
    assert steady(10).judge(attempted(11, 50.0, 1e6)).kind is Kind.clean
    assert steady(10).limits == Limits()
    # One more: the limits lag one applied step behind the statistics.
    assert steady(11).judge(attempted(12, 50.0)).kind is Kind.spike


def test_an_end_state_is_held_against_the_limit_or_what_was_before() -> None:
    baseline = steady(30, level=3.0)
    limit = baseline.limits.loss
    assert baseline.end_limit() == limit > 3.0
    assert baseline.end_limit(2.0) == limit, "held out lower than trained on"
    room = limit - 3.0
    assert baseline.end_limit(5.0) == pytest.approx(5.0 + room, abs=0.02), "learned by heart"
    assert steady(5).end_limit() == steady(5).end_limit(5.0) == math.inf, "not armed"
    assert steady(0).end_limit(5.0) == math.inf


def test_refused_steps_change_no_limit() -> None:
    clean, hit = steady(30), steady(30)
    for loss, norm in [(1e6, 1e6), (math.nan, math.inf), (3.9, 1.0)] * 20:
        signals = attempted(31, loss, norm)
        assert hit.judge(signals).kind is not Kind.clean
        hit.refuse(signals)
    hit.refuse(attempted(31, 3.0, 1e6))  # not high: the usual limit holds again
    assert hit.limits == clean.limits
    for step in (31, 32, 33):
        for baseline in (clean, hit):
            baseline.accept(attempted(step, 3.01))
    assert hit.limits == clean.limits
    assert held_level(hit) == held_level(clean)


def test_the_streak_counts_clean_steps_since_the_last_refusal() -> None:
    baseline = steady(12)
    assert baseline.clean_streak == 12
    baseline.refuse(attempted(13, 9.0))
    assert baseline.clean_streak == 0
    baseline.accept(attempted(13))
    assert baseline.clean_streak == 1


@given(loss=st.floats(0.0, 3.2), norm=st.floats(0.0, 7.0))
@settings(max_examples=25, deadline=None)
def test_limits_lag_one_applied_step(loss: float, norm: float) -> None:
    """Which of the two holds, the usual or the one after a high loss, is all that does not."""
    usual, other = steady(30), steady(30)
    usual.accept(attempted(31, 3.0, 1.0))
    other.accept(attempted(31, loss, norm))
    assert other.limits == usual.limits, "step 31's own value may not move the limits of step 32"


def test_the_lag_is_no_more_than_one_step() -> None:
    # A window of four that has forgotten everything else shows the shift exactly one step on.
    baseline = Baseline(guard_settings(window=4, min_history=4, norm_floor=0.4))
    for step in range(1, 9):
        baseline.accept(attempted(step, 3.0, math.exp(3.0 if step <= 4 else 2.0)))
    assert math.log(baseline.limits.grad_norm) == pytest.approx(2.4)  # [3, 2, 2, 2], of step 7
    usual = math.log(baseline.limits.grad_norm)
    baseline.accept(attempted(9, 3.0, math.exp(8.0)))
    assert math.log(baseline.limits.grad_norm) == pytest.approx(usual)
    baseline.accept(attempted(10, 3.0, math.exp(8.0)))
    baseline.accept(attempted(11, 3.0, math.exp(8.0)))
    assert math.log(baseline.limits.grad_norm) > 5.0, "[2, 2, 8, 8], of step 10"


STEEP = [3.0 + 8.0 * math.exp(-at / 120) for at in range(700)]


@pytest.mark.parametrize("seed", range(3))
def test_a_jump_is_found_by_its_second_step_on_a_steep_curve_too(seed: int) -> None:
    """The curve falls by up to 0.07 a step: the window's median lies two nats above it."""
    noise = random.Random(seed)
    losses = [loss + noise.gauss(0, 0.045) for loss in STEEP]
    baseline = Baseline(guard_settings())
    for step, loss in enumerate(losses, start=1):
        if step in (60, 80, 120, 200, 400, 600):
            other = copied(baseline)
            verdict = watch(other, [loss + 0.5, losses[step] + 0.5], first=step)
            assert verdict is not None, step
            assert verdict.kind is Kind.spike
        assert watch(baseline, [loss], first=step) is None


def copied(baseline: Baseline) -> Baseline:
    other = Baseline(guard_settings())
    other.load_json(baseline.to_json())
    return other


def test_a_fall_is_clean_and_the_level_after_it_is_kept() -> None:
    for slope in (0.02, 0.1, 0.5):
        losses = [max(3.0, 3.0 + slope * (50 - at)) for at in range(150)]
        assert watch(Baseline(guard_settings()), losses) is None, slope
    losses = [5.0] * 60 + [3.0] * 60
    baseline = Baseline(guard_settings())
    assert watch(baseline, losses) is None
    assert baseline.judge(attempted(121, 3.5)).kind is Kind.spike


def test_a_creeping_rise_does_not_take_the_short_level_along() -> None:
    """Every step lies close to the five before it, and still it is too high."""
    losses = [3.0] * 80 + [3.0 + 0.06 * at for at in range(40)]
    verdict = watch(Baseline(guard_settings()), losses)
    assert verdict.onset_step < 80 + 12


@pytest.mark.parametrize("seed", range(4))
def test_a_slow_rise_is_drift_before_half_a_nat(seed: int) -> None:
    noise = random.Random(seed)
    flat, slope = 300, 0.3 / 200
    losses = [3.0 + max(0, at - flat) * slope + noise.gauss(0, 0.05) for at in range(flat + 340)]
    verdict = watch(Baseline(guard_settings()), losses)
    assert verdict.kind is Kind.drift
    assert "drift_nats" in verdict.reason
    assert flat < verdict.onset_step < flat + 0.3 / slope, "where the excess began to pile up"
    assert verdict.onset == (verdict.onset_step - 1) * BATCH


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sigma", [0.02, 0.05, 0.15])
def test_a_healthy_falling_curve_is_clean_throughout(seed: int, sigma: float) -> None:
    noise = random.Random(seed)
    losses = [2.5 + 6.0 * math.exp(-at / 150) + noise.gauss(0, sigma) for at in range(1000)]
    assert watch(Baseline(guard_settings()), losses) is None


def test_no_single_step_is_a_drift_and_the_onset_is_where_the_rise_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(judge, "_DRIFT_SLACK", 0.01)
    monkeypatch.setattr(judge, "_DRIFT_RISE", 0.02)
    lax = {"loss_floor": 10.0, "drift_nats": 2.0}  # no spikes
    baseline = Baseline(guard_settings(window=4, min_history=4, **lax))
    assert watch(baseline, [1.0, 1.0, 1.0, 1.0, 1.0, 1.5, 0.5, 0.5]) is None, "a rise that healed"
    assert watch(baseline, [9.0, 0.5, 0.5], first=9) is None, "one hard batch"
    verdict = watch(baseline, [2.0] * 30, first=12)
    assert verdict.kind is Kind.drift
    assert (verdict.onset_step, verdict.onset) == (12, 11 * BATCH), "not the ones that healed"


@pytest.mark.parametrize(
    ("losses", "found"),
    [
        ([3.3, 3.0, 3.3, 3.0, 3.3], None),  # hard batches, never two in a row
        ([3.3, 3.3], 2),  # too little for one, enough for two
        ([3.2, 3.2, 3.2], None),  # below the pair limit
        ([3.3, 3.2, 3.3], None),  # one of them is
        ([3.5], 1),
    ],
)
def test_two_high_losses_in_a_row(losses: list[float], found: int | None) -> None:
    baseline = steady(30, loss_floor=0.4)
    verdict = watch(baseline, losses, first=31)
    assert (None if verdict is None else verdict.onset_step - 30) == found
    if found == 2:
        assert "limit 3.250 after a high one" in verdict.reason


def test_a_second_high_loss_is_never_allowed_more_than_a_first() -> None:
    baseline = steady(30, loss_floor=0.02, loss_sigmas=1.0)
    usual = baseline.limits.loss
    baseline.refuse(attempted(31, 9.0))
    assert baseline.limits.loss == usual == pytest.approx(3.02)


def test_what_was_refused_or_not_finite_is_high_too() -> None:
    baseline = steady(30, loss_floor=0.4)
    for bad in (attempted(31, 9.0), attempted(31, math.nan)):
        baseline.refuse(bad)
        assert baseline.limits.loss == pytest.approx(3.25)
    baseline.accept(attempted(31, 3.0))
    assert baseline.limits.loss == pytest.approx(3.4)


def test_heavy_tails_put_the_pair_limit_beyond_their_reach() -> None:
    """Student's t with 4 degrees: one step in 70 lies above three robust sigmas."""
    draw = random.Random(5)
    baseline, num_bad = Baseline(guard_settings()), 0
    for step in range(1, 2501):
        left = draw.gauss(0, 1) / math.sqrt(draw.gammavariate(2, 2) / 4)
        signals = attempted(step, 3.0 + 0.1 * left)
        if baseline.judge(signals).kind is Kind.clean:
            baseline.accept(signals)
        else:
            num_bad += 1
            baseline.refuse(signals)
    assert num_bad <= 1


def test_one_hard_batch_does_not_raise_the_pair_limit() -> None:
    baseline = steady(30)
    assert watch(baseline, [3.39, 3.39 - 0.2], first=31) is None
    verdict = watch(baseline, [3.0] * 3 + [3.35, 3.35], first=33)
    assert verdict.onset_step == 37


def test_a_level_after_a_steep_fall_is_guarded_though_the_window_remembers_the_fall() -> None:
    noise = random.Random(1)
    losses = [6.0 + 25.0 * math.exp(-at / 8) for at in range(45)] + [6.0] * 20
    losses = [loss + noise.gauss(0, 0.01 * loss) for loss in losses]
    baseline = Baseline(guard_settings())
    assert watch(baseline, losses) is None
    verdict = watch(baseline, [7.0, 7.0], first=66)
    assert verdict is not None


def test_a_calm_norm_is_guarded_though_the_window_remembers_a_wild_one() -> None:
    noise = random.Random(1)
    baseline = Baseline(guard_settings())
    for step in range(1, 81):
        spread = 0.8 if step <= 62 else 0.1
        baseline.accept(attempted(step, 3.0, math.exp(noise.gauss(0, spread))))
    assert baseline.judge(attempted(81, 3.0, 9.0)).kind is Kind.clean
    assert baseline.judge(attempted(81, 3.0, 60.0)).kind is Kind.spike


def test_a_run_that_has_learned_nothing_has_no_drift() -> None:
    """Two vision models here climb above a uniform guess at once, and stay there for an age."""
    noise = random.Random(2)
    climb = [7.0 + 0.25 * (1 - math.exp(-at / 60)) for at in range(300)]
    climb = [6.91, 6.88, 6.85, 6.87, 6.9, *climb]
    climb = [loss + noise.gauss(0, 0.02) for loss in climb]
    assert watch(Baseline(guard_settings()), climb) is None
    learned = [6.9 - 0.002 * at for at in range(200)]
    again = [learned[-1] + loss - climb[0] for loss in climb]
    verdict = watch(Baseline(guard_settings()), [*learned, *again])
    assert verdict is not None, "with something to lose it has"


def test_after_a_new_baseline_the_beginning_is_its_own() -> None:
    baseline = steady(30)
    baseline.restart_at([5.0] * 30, [1.0] * 30)
    verdict = watch(baseline, [5.0 + 0.004 * at for at in range(200)], first=31)
    assert verdict.kind is Kind.drift


@pytest.mark.parametrize(("height", "found"), [(0.18, False), (0.4, True)])
def test_shallow_waves_are_left_alone(height: float, found: bool) -> None:
    """Where data is seen again the loss rises within each epoch; where a rate restarts, too."""
    noise = random.Random(3)
    losses = [
        3.0 - 0.1 * (at // 600) + height * min(1.0, (at % 600) / 100) + noise.gauss(0, 0.05)
        for at in range(1300)
    ]
    assert (watch(Baseline(guard_settings()), losses) is not None) == found


def test_noise_that_comes_and_goes_is_no_drift() -> None:
    """The best level of a wild stretch is a lucky one; it is forgotten as fast as it was wild."""
    noise = random.Random(1)
    losses = [5.0 + 3 * noise.gauss(0, 1) * (1 + 0.5 * math.sin(at / 200)) for at in range(3000)]
    baseline = Baseline(guard_settings())
    assert watch(baseline, losses) is None


@pytest.mark.parametrize("sigma", [0.05, 0.3, 1.0, 3.0])
def test_noise_of_any_size_is_no_drift(sigma: float) -> None:
    noise = random.Random(7)
    baseline = Baseline(guard_settings(loss_sigmas=50.0))
    assert watch(baseline, (9.0 + noise.gauss(0, sigma) for _ in range(800))) is None


def test_restart_at_takes_a_new_level_as_normal() -> None:
    baseline = steady(30)
    assert baseline.judge(attempted(31, 5.0)).kind is Kind.spike
    baseline.restart_at([5.0 + NOISE[at % 5] for at in range(12)], [1.0] * 12)
    assert held_level(baseline) == pytest.approx(5.0, abs=0.02)
    assert watch(baseline, [5.0 + NOISE[at % 5] for at in range(60)], first=31) is None
    assert baseline.judge(attempted(91, 5.5)).kind is Kind.spike


def test_restart_at_forgets_the_drift_so_far() -> None:
    drift = {"loss_floor": 1.0, "drift_nats": 2.0}
    baseline = steady(30, **drift)
    assert watch(baseline, [3.55] * 9, first=31) is None  # 9 of at least 10 steps
    baseline.restart_at([3.55] * 12, [1.0] * 12)
    assert watch(baseline, [4.1] * 9, first=40) is None
    verdict = watch(baseline, [4.1] * 3, first=49)
    assert verdict.kind is Kind.drift
    assert verdict.onset_step == 40


def test_restart_with_few_values_is_not_armed_at_once() -> None:
    baseline = steady(30)
    baseline.restart_at([5.0] * 4, [1.0] * 4)
    assert baseline.limits == Limits()
    assert watch(baseline, [5.0] * 20, first=31) is None
    assert baseline.judge(attempted(51, 9.0)).kind is Kind.spike


def test_limits_are_kept_where_a_rollback_leads_back_to_none() -> None:
    """Wide enough for the beginning as it was, narrow enough for a fault that goes on."""
    baseline = Baseline(guard_settings(**TIGHT))
    beginning = baseline.to_json()
    watch(baseline, [4.4, 4.2, 4.0, *(3.0 + NOISE[at % 5] for at in range(60))])
    held = baseline.to_hold
    baseline.load_json(beginning)
    assert baseline.limits == Limits() and baseline.judge(attempted(1, 90.0)).kind is Kind.clean
    baseline.hold(limits_of(json.loads(json.dumps(held.to_json()))))
    assert baseline.limits == baseline.bounds_ahead.usual == held
    assert baseline.judge(attempted(1, 4.5, grad_norm=2.0)).kind is Kind.clean
    high = baseline.judge(attempted(1, 4.4, grad_norm=1e5))
    assert high.kind is Kind.spike and "kept from before the rollback" in high.reason
    assert baseline.judge(attempted(1, 9.0)).kind is Kind.spike
    watch(baseline, [4.4, 4.2, 4.0, *(3.0 + NOISE[at % 5] for at in range(60))])
    assert baseline.limits.loss < held.loss, "its own as soon as it has some"
    baseline.load_json(beginning)
    baseline.restart_at([9.0] * 4, [1.0] * 4)
    assert baseline.limits == Limits(), "a new level is judged by itself"


def test_first_loss_is_kept_for_good() -> None:
    baseline = Baseline(guard_settings(**TIGHT))
    assert math.isnan(baseline.first_loss)
    assert held_level(baseline) is None
    assert watch(baseline, [11.0, 10.0, 9.0]) is None
    baseline.restart_at([4.0] * 12, [1.0] * 12)
    assert baseline.first_loss == 11.0


def test_a_gradient_of_zero_is_no_news() -> None:
    baseline = steady(30)
    for step in range(31, 36):
        baseline.accept(attempted(step, 3.0, 0.0))
    assert baseline.judge(attempted(36)).kind is Kind.clean


@given(history=st.integers(0, 40), seed=st.integers(0, 2**16))
@settings(max_examples=20, deadline=None)
def test_json_round_trip_is_exact_and_judges_on_alike(history: int, seed: int) -> None:
    draw = random.Random(seed)
    one = Baseline(guard_settings(**TIGHT))
    for step in range(1, history + 1):  # rising, so that limits move and a drift piles up
        one.accept(attempted(step, draw.gauss(2.0 + 0.02 * step, 0.1), 10 ** draw.gauss(0, 0.2)))
    if draw.random() < 0.3:
        one.refuse(attempted(history + 1, 9.0))
    text = json.dumps(one.to_json(), allow_nan=False)
    two = Baseline(guard_settings(**TIGHT))
    two.load_json(json.loads(text))
    assert json.dumps(two.to_json()) == text
    for step in range(history + 1, history + 51):
        signals = attempted(step, draw.gauss(2.0 + 0.02 * step, 0.2), 10 ** draw.uniform(-1, 1))
        verdict = one.judge(signals)
        assert two.judge(signals) == verdict
        for baseline in (one, two):
            if verdict.kind is Kind.clean:
                baseline.accept(signals)
            else:
                baseline.refuse(signals)
        assert one.limits == two.limits
        assert (one.clean_streak, held_level(one)) == (two.clean_streak, held_level(two))
    assert one.to_json() == two.to_json()


@pytest.mark.parametrize("loss", [3.0, 1e9, math.nan, math.inf])
def test_disabled_calls_everything_clean(loss: float) -> None:
    baseline = Baseline(guard_settings(enabled=False, **TIGHT))
    for step in range(1, 40):
        signals = attempted(step, loss, loss, nonfinite_ranks=1)
        assert baseline.judge(signals).kind is Kind.clean
        baseline.accept(signals)
    assert baseline.limits == Limits()
    assert baseline.clean_streak == 39
    json.dumps(baseline.to_json(), allow_nan=False)
