"""P13: a transient fault leaves no trace; and of bad data only the culprits are skipped (P3)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from runner.__main__ import main
from tests.drills.compare import assert_every_sample_once, assert_same_end
from tests.rows import full
from tests.run import TINY, TWO_LAYERS, Result, finish, skip_override, train
from tests.warm import finished

VERDICT = "guard.remedy=verdict"
# On each rank in turn; the first before the guard has any limits.
PASSING = (
    ("nan_grad", 5, 1),
    ("flip_grad", 14, 0),
    ("nan_loss", 26, 1),
    ("misread", 40, 0),
    ("flip_grad", 45, 1),
    ("misread", 50, 1),
)
# A third of a batch that says nothing is too little for the guard to see.
UNSEEN_ON_MORE = "misread"
CAUSES = {"misread": "read wrongly once"}


def redone(run: Result) -> list[dict[str, Any]]:
    """Its redo lines; there is no other trouble in its journal, but for ranks that die."""
    assert {line["kind"] for line in run.journal()} <= {"start", "redo", "crash"}, run.tail
    return run.journal("redo")


def assert_no_trace(hit: Result, clean: Result) -> None:
    assert_same_end(hit, clean)
    assert hit.summary["skipped"] == [] and hit.summary["discarded_steps"] == 0, hit.tail
    for key in ("cursor", "final_loss", "samples_used"):
        assert hit.summary[key] == clean.summary[key]


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, []),
        full(2, ["guard.sync=false", "data.workers=1"]),
        # With dropout the guard does not see samples that one layer reads wrongly.
        full(2, ["parallel=ddp", "model.dropout=0.1", "batch.micro_size=4", TWO_LAYERS]),
        full(4, ["parallel=hsdp", "parallel.shard_size=2"]),
        full(3, ["parallel=fsdp"]),
        full(2, ["parallel=zero1"]),
        full(2, ["parallel=zero2", "batch.micro_size=8"]),
        full(2, ["parallel=zero3", "guard.sync=false"]),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_a_transient_fault_leaves_no_trace(
    tmp_path: Path, ranks: int, settings: list[str], clean: Result
) -> None:
    faults = [fault for fault in PASSING if ranks == 2 or fault[0] != UNSEEN_ON_MORE]
    told = ",".join(f"{kind}@step={step},rank={rank}" for kind, step, rank in faults)
    hit = finish(tmp_path / "hit", VERDICT, f"faults=[{told}]", *settings, ranks=ranks)
    peace = clean
    if settings:
        peace = finish(tmp_path / "clean", VERDICT, *settings, ranks=ranks)
    assert_no_trace(hit, peace)
    lines = redone(hit)
    assert [(line["step"], line["ranks"]) for line in lines] == [
        (step, [rank]) for _, step, rank in faults
    ], hit.tail
    for (kind, _, _), line in zip(faults, lines, strict=True):
        cause = line["detail"]["cause"]
        assert cause["cause"] == CAUSES.get(kind, "hardware, transient") and cause["is_tried"]
        assert cause["steps"] <= 3 and line["detail"]["skipped"] == []
    assert "fault 2 of this rank" in lines[2]["reason"]
    redone_steps = [line["step"] for line in hit.metrics() if line["action"] == "redo"]
    assert redone_steps == [step for _, step, _ in faults]


@pytest.mark.twin
@pytest.mark.parametrize("settings", [[], full(["parallel=zero3", "guard.sync=false"])])
def test_of_bad_data_only_the_culprits_are_skipped(
    tmp_path: Path, settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of a batch, on both ranks; one that is finite; then as if told never to read them.

    A rank dies behind the first, and the steps up to there are computed once more.
    """
    bad = "faults=[poison@samples=410-411,kill@step=17,rank=1,spike@samples=900,scale=60]"
    hit = finish(tmp_path / "hit", VERDICT, bad, *settings, restarts=1)
    assert hit.summary["restarts"] == 1
    lines = redone(hit)
    assert [line["detail"]["skipped"] for line in lines] == [[410, 411], [900]], hit.tail
    for line in lines:
        cause = line["detail"]["cause"]
        assert cause["is_tried"] and cause["ranks"] == [] and cause["remedy"] == "skip"
        assert cause["cause"] == "data"
        assert cause["steps"] <= 10 and len(line["sample_ids"]) == len(line["detail"]["skipped"])
    assert hit.summary["skipped"] == [[410, 412], [900, 901]]
    assert_evidence(hit, lines[0], capsys)
    assert_every_sample_once(hit)
    told = finish(tmp_path / "told", VERDICT, *settings, skip_override(hit.summary["skipped"]))
    assert not told.journal("redo"), told.tail
    assert_same_end(hit, told)


