"""P3, P6, P8: bad ranges are rolled back and skipped exactly, or end in a halt that says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.__main__ import main
from tests.drills.compare import assert_every_sample_once, assert_same_end, differing, in_order
from tests.drills.conftest import POISON
from tests.run import TINY, Result, finish, skip_override, train

SPIKE = POISON.replace("poison", "spike").replace("]", ",scale=50]")


@pytest.fixture(scope="module")
def told(runs: Path, poisoned: Result) -> Result:
    """The run that never reads what the poisoned one skipped."""
    return finish(runs / "told", skip_override(poisoned.summary["skipped"]))


def test_poison_ends_as_if_it_was_never_there(
    poisoned: Result, told: Result, clean: Result
) -> None:
    [line] = poisoned.journal("rollback")
    assert not told.journal("discard") and not told.journal("rollback"), told.tail
    assert_same_end(poisoned, told)
    assert_every_sample_once(poisoned)
    assert poisoned.summary["steps"] - line["detail"]["onset_step"] >= 20
    assert clean.digest != poisoned.digest, "the clean run reads other data"
    assert clean.summary["samples_used"] == poisoned.summary["samples_used"]


def test_a_rollback_explains_itself(poisoned: Result) -> None:
    [line] = poisoned.journal("rollback")
    detail = line["detail"]
    assert set(line["ranks"]) <= {0, 1} and line["ranks"]
    assert line["sample_ids"] and all("synthetic sample" in name for name in line["sample_ids"])
    assert "NaN" in line["reason"] and "3 bad steps among the last 10" in line["reason"]
    assert line["cost_steps"] == detail["onset_step"] - 1 - detail["to_step"]
    assert line["cost_seconds"] > 0
    first, stop = line["samples"]
    assert first < 700 < stop and f"skip samples {first}-{stop - 1}" in line["decision"]
    assert covered(700, 791, poisoned.summary["skipped"])
    assert all(700 <= position <= 790 for position in detail["suspects"])


def test_a_rollback_goes_to_a_proven_checkpoint(poisoned: Result) -> None:
    [line] = poisoned.journal("rollback")
    detail = line["detail"]
    assert detail["onset_step"] - 1 - detail["to_step"] >= 5, "checkpoint.clean_after"
    marks = ring_marks(poisoned.out)
    assert marks[detail["serial"]] >= {"COMMITTED", "CLEAN"}, marks
    abandoned = range(detail["serial"] + 1, detail["next_serial"])
    assert not any("CLEAN" in marks.get(serial, ()) for serial in abandoned), marks
    # What was applied before the checkpoint stands; nothing it read is skipped now.
    applied = [m for m in poisoned.metrics() if m["step"] == detail["to_step"]]
    assert applied[0]["cursor"] <= line["samples"][0]


def test_a_backtest_decides_what_the_run_decided(
    poisoned: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [text for text in TINY if text.startswith(("guard.", "checkpoint."))]
    assert main(["backtest", str(poisoned.out), *settings, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    lived = [line for line in poisoned.metrics() if line["action"] != "apply"]
    assert "rollback" in {line["action"] for line in lived}
    assert [(d["step"], d["action"], d["verdict"]) for d in told["decisions"]] == [
        (line["step"], line["action"], line["verdict"]) for line in lived
    ]


@pytest.mark.full
def test_a_finite_spike_is_skipped_likewise(tmp_path: Path, told: Result, clean: Result) -> None:
    hit = finish(tmp_path / "spike", SPIKE)
    named = [line for line in hit.journal() if line["kind"] in ("discard", "rollback")]
    assert named and all(line["detail"]["verdict"] == "Spike" for line in named), hit.tail
    assert all("limit" in line["reason"] and line["sample_ids"] for line in named)
    assert covered(700, 791, hit.summary["skipped"]), hit.tail
    assert hit.summary["skipped"] == told.summary["skipped"]
    assert_same_end(hit, told)
    assert abs(hit.summary["final_loss"] - clean.summary["final_loss"]) < 0.1


def test_trouble_that_comes_back_lowers_the_rate(tmp_path: Path, clean: Result) -> None:
    hit = finish(
        tmp_path / "long",
        "faults=[poison@samples=700-1200]",
        "guard.max_rollbacks=3",  # the last one cuts the rate, though the data is suspected
        "guard.cooldown_steps=12",
    )
    rollbacks = hit.journal("rollback")
    assert [line["detail"]["repeat"] for line in rollbacks] == [0, 1, 2], hit.tail
    widths = [line["samples"][1] - line["samples"][0] for line in rollbacks]
    assert widths == sorted(set(widths)), "each time a wider range"
    last = rollbacks[-1]
    assert "repeat 2" in last["reason"] and "learning rate times 0.5" in last["reason"]
    assert last["detail"]["cut_factor"] == 0.5 and last["detail"]["cut_steps"] == 12
    began = last["detail"]["onset_step"] - 1
    ended = began + 12
    expected = [
        line["lr"] * (0.5 if began < line["step"] <= ended else 1.0) for line in in_order(clean)
    ]
    assert [line["lr"] for line in in_order(hit)] == expected
    assert_every_sample_once(hit)


def test_a_spent_budget_halts_and_stays_halted(tmp_path: Path) -> None:
    endless = ("faults=[poison@samples=700-99999]", "guard.max_rollbacks=1")
    for attempt in (1, 2):
        hit = train(tmp_path / "endless", *endless)
        assert hit.code == 1, "torchrun's own code for a worker that failed"
        summary = hit.summary
        assert (summary["status"], summary["exit_code"]) == ("halted", 3), hit.tail
        halts = hit.journal("halt")
        assert len(halts) == attempt, hit.tail
        assert "guard.max_rollbacks=1" in halts[-1]["reason"]
        assert halts[-1]["ranks"] and halts[-1]["sample_ids"]
        assert summary["reason"] == halts[-1]["reason"] and summary["reason"] in hit.text
        assert "runner/session/session.py" not in hit.text, "a halt is no traceback of ours"
        assert (summary["restarts"], summary["rollbacks"]) == (attempt - 1, 1)
    # The second start judged what it knew again and computed one bad step.
    since = [line["kind"] for line in hit.journal()][-2:]
    assert since == ["start", "halt"], hit.tail


def test_a_lasting_level_becomes_the_new_normal(tmp_path: Path) -> None:
    """And the end is that of a run told never to read what was skipped on the way.

    That one's guard would take the level for trouble, which was learned from those samples.
    """
    level = "faults=[spike@samples=1134-999999,scale=1.6]"
    hit = finish(
        tmp_path / "shift",
        level,
        "guard.window=10",
        "guard.loss_sigmas=4",
        "guard.level_steps=6",
        "guard.drift_nats=50",
    )
    [line] = hit.journal("rebaseline")
    assert "level" in line["reason"], hit.tail
    assert len(hit.journal("rollback")) == 1, "only what a rollback does not mend is a new level"
    after = [m for m in hit.counted().values() if m["samples"][0] >= line["samples"][1]]
    assert len(after) >= 20 and all(m["verdict"] == "Clean" for m in after), hit.tail
    assert hit.summary["discarded_steps"] <= 3 + 3 + 6
    assert_every_sample_once(hit)
    assert "only with guard=off" in line["reason"], "the one thing to tell that run besides"
    told = finish(tmp_path / "told", level, "guard=off", skip_override(hit.summary["skipped"]))
    assert not told.journal("rebaseline") and not told.journal("discard"), told.tail
    assert told.counted() == hit.counted(), differing(told, hit)
    assert told.digest == hit.digest, told.tail


@pytest.mark.full
def test_as_palm_did(tmp_path: Path) -> None:
    batch, back, ahead = 32, 100, 200
    hit = finish(
        tmp_path / "palm",
        "guard=palm",
        "steps=112",
        "checkpoint.every=50",
        "faults=[poison@samples=3460-3550]",
    )
    [line] = hit.journal("rollback")
    detail = line["detail"]
    assert detail["onset_step"] - detail["to_step"] >= back, hit.tail
    first, stop = line["samples"]
    assert first <= 3460 - (back - 1) * batch and stop >= 3550 + ahead * batch
    assert_every_sample_once(hit)


def covered(first: int, stop: int, ranges: list[list[int]]) -> bool:
    return any(start <= first and stop <= end for start, end in ranges)


def ring_marks(out: Path) -> dict[int, set[str]]:
    """Serial to the names in its folder."""
    return {
        int(folder.name.split("-")[0]): {file.name for file in folder.iterdir()}
        for folder in (out / "ring").iterdir()
        if folder.is_dir() and not folder.name.startswith("writing-")
    }
