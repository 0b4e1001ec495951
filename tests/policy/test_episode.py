"""What trouble is called when it ends, and what is suspected, from the numbers before it."""

from __future__ import annotations

import json
import math
import random

import pytest

from runner.policy.decision.episode import Diagnosis
from runner.policy.decision.history import History
from runner.policy.decision.judge import Baseline, Kind
from runner.policy.decision.ladder import BadStepTracker, Discard, Rollback
from runner.policy.decision.step_decision import decide_step
from runner.policy.retention.records import Record, State
from tests.policy.steps import attempted, guard_settings, remedy_rules

START = [Record(serial=1, step=0, cursor=0, state=State.clean)]
Numbers = tuple[float, float]


class Guarded:
    """A run of given numbers: what is not applied happens to the guard's memory alone."""

    def __init__(self, seed: int = 0) -> None:
        self.baseline = Baseline(guard_settings())
        self.trouble = BadStepTracker(guard_settings())
        self.draw = random.Random(seed)
        self.tried = 0

    def attempt(self, numbers: Numbers) -> tuple[type, Diagnosis | None]:
        self.tried += 1
        signals = attempted(self.tried, *numbers)
        ruling = decide_step(
            signals,
            baseline=self.baseline,
            trouble=self.trouble,
            history=History(),
            ring=START,
            rules=remedy_rules(),
        )
        if ruling.verdict.kind is Kind.clean:
            self.baseline.accept(signals)
        return type(ruling.action), ruling.finding

    def healthy(self, steps: int, loss: float = 3.0, norm: float = 0.3) -> list[Diagnosis]:
        told = [
            self.attempt((loss + self.draw.gauss(0, 0.03), norm * self.draw.lognormvariate(0, 0.1)))
            for _ in range(steps)
        ]
        return [finding for _, finding in told if finding]

    def go_on(self, numbers: list[Numbers]) -> list[Diagnosis]:
        return [finding for _, finding in map(self.attempt, numbers) if finding]


def run() -> Guarded:
    guarded = Guarded()
    assert guarded.healthy(100) == []
    return guarded


def test_one_hard_batch_is_transient_and_the_datas() -> None:
    guarded = run()
    assert guarded.attempt((5.0, 4.0)) == (Discard, None)
    assert guarded.healthy(9) == []
    [finding] = guarded.healthy(1)
    assert (finding.shape, finding.cause) == ("transient", "data")
    assert (finding.episode.num_bad, finding.episode.worst_loss) == (1, 5.0)
    assert finding.episode.stop - finding.episode.start == 8, "the one batch"
    assert finding.describe().startswith("transient from step 101: 1 bad step, then clean again")
    assert finding.describe().endswith(f"; suspected cause: data ({finding.why})")
    found = {"cause": "hardware, sticky", "why": "it did not follow the sample"}
    told = finding.describe(confirmed=found)
    assert told.endswith("; cause: hardware, sticky (it did not follow the sample)")
    assert guarded.trouble.episode is None
    assert guarded.healthy(30) == [], "told once"


def test_a_lasting_jump_is_persistent_and_goes_back() -> None:
    guarded = run()
    [finding] = guarded.go_on([(5.0, 4.0), (5.1, 4.0), (5.0, 3.9)])
    assert (finding.shape, finding.cause) == ("persistent", "data")
    assert "3 bad steps among 3; the run goes back" in finding.describe()
    assert "grad norm flat at 0.297 before, 4 at the onset" in finding.why


def test_a_norm_that_crept_up_points_at_the_rate() -> None:
    """BLOOM-176B, steps 31214 to 31222: the norm speaks four steps before the loss."""
    guarded = run()
    spoke = [0.24, 0.947, 2.39, 15.9, 145.1]
    actions = [
        guarded.attempt((loss, norm))[0]
        for loss, norm in zip([2.99, 3.02, 3.3, 3.04, 3.14], spoke, strict=True)
    ]
    assert actions.index(Discard) <= 3, "before the loss did anything"
    findings = guarded.go_on([(5.9, 960.0), (4.3, 353.0), (4.0, 379.0)])
    assert findings[0].cause == "learning rate or numerics"
    assert "crept up" in findings[0].why


