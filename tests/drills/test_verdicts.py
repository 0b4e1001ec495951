"""What follows from a verdict: a sick device costs no sample, and is never taken for the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.rows import full
from tests.run import Result, finish, train

# The model of tests/sick.py on real ranks; its illness begins at step 33.
LEVEL = "schedule._target_=tests.sick.level"
SICK = ("model._target_=tests.sick.Net", "guard.remedy=verdict", "eval.every=0", "steps=70")
# For a run that ends well: the culprit is read in step 33.
MENDED = (*SICK[:-1], "steps=53")


def verdicts(run: Result) -> list[dict[str, Any]]:
    """The causes in its journal, in order."""
    causes = [line["detail"].get("cause") for line in run.journal()]
    return [cause for cause in causes if isinstance(cause, dict)]


@pytest.mark.parametrize(
    ("how", "ranks", "bad", "settings"),
    [
        ("noise", 2, [1], []),
        ("weight", 3, [1, 2], []),
        ("sum", 2, [], []),
        # Always: one rank that is named (noise), several (weight), none (sum).
        full("pattern", 2, [1], []),
        full("pattern", 4, [2], ["parallel=zero2"]),
        full(*("sum", 2, [], ["model.since=13"]), id="back to before any limits"),
        full("noise", 3, [0], ["explain=full"]),
        full("weight", 4, [3], ["parallel=ddp"]),
        full("weight", 2, [0], ["model.since=13"]),
    ],
)
def test_a_sick_device_halts_the_run_and_skips_nothing(
    tmp_path: Path, how: str, ranks: int, bad: list[int], settings: list[str]
) -> None:
    words = (f"model.how={how}", f"model.bad={bad}", *settings)
    hit = train(tmp_path / "hit", *SICK, *words, ranks=ranks)
    assert hit.summary["status"] == "halted" and hit.summary["skipped"] == [], hit.tail
    assert not hit.journal("rebaseline") and not hit.journal("explained"), hit.tail
    (halt,) = hit.journal("halt")
    assert halt["ranks"] == bad and halt["sample_ids"] == [], halt
    last = verdicts(hit)[-1]
    assert (last["cause"], last["ranks"]) == ("hardware, sticky", bad), last
    assert last["hosts"] or not bad
    named = [cause for cause in verdicts(hit) if cause["cause"] != "unclear"]
    assert {cause["cause"] for cause in named} == {"hardware, sticky"}, named


HALF = ("model.how=half",)
# With the limits of the guard scaled as docs/guard.md says.
UNIT = ("model._target_=tests.sick.Scaled", "guard.loss_floor=50", "guard.drift_nats=400")
SHARED = ("model.how=statistic", "batch.micro_size=4", "explain=full")


@pytest.mark.parametrize(
    ("settings", "fault", "not_tried"),
    [
        # Probe C computes without the model's own casts, and so raises in it on all ranks.
        pytest.param(HALF, "poison@samples=1040", "only fp16 and bf16 are supported", id="half"),
        pytest.param(UNIT, "'spike@samples=1040,scale=300'", "", id="another unit"),
        pytest.param(SHARED, "poison@samples=1040", "", id="a statistic of several"),
    ],
)
def test_the_culprit_alone_is_named(
    tmp_path: Path, settings: tuple[str, ...], fault: str, not_tried: str
) -> None:
    hit = finish(tmp_path / "hit", *MENDED, *settings, f"faults=[{fault}]")
    (line,) = hit.journal("redo")
    cause = line["detail"]["cause"]
    assert (cause["cause"], cause["positions"]) == ("data", [1040]), hit.tail
    assert any(not_tried in one for one in cause["not_tried"]) or not not_tried, cause
    assert hit.summary["skipped"] == [[1040, 1041]] and not hit.journal("discard")


@pytest.mark.full
def test_a_checkpoint_that_was_saved_with_wrong_moments_is_no_rate(tmp_path: Path) -> None:
    """The run was done at step 30, its weights proven clean; then it was asked for more steps."""
    words = (*SICK[:-1], "explain=full", "schedule.total=60", LEVEL)
    spoilt = train(tmp_path / "hit", *words, "steps=30", env={"SICK_MOMENTS": "1"})
    assert spoilt.code == 0, spoilt.tail
    hit = train(tmp_path / "hit", *words, "steps=60")
    causes = [cause["cause"] for cause in verdicts(hit)]
    assert "state corrupted" in causes and "rate" not in causes, hit.tail
    assert hit.summary["status"] == "done" and hit.summary["skipped"] == [], hit.tail
    clean = finish(tmp_path / "clean", *words, "steps=60")
    assert hit.digest == clean.digest


@pytest.mark.full
def test_a_checkpoint_that_cannot_be_loaded_for_probe_g_ends_nothing(tmp_path: Path) -> None:
    """The ladder goes on as in a run that has no computations left for G, up to the same end."""
    words = (*SICK, "schedule._target_=tests.sick.bump", "guard.max_rollbacks=3")
    hit = train(tmp_path / "hit", *words, "model.how=torn", "explain=full")
    lines = [one for cause in verdicts(hit) for one in cause["not_tried"] if "G: " in one]
    assert any("G: not tried: " in one and "it was damaged meanwhile" in one for one in lines)
    assert {line["detail"]["observer"] for line in hit.journal("observer")} == {"explain"}
    assert hit.summary["status"] == "halted" and len(hit.journal("rollback")) == 3, hit.tail
    quick = train(tmp_path / "quick", *words)
    assert hit.digest == quick.digest and hit.summary["skipped"] == quick.summary["skipped"]
    assert hit.metrics() == quick.metrics()


@pytest.mark.full
def test_a_device_that_fails_at_times_costs_no_sample(tmp_path: Path) -> None:
    words = ("model.how=at times", "model.bad=[1]", "guard.persist=30")
    hit = train(tmp_path / "hit", *SICK, *words)
    assert hit.summary["skipped"] == [], hit.tail
    found = verdicts(hit)
    assert {cause["cause"] for cause in found} & {"hardware, sticky", "hardware, transient"}
    assert not {cause["cause"] for cause in found} & {"numerics", "data"}, hit.tail
    assert {tuple(cause["ranks"]) for cause in found} <= {(), (1,)}, hit.tail
