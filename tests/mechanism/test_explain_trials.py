"""The count of causes: what is right, what is a wrong name, and what the page says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scripts.explain_trials import page
from scripts.explain_trials.outcome import Outcome, Trial, append, judge, read


def outcome(trial: Trial) -> Outcome:
    return Outcome(
        key=f"one/1/0/{trial.kind}",
        layout="one",
        kind=trial.kind,
        tuned=True,
        group="",
        causes=trial.causes,
    )


def cause(said: str, **named: Any) -> dict[str, Any]:
    nothing = {"ranks": [], "positions": [], "module": "", "step": None, "rate_factor": None}
    return {**nothing, "cause": said, "why": "", "steps": 3, **named}


STICKY = Trial(kind="a sick rank", causes=("hardware, sticky",), ranks=(1,))
SAMPLES = Trial(kind="two samples", causes=("data",), positions=(4, 9))


def test_a_rank_that_was_not_hit_is_a_wrong_name() -> None:
    right = judge(outcome(STICKY), STICKY, [cause("hardware, sticky", ranks=[1])])
    assert right.is_right and right.is_complete and not right.wrong_ranks
    wrong = judge(outcome(STICKY), STICKY, [cause("hardware, sticky", ranks=[0, 1])])
    assert wrong.is_right and not wrong.is_complete and wrong.wrong_ranks == [0]
    other = judge(outcome(SAMPLES), SAMPLES, [cause("hardware, sticky", ranks=[0])])
    assert not other.is_right and other.wrong_ranks == [0]


def test_samples_are_counted_both_ways() -> None:
    found = judge(outcome(SAMPLES), SAMPLES, [cause("data", positions=[4, 5])])
    assert (found.precision, found.recall, found.wrong_samples) == (0.5, 0.5, [5])
    assert found.is_right and not found.is_complete


def test_the_last_cause_that_is_named_counts() -> None:
    trial = Trial(kind="a weight", causes=("state corrupted",), step=34)
    told = [cause("unclear"), cause("state corrupted", step=35), cause("unclear")]
    found = judge(outcome(trial), trial, told)
    assert found.is_right and found.is_complete and found.computations == 9
    late = judge(outcome(trial), trial, [cause("state corrupted", step=36)])
    assert late.is_right and not late.is_complete


def test_rows_come_back_and_make_the_page(tmp_path: Path) -> None:
    right = judge(outcome(STICKY), STICKY, [cause("hardware, sticky", ranks=[1])])
    wrong = judge(outcome(SAMPLES), SAMPLES, [cause("hardware, sticky", ranks=[0])])
    file = tmp_path / "rows.jsonl"
    append(file, [right])
    append(file, [wrong])
    with file.open("a") as torn:
        torn.write('{"key": "a line of wh')
    assert read(file) == [right, wrong]
    made = page.text(read(file), [])
    assert "| verdict right | 1/2 (50.0 %) | 95 % |" in made
    assert "| wrong ranks named | 1 | 0 |" in made
    assert "| data | two samples 1/1 (1 hardware, sticky) |  |" in made
