"""The guard over rows: what a backtest does where a run would go back, restart or stop."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from runner.config.schema import CheckpointConfig
from runner.tools.backtest.guard_replay import GuardReplay, RecordedCurve
from tests.policy.steps import remedy_rules

SAVES = CheckpointConfig(every=20, clean_after=5, keep=3)


def healthy(rows: int, *, level: float = 3.0, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [level + draw.gauss(0, 0.04) for _ in range(rows)]


def replayed(losses: Sequence[float], *, norms: Sequence[float] = (), **more: Any) -> GuardReplay:
    """The replay of a curve that counts its steps from 0 unless told."""
    rules = {name: more.pop(name) for name in list(more) if name in ("max_rollbacks", "persist")}
    curve = RecordedCurve(
        steps=more.pop("steps", range(len(losses))),
        losses=losses,
        grad_norms=norms or [1.0] * len(losses),
        **{name: frozenset(rows) for name, rows in more.items()},
    )
    replay = GuardReplay(curve, rules=remedy_rules(batch=1, **rules), checkpoint=SAVES)
    replay.run()
    return replay


def told(replay: GuardReplay) -> list[tuple[int, str]]:
    return [(decision.row, decision.action) for decision in replay.decisions]


def test_a_healthy_curve_has_no_decisions() -> None:
    assert told(replayed(healthy(2000))) == []


def test_one_bad_row_is_discarded_and_three_go_back() -> None:
    losses = healthy(400)
    losses[150] = 9.0
    losses[300:303] = [9.0, math.nan, 9.0]
    replay = replayed(losses)
    assert told(replay) == [(150, "discard"), (300, "discard"), (301, "discard"), (302, "rollback")]
    back = replay.decisions[-1]
    assert (back.onset, back.verdict) == (300, "Spike")
    # One row was discarded: row 299 is update 299, the last proven save was at update 280.
    assert back.num_undone == 299 - 280
    assert list(replay.skipped) == [(299, 303)], "a row of margin before the onset"
    assert [finding.shape for _, finding in replay.findings.values()] == ["transient", "persistent"]


def test_after_a_rollback_the_statistics_are_the_checkpoints() -> None:
    """The rows after the skipped range are judged as the run told to skip them would."""
    losses = healthy(200) + [9.0] * 3 + healthy(300, seed=1)
    losses[350] = 3.55
    hit = replayed(losses)
    told_to = replayed([*losses[:199], *losses[203:]])
    assert told(hit)[2:] == [(202, "rollback"), (350, "discard")]
    assert hit.decisions[-1].reason == told_to.decisions[-1].reason
    assert told(told_to) == [(350 - 4, "discard")]


def test_a_level_that_stays_becomes_the_baseline_and_is_guarded_at_once() -> None:
    losses = healthy(200) + healthy(200, level=5.0, seed=2)
    losses[0] = 9.0  # an untrained model's: the new level is better than knowing nothing
    losses[240] = 5.6
    actions = told(replayed(losses))
    assert actions[2] == (202, "rollback")
    assert actions[-2:] == [(222, "rebaseline"), (240, "discard")]
    assert len(actions) == 3 + 20 + 1


@pytest.mark.parametrize(
    ("untrained", "fresh", "accepted"),
    [
        (0.0, [], False),  # 4.5 is worse than the first loss of 3, perhaps a uniform guess
        (math.log(256), [], True),  # no, that is 5.5
        (0.0, [0], True),  # a recording that begins in the middle tells nothing of it
        (0.0, [40], True),
    ],
)
def test_what_bounds_a_new_baseline(untrained: float, fresh: list[int], accepted: bool) -> None:
    losses = [*healthy(150), *healthy(150, level=4.5)]
    curve = RecordedCurve(
        steps=range(300), losses=losses, grad_norms=[1.0] * 300, fresh=frozenset(fresh)
    )
    rules = remedy_rules(batch=1, untrained_loss=untrained)
    replay = GuardReplay(curve, rules=rules, checkpoint=SAVES)
    replay.run()
    assert ("rebaseline" in {action for _, action in told(replay)}) == accepted


def test_a_halt_is_told_and_what_follows_is_judged_anew() -> None:
    draw = random.Random(3)
    losses = healthy(100) + [draw.uniform(6, 60) for _ in range(6)] + healthy(200, level=4.0)
    losses[250] = 9.0
    actions = told(replayed(losses, max_rollbacks=0))
    assert actions[:3] == [(100, "discard"), (101, "discard"), (102, "halt")]
    assert actions[-1] == (250, "discard"), "armed again, and not for ever in trouble"


@pytest.mark.parametrize("to", [150, 161, 40, 0])
def test_a_recorded_restart_goes_on_from_the_state_of_its_step(to: int) -> None:
    """A falling curve: judged by what it had reached before, the restart would be a spike."""
    fall = [8.0 - 0.02 * at + value - 3.0 for at, value in enumerate(healthy(400))]
    steps = [*range(200), *range(to, 400)]
    losses = fall[:200] + fall[to:]
    assert told(replayed(losses, steps=steps, restarts=[200])) == []
    once = replayed(fall)
    assert once.decisions == []
    losses[200 + 250 - to] += 1.0
    again = replayed(losses, steps=steps, restarts=[200])
    assert told(again) == [(200 + 250 - to, "discard")]
    if to > 100:  # and it is judged by the very numbers of a run that never stopped
        fall[250] += 1.0
        assert again.decisions[0].reason == replayed(fall).decisions[0].reason


def test_a_restart_after_trouble_forgets_what_was_left_behind() -> None:
    """As the metrics of a run of ours: rolled back from row 203 to step 180."""
    good = healthy(400)
    losses = good[:200] + [9.0] * 3 + good[180:]
    steps = [*range(203), *range(180, 400)]
    assert told(replayed(losses, steps=steps, restarts=[203])) == [
        (200, "discard"),
        (201, "discard"),
        (202, "rollback"),
    ]


def test_a_skip_ends_where_the_recorded_run_went_back_itself() -> None:
    """A repeat skips rows ahead; those after the restart are other steps, and are judged."""
    good = healthy(400)
    hit = [*good[:200], *[9.0] * 3, *good[180:205], *[9.0] * 3, *good[185:]]
    steps = [*range(203), *range(180, 208), *range(185, 400)]
    hit[203 + 28 + 100] = 9.0
    replay = replayed(hit, steps=steps, restarts=[203, 231])
    assert [row for row, _ in told(replay)] == [200, 201, 202, 228, 229, 230, 331]
    assert list(replay.skipped) == [(199, 203), (227, 231)]


def test_nothing_is_known_after_a_gap() -> None:
    losses = healthy(100, level=7.0) + healthy(60, level=8.0)
    steps = [*range(100), *range(5000, 5060)]
    assert told(replayed(losses, steps=steps))[0] == (100, "discard")
    assert told(replayed(losses, steps=steps, fresh=[100])) == []
    losses[130] += 1.0
    assert told(replayed(losses, steps=steps, fresh=[100])) == [(130, "discard")]


def test_limits_are_kept_where_asked_and_change_nothing() -> None:
    losses = healthy(100)
    losses[60] = 9.0
    curve = RecordedCurve(steps=range(100), losses=losses, grad_norms=[1.0] * 100)
    replay = GuardReplay(curve, rules=remedy_rules(batch=1), checkpoint=SAVES, keep_limits=True)
    replay.run()
    assert replay.limits is not None
    assert sorted(replay.limits) == list(range(100))
    assert replay.limits[10].loss == math.inf
    assert 3.3 < replay.limits[60].loss < 3.8
    assert told(replay) == told(replayed(losses))


def test_hours_of_nan_end() -> None:
    replay = replayed(healthy(100) + [math.nan] * 2000)
    assert len(replay.decisions) <= 2000
    assert {decision.verdict for decision in replay.decisions} == {"NonFinite"}
    assert "halt" in {decision.action for decision in replay.decisions}
