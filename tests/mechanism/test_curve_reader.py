"""A run reads its own curve at evaluations: each signature once, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace as parts
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from runner.data.dataset import NOT_COUNTED, Sample
from runner.data.feed import MicroBatch
from runner.explain.curve_reader import CurveReader, text_columns, unigram_entropy
from runner.observe.metrics import MetricsLine
from runner.policy.decision.history import Incident
from runner.system.json_lines import LineFile
from tests.made_curves import TROUBLED, Made, healthy
from tests.observed import observers
from tests.run import TINY, train
from tests.stored import metrics_line


@dataclass
class _Uniform:
    vocab_size = 16

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Sample:
        tokens = np.random.default_rng(index).integers(0, 16, 257)
        return Sample(tokens=tokens, segments=None)


class _Run:
    """A run's metrics, and the incidents that its reader reports; each reading is a process."""

    def __init__(self, path: Path, *, total: int = 1000, warmup: int = 10) -> None:
        self.reported: list[Incident] = []
        self.observers = observers(self.reported.append)
        self._path, self._total, self._warmup = path, total, warmup
        self.start()

    def start(self) -> None:
        """As a restart does: with the lines and incidents of before."""
        length = self._path.stat().st_size if self._path.exists() else 0
        self.file = LineFile(self._path, length=length)
        run: Any = parts(
            observers=self.observers,
            reporter=parts(metrics_file=self.file),
            history=parts(incidents=list(self.reported)),
            corpus=parts(dataset=_Uniform()),
            written=parts(report=self.reported.append),
        )
        self.reader = CurveReader(run, total=self._total, warmup=self._warmup)

    def take(self, lines: Iterable[MetricsLine]) -> None:
        for line in lines:
            self.file.append(line.to_json(), durably=False)
            self.reader.applied(line)


def _lines(made: Made, every: int = 250) -> list[MetricsLine]:
    held_out = made.further.get("eval_loss")
    lines = []
    for row in range(len(made.loss)):
        level = float(np.median(made.loss[max(0, row - 49) : row + 1]))
        eval_loss = level if held_out is None else held_out[row]
        is_due = (row + 1) % every == 0 if held_out is None else np.isfinite(eval_loss)
        numbers = {"loss": made.loss[row], "grad_norm": made.grad_norm[row]}
        numbers |= {
            "lr": made.further["lr"][row],
            "eval_loss": float(eval_loss) if is_due else None,
        }
        lines.append(metrics_line(row + 1, **numbers))
    return lines


def test_a_signature_is_reported_once(tmp_path: Path) -> None:
    lines = _lines(TROUBLED["overfitting"](np.random.default_rng(1)))
    run = _Run(tmp_path / "metrics.jsonl")
    run.take(lines[: len(lines) // 2])
    known = list(run.reported)
    run.file.close()
    # After a restart the journal has it, and the metrics of before are read.
    run.start()
    run.take(lines[len(lines) // 2 :])
    (incident,) = run.reported
    assert known in ([], [incident])
    assert incident.kind == "reading"
    assert incident.decision == "only reported"
    assert incident.detail["signature"] == "overfitting"
    assert incident.reason.startswith("overfitting: the held-out loss was lowest")
    run.file.close()
    run.start()
    run.take(lines[-1:])
    assert run.reported == [incident]


def test_nothing_is_reported_of_a_healthy_run_nor_of_its_warm_up(tmp_path: Path) -> None:
    run = _Run(tmp_path / "healthy.jsonl")
    run.take(_lines(healthy(np.random.default_rng(2), rows=1000, noise=0.05)))
    flat = _Run(tmp_path / "flat.jsonl", warmup=300)
    flat.take(_lines(TROUBLED["plateau"](np.random.default_rng(1))))
    assert run.reported == flat.reported == []


def test_a_reading_is_collected_at_the_next_evaluation(tmp_path: Path) -> None:
    lines = _lines(TROUBLED["plateau"](np.random.default_rng(1)), every=200)
    run = _Run(tmp_path / "metrics.jsonl", total=len(lines))
    run.take(lines[:399])
    assert run.reported == []
    run.take(lines[399:])
    (incident,) = run.reported
    assert incident.detail["signature"] == "plateau" and incident.step in (400, 600, 800, 1000)


def test_what_the_beginning_of_a_healthy_run_resembles_is_asked_for_twice(tmp_path: Path) -> None:
    """As small decoders do that know the letters' frequencies, and then learn how they follow."""
    flat, falling = np.full(100, 2.8), np.linspace(2.8, 1.6, 300)
    loss = np.concatenate([np.linspace(5.4, 2.8, 20), flat[:80], falling])
    loss += np.random.default_rng(0).normal(0, 0.02, len(loss))
    made = Made(np.arange(400.0), loss, np.ones(400), {"lr": np.full(400, 1e-3)})
    run = _Run(tmp_path / "metrics.jsonl", total=400)
    run.reader.columns(None)  # a corpus of 2.8 nats
    read = Mock(wraps=run.reader._report_once)
    run.reader._report_once = read  # type: ignore[method-assign]
    run.take(_lines(made, every=100))
    assert [call.args[0]["signature"] for call in read.mock_calls] == ["plateau"]
    assert run.reported == []


def test_a_reading_that_fails_is_an_observer_that_fails(tmp_path: Path) -> None:
    run = _Run(tmp_path / "metrics.jsonl")
    run.take(_lines(healthy(np.random.default_rng(2), rows=249, noise=0.05)))
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    run.take(_lines(healthy(np.random.default_rng(2), rows=1000, noise=0.05))[249:500])
    (incident,) = run.reported
    assert incident.kind == "observer" and "metrics.jsonl" in incident.reason


def test_the_entropy_of_a_corpus(tmp_path: Path) -> None:
    assert unigram_entropy(_Uniform()) == pytest.approx(np.log(16), abs=0.005)  # type: ignore[arg-type]
    reader = _Run(tmp_path / "metrics.jsonl").reader
    assert reader.columns(None) == {"corpus_entropy": pytest.approx(np.log(16), abs=0.005)}


def _batch(targets: np.ndarray) -> MicroBatch:
    labels = torch.from_numpy(targets)
    return MicroBatch(tokens=labels, targets=labels, segments=None, positions=())


def test_the_text_of_a_step_is_measured() -> None:
    various = np.random.default_rng(0).integers(0, 16, (8, 512))
    assert text_columns([_batch(various[:3])]) == {}, "too few tokens to judge"
    measured = text_columns([_batch(various[:4]), _batch(various[4:])])
    assert measured["entropy"] == pytest.approx(np.log(16), abs=0.01)
    assert measured["repeated"] < 0.02
    with_padding = np.concatenate([various, np.full((8, 512), NOT_COUNTED)], axis=1)
    assert text_columns([_batch(with_padding)]) == measured
    phrase = np.tile(various[:, :8], 64)
    looped = text_columns([_batch(phrase)])
    assert looped["repeated"] > 0.98 and looped["entropy"] == pytest.approx(
        measured["entropy"], abs=0.5
    )
    assert text_columns([_batch(np.full((8, 512), 7))])["entropy"] == 0


def test_batches_of_few_tokens_are_named(tmp_path: Path) -> None:
    made = TROUBLED["degenerate_batches"](np.random.default_rng(1))
    lines = [
        replace(line, columns={"entropy": entropy})
        for line, entropy in zip(_lines(made), made.further["entropy"], strict=True)
    ]
    run = _Run(tmp_path / "metrics.jsonl", total=len(lines))
    run.take(lines)
    assert "degenerate_batches" in {line.detail["signature"] for line in run.reported}


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
