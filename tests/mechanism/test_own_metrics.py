"""Metrics of a loop's own: reduced with the step, by attempt, refused in words."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace as parts
from typing import Any

import numpy as np
import pytest
import torch

from runner.__main__ import main
from runner.embed.opening import SingleProcessRanks
from runner.engine.protocol import Evaluated
from runner.observe.metrics import MetricsLine
from runner.observe.tracker import numbers_of
from runner.policy.columns import FIELDS
from runner.system.error import ConfigError
from runner.system.parsing import NONFINITE
from runner.tools.report.page import page, read_runs
from runner.tools.report.run_reader import RunStatus
from runner.train.agreed_step import MetricNames
from runner.train.evaluate import Evaluator, FixedSet
from tests.mechanism.test_guard_loop import CLIP, Job, Killed, batches, die

pytestmark = pytest.mark.usefixtures("alone")
BAD = {9, 10, 11, 12, 13, 30}


def train(out: Path, *, kill_at: int = -1, **settings: Any) -> Any:
    """Two batches a step; each logs its own number, once as a number, once with a count."""
    job = Job.make()
    gated = torch.optim.AdamW(job.model.parameters(), lr=1e-2, fused=True)
    job.optimizer, job.scheduler = gated, torch.optim.lr_scheduler.CosineAnnealingLR(gated, 80)
    guard = job.guard(out, clip=CLIP, accumulate=2, persist=2, **settings)
    data = batches(BAD, 60)
    where = {id(batch): number for number, batch in enumerate(data)}
    for count, batch in enumerate(guard.over(data), start=1):
        loss = job.backward(batch)
        number = where[id(batch)]
        guard.log(number=number, odd=(number % 2, 1), nothing=(0, 0))
        guard.log({"of/batch": torch.tensor(float(number))})
        if number == 20:
            guard.log(weird=math.nan)
        if count == kill_at:
            die(guard)
        if count % 2:
            guard.note(loss)
        else:
            job.update(guard.ok(loss))
            if guard.updates % 5 == 0:
                guard.log(eval_updates=guard.updates)
    guard.close()
    return guard.skipped, guard.state_digest()


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("sync", [True, False])
def test_they_belong_to_the_attempt_and_survive_kills_and_rollbacks(
    tmp_path: Path, sync: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train(tmp_path / "whole", sync=sync)
    with pytest.raises(Killed):
        train(tmp_path / "cut", sync=sync, kill_at=41)
    assert train(tmp_path / "cut", sync=sync) == whole
    kept = ("step", "action", "samples", "number", "odd", "of/batch", "weird", "eval_updates")
    ends = [
        [{key: line[key] for key in kept if key in line} for line in lines(tmp_path / name)]
        for name in ("whole", "cut")
    ]
    # A discard that a start repeats from the journal is not computed again, and has no metrics.
    compared = [
        [line if line["action"] == "apply" else [line[key] for key in kept[:3]] for line in end]
        for end in ends
    ]
    assert compared[0] == compared[1]
    for line in ends[0]:
        start, stop = line["samples"]
        assert line["number"] == line["of/batch"] == (start + stop - 1) / 2, line
        assert line["odd"] == 0.5
    actions = [line["action"] for line in ends[0]]
    assert "discard" in actions and "rollback" in actions, actions
    assert not [line for line in lines(tmp_path / "whole") if "nothing" in line]
    odd = [line for line in ends[0] if "weird" in line]
    assert [(line["weird"], line["samples"]) for line in odd] == [(None, [20, 22])]
    told = {line["eval_updates"] for line in ends[0] if "eval_updates" in line}
    assert told == {5.0, 10.0}
    [run] = read_runs([tmp_path / "whole"])
    text = page([run])
    assert "Metrics of the model or the loop" in text and "of/batch" in text
    # Nor do settings of the runner's, which a loop does not use, become numbers of it.
    assert RunStatus(run).progress() == str(run.fold.thinned.last.step)
    assert main(["read", str(tmp_path / "whole")]) == 0
    assert "clipping at" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"loss": 1.0}, "cannot be called 'loss'"),
        ({"grad_norm/me": 1.0}, "'own_grad_norm_me'"),
        ({"layers/x": 1.0}, "called so already"),
        ({"2nd": 1.0}, "'2nd' is no name of a metric"),
        ({"a b": 1.0}, "is no name of a metric"),
        ({"x": "high"}, "'x' is str 'high'; give a number"),
        ({"x": None}, "'x' is NoneType None"),
        ({"x": torch.ones(3)}, r"'x' is a tensor of shape \[3\]"),
        ({"x": (1, 2, 3)}, "'x' is tuple of 3; give a number, or"),
    ],
)
def test_what_is_no_metric_is_refused(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    job = Job.make()
    guard = job.guard(tmp_path)
    with pytest.raises(ConfigError, match=words):
        guard.log(given)
    guard.close()


def test_names_that_differ_in_each_evaluation_are_refused_whatever_the_groups_are() -> None:
    groups = [f"set{number}" for number in range(4)]
    names = MetricNames(SingleProcessRanks(), "it", are_evaluated=True, groups=groups)
    one = (torch.tensor(1.0), torch.tensor(1.0))

    def agree(count: int) -> None:
        given = [f"at_{number}" for number in range(count)]
        names.agree({name: one for own in given for name in (own, *(f"{own}/{g}" for g in groups))})

    agree(256)
    with pytest.raises(ConfigError, match="different names"):
        agree(257)


def test_a_line_keeps_them_and_trackers_get_them_by_kind() -> None:
    columns = {"accuracy": 0.5, "eval_accuracy/web": 0.25, "layers/a": 1.0, "samples/web": 3,
               "broken": math.inf}  # fmt: skip
    line = MetricsLine(
        step=1, cursor=2, samples=(0, 2), loss=1.0, grad_norm=1.0, lr=0.1, tokens=2,
        tokens_per_second=1.0, seconds=1.0, data_wait_seconds=0.0, verdict="clean",
        action="apply", columns=columns,
    )  # fmt: skip
    assert {*line.to_json()} <= {*FIELDS, NONFINITE, *columns}
    state = json.loads(json.dumps(line.to_state(), allow_nan=False))
    assert MetricsLine.from_state(state) == line
    numbers = numbers_of(line)
    own = {name: numbers[name] for name in numbers if numbers[name] in (0.5, 0.25, 3.0)}
    assert own == {"train/accuracy": 0.5, "eval/accuracy/web": 0.25, "sources/samples/web": 3.0}
    assert numbers["layers/a"] == 1.0 and not [name for name in numbers if "broken" in name]


def test_a_metric_called_as_that_of_a_set_keeps_its_own_numbers() -> None:
    batch = parts(positions=[0, 1], unreadable=[], to=lambda device: batch)
    ones = torch.ones(2)
    metrics = {"right": (ones, ones), "right/wiki": (0 * ones, ones)}
    total = ones.sum()
    found = Evaluated(losses=(ones,), counts=(ones,), total=total, count=total, metrics=(metrics,))
    run: Any = parts(
        engine=parts(device=torch.device("cpu"), evaluate=lambda batches: found),
        ranks=SingleProcessRanks(),
        written=parts(report_once=None),
        state=parts(updates=5),
        group=parts(stop_look=parts(over=list)),
        corpus=parts(has_tokens=False),
    )
    held_out = FixedSet(
        indices=np.arange(2), names=("code", "wiki"), groups=np.array([0, 1], dtype=np.int64)
    )
    evaluator = Evaluator(run, parts(fixed=lambda indices: [batch]), parts(), held_out)
    assert evaluator.loss() == 1.0
    columns = evaluator.columns
    assert (columns["eval_right/code"], columns["eval_right/wiki"]) == (1.0, 0.0)
