"""A run reads its own curve at evaluations: each signature once, and nothing else changes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner.data.dataset import Sample
from runner.observe.metrics import MetricsLine
from runner.policy.decision.history import Incident
from runner.train.curve_reader import CurveReader, unigram_entropy
from tests.made_curves import TROUBLED, Made, healthy
from tests.observed import observers
from tests.run import TINY, train


@dataclass
class _Uniform:
    vocab_size = 16

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Sample:
        tokens = np.random.default_rng(index).integers(0, 16, 257)
        return Sample(tokens=tokens, segments=None)


def _reader(told: list[Incident], known: list[Incident] | None = None, **settings: Any) -> Any:
    return CurveReader(
        observers=observers(),
        past=settings.get("past", ()),
        known=known or [],
        total=settings.get("total", 1000),
        warmup=settings.get("warmup", 10),
        dataset=_Uniform(),  # type: ignore[arg-type]
        report=told.append,
    )


def _lines(made: Made, every: int = 50) -> list[MetricsLine]:
    held_out = made.further.get("eval_loss")
    found = []
    for row in range(len(made.loss)):
        level = float(np.median(made.loss[max(0, row - 49) : row + 1]))
        told = level if held_out is None else held_out[row]
        is_due = np.isfinite(told) if held_out is not None else row % every == 0
        found.append(
            MetricsLine(
                step=row + 1, cursor=row, samples=(row, row + 1), loss=made.loss[row],
                grad_norm=made.grad_norm[row], lr=made.further["lr"][row], tokens=1,
                tokens_per_second=1.0, seconds=1.0, data_wait_seconds=0.0, verdict="clean",
                action="apply", eval_loss=float(told) if is_due else None,
            )
        )  # fmt: skip
    return found


def test_a_signature_is_told_once() -> None:
    told: list[Incident] = []
    reader = _reader(told)
    lines = _lines(TROUBLED["overfitting"](np.random.default_rng(1)))
    for line in lines:
        reader.applied(line)
    (incident,) = told
    assert incident.kind == "reading"
    assert incident.decision == "only reported"
    assert incident.detail["signature"] == "overfitting"
    assert incident.reason.startswith("overfitting: the held-out loss was lowest")
    # After a restart the journal has it, and the metrics of before are read.
    again = _reader(told, known=[incident], past=[line.to_json() for line in lines[:500]])
    for line in lines[500:]:
        again.applied(line)
    assert told == [incident]


def test_nothing_is_told_of_a_healthy_run_nor_of_its_warm_up() -> None:
    told: list[Incident] = []
    reader = _reader(told)
    for line in _lines(healthy(np.random.default_rng(2), rows=1000, noise=0.05)):
        reader.applied(line)
    flat = TROUBLED["plateau"](np.random.default_rng(1))
    reader = _reader(told, warmup=300)
    for line in _lines(flat):
        reader.applied(line)
    assert told == []


def test_rows_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.train.curve_reader._MOST_ROWS", 300)
    told: list[Incident] = []
    reader = _reader(told, total=3000)
    for line in _lines(healthy(np.random.default_rng(2), rows=3000, noise=0.05)):
        reader.applied(line)
    assert 100 < len(reader._curve()) < 300
    assert len(reader._curve().held_out) == 60
    assert told == []


def test_the_entropy_of_a_corpus() -> None:
    assert unigram_entropy(_Uniform()) == pytest.approx(np.log(16), abs=0.005)  # type: ignore[arg-type]
    reader = _reader([])
    assert reader.columns() == {"corpus_entropy": pytest.approx(np.log(16), abs=0.005)}


_SLOW = (*TINY, "eval.every=40", "eval.samples=8", "steps=120", "optim.lr=1e-6")


def test_a_real_run_tells_it_on_two_ranks(tmp_path: Path) -> None:
    run = train(tmp_path, *_SLOW, ranks=2)
    assert run.code == 0, run.tail
    (line,) = run.journal("reading")
    assert line["detail"]["signature"] == "rate_too_low"
    entropies = {line["corpus_entropy"] for line in run.metrics() if line["eval_loss"] is not None}
    assert len(entropies) == 1


@pytest.mark.full
def test_it_changes_nothing_and_is_not_repeated(tmp_path: Path) -> None:
    killed = train(tmp_path / "killed", *_SLOW, "faults=[kill@step=110,rank=1]", ranks=2)
    assert killed.code != 0
    killed = train(tmp_path / "killed", *_SLOW, "faults=[kill@step=110,rank=1]", ranks=2)
    off = train(tmp_path / "off", *_SLOW, "track.read=false", ranks=2)
    assert killed.code == off.code == 0, killed.tail
    assert killed.digest == off.digest
    assert len(killed.journal("reading")) == 1
    assert off.journal("reading") == []
