"""Reads the run's own curve at each evaluation, and reports a signature when it first appears.

Rank 0 reads; all ranks add the same lines to their journals, because line numbers must be
equal. The report is only information: no decision depends on it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from runner.data.dataset import NOT_COUNTED, Dataset, Sample
from runner.data.draws import read_sample
from runner.distributed.observers import Observers
from runner.observe.metrics import MetricsLine
from runner.policy.decision.history import Incident
from runner.reading.curve import CORPUS_ENTROPY, HELD_OUT, LEARNING_RATE, Curve
from runner.reading.finding import Finding
from runner.reading.read import read

KIND = "reading"
CURVE = "curve"  # the observer
_LEAST_ROWS, _LEAST_SHARE = 100, 0.1  # rows, and share of the run, before the first report
_GROWN = 1.1  # growth since the last reading: all readings cost as much as eleven of the last
_MOST_ROWS = 200_000
_IN_WARMUP = frozenset({"plateau", "rate_too_low"})  # signatures that a warm-up resembles
_SAMPLES = 32
_FIELDS = ("step", "loss", "grad_norm", "lr", "eval_loss")


class CurveReader:
    """The rows of the run's curve, and the signatures already reported.

    Args:
        observers: all ranks report what rank 0 finds.
        past: lines of the metrics so far, on rank 0.
        known: incidents of the journal; their reports are not repeated.
        total, warmup: length and warm-up of the run, in updates.
        dataset: for the loss of a model that knows only token frequencies.
        report: receives an incident for each new signature.
    """

    def __init__(
        self,
        *,
        observers: Observers,
        past: Iterable[Mapping[str, Any]],
        known: Iterable[Incident],
        total: int,
        warmup: int,
        dataset: Dataset,
        report: Callable[[Incident], None],
    ) -> None:
        self._observers = observers
        self._is_first = not observers.ranks.rank
        self._reported = {str(i.detail.get("signature")) for i in known if i.kind == KIND}
        self._total = total
        self._warmup = warmup
        self._dataset = dataset
        self._report = report
        self._columns = {name: array("d") for name in _FIELDS}
        self._thinning = 1
        self._num_rows = 0
        self._next = _LEAST_ROWS
        self._entropy: float | None = None
        for line in past:
            if line.get("action") == "apply":
                self._add([line.get(name) for name in _FIELDS])

    def columns(self) -> dict[str, float]:
        """Metrics columns of each evaluation, which ``holdfast read`` also uses."""
        if not self._is_first:
            return {}
        return self._observers.alone(CURVE, self._own_columns, {})

    def _own_columns(self) -> dict[str, float]:
        if self._entropy is None:
            self._entropy = unigram_entropy(self._dataset)
        return {CORPUS_ENTROPY: round(self._entropy, 6)} if self._entropy > 0 else {}

    def applied(self, line: MetricsLine) -> None:
        """Add one applied step; read the curve if it was evaluated and has grown enough.

        Collective then.
        """
        if self._is_first:
            row = [line.step, line.loss, line.grad_norm, line.lr, line.eval_loss]
            self._observers.alone(CURVE, lambda: self._add(row), None)
        if line.eval_loss is None or line.step < max(self._next, _LEAST_SHARE * self._total):
            return
        self._next = math.ceil(_GROWN * line.step)
        self._observers.together(CURVE, lambda: self._read(line.step))

    def _read(self, step: int) -> None:
        findings = [asdict(one) for one in read(self._curve())] if self._is_first else None
        for finding in self._observers.ranks.from_first(findings):
            self._report_once(Finding(**finding), step)

    def _add(self, values: list[Any]) -> None:
        self._num_rows += 1
        if self._num_rows % self._thinning and values[-1] is None:
            return
        for name, value in zip(_FIELDS, values, strict=True):
            is_number = isinstance(value, int | float)
            self._columns[name].append(float(value) if is_number else math.nan)
        if len(self._columns["step"]) >= _MOST_ROWS:
            self._thin()

    def _thin(self) -> None:
        """Drop every other row, except rows with a held-out loss."""
        stays = np.isfinite(np.array(self._columns["eval_loss"]))
        stays[::2] = True
        self._columns = {
            name: array("d", np.array(values)[stays]) for name, values in self._columns.items()
        }
        self._thinning *= 2

    def _curve(self) -> Curve:
        columns = {name: np.array(values) for name, values in self._columns.items()}
        further = {LEARNING_RATE: columns["lr"], HELD_OUT: columns["eval_loss"]}
        if self._entropy:
            further[CORPUS_ENTROPY] = np.full(len(columns["loss"]), self._entropy)
        return Curve.of(columns["step"], columns["loss"], columns["grad_norm"], further)

    def _report_once(self, finding: Finding, step: int) -> None:
        signature = finding.signature
        is_early = signature in _IN_WARMUP and step < 2 * self._warmup
        if signature in self._reported or finding.confidence == "low" or is_early:
            return
        self._reported.add(signature)
        self._report(
            Incident(
                kind=KIND,
                step=step,
                decision="only reported",
                reason=f"{signature}: {finding.evidence}",
                detail={
                    "signature": signature,
                    "try": finding.remedy,
                    "confidence": finding.confidence,
                },
            )
        )


def unigram_entropy(dataset: Dataset) -> float:
    """The entropy of the counted tokens of a few samples, in nats; 0 for no tokens.

    Corrected for small samples as in Miller (1955): half a nat for each kind and sample.
    """
    counts = np.zeros(0, dtype=np.int64)
    some = np.random.default_rng(0).integers(0, len(dataset), _SAMPLES)
    for index in some.tolist():
        try:
            sample = read_sample(dataset, index)
        except Exception:  # a run skips such samples and reports them elsewhere
            continue
        if not isinstance(sample, Sample):
            return 0.0
        labels = sample.tokens if sample.labels is None else sample.labels
        token_counts = np.bincount(labels[labels != NOT_COUNTED])
        counts = np.pad(counts, (0, max(0, len(token_counts) - len(counts))))
        counts[: len(token_counts)] += token_counts
    counts = counts[counts > 0]
    if not len(counts):
        return 0.0
    share = counts / counts.sum()
    return float(-(share * np.log(share)).sum() + (len(counts) - 1) / (2 * counts.sum()))
