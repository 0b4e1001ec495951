"""Start again or not: every answer of the policy, as a table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runner.policy.restart import HARDWARE, Again, Attempt, End, ExitCodes, RestartRules, after

CRASH = Attempt(
    code=1, clean_before=20, clean_after=20, took_up=True, step=33, cause="exception", signature="s"
)
NOBODY_SAID = replace(CRASH, cause=None, signature=None)
CODES = ExitCodes(
    done=0,
    crash=1,
    halted=3,
    preempted=75,
    final={2: "settings or data", 3: "halted by the guard", 4: "no loadable checkpoint"},
)
RULES = RestartRules(codes=CODES, restarts=3, pause_seconds=1.0, max_pause_seconds=3.0)


def crash(step: int, *, clean: tuple[int, int] = (20, 20), signature: str | None = "s") -> Attempt:
    return replace(
        CRASH, step=step, clean_before=clean[0], clean_after=clean[1], signature=signature
    )


@pytest.mark.parametrize(
    ("code", "ends_with", "words"),
    [
        (0, 0, "done"),
        (2, 2, "settings"),
        (3, 3, "halted"),
        (4, 4, "no loadable checkpoint"),
        (1, None, "failed at step 33, newest clean checkpoint 20"),
        (75, None, "preempted at step 33"),
        (137, None, "failed at step 33"),
    ],
)
def test_one_attempt(code: int, ends_with: int | None, words: str) -> None:
    what = after([replace(CRASH, code=code)], RULES, asked_to_stop=False)
    assert words in what.reason
    if ends_with is None:
        assert isinstance(what, Again)
    else:
        assert isinstance(what, End) and what.code == ends_with


@pytest.mark.parametrize("code", [1, 75, 143])
def test_a_job_that_was_asked_to_stop_is_left_alone(code: int) -> None:
    what = after([replace(CRASH, code=code)], RULES, asked_to_stop=True)
    assert what == End(reason="asked to stop", code=code)


def test_the_scheduler_restarts_what_was_preempted() -> None:
    rules = replace(RULES, restart_preempted=False)
    what = after([replace(CRASH, code=75)], rules, asked_to_stop=False)
    assert isinstance(what, End) and what.code == 75


@pytest.mark.parametrize("cause", ["exception", HARDWARE])
def test_the_budget_and_its_pauses_without_progress(cause: str) -> None:
    attempts = [replace(crash(step), cause=cause) for step in (31, 32, 33, 34)]
    pauses = []
    for count in (1, 2, 3):
        what = after(attempts[:count], RULES, asked_to_stop=False)
        assert isinstance(what, Again)
        pauses.append(what.pause_seconds)
    assert pauses == [1.0, 2.0, 3.0], "doubled, up to the limit"
    what = after(attempts, RULES, asked_to_stop=False)
    assert isinstance(what, End) and what.code == 1
    assert "4 attempts without a new clean checkpoint, the budget is 3 restarts" in what.reason


@pytest.mark.parametrize("clean", [(20, 20), (20, 30)])
def test_without_restarts_the_first_failure_is_the_end(clean: tuple[int, int]) -> None:
    """Also after progress, which would renew a budget."""
    what = after([crash(33, clean=clean)], replace(RULES, restarts=0), asked_to_stop=False)
    assert what == End(reason="restarts: 0; failed at step 33: s", code=1)


def test_progress_renews_the_budget_for_ever() -> None:
    attempts = [crash(10 * n + 3, clean=(10 * n - 10, 10 * n)) for n in range(1, 30)]
    for count in range(1, 30):
        what = after(attempts[:count], RULES, asked_to_stop=False)
        assert isinstance(what, Again) and what.pause_seconds == 0.0


def test_coming_back_to_where_it_was_is_no_progress() -> None:
    """A rollback lets the newest clean checkpoint fall; reaching it again is nothing new."""
    attempts = [
        crash(41, clean=(30, 40)),
        crash(42, clean=(40, 20)),
        crash(43, clean=(20, 40)),
        crash(44, clean=(40, 40)),
        crash(45, clean=(40, 40)),
    ]
    what = after(attempts, RULES, asked_to_stop=False)
    assert isinstance(what, End) and what.code == 1


@pytest.mark.parametrize(
    ("attempts", "is_deterministic"),
    [
        ([crash(33), crash(33), crash(33)], True),
        ([crash(33, clean=(20, 30)), crash(33, clean=(30, 30)), crash(33, clean=(30, 30))], True),
        ([crash(33, signature=None)] * 3, True),
        ([crash(33), crash(33)], False),
        ([crash(33), crash(34), crash(33)], False),
        ([crash(33), crash(33, signature="other"), crash(33)], False),
        ([crash(33), crash(33), replace(crash(33), took_up=False)], False),
        ([replace(crash(33), code=75)] * 3, False),
        # Of a device, whatever happens at the same step again: the next node may do it.
        ([replace(crash(33), cause=HARDWARE)] * 3, False),
        ([crash(33), crash(33), replace(crash(33), cause=HARDWARE)], False),
    ],
)
def test_the_same_failure_three_times_is_deterministic(
    attempts: list[Attempt], is_deterministic: bool
) -> None:
    what = after(attempts, RULES, asked_to_stop=False)
    if is_deterministic:
        assert isinstance(what, End) and what.code == 3
        assert "deterministic: 3 attempts in a row failed at step 33 with" in what.reason
    else:
        assert isinstance(what, Again)


def test_endless_preemption_without_progress_ends() -> None:
    """A time limit that has passed would stop every attempt at once."""
    attempts = [replace(CRASH, code=75)] * 4
    what = after(attempts, RULES, asked_to_stop=False)
    assert isinstance(what, End) and what.code == 75
    first = after(attempts[:1], RULES, asked_to_stop=False)
    assert isinstance(first, Again) and first.pause_seconds == 0.0


@pytest.mark.parametrize(
    ("attempt", "diagnose"),
    [
        (NOBODY_SAID, True),
        *((replace(CRASH, cause=cause), True) for cause in ("silence", "exit", "fatal", "network")),
        *((replace(CRASH, cause=cause), False) for cause in ("exception", "signal", "absent")),
        (replace(NOBODY_SAID, diagnosed=True), False),
        (replace(NOBODY_SAID, took_up=False), False),
        (replace(NOBODY_SAID, code=75), False),
    ],
)
def test_an_unexplained_crash_is_diagnosed_once(attempt: Attempt, diagnose: bool) -> None:
    what = after([attempt], replace(RULES, diagnose=True), asked_to_stop=False)
    assert isinstance(what, Again) and what.diagnose is diagnose
    without = after([attempt], RULES, asked_to_stop=False)
    assert isinstance(without, Again) and not without.diagnose