def assert_evidence(run: Result, line: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """What a redo refers to lies there, and ``holdfast replay`` tells it."""
    number = line["detail"]["cause"]["bundle"]
    folder = run.out / "explanations" / f"{number:06d}"
    told = json.loads((folder / "incident.json").read_text())
    assert told["finding"] == line["detail"]["cause"] and told["suspects"] == [410, 411]
    assert {"first", "A", "known", "B"} <= told["probes"].keys()
    tensors = load_file(folder / "batch.safetensors")
    assert tensors["suspects"].tolist() == [410, 411] and len(tensors["positions"]) == 32
    assert tensors["tokens"].shape[0] == 2
    assert line["sample_ids"][0] in (folder / "samples.txt").read_text()
    assert main(["replay", str(run.out), "--incident", str(number)]) == 0
    shown = capsys.readouterr().out
    assert "410, 411" in shown and "(tested: not so)" in shown
    assert main(["replay", str(run.out)]) == 0
    assert len(capsys.readouterr().out.split("\n\n")[0].splitlines()) == 2


def test_of_samples_without_tokens_only_the_culprits_are_skipped(tmp_path: Path) -> None:
    """And a sample has as many terms as the model counts."""
    guests = "tests.uncommon_guests"
    how = (
        *(VERDICT, f"model._target_={guests}.Counting", "model.how=floats"),
        *(f"data._target_={guests}.Uneven", "steps=32"),
    )
    hit = finish(tmp_path / "hit", *how, "faults=[poison@samples=410-411]")
    [line] = redone(hit)
    assert line["detail"]["skipped"] == [410, 411], hit.tail
    assert_same_end(hit, finish(tmp_path / "told", *how, skip_override([[410, 412]])))
    folder = hit.out / "explanations" / f"{line['detail']['cause']['bundle']:06d}"
    probes = json.loads((folder / "incident.json").read_text())["probes"]
    for name in ("first", "A", "known", "B"):
        of_ranks, of_samples = probes[name]["ranks"], probes[name]["samples"].values()
        assert sum(row[3] for row in of_ranks) == sum(row[3] for row in of_samples) == 16, name


LAYERS = (VERDICT, TWO_LAYERS, "steps=48")
OVERFLOW = "faults=[overflow@step=28-30,module=blocks.1.ffn]"


def assert_numerics(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        cause = line["detail"]["cause"]
        assert (cause["cause"], cause["module"]) == ("numerics", "blocks.1.ffn"), cause
        assert cause["is_tried"] and not cause["ranks"] and not cause["positions"]


@pytest.mark.twin
@pytest.mark.parametrize(
    "settings",
    [
        [],  # FP32, which FP64 arbitrates
        full(["compute.precision=bf16", "guard.sync=false"]),
        full(["parallel=hsdp", "parallel.shard_size=2"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_what_overflows_is_computed_in_a_wider_precision(
    tmp_path: Path, settings: list[str]
) -> None:
    """The module is named and nothing is skipped; a rank's death behind it changes nothing."""
    ranks = 4 if "parallel=hsdp" in settings else 2
    hit = finish(tmp_path / "hit", *LAYERS, OVERFLOW, *settings, ranks=ranks)
    lines = redone(hit)
    # The second asks for the wider precision first, and the steps after it are computed in it.
    assert [line["step"] for line in lines] == [28, 29], hit.tail
    assert_numerics(lines)
    assert "the step again and 15 after it" in lines[1]["decision"]
    assert [line["detail"]["cause"]["steps"] for line in lines] == [6, 4]
    bundle = lines[0]["detail"]["cause"]["bundle"]
    layers = json.loads((hit.out / "explanations" / f"{bundle:06d}" / "layers.json").read_text())
    assert layers["blocks.0.ffn"][0] is not None and layers["blocks.1.ffn"][0] is None
    assert hit.summary["skipped"] == [] and hit.summary["discarded_steps"] == 0
    kill = OVERFLOW.replace("]", ",kill@step=32,rank=1]")
    again = finish(tmp_path / "killed", *LAYERS, kill, *settings, ranks=ranks, restarts=1)
    assert again.summary["restarts"] == 1 and len(redone(again)) == 2, again.tail
    assert_same_end(again, hit)


@pytest.mark.full
@pytest.mark.parametrize("engine", ["zero1", "zero2", "zero3"])
def test_an_engine_that_takes_no_other_precision_skips_no_range(
    tmp_path: Path, engine: str
) -> None:
    """Single steps cannot be applied, and are left out; where they last, the run halts."""
    hit = train(tmp_path / "hit", *LAYERS, OVERFLOW, f"parallel={engine}")
    (halt,) = hit.journal("halt")
    lines = [line for line in hit.journal() if isinstance(line["detail"].get("cause"), dict)]
    assert_numerics(lines)
    assert [line["kind"] for line in lines] == ["discard", "discard", "halt"], hit.tail
    assert (
        "No sample is at fault, so no more are skipped" in halt["reason"]
        and "blocks.1.ffn" in halt["reason"]
    )
    assert hit.summary["status"] == "halted" and hit.summary["discarded_steps"] == 2, hit.tail
    assert not [kind for kind in ("redo", "rollback", "rebaseline") if hit.journal(kind)]


@pytest.mark.full
def test_an_incident_before_a_rollback_is_computed_again(tmp_path: Path) -> None:
    """The checkpoint of step 20 was saved before it, that of step 30 after: the journal tells."""
    settings = (VERDICT, "faults=[spoil_state@step=36,rank=1]", "checkpoint.keep=10")
    hit = finish(tmp_path / "hit", *settings)
    (back,) = hit.journal("rollback")
    number = str(back["detail"]["cause"]["bundle"])
    told = [sys.executable, "-m", "runner", "replay", str(hit.out), "--incident", number, "--"]
    again = finished([*told, *TINY, *settings], timeout=200)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "the step is good" in again.stdout and "from the checkpoint of step" in again.stdout


def test_a_device_that_stays_bad_is_named(tmp_path: Path) -> None:
    """Computed again as often as guard.persist says; then the run halts, and skips nothing."""
    hit = train(tmp_path / "hit", VERDICT, "faults=[sticky@step=21,rank=1]")
    assert (hit.summary["status"], hit.summary["steps"]) == ("halted", 20), hit.tail
    assert len(hit.journal("redo")) == 2 and hit.summary["skipped"] == [], hit.tail
    (halt,) = hit.journal("halt")
    host = halt["detail"]["cause"]["hosts"][0]
    assert halt["ranks"] == [1] and f"rank 1 on {host}" in halt["reason"], hit.tail
    causes = [line["detail"]["cause"] for line in hit.journal() if "cause" in line["detail"]]
    causes = [cause for cause in causes if isinstance(cause, dict)]
    assert len(causes) == 3, hit.tail
    for cause in causes:
        assert (cause["cause"], cause["ranks"]) == ("hardware, sticky", [1]), cause
        assert cause["is_tried"] and cause["hosts"] and cause["steps"] <= 10


@pytest.mark.parametrize(
    ("step", "settings"),
    [
        (27, []),
        full(21, ["guard.sync=false"]),
        # The update of step 37 has been gathered: the partition's bit is first used after the next.
        full(38, ["parallel=zero2"]),
    ],
)
def test_weights_that_were_spoilt_cost_no_sample(
    tmp_path: Path, step: int, settings: list[str], clean: Result
) -> None:
    """It goes back at once and reads all again: the run is the one without the fault.

    On the way the step is named whose weights were others.
    """
    hit = finish(tmp_path / "hit", VERDICT, f"faults=[spoil_state@step={step},rank=1]", *settings)
    step += "parallel=zero2" in settings
    (back,) = hit.journal("rollback")
    assert back["step"] == step and back["detail"]["read_again"], hit.tail
    cause = back["detail"]["cause"]
    assert (cause["cause"], cause["remedy"], cause["ranks"]) == ("unclear", "go back", [])
    (line,) = hit.journal("explained")
    cause = line["detail"]["cause"]
    assert (cause["cause"], cause["step"], line["step"]) == ("state corrupted", step, step)
    assert cause["is_tried"] and not cause["ranks"] and not cause["positions"]
    number = cause["bundle"]
    told = json.loads((hit.out / "explanations" / f"{number:06d}" / "incident.json").read_text())
    assert told["finding"] == cause
    (episode,) = hit.journal("episode")
    assert episode["detail"]["cause"] == "unclear", hit.tail
    assert "suspected" not in episode["reason"]
    assert hit.summary["skipped"] == [] and hit.summary["discarded_steps"] == 0
    peace = finish(tmp_path / "clean", VERDICT, *settings) if settings else clean
    assert hit.digest == peace.digest and hit.counted() == peace.counted(), hit.tail


def jump(updates: int, peak: float = 3e-3, at: int = 24, factor: float = 300.0) -> float:
    """A schedule with a mistake: from an update on far too high a rate, ever after."""
    rate = peak * min(1.0, (updates + 1) / 5)
    return rate * (factor if updates >= at else 1.0)


def test_a_rate_that_is_too_high_is_named_and_cut(tmp_path: Path) -> None:
    """Back to before it, the same again; then lower rates are tried, and other samples."""
    hit = train(
        tmp_path / "hit",
        *(VERDICT, "explain=full", "schedule._target_=tests.drills.test_redo.jump", "steps=45"),
        *("guard.max_rollbacks=6", "guard.cooldown_steps=1000"),
    )
    backs = hit.journal("rollback")
    causes = [line["detail"]["cause"] for line in backs]
    assert [cause["cause"] for cause in causes][:2] == ["unclear", "rate"], hit.tail
    rate = causes[1]
    assert rate["is_tried"] and not rate["ranks"] and not rate["positions"], rate
    assert 0 < rate["rate_factor"] < 1
    assert backs[1]["detail"]["read_again"]
    assert backs[1]["detail"]["cut_factor"] == rate["rate_factor"]
    assert hit.summary["skipped"] == [] and not hit.journal("explained"), hit.tail


@pytest.mark.full
def test_an_incident_is_computed_again_elsewhere(tmp_path: Path) -> None:
    """In one process, from a copy: what samples or an operation did is there again, and what a
    device did is not."""
    faults = "faults=[nan_grad@step=24,rank=1,poison@samples=900,overflow@step=38,module=norm]"
    hit = finish(tmp_path / "hit", VERDICT, faults, "checkpoint.keep=10")
    lines = redone(hit)
    assert [line["step"] for line in lines] == [24, 28, 38], hit.tail
    before = sorted(path.relative_to(hit.out) for path in hit.out.rglob("*"))
    for line, words in zip(lines, ("the step is good", "900", "module       norm"), strict=True):
        number = str(line["detail"]["cause"]["bundle"])
        told = [sys.executable, "-m", "runner", "replay", str(hit.out), "--incident", number, "--"]
        again = finished([*told, *TINY, VERDICT, faults], timeout=200)
        assert again.returncode == 0 and words in again.stdout, again.stdout + again.stderr
        named = [word for word in again.stdout.splitlines() if "operation " in word]
        assert bool(named) is words.startswith("module"), again.stdout
    assert sorted(path.relative_to(hit.out) for path in hit.out.rglob("*")) == before
    assert "wrap.py" in named[0], "the fault stands in for the operation"


@pytest.mark.twin
@pytest.mark.full
def test_another_mix_is_accepted_without_going_back(tmp_path: Path) -> None:
    level = (
        *("faults=[spike@samples=1134-999999,scale=1.6]", "guard.window=10"),
        *("guard.loss_sigmas=4", "guard.level_steps=6", "guard.drift_nats=50"),
    )
    hit = finish(tmp_path / "hit", VERDICT, *level)
    assert not hit.journal("rollback") and not hit.journal("redo"), hit.tail
    assert len(hit.journal("rebaseline")) == 1 and hit.summary["discarded_steps"] == 6, hit.tail
    causes = [line["detail"]["cause"] for line in hit.journal("discard")]
    assert {cause["cause"] for cause in causes} == {"data mix"}
    assert [cause["steps"] > 0 for cause in causes] == [True, *[False] * 5]
    kill = level[0].replace("]", ",kill@step=36,rank=1,at=agree]")
    again = finish(tmp_path / "killed", VERDICT, kill, *level[1:], restarts=1)
    assert again.summary["restarts"] == 1
    assert_same_end(again, hit)
