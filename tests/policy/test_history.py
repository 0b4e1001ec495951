"""The fold over the journal, and that JSON takes nothing from it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.policy.decision.history import (
    History,
    Incident,
    discard_incident,
    discarded_signals,
    verdict_within,
)
from runner.policy.schedule import RateCut
from tests.policy.steps import attempted

# Not st.text(): building its table of all of Unicode takes longer than all the rest.
WORDS = st.text(alphabet='ab "\\\n\0é☃𝄞', max_size=8)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
SPAN = st.tuples(st.integers(0, 1000), st.integers(1, 100)).map(lambda s: (s[0], s[0] + s[1]))
INCIDENTS = st.builds(
    Incident,
    kind=st.sampled_from(["start", "discard", "rollback", "halt", "save_failed"]),
    step=st.integers(0, 10**6),
    decision=WORDS,
    reason=WORDS,
    ranks=st.lists(st.integers(0, 99), max_size=3).map(tuple),
    samples=st.none() | SPAN,
    sample_ids=st.lists(WORDS, max_size=3).map(tuple),
    cost_steps=st.integers(0, 100),
    cost_seconds=FLOATS,
    detail=st.dictionaries(WORDS, st.integers() | FLOATS | WORDS, max_size=3),
)


def discard(start: int, stop: int, step: int = 1) -> Incident:
    signals = attempted(step, 9.0, start=start, stop=stop)
    return discard_incident(signals, verdict="Spike", reason="made up")


def rollback(to: int, next_serial: int, skip: tuple[int, int], **detail: Any) -> Incident:
    """Back to checkpoint ``to``, which stands at step ``10 * to``."""
    told = {
        "onset_step": 35,
        "to_step": 10 * to,
        "cursor": 80 * to,
        "serial": to,
        "next_serial": next_serial,
        "read_again": False,
        "repeat": 0,
        "metrics_bytes": 0,
        "cut_factor": 1.0,
        "cut_steps": 0,
    }
    return Incident(
        kind="rollback",
        step=38,
        decision="back",
        reason="made up",
        samples=skip,
        detail=told | detail,
    )


def folded(*incidents: Incident, told_to_skip: tuple[tuple[int, int], ...] = ()) -> History:
    history = History(told_to_skip)
    for incident in incidents:
        history.add(incident)
    return history


START = Incident(kind="start", step=0, decision="go", reason="made up")


@given(incident=INCIDENTS)
@settings(max_examples=25, deadline=None)
def test_an_incident_survives_json(incident: Incident) -> None:
    line = json.loads(json.dumps(incident.to_json(), allow_nan=False))
    assert Incident.from_json(line | {"time": 1.0, "seq": 3, "attempt": 1}) == incident


@pytest.mark.parametrize("missing", ["kind", "step", "samples", "detail", "cost_seconds"])
def test_a_line_that_lacks_a_key_is_no_incident(missing: str) -> None:
    line = START.to_json()
    del line[missing]
    with pytest.raises(KeyError, match=missing):
        Incident.from_json(line)


def test_a_verdict_that_names_something_goes_before_one_that_does_not() -> None:
    def explained(start: int, cause: str) -> Incident:
        line = discard(start, start + 8)
        return replace(line, detail=line.detail | {"cause": {"cause": cause, "steps": 1}})

    lines = [explained(0, "sticky"), explained(8, "data"), explained(16, "unclear"), START]

    def found(start: int, stop: int) -> str | None:
        verdict = verdict_within(lines, (start, stop), {"unclear"})
        return None if verdict is None else str(verdict["cause"])

    assert found(0, 24) == "data"
    assert found(0, 8) == "sticky"
    assert found(16, 24) == "unclear"
    assert found(24, 99) is None


def test_the_ledger_holds_what_was_told_discarded_and_rolled_back_over() -> None:
    history = folded(
        START,
        discard(100, 108),
        rollback(2, 4, (100, 132)),
        discard(200, 208),
        Incident(kind="halt", step=5, decision="halt", reason="made up", samples=(300, 308)),
        told_to_skip=((0, 8), (50, 60)),
    )
    assert list(history.ledger) == [(0, 8), (50, 60), (100, 132), (200, 208)]
    assert history.num_discarded == 2
    assert len(history.incidents) == 5


def test_what_is_to_be_read_again_is_not_in_the_ledger() -> None:
    history = folded(START, rollback(2, 4, (100, 132), read_again=True))
    assert list(history.ledger) == []
    assert len(history.rollbacks) == 1


def test_replays_of_all_incidents_are_summed() -> None:
    """In each line that has a cause, whatever was decided."""
    history = History()
    for steps, kind in ((7, "redo"), (5, "rollback"), (0, "discard"), (3, "explained")):
        incident = rollback(1, 2, (0, 8)) if kind == "rollback" else discard(0, 8)
        more = {"cause": {"cause": "unclear", "steps": steps}, "skipped": []}
        history.add(replace(incident, kind=kind, detail={**incident.detail, **more}))
    assert history.num_probes == 15


def test_the_newest_cause_is_of_samples_up_to_a_position() -> None:
    """A rollback does not undo it; a step that is recomputed knows no later one."""
    sticky, data = (
        replace(discard(start, start + 8), detail={"cause": {"cause": cause, "steps": 1}})
        for start, cause in ((100, "hardware, sticky"), (300, "data"))
    )
    history = folded(START, sticky, discard(200, 208), rollback(1, 5, (50, 90)), data)
    found = [history.newest_cause(position).get("cause") for position in (99, 100, 299, 300)]
    assert found == [None, "hardware, sticky", "hardware, sticky", "data"]


def test_starts_are_counted() -> None:
    assert folded().num_starts == 0
    assert folded(START, discard(0, 8), START).num_starts == 2


def test_rollbacks_keep_what_the_ladder_and_a_restart_need() -> None:
    made = rollback(3, 6, (240, 280), onset_step=31, repeat=2, metrics_bytes=77)
    history = folded(START, discard(0, 8), made)
    [record] = history.rollbacks
    assert (record.onset_step, record.to_step, record.repeat) == (31, 30, 2)
    assert (record.serial, record.next_serial, record.skip) == (3, 6, (240, 280))
    assert (record.metrics_bytes, record.seq) == (77, 2)


def test_only_a_rollback_with_a_cut_cuts() -> None:
    history = folded(
        rollback(3, 6, (240, 280)), rollback(2, 8, (240, 300), cut_steps=100, cut_factor=0.5)
    )
    assert history.cuts == [RateCut(start=34, stop=134, factor=0.5)]


def test_serials_left_behind_are_never_used_again() -> None:
    history = folded(rollback(3, 6, (240, 280)), rollback(2, 9, (160, 280)))
    # 3 was gone back to first, then left by the second rollback; 6 to 8 were written between.
    assert history.abandoned_serials() == {3, 4, 5, 6, 7, 8}
    assert folded(rollback(3, 4, (240, 280))).abandoned_serials() == set()
    assert folded(START).abandoned_serials() == set()


def test_the_newest_discard_is_the_same_on_all_ranks() -> None:
    lost = Incident(kind="output_lost", step=9, decision="go on without it", reason="full")
    first = folded(discard(0, 8), discard(8, 16), lost)
    other = folded(discard(0, 8), discard(8, 16))
    assert first.newest_discard() == other.newest_discard() == discard(8, 16)
    assert folded(discard(0, 8), rollback(5, 4, (0, 8)), lost).newest_discard() is None
    assert folded(lost).newest_discard() is None


def test_the_last_rollback_to_a_checkpoint() -> None:
    history = folded(
        rollback(3, 6, (240, 280), metrics_bytes=1),
        rollback(2, 7, (160, 280), metrics_bytes=2),
        rollback(2, 8, (160, 300), metrics_bytes=3),
    )
    newest = history.last_rollback_to(2)
    assert (newest.metrics_bytes, newest.seq) == (3, 2)
    assert history.last_rollback_to(5) is None


def test_discards_are_known_by_their_samples() -> None:
    """A restarted run journals a rollback to an older checkpoint between them, and goes on."""
    history = folded(discard(0, 8), START, discard(120, 128), discard(200, 208))
    assert [i.samples for i in history.discards_from(0)] == [(0, 8), (120, 128), (200, 208)]
    assert [i.samples for i in history.discards_from(120)] == [(120, 128), (200, 208)]
    assert history.discards_from(201) == []


def test_a_rollback_undoes_the_discards_behind_its_checkpoint() -> None:
    history = folded(
        discard(120, 128),
        discard(200, 208),
        rollback(2, 6, (192, 216)),  # checkpoint 2 has cursor 160
        discard(300, 308),
    )
    assert [i.samples for i in history.discards_from(0)] == [(120, 128), (300, 308)]
    assert [i.samples for i in history.discards_from(160)] == [(300, 308)]


@pytest.mark.parametrize("loss", [2.5, 0.1 + 0.2, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("grad_norm", [1e-30, math.nan, math.inf])
@pytest.mark.parametrize("withheld", [None, "the engine would not"])
def test_a_discarded_step_is_read_back_exactly(
    loss: float, grad_norm: float, withheld: str | None
) -> None:
    numbers = {"start": 48, "stop": 60, "tokens": 99, "nonfinite_ranks": 3, "gated": True}
    signals = attempted(7, loss, grad_norm, **numbers, withheld=withheld)
    incident = discard_incident(signals, verdict="NonFinite", reason="made up")
    assert (incident.kind, incident.step, incident.samples) == ("discard", 7, (48, 60))
    line = json.dumps(incident.to_json(), allow_nan=False)
    again = discarded_signals(Incident.from_json(json.loads(line)))
    # repr: NaN equals nothing, itself included.
    assert repr(again) == repr(signals)
    assert json.loads(line)["detail"]["verdict"] == "NonFinite"


def test_steps_that_are_computed_in_a_wider_precision_at_once() -> None:
    def redo(start: int, **more: int) -> Incident:
        detail = {"skipped": [], "widened": True, **more}
        return Incident(
            kind="redo", step=1, decision="", reason="", samples=(start, start + 8), detail=detail
        )

    history = folded(redo(80), redo(88, wide_until=120))
    assert [history.is_wide(at) for at in (72, 80, 81, 88, 96, 119, 120)] == [
        *(False, True, False, True, True, True, False)
    ]
