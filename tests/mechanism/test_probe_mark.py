"""The note of the step that is being explained: two starts may end in its probes, no third."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.explain.mark import ProbeMark
from runner.policy.decision.history import History
from runner.system.error import Preempted, RankError
from tests.policy.steps import attempted


def ended(path: Path, step: int, error: Exception | None) -> None:
    """A start that explains this step and ends there; None: by nothing."""
    mark = ProbeMark(path)
    with mark.ended_after():
        mark.begin(attempted(step))
        if error is not None:
            raise error


def test_the_second_start_in_a_row_that_ends_in_one_step_is_told(tmp_path: Path) -> None:
    path = tmp_path / "explaining.json"
    for step in (7, 8, 8):
        assert ProbeMark(path).incident() is None, "once may be by chance"
        with pytest.raises(RankError):
            ended(path, step, RankError("timed out"))
    line = ProbeMark(path).incident()
    assert line is not None and line.step == 8
    assert line.reason == "explaining step 8: not tried: the 2 starts before ended in it"
    history = History()
    history.add(line)
    assert history.has_ended_starts(8) and not history.has_ended_starts(7)
    ProbeMark(path).remove()
    assert ProbeMark(path).incident() is None


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
    assert ProbeMark(path).incident() is None
    ended(path, 3, None)


def test_other_ranks_have_no_note(tmp_path: Path) -> None:
    mark = ProbeMark(None)
    mark.begin(attempted(3))
    assert mark.incident() is None and not list(tmp_path.iterdir())
