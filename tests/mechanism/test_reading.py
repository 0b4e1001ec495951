"""What ``holdfast read`` names in made curves, and that it is silent where nothing is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner.__main__ import main
from runner.command.read import curve_of_run
from runner.tools.reading import read
from runner.tools.reading.curve import SIGNATURES, Curve
from runner.tools.reading.trouble import clipping
from tests.made_curves import HEALTHY, TROUBLED, healthy

_SEEDS = range(4)
_MANY = range(100, 140)


def _names(curve: Curve) -> list[str]:
    return [finding.signature for finding in read(curve)]


def _made(name: str, seed: int) -> Curve:
    make = TROUBLED.get(name) or HEALTHY[name]
    return make(np.random.default_rng(seed)).curve()


def _read(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["read", *arguments, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


# -- signatures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TROUBLED)
def test_each_signature_is_named(name: str) -> None:
    expected = name.partition("/")[0]
    found = [_names(_made(name, seed)) for seed in _SEEDS]
    assert sum(expected in names for names in found) >= len(_SEEDS) - 1, found


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_said_of_a_healthy_curve(name: str) -> None:
    assert [_names(_made(name, seed)) for seed in _SEEDS] == [[]] * len(_SEEDS)


@pytest.mark.full
def test_recall_and_precision_over_many_seeds() -> None:
    right = told = false = 0
    for name in TROUBLED:
        for seed in _MANY:
            names = _names(_made(name, seed))
            right += name.partition("/")[0] in names
            told += len(names)
    for name in HEALTHY:
        loud = [_names(_made(name, seed)) for seed in _MANY]
        false += sum(map(bool, loud))
        told += sum(map(len, loud))
    assert right >= 0.9 * len(TROUBLED) * len(_MANY)
    assert right >= 0.9 * told
    assert false <= 0.05 * len(HEALTHY) * len(_MANY)


def test_every_signature_is_made_and_described() -> None:
    assert {name.partition("/")[0] for name in TROUBLED} == set(SIGNATURES)


def test_a_finding_tells_where_and_why() -> None:
    made = healthy(np.random.default_rng(3), rows=400, noise=0.02)
    made.loss[200:205] += 3.0
    (finding,) = read(made.curve())
    assert (finding.signature, finding.first, finding.last) == ("spike", 200, 204)
    assert f"at step {int(made.steps[200])} " in finding.evidence
    assert "5 rows" in finding.evidence
    assert finding.remedy


# -- odd curves ------------------------------------------------------------------------------------


def test_few_or_strange_rows_are_no_trouble() -> None:
    for rows in (0, 1, 2, 5, 19, 20, 21, 60, 61):
        for value in (0.0, 1.0, -3.0):
            column = [value] * rows
            further = {name: column for name in ("lr", "epoch", "eval_loss")}
            assert read(Curve.of(column, column, column, further)) == []
    read(Curve.of([1e300] * 70, [1e300, -1e300] * 35, [1e-300] * 70))
    nothing = [float("nan")] * 50
    (finding,) = read(Curve.of(list(range(50)), nothing, nothing))
    assert finding.signature == "not_finite"


def test_what_a_rollback_undid_is_left_out() -> None:
    made = healthy(np.random.default_rng(5), rows=400, noise=0.02)
    bad = made.loss[200:240] + 4.0
    steps = np.concatenate([np.arange(240), np.arange(200, 400)])
    loss = np.concatenate([made.loss[:200], bad, made.loss[200:]])
    curve = Curve.of(steps, loss, np.ones(440))
    assert len(curve) == 400
    assert (np.diff(curve.steps) == 1).all()
    assert read(curve) == []


def test_steps_that_begin_anew_each_epoch_are_rows_of_their_own() -> None:
    loss = healthy(np.random.default_rng(5), rows=400, noise=0.02).loss
    assert len(Curve.of(np.tile(np.arange(100), 4), loss, np.ones(400))) == 400


# -- files -----------------------------------------------------------------------------------------


def test_a_csv_with_further_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for name in ("overfitting", "floor_early", "epoch_steps"):
        path = tmp_path / f"{name}.csv"
        path.write_text(TROUBLED[name](np.random.default_rng(1)).csv())
        paths.append(str(path))
    found = _read(capsys, *paths)
    names = [[one["signature"] for one in line["signatures"]] for line in found]
    assert names == [["overfitting"], ["floor_early"], ["epoch_steps"]]
    (one,) = found[0]["signatures"]
    assert set(one) == {"signature", "rows", "steps", "evidence", "try", "confidence"}
    assert found[0]["file"] == paths[0]


def test_a_trainers_state_has_evaluations_on_lines_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = TROUBLED["overfitting"](np.random.default_rng(2))
    history: list[dict[str, float]] = []
    for step, loss, rate, held_out in zip(
        made.steps, made.loss, made.further["lr"], made.further["eval_loss"], strict=True
    ):
        history.append({"step": step, "loss": loss, "learning_rate": rate, "epoch": step / 1e9})
        if np.isfinite(held_out):
            history.append({"step": step, "eval_loss": held_out, "epoch": step / 1e9})
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"log_history": history}))
    (line,) = _read(capsys, str(path))
    assert line["rows"] == 1000
    assert [one["signature"] for one in line["signatures"]] == ["overfitting"]


def test_event_files_have_them_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensorboard = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    event_pb2 = pytest.importorskip("tensorboard.compat.proto.event_pb2")
    made = TROUBLED["overfitting"](np.random.default_rng(2))
    writer = tensorboard.EventFileWriter(str(tmp_path))
    for step in range(1000):
        event = event_pb2.Event(step=step)
        event.summary.value.add(tag="train/loss", simple_value=made.loss[step])
        event.summary.value.add(tag="train/lr", simple_value=made.further["lr"][step])
        writer.add_event(event)
        if np.isfinite(made.further["eval_loss"][step]):
            later = event_pb2.Event(step=step + 1)  # logged a step after
            later.summary.value.add(tag="eval/loss", simple_value=made.further["eval_loss"][step])
            writer.add_event(later)
    writer.close()
    (line,) = _read(capsys, str(tmp_path))
    assert [one["signature"] for one in line["signatures"]] == ["overfitting"]


def test_our_own_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = healthy(np.random.default_rng(7), rows=300, noise=0.02)
    lines = [
        {"step": step, "cursor": 0, "verdict": "clean", "action": "apply", "loss": loss,
         "grad_norm": 1.0, "lr": 1e-3, "eval_loss": None}
        for step, loss in enumerate(made.loss)
    ]  # fmt: skip
    lines[150] |= {"loss": None, "verdict": "nonfinite", "action": "discard"}
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text)
    (line,) = _read(capsys, str(tmp_path))
    assert [(one["signature"], one["steps"]) for one in line["signatures"]] == [
        ("not_finite", [150, 150])
    ]


def test_our_own_held_out_sets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = TROUBLED["forgetting"](np.random.default_rng(3))
    sets = [name for name in made.further if name.startswith("eval_loss")]
    lines = [
        {"step": step, "cursor": 0, "verdict": "clean", "action": "apply", "loss": loss,
         "grad_norm": 1.0, "lr": 1e-3, "eval_loss": None,
         **{name: made.further[name][step] for name in sets if made.further[name][step] > 0}}
        for step, loss in enumerate(made.loss)
    ]  # fmt: skip
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for path in (tmp_path, metrics):
        (line,) = _read(capsys, str(path))
        (finding,) = line["signatures"]
        assert finding["signature"] == "forgetting"
        assert "set old was lowest" in finding["evidence"] and "that of new" in finding["evidence"]
    beside = read(curve_of_run(metrics, metrics.stat().st_size, None))
    assert [one.evidence for one in beside] == [finding["evidence"]]


@pytest.mark.parametrize("name", ["trainer_state.json", "metrics.jsonl"])
def test_held_out_sets_as_others_call_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Of Hugging Face's trainer, which has no loss of all sets; and of a loop's own."""
    made = TROUBLED["forgetting"](np.random.default_rng(3))
    sets = [one for one in made.further if one.startswith("eval_loss/")]
    rows = [
        {"step": step, "loss": loss, "grad_norm": 1.0, "learning_rate": 1e-3}
        for step, loss in enumerate(made.loss)
    ]
    for one in sets:
        of = made.further[one]
        named = f"eval_{one.partition('/')[2]}_loss"
        rows += [{"step": step, named: of[step]} for step in range(len(of)) if of[step] > 0]
    rows.sort(key=lambda row: row["step"])
    file = tmp_path / name
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    file.write_text(json.dumps({"log_history": rows}) if name.endswith(".json") else lines)
    (line,) = _read(capsys, str(file))
    assert [one["signature"] for one in line["signatures"]] == ["forgetting"]
    assert "set old was lowest" in line["signatures"][0]["evidence"]