@pytest.mark.parametrize(
    ("factor", "cause"), [(1.0, "one sample or one layer"), (1.5, "unclear"), (2.5, "rate")]
)
def test_a_small_rise_of_the_norm_points_nowhere(factor: float, cause: str) -> None:
    """Norms of healthy runs wander by a half within the first hundreds of steps."""
    guarded = Guarded()
    for at in range(100):
        norm = 0.3 * factor ** (at / 64) * guarded.draw.lognormvariate(0, 0.03)
        guarded.attempt((3.0 + guarded.draw.gauss(0, 0.03), norm))
    guarded.attempt((math.nan, math.nan))
    [finding] = guarded.healthy(10)
    assert cause in finding.cause


def test_a_norm_that_wanders_is_no_clear_creep() -> None:
    """Up by 1.8, but not on and on: high in the first half already, back, and high again."""
    guarded = Guarded()
    for at in range(64):
        norm = (0.3, 0.54, 0.4, 0.54)[at // 16]
        guarded.attempt((3.0 + guarded.draw.gauss(0, 0.03), norm))
    guarded.attempt((math.nan, math.nan))
    [finding] = guarded.healthy(10)
    assert finding.cause != "learning rate or numerics"


def test_nan_out_of_a_calm_norm_is_one_sample_or_one_layer() -> None:
    guarded = run()
    guarded.attempt((math.nan, math.nan))
    [finding] = guarded.healthy(10)
    assert (finding.shape, finding.cause) == ("transient", "one sample or one layer")
    assert finding.episode.worst_loss is None


def test_nan_after_a_rising_norm_is_numerics() -> None:
    guarded = run()
    guarded.go_on([(3.0, 0.6), (3.0, 0.9), (3.0, 1.4), (math.nan, math.inf)])
    [finding] = guarded.healthy(10)
    assert finding.cause == "learning rate or numerics"


@pytest.mark.parametrize(
    ("norms", "cause"), [([0.3] * 400, "data"), ([0.3 * 1.02**at for at in range(400)], "rate")]
)
def test_a_slow_rise_is_a_divergence(norms: list[float], cause: str) -> None:
    guarded = run()
    for at, norm in enumerate(norms):
        action, finding = guarded.attempt((3.0 + 0.0015 * at, norm))
        if finding is not None:
            break
    assert action is Rollback
    assert finding.shape == "divergence"
    assert cause in finding.cause
    assert finding.episode.onset_step <= 101 + 200


def test_a_jump_on_top_of_a_rise_is_a_divergence_too() -> None:
    guarded = run()
    guarded.go_on([(3.0 + 0.006 * at, 0.3) for at in range(41)])
    [finding] = guarded.go_on([(5.0, 2.0)] * 3)
    assert finding.shape == "divergence"


def test_scattered_bad_steps_end_an_episode_too_and_do_not_drag_its_onset_along() -> None:
    guarded, findings = run(), []
    for _ in range(30):  # one in eight, for ever: never ten clean ones in a row
        assert guarded.attempt((5.0, 1.0))[0] is Discard
        findings += guarded.healthy(7)
    assert {finding.shape for finding in findings} == {"persistent"}
    assert len(findings) == 2
    assert "never enough at once" in findings[0].describe()
    assert len(guarded.trouble.bad) == 1, "what lies further back is other trouble"


def test_an_episode_survives_json_at_any_moment() -> None:
    rest: list[Numbers] = [(3.0, 0.3), (math.nan, math.nan), (5.0, 9.0)]
    rest += [(3.0, 0.3)] * 12
    guarded = run()
    guarded.attempt((6.0, 2.0))
    for at in range(len(rest)):
        whole, again = BadStepTracker(guard_settings()), BadStepTracker(guard_settings())
        state = json.loads(json.dumps(guarded.trouble.to_json(), allow_nan=False))
        whole.load_json(state)
        again.load_json(json.loads(json.dumps(whole.to_json(), allow_nan=False)))
        assert again.to_json() == guarded.trouble.to_json()
        before, kept = guarded.attempt(rest[at]), guarded.trouble
        guarded.trouble, guarded.tried = again, guarded.tried - 1
        assert guarded.attempt(rest[at]) == before, "a restart finds the same"
        assert guarded.trouble.to_json() == kept.to_json()
