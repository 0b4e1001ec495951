"""Recorded curves of every kind, read and replayed; what the command prints."""

from __future__ import annotations

import cProfile
import csv
import gzip
import json
import math
import pstats
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from runner.__main__ import main
from runner.system.error import ConfigError
from runner.tools.backtest.recording import read_curve

BAD = 150


def losses(rows: int = 300, *, bad: Sequence[int] = (BAD,), seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    values = [3.0 + draw.gauss(0, 0.04) for _ in range(rows)]
    for row in bad:
        values[row] = 9.0
    return values


def write_csv(path: Path, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([head, *rows])
    return path


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def backtest(capsys: pytest.CaptureFixture[str]) -> Callable[..., list[dict[str, Any]]]:
    """The command with --json; its lines."""

    def run(*arguments: str | Path) -> list[dict[str, Any]]:
        assert main(["backtest", "--json", *map(str, arguments)]) == 0
        out = capsys.readouterr().out
        return [json.loads(line) for line in out.splitlines()]

    return run


@pytest.mark.parametrize(
    "head",
    [
        ("step", "loss", "grad_norm"),
        ("global_step", "train_loss", "gradient_norm"),
        ("iteration", "lm loss", "grad-norm"),
        ("_step", "train/loss", "train/grad_norm"),
        ("Step", "run-7 - train/loss", "run-7 - train/grad_norm"),
        ("tokens/iteration", "lm-loss-training/lm loss", "grad-norm/grad-norm"),
        ("optimizer_step", "pretrain_loss_mean", "gradients/global norm"),
    ],
)
def test_columns_are_found_by_common_names(tmp_path: Path, head: tuple[str, ...]) -> None:
    rows = [[10 + at, value, 0.5] for at, value in enumerate(losses(5, bad=[]))]
    recording = read_curve(str(write_csv(tmp_path / "a.csv", head, rows)))
    assert list(recording.curve.steps) == [10, 11, 12, 13, 14]
    assert list(recording.curve.losses) == [row[1] for row in rows]
    assert list(recording.curve.grad_norms) == [0.5] * 5
    assert recording.notes == ()


def test_a_held_out_loss_is_not_taken_for_the_loss(tmp_path: Path) -> None:
    head = ["step", "val/loss", "my_loss", "eval_loss", "param_grad_norm"]
    path = write_csv(tmp_path / "a.csv", head, [[1, 9.0, 3.0, 8.0, 0.1], [2, 9.0, 3.1, 8.0, 0.1]])
    recording = read_curve(str(path))
    assert list(recording.curve.losses) == [3.0, 3.1]
    assert recording.notes == ("no grad norm: judged on the loss alone",)
    two = write_csv(tmp_path / "b.csv", ["step", "a_loss", "b_loss"], [[1, 2, 3]])
    with pytest.raises(ConfigError, match="'a_loss', 'b_loss' could all be --loss"):
        read_curve(str(two))


def test_a_wandb_export_with_ranges_and_empty_cells(tmp_path: Path) -> None:
    name = "vivid-sun-3 - train/loss"
    head = ["Step", name, f"{name}__MIN", f"{name}__MAX"]
    rows: list[list[Any]] = [[at, value, 0, 99] for at, value in enumerate(losses(40, bad=[]))]
    rows.insert(7, [6.5, "", "", ""])  # a step at which something else was logged
    recording = read_curve(str(write_csv(tmp_path / "w.csv", head, rows)))
    assert len(recording.curve.steps) == 40
    assert list(recording.curve.losses) == [row[1] for row in rows if row[1] != ""]
    assert recording.notes == ("no grad norm: judged on the loss alone",)


def test_told_columns_and_what_is_said_when_they_are_not_there(tmp_path: Path) -> None:
    path = write_csv(
        tmp_path / "a.csv", ["when", "a - loss", "b - loss"], [[1, 3.0, 4.0], [2, 3.1, 4.1]]
    )
    with pytest.raises(ConfigError, match="'a - loss', 'b - loss' could all be --loss"):
        read_curve(str(path))
    recording = read_curve(str(path), {"loss": "b - loss", "step": "when"})
    assert list(recording.curve.losses) == [4.0, 4.1]
    assert list(recording.curve.steps) == [1, 2]
    with pytest.raises(ConfigError, match=r"--grad-norm gn: not in .*'when', 'a - loss'"):
        read_curve(str(path), {"loss": "b - loss", "grad_norm": "gn"})
    other = write_csv(tmp_path / "b.csv", ["x", "y"], [[1, 2]])
    with pytest.raises(ConfigError, match="no loss among 'x', 'y'; name it: --loss NAME"):
        read_curve(str(other))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("loss\n", "no row has a loss"),
        ("", "no loss among"),
        ("step,loss\n1,a\n2,b\n3,c\n", "3 lines could not be read, the first of them '1,a'"),
        ("1,3.0\n2,3.1\n", "the first line must name the columns"),
        ("{broken\n", "no line of it is a JSON object"),
    ],
)
def test_files_that_are_no_curve(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "x.csv"
    path.write_text(content)
    with pytest.raises(ConfigError, match=said):
        read_curve(str(path))
    with pytest.raises(ConfigError, match="no such file"):
        read_curve(str(tmp_path / "nothing.csv"))


def test_what_is_not_finite_is_trouble_and_what_is_not_there_is_none(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("step,loss,grad_norm\n1,3.0,\n2,nan,0.5\n3,3.1,inf\n4,,0.7\n5,3.2,\ntorn")
    recording = read_curve(str(path))
    assert [math.isnan(loss) for loss in recording.curve.losses] == [False, True, False, False]
    assert list(recording.curve.grad_norms) == [0.5, 0.5, math.inf, 0.5]
    assert list(recording.curve.steps) == [1, 2, 3, 5]
    assert recording.notes == (
        "1 line could not be read, and left out",
        "no grad norm in 2 of 4 rows: the last one stands in",
        "1 loss(es) not finite",
    )


def test_what_a_hugging_face_trainer_leaves(tmp_path: Path, backtest: Any) -> None:
    """A document of many lines, with evaluations and a summary among the steps."""
    log: list[Any] = [
        {"epoch": 0.1, "grad_norm": 0.5, "loss": loss, "step": 10 * at}
        for at, loss in enumerate(losses(), start=1)
    ]
    log.insert(50, {"eval_loss": 9.9, "step": 500})
    log.append({"train_loss": 3.0, "train_runtime": 5.0, "step": 3000})
    state = tmp_path / "trainer_state.json"
    for content in (
        json.dumps({"best_metric": None, "log_history": log}, indent=2),
        json.dumps({"log_history": log}),
        json.dumps(log),
    ):
        state.write_text(content)
        [line] = backtest(state)
        assert line["rows"] == 300
        assert [d["step"] for d in line["decisions"]] == [10 * (BAD + 1)]
    state.write_text(json.dumps({"log_history": 7}, indent=2))
    with pytest.raises(ConfigError, match="log_history"):
        read_curve(str(state))


def test_packed_files(tmp_path: Path) -> None:
    plain = write_csv(tmp_path / "a.csv", ["step", "loss"], list(enumerate(losses(bad=[]))))
    packed = tmp_path / "a.csv.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_curve(str(packed)).curve == read_curve(str(plain)).curve
    for broken in (packed.read_bytes()[:200], b"step,loss\n1,3\n"):
        packed.write_bytes(broken)
        with pytest.raises(ConfigError, match="cannot be unpacked"):
            read_curve(str(packed))


def test_rows_that_repeat_the_one_before_are_one_step(tmp_path: Path) -> None:
    """Two loggers of one run; a hard batch twice would be two in a row."""
    values = losses(100, bad=[])
    rows: list[list[Any]] = []
    for at, value in enumerate(values):
        rows += [[at, value, ""], [at, value, 0.5]]
    rows.append([99, 3.3, 0.5])  # another loss: another row
    rows += [[100, "nan", 0.5], [100, "nan", 0.5]]  # tried twice
    recording = read_curve(str(write_csv(tmp_path / "a.csv", ["step", "loss", "norm"], rows)))
    assert list(recording.curve.losses[:-2]) == [*values, 3.3]
    assert [math.isnan(loss) for loss in recording.curve.losses[-2:]] == [True, True]
    assert set(recording.curve.grad_norms) == {0.5}
    assert "left out: 100 rows with the step and loss of the one before" in recording.notes


def test_losses_below_the_thresholds_are_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for scale, said in ((0.01, True), (1.0, False)):
        rows = [[at, scale * loss] for at, loss in enumerate(losses(bad=[]))]
        path = write_csv(tmp_path / "a.csv", ["step", "loss"], rows)
        assert main(["backtest", str(path)]) == 0
        assert ("lie below guard.loss_floor=0.4" in capsys.readouterr().out) == said
    assert main(["backtest", str(path), "guard.loss_floor=9"]) == 0
    assert "lie below guard.loss_floor=9" in capsys.readouterr().out


def test_a_recording_that_begins_late_is_said_to(tmp_path: Path) -> None:
    rows = [[5000 + 10 * at, loss] for at, loss in enumerate(losses(40, bad=[]))]
    recording = read_curve(str(write_csv(tmp_path / "a.csv", ["step", "loss"], rows)))
    assert recording.curve.fresh == {0}
    assert any("begins at step 5000" in note for note in recording.notes)
    soon = write_csv(
        tmp_path / "b.csv", ["step", "loss"], [[10 + row[0] - 5000, 3] for row in rows]
    )
    assert read_curve(str(soon)).curve.fresh == frozenset()


def test_gaps_and_restarts_are_told(tmp_path: Path) -> None:
    steps = [*range(0, 1000, 10), *range(900, 2000, 10), *range(9000, 9500, 10)]
    rows = list(zip(steps, losses(len(steps), bad=[]), strict=True))
    recording = read_curve(str(write_csv(tmp_path / "a.csv", ["step", "loss"], rows)))
    assert recording.curve.restarts == {100}
    assert recording.curve.fresh == {210}
    told = "\n".join(recording.notes)
    assert "a row every 10 steps" in told
    assert "1 gap " in told and "1990 -> 9000" in told
    assert "1 restart " in told and "990 -> 900" in told


def our_line(step: int, loss: float | None, action: str = "apply") -> dict[str, Any]:
    return {
        "step": step,
        "cursor": step,
        "loss": loss,
        "grad_norm": None if loss is None else 1.0,
        "verdict": "Clean",
        "action": action,
    }


def test_metrics_of_ours_a_null_is_not_finite(tmp_path: Path, backtest: Any) -> None:
    values: list[float | None] = list(losses(200, bad=[]))
    values[100] = None
    lines = [our_line(at, value) for at, value in enumerate(values, start=1)]
    write_jsonl(tmp_path / "metrics.jsonl", lines)
    [told] = backtest(tmp_path)
    assert told["rows"] == 200
    assert [(d["step"], d["verdict"], d["action"]) for d in told["decisions"]] == [
        (101, "NonFinite", "discard")
    ]


def test_another_log_of_json_lines_a_null_is_not_there(tmp_path: Path) -> None:
    lines = [{"step": at, "loss": None if at % 2 else 3.0, "lr": 0.1} for at in range(10)]
    recording = read_curve(str(write_jsonl(tmp_path / "log.jsonl", lines)))
    assert list(recording.curve.steps) == [0, 2, 4, 6, 8]


def test_tensorboard_event_files_with_a_restart(tmp_path: Path, backtest: Any) -> None:
    writers = pytest.importorskip("torch.utils.tensorboard")
    values = losses(300, bad=[])
    for part, steps in enumerate([range(200), range(150, 300)]):
        writer = writers.SummaryWriter(str(tmp_path), filename_suffix=f".{part}")
        for step in steps:
            writer.add_scalar("eval/loss", 5.0, step)
            writer.add_scalar("train/loss", values[step] + (2.0 if step == 250 else 0.0), step)
            writer.add_scalar("train/grad_norm", 0.5 + step / 1000, step)
        writer.close()
        time.sleep(1.1)  # the files are named by the second
    recording = read_curve(str(tmp_path))
    assert list(recording.curve.steps) == [*range(200), *range(150, 300)]
    assert list(recording.curve.losses)[:150] == pytest.approx(values[:150])
    assert recording.curve.grad_norms[-1] == pytest.approx(0.5 + 0.299)
    assert recording.curve.restarts == {200}
    [told] = backtest(tmp_path)
    assert [(d["step"], d["action"]) for d in told["decisions"]] == [(250, "discard")]
    one = sorted(tmp_path.glob("*tfevents*"))[0]
    assert len(read_curve(str(one)).curve.steps) == 200


def test_one_line_per_file_and_overrides_as_in_training(tmp_path: Path, backtest: Any) -> None:
    bad = write_csv(tmp_path / "bad.csv", ["step", "loss"], list(enumerate(losses())))
    good = write_csv(tmp_path / "good.csv", ["step", "loss"], list(enumerate(losses(bad=[]))))
    first, second = backtest(bad, good)
    assert set(first) == {"file", "rows", "decisions"}
    assert (first["file"], first["rows"]) == (str(bad), 300)
    [decision] = first["decisions"]
    assert set(decision) == {"step", "verdict", "action", "reason"}
    assert (decision["step"], decision["verdict"], decision["action"]) == (BAD, "Spike", "discard")
    assert "loss 9.000 > limit" in decision["reason"]
    assert second == {"file": str(good), "rows": 300, "decisions": []}
    [lax] = backtest(bad, "guard.loss_floor=20")
    assert lax["decisions"] == []
    # Options and overrides in any order.
    [strict] = backtest(bad, "guard.persist=1", "--loss", "loss", "checkpoint.every=20")
    assert [d["action"] for d in strict["decisions"]] == ["rollback"]


def test_the_report_for_a_person(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = losses(400, bad=[100, 300, 301, 302])
    path = write_csv(
        tmp_path / "a.csv", ["step", "loss"], [[5 * a, v] for a, v in enumerate(values)]
    )
    assert main(["backtest", str(path)]) == 0
    out = capsys.readouterr().out
    assert "400 rows, steps 0 to 1,995" in out
    assert "3 discarded (0.75 % of the steps), 1 rollbacks" in out
    assert "step 500: Spike, at its first row: discard" in out
    assert "transient from step 500" in out
    assert "step 1,500: Spike, at its first row: discard x2, rollback up to step 1,510" in out
    assert "persistent from step 1500: 3 bad steps among 3" in out


@pytest.mark.parametrize("ending", [".png", ".html"])
def test_a_plot_is_written_for_each_curve(
    tmp_path: Path, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    rows = [[at, value, 1.0] for at, value in enumerate(losses(bad=[BAD, 200, 201, 202]))]
    rows[10][1] = math.nan
    file = str(write_csv(tmp_path / "a<b.csv", ["step", "loss", "grad_norm"], rows))
    assert main(["backtest", file, file, "--plot", str(tmp_path / f"p{ending}")]) == 0
    for number in (1, 2):
        data = (tmp_path / f"p-{number}{ending}").read_bytes()
        assert len(data) > 10_000
        if ending == ".html":
            assert b"a&lt;b.csv" in data and b"rollback" in data and b"<b.csv" not in data
        else:
            assert data.startswith(b"\x89PNG")
    assert main(["backtest", file, "--plot", str(tmp_path / "p.gif")]) == 2
    assert "must end in .png or .html" in capsys.readouterr().err


def test_a_row_costs_the_same_however_many_there_are(tmp_path: Path) -> None:
    """Counted in calls of Python functions, which no other work on the machine changes."""

    def num_calls(rows: int) -> int:
        path = write_csv(
            tmp_path / f"{rows}.csv", ["step", "loss"], list(enumerate(losses(rows, bad=[])))
        )
        profile = cProfile.Profile()
        assert profile.runcall(main, ["backtest", str(path), "--json"]) == 0
        return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]

    num_calls(100)  # imports
    assert num_calls(8_000) < 4.4 * num_calls(2_000)