def test_columns_as_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = TROUBLED["plateau"](np.random.default_rng(1))
    path = tmp_path / "odd.csv"
    path.write_text(
        "n,main,speed\n"
        + "".join(f"{n},{loss:.6g},0.05\n" for n, loss in zip(made.steps, made.loss, strict=True))
    )
    told = ["--loss", "main", "--step", "n", "--update-ratio", "speed", "--corpus-entropy", "7.5"]
    (line,) = _read(capsys, str(path), *told)
    assert [one["signature"] for one in line["signatures"]] == ["rate_too_high"]
    assert main(["read", str(path), *told[:4], "--lr", "nowhere"]) == 2
    assert main(["read", str(path)]) == 2
    assert main(["read"]) == 2


@pytest.mark.parametrize(
    ("header", "row", "names"),
    [
        ("step,loss", "{step},3.0", "loss"),
        ("step,loss,grad_norm", "{step},3.0,1.0", "loss, grad_norm"),
        ("step,loss,grad_norm", "{step},3.0,", "loss"),
        ("step,loss,grad_norm,lr,epoch", "{step},3.0,1.0,1e-3,0.5", "loss, grad_norm, lr, epoch"),
    ],
)
def test_the_columns_that_were_read_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], header: str, row: str, names: str
) -> None:
    file = tmp_path / "curve.csv"
    file.write_text("\n".join([header, *(row.format(step=step) for step in range(1, 200))]) + "\n")
    assert main(["read", str(file)]) == 0
    assert f"steps 1 to 199 ({names})" in capsys.readouterr().out


