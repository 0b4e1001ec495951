"""What looks at a run says after a kill and a resume what it would have said without."""

from __future__ import annotations

import math
import random
from pathlib import Path
from types import SimpleNamespace as parts
from typing import Any

import pytest

from runner.explain.curve_reader import spike_score
from runner.policy.decision.early import SpikeScore
from runner.policy.decision.finding import from_rows
from runner.policy.decision.history import Incident
from runner.startup import resume
from runner.startup.resume import ResumeCheck
from runner.system.parsing import json_text
from tests.observed import observers


@pytest.mark.parametrize("kept", [0, 1, 150, 999, 1000, 1500, 2900])
def test_the_spike_score_says_the_same_after_a_resume(tmp_path: Path, kept: int) -> None:
    """The metrics are cut to where the checkpoint was saved; the rest is computed again."""
    dice = random.Random(kept)
    losses = [dice.gauss(3.0, 0.1) for _ in range(3000)]
    for at in range(300, 3000, 97):
        losses[at] = math.nan if at % 2 else 30.0
    metrics = tmp_path / "metrics.jsonl"
    lines = [json_text({"step": at + 1, "loss": loss}) + "\n" for at, loss in enumerate(losses)]
    metrics.write_text("".join(lines))
    run: Any = parts(
        group=parts(is_first=True, run_dir=parts(metrics=metrics)),
        resumed=parts(metrics_bytes=len("".join(lines[:kept]))),
        observers=observers(),
    )
    score, whole = spike_score(run), SpikeScore()
    shares = [whole.note(loss) for loss in losses]
    assert [score.note(loss) for loss in losses[kept:]] == shares[kept:]
    assert score.to_json() == whole.to_json()
    assert [at for at, share in enumerate(shares) if share is not None] == [1999]


@pytest.mark.parametrize(
    ("kinds", "is_compared"),
    [
        (["start"], True),
        (["start", "setting_changed"], False),
        (["start", "setting_changed", "start"], True),
        (["setting_changed", "start", "discard"], True),
    ],
)
def test_steps_of_other_settings_are_not_compared(kinds: list[str], is_compared: bool) -> None:
    """Settings that the command allowed to change, as optim.beta2, since the start before."""
    lines = [Incident(kind=kind, step=10, decision="", reason="") for kind in kinds]
    reports: list[Incident] = []
    run: Any = parts(
        history=parts(incidents=lines), written=parts(report=reports.append), resumed=parts(step=20)
    )
    start = Incident(kind="start", step=20, decision="", reason="")
    rows = from_rows([[21, 160, 168, 3.0, 1.0, 1e-3]])
    check = ResumeCheck(run, rows, start)
    line: Any = parts(step=21, samples=(160, 168), loss=2.0, grad_norm=1.0, lr=1e-3)
    check.applied(line)
    assert (check.num_compared, len(reports)) == ((1, 1) if is_compared else (0, 0))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, True),
        ({"repeats_bits": False}, False),
        ({"rows": {}, "resumed": 9}, True),  # it saved later than it began
        ({"rows": {}}, None),  # it never trained
        ({"is_restart": False}, None),
        ({"others": 1}, None),  # a node that was replaced
        ({"hosts": {"b": "0"}}, None),
        ({"settings": "other"}, None),
        ({"code": "other"}, None),
        ({"cause": "hardware"}, None),
        ({"cause": "silence"}, True),
        ({"incidents": []}, None),
    ],
)
def test_a_restart_trusts_the_tests_of_the_start_before_it(
    change: dict[str, Any], found: bool | None
) -> None:
    """Of the same run on the same machines that has trained; of nothing else."""
    same = {"hosts": {"a": "0"}, "settings": "s", "code": "c", "incarnation": 1, "tier": None}
    now = same | {k: v for k, v in change.items() if k in same} | {"incarnation": 2}
    detail = same | {"repeats_bits": change.get("repeats_bits", True), "corpus": "words"}
    first = Incident(kind="start", step=5, decision="", reason="", detail=detail)
    crash = Incident(
        kind="crash", step=8, decision="", reason="", detail={"cause": change.get("cause")}
    )
    run: Any = parts(
        history=parts(incidents=change.get("incidents", [first, crash])),
        group=parts(times=parts(is_restart=change.get("is_restart", True))),
        resumed=parts(step=change.get("resumed", 5)),
        ranks=parts(sum=lambda numbers: [numbers[0] + change.get("others", 0)]),
    )
    start = Incident(kind="start", step=5, decision="", reason="", detail=now)
    assert resume.tested_before(run, change.get("rows", {6: parts()}), start) is found
