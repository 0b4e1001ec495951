"""The note of the step that is being explained: two starts may end in its probes, no third."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.distributed.observers import Observers
from runner.explain.observer_note import ObserverNote
from runner.policy.decision.history import History, Incident
from runner.system.error import Preempted, RankError, Superseded
from tests.policy.steps import attempted


def told(path: Path) -> Incident | None:
    """What the next start journals."""
    line = ObserverNote(path).read()
    return line if line is not None and line.reason else None


def ended(path: Path, step: int, error: Exception | None) -> None:
    """A start that explains this step and ends there; None: by nothing."""
    mark = ObserverNote(path)
    with mark.ended_after():
        mark.begin(attempted(step))
        if error is not None:
            raise error


def test_the_second_start_in_a_row_that_ends_in_one_step_is_told(tmp_path: Path) -> None:
    path = tmp_path / "explaining.json"
    for step in (7, 8, 8):
        assert told(path) is None, "once may be by chance"
        with pytest.raises(RankError):
            ended(path, step, RankError("timed out"))
    line = told(path)
    assert line is not None and line.step == 8
    assert line.reason == "explaining step 8: not tried: the 2 starts before ended in it"
    history = History()
    history.add(line)
    assert history.has_ended_starts(8) and not history.has_ended_starts(7)
    ObserverNote(path).remove()
    assert told(path) is None


@pytest.mark.parametrize("error", [None, Preempted("asked to stop")])
def test_an_explanation_that_ended_or_was_stopped_leaves_no_note(
    tmp_path: Path, error: Exception | None
) -> None:
    path = tmp_path / "explaining.json"
    with pytest.raises(RankError):
        ended(path, 8, RankError("timed out"))
    assert path.exists()
    if error is None:
        ended(path, 8, None)
    else:
        with pytest.raises(Preempted):
            ended(path, 8, error)
    assert not path.exists()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"step": 3}', '{"step":"3","start":0,"stop":8,"starts":9}']
)
def test_a_damaged_note_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "explaining.json"
    path.write_text(text)
    assert told(path) is None
    ended(path, 3, None)


def test_last_words_are_of_an_observer_or_of_a_step(tmp_path: Path) -> None:
    note, history = ObserverNote(tmp_path / "observer-1.json"), History()
    note.write("audit", 20, RuntimeError(), "rank 1: RuntimeError: no memory")
    audit = note.read()
    assert audit is not None and audit.reason == (
        "audit: not tried: rank 1: RuntimeError: no memory; the start before ended in it"
    )
    note.write("explain", 20, RuntimeError(), "rank 1: RuntimeError: no memory")
    explain = note.read()
    assert explain is not None
    history.add(audit)
    assert not history.has_ended_starts(20)
    history.add(explain)
    assert history.has_ended_starts(20)


def test_a_rank_that_lost_contact_and_one_that_was_superseded_leave_no_words(
    tmp_path: Path,
) -> None:
    """It may be in a collective with one that was killed by chance."""
    path = tmp_path / "observer-1.json"
    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"
    ObserverNote(path).write("audit", 20, RuntimeError(gloo), "")

    def check() -> None:
        raise Superseded("a newer start owns it")

    with pytest.raises(Superseded):
        ObserverNote(path, check).write("audit", 20, ValueError(), "")
    assert not path.exists()


@pytest.mark.parametrize("meets", [True, False])
def test_words_stay_only_if_the_others_could_not_be_met(tmp_path: Path, meets: bool) -> None:
    class Alone:
        rank, world_size = 1, 2

        def gather(self, value: Any) -> list[Any]:
            if not meets and "why" in value:
                raise RuntimeError("timed out")
            return [value, {"value": None}]

    ranks: Any = Alone()
    words = ObserverNote(tmp_path / "observer-1.json")
    looking = Observers(ranks, report=lambda line: None, last_words=words)

    def fails() -> None:
        raise ValueError("it does")

    if meets:
        assert looking.together("audit", fails) is not None
    else:
        with pytest.raises(RuntimeError, match="timed out"):
            looking.together("audit", fails)
    assert len(list(tmp_path.iterdir())) == (0 if meets else 1)


def test_other_ranks_have_no_note(tmp_path: Path) -> None:
    mark = ObserverNote(None)
    mark.begin(attempted(3))
    assert mark.read() is None and not list(tmp_path.iterdir())