def test_the_page_of_a_reading(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.csv"
    path.write_text(TROUBLED["spike"](np.random.default_rng(1)).csv())
    assert main(["read", str(path)]) == 0
    out = capsys.readouterr().out
    assert "spike (steps" in out
    assert "try: " in out
    path.write_text(HEALTHY["drawn"](np.random.default_rng(1)).csv())
    assert main(["read", str(path)]) == 0
    assert "no signature found" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        main(["read", "--help"])
    out = capsys.readouterr().out
    assert all(name in out for name in SIGNATURES)


# -- clipping --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clip", "said"), [(0.05, "always engages"), (50.0, "never engages"), (0.5, "engages in 50.")]
)
def test_what_clipping_did_is_said(clip: float, said: str) -> None:
    norms = np.where(np.arange(400) % 2 == 0, 0.2, 0.8)
    curve = Curve.of(np.arange(400.0), np.linspace(5, 3, 400), norms)
    assert said in clipping(curve, clip)
    assert clipping(curve, 0.0) == ""


def test_a_spike_that_clipping_did_not_touch_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    out.mkdir()
    loss = [5 - step / 200 + 4 * (300 <= step < 306) for step in range(600)]
    lines = [{"step": step, "loss": one, "grad_norm": 0.3} for step, one in enumerate(loss)]
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["read", str(out)]) == 0
    assert "note: clipping" not in capsys.readouterr().out, "nobody knows the clip"
    (out / "config.yaml").write_text("steps: 600\noptim: {clip: 1.0}\n")
    assert main(["read", str(out)]) == 0
    words = capsys.readouterr().out
    assert "clipping at 1 never engages" in words and "1 of 1 spikes" in words and "0.6" in words
