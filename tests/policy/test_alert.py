"""One message when trouble begins, and one when it is over: which lines and states make which."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runner.policy.alert import FAR_STEPS, Episodes, merged


class Told:
    """A run whose lines come at one-second intervals, and what is told of it."""

    def __init__(self, every: float = 60.0) -> None:
        self.every, self.now, self.told = every, 1000.0, []
        self.episodes = Episodes("run", every_seconds=every)

    def line(self, kind: str, step: int, **more: Any) -> None:
        self.now += 1.0
        line = {"kind": kind, "step": step, "time": self.now, "reason": "r", "decision": "d"}
        self.told += self.episodes.add({**line, "detail": {}, **more}, self.now)

    def is_now(self, status: str, step: int, *, after: float = 1.0, moves: bool = True) -> None:
        self.now += after
        moved = self.now if moves else 0.0
        self.told += self.episodes.see(status, step, self.now, moved=moved)
        # Started again at each moment, it knows what it knew.
        state = json.loads(json.dumps(self.episodes.to_json()))
        self.episodes = Episodes("run", every_seconds=self.every, state=state)

    def trains(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.is_now("running", step)

    @property
    def events(self) -> list[tuple[str, str]]:
        return [(one["event"], one["kind"]) for one in self.told]


def test_one_cause_that_made_26_alerts_makes_two_messages() -> None:
    """A poisoned stretch: 8 redos, 12 discards, 5 rollbacks, and a halt, in 46 seconds."""
    run = Told()
    run.trains(1, 43)
    for back in range(5):
        for kind in ("redo", "discard", "redo", "discard", "discard")[back // 3 :]:
            run.line(kind, 44 + back)
        run.line("rollback", 46)
        run.trains(30 - 10 * (back > 2), 43)
    run.line("halt", 46)
    run.is_now("halted", 46)
    run.is_now("halted", 46, after=3600)
    assert run.events == [("trigger", "redo"), ("trigger", "halt")]
    assert len({one["key"] for one in run.told}) == 1
    assert [one["level"] for one in run.told] == ["warning", "error"]


def test_each_incident_is_told_and_each_end_once() -> None:
    run = Told(every=0.0)
    run.trains(1, 40)
    run.line("discard", 41)
    run.trains(41, 40 + FAR_STEPS + 2)
    run.line("crash", 80)
    run.is_now("starting", 80)
    run.is_now("running", 80, moves=False)  # a metrics line from before the crash proves nothing
    run.trains(81, 84)
    for kind in ("discard", "discard", "rollback"):
        run.line(kind, 84)
    run.line("episode", 84)
    run.trains(70, 120)
    run.is_now("done", 120)
    run.is_now("done", 120)
    kinds = [("discard", "recovered"), ("crash", "recovered"), ("discard", "recovered")]
    pairs = [[("trigger", kind), ("resolve", end)] for kind, end in kinds]
    assert run.events == [*pairs[0], *pairs[1], *pairs[2], ("notice", "done")]
    assert [one["key"] for one in run.told[0:6:2]] == [one["key"] for one in run.told[1:6:2]]
    assert len({one["key"] for one in run.told}) == 4
    assert "discard x2, rollback" in run.told[5]["reason"]


def test_silence_and_the_crash_that_the_next_start_reports_are_one_episode() -> None:
    run = Told()
    run.trains(1, 10)
    run.is_now("silent", 10)
    run.is_now("silent", 10, after=500)
    run.line("crash", 10)
    run.is_now("starting", 10)
    run.is_now("running", 11)
    assert run.events == [("trigger", "silent")]
    run.is_now("running", 12, after=30)
    assert len(run.told) == 1, "it was not well for a minute"
    run.is_now("running", 13, after=31)
    assert run.events == [("trigger", "silent"), ("resolve", "recovered")]


def test_a_loop_of_crashes_is_one_episode_which_gets_worse_when_nothing_starts_it_again() -> None:
    run = Told()
    for _ in range(6):
        run.line("crash", 5)
        run.is_now("running", 6, after=10)
    run.is_now("silent", 6, after=200)
    assert run.events == [("trigger", "crash"), ("trigger", "silent")]
    assert len({one["key"] for one in run.told}) == 1


def test_trouble_of_another_kind_is_told_beside_an_open_episode() -> None:
    run = Told()
    for kind in ("discard", "straggler", "straggler", "replica_mismatch", "crash", "discard"):
        run.line(kind, 5)
    assert [kind for _, kind in run.events] == ["discard", "straggler", "replica_mismatch", "crash"]
    assert [event for event, _ in run.events] == ["trigger", "notice", "notice", "trigger"]


@pytest.mark.parametrize("kind", ["start", "episode", "interval", "setting_changed", "throughput"])
def test_what_is_information_only_is_not_told(kind: str) -> None:
    run = Told()
    run.line(kind, 1)
    run.line("warning", 2, detail={"agreeing": []})
    assert run.told == []


@pytest.mark.parametrize("status", ["halted", "preempted", "failed"])
def test_an_end_is_told_once_and_over_once_it_trains_again(status: str) -> None:
    run = Told(every=0.0)
    run.is_now(status, 7)
    run.is_now(status, 7)
    run.is_now("starting", 7)
    run.trains(8, 8 + FAR_STEPS)
    assert [event for event, _ in run.events] == ["trigger", "resolve"]


def test_what_nobody_was_told_of_is_not_told_to_be_over() -> None:
    episodes = Episodes("run", every_seconds=0.0)
    line = {"kind": "crash", "step": 3, "detail": {}}
    assert episodes.add(line, 5.0, is_told=False) == []
    assert episodes.is_trouble and episodes.see("running", 9, 20.0) == []
    assert not episodes.is_trouble


def test_of_an_episode_that_is_over_before_it_is_told_one_message_is_left() -> None:
    waiting = [
        {"event": "trigger", "key": "a"}, {"event": "notice", "key": "b"},
        {"event": "trigger", "key": "c"}, {"event": "resolve", "key": "a"},
    ]  # fmt: skip
    assert merged(waiting) == waiting[1:]
