"""Has the run's own curve read at evaluations, and reports a signature when it first appears.

A process beside rank 0 reads the metrics; its findings are collected at the next evaluation, or at
the last step. All ranks add the same lines to their journals, because line numbers must be equal.
The report is only information: no decision depends on it.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.data.dataset import NOT_COUNTED, Dataset, Sample
from runner.data.draws import read_sample
from runner.data.feed import MicroBatch
from runner.observe.metrics import MetricsLine
from runner.policy.decision.early import SpikeScore
from runner.policy.decision.history import Incident
from runner.system.json_lines import LineFile, iter_lines
from runner.system.process import in_thread, run_beside
from runner.train.agreed_step import StepInfo
from runner.train.run import EngineRun

KIND = "reading"
CURVE = "curve"  # the observer
SPIKES = "spike score"  # the observer
_ENTROPY = "corpus_entropy"  # the column
_LEAST_ROWS, _LEAST_SHARE = 100, 0.1  # rows, and share of the run, before the first report
_GROWN = 1.1  # growth since the last reading: all readings cost as much as eleven of the last
_LONGEST_SECONDS = 60.0
_NICE = 10
# Signatures that the beginning of a healthy run resembles: asked for after the warm-up, and in two
# readings in a row or at the end.
_AT_FIRST = frozenset({"plateau", "rate_too_low"})
_SAMPLES = 32
_TOKENS = 2048  # a few hundred have a low entropy whatever they are; more take time of the step
_GRAM, _PRIME = 4, 1_000_003


def watch_spikes(run: EngineRun) -> None:
    """Report, once, that losses far above their mean are frequent. Collective."""
    known = run.observers.together(SPIKES, lambda: spike_score(run))
    score = known if isinstance(known, SpikeScore) else SpikeScore()

    def count(info: StepInfo | None) -> dict[str, float]:
        # One loss for each line of the metrics: a start reads them from there.
        share = None if info is None else score.note(info.signals.loss)
        if info is not None and share is not None:
            run.written.report_once(
                Incident(
                    kind="advice",
                    step=info.signals.step,
                    decision="only reported",
                    reason=f"{share:.2%} of the last 1,000 losses are 7 standard deviations above "
                    "their mean, and as many before: try a rate that is lower by a fifth "
                    "(optim.lr), or a longer warm-up",
                    detail={"spike_score": round(share, 6)},
                )
            )
        return {}

    run.reporter.add_columns(SPIKES, count)


def spike_score(run: EngineRun) -> SpikeScore:
    """The spike score of the losses so far, from rank 0's metrics. Collective."""
    score = SpikeScore()
    if run.group.is_first:
        for line in iter_lines(run.group.run_dir.metrics, stop=run.resumed.metrics_bytes):
            loss = line.get("loss")
            score.note(float(loss) if isinstance(loss, int | float) else math.nan)
    score.load_json(run.observers.ranks.from_first(score.to_json()))
    return score


class CurveReader:
    """The signatures already reported, and the reading in progress.

    All ranks report what rank 0 finds, and none twice.

    Args:
        total, warmup: length and warm-up of the run, in updates.
    """

    def __init__(self, run: EngineRun, *, total: int, warmup: int) -> None:
        self._observers = run.observers
        self._metrics = run.reporter.metrics_file
        self._reported = {
            str(line.detail.get("signature")) for line in run.history.incidents if line.kind == KIND
        }
        self._run, self._total, self._warmup = run, total, warmup
        self._next = _LEAST_ROWS
        self._entropy: float | None = None
        self._before = frozenset[str]()  # signatures of the reading before
        self._begun: int | None = None  # the step whose reading is not collected yet
        self._found: Future[list[dict[str, Any]]] = Future()

    @classmethod
    def attach(cls, run: EngineRun, *, total: int, warmup: int) -> None:
        """Have the run's own curve read at evaluations. Collective."""
        reader = run.observers.together(CURVE, lambda: cls(run, total=total, warmup=warmup))
        if isinstance(reader, CurveReader):
            run.reporter.add_columns(CURVE, reader.columns)
            run.reporter.also_applied(reader.applied)

    def columns(self, info: StepInfo | None) -> dict[str, float]:
        """Metrics columns of each evaluation and step, which ``holdfast read`` also uses."""
        if self._metrics is None:
            return {}
        if info is not None:
            return text_columns(info.share)
        if self._entropy is None:
            self._entropy = unigram_entropy(self._run.corpus.dataset)
        return {_ENTROPY: round(self._entropy, 6)} if self._entropy > 0 else {}

    def applied(self, line: MetricsLine) -> None:
        """Collect a reading, and begin one if the step was evaluated and the curve has grown.

        Collective then.
        """
        is_last = line.step >= self._total
        if line.eval_loss is None and not is_last:
            return
        least = max(self._next, _LEAST_SHARE * self._total)
        is_due = line.eval_loss is not None and line.step >= least
        if is_due or self._begun is not None:
            self._observers.together(CURVE, lambda: self._read(line.step, is_due, is_last))

    def _read(self, step: int, is_due: bool, is_last: bool) -> None:
        self._collect()
        if not is_due:
            return
        self._next = math.ceil(_GROWN * step)
        self._begun = step
        if self._metrics is not None:
            self._begin(self._metrics, 0 if is_last else _NICE)
        if is_last:
            self._collect()

    def _begin(self, metrics: LineFile, nice: int) -> None:
        command = ["read", str(metrics.path), "--stop", str(metrics.num_bytes())]
        command += ["--nice", str(nice)]
        if self._entropy:
            command += ["--corpus-entropy", repr(self._entropy)]

        def read() -> list[dict[str, Any]]:
            output = run_beside(command, seconds=_LONGEST_SECONDS)
            signatures: list[dict[str, Any]] = json.loads(output or b"{}")["signatures"]
            return signatures

        self._found = in_thread(read, KIND)

    def _collect(self) -> None:
        step, self._begun = self._begun, None
        if step is None:
            return
        found: list[dict[str, Any]] = []
        # On a busy machine it may time out: the next reading sees as much.
        with contextlib.suppress(TimeoutError):
            found = self._found.result() if self._metrics is not None else []
        found = self._observers.ranks.from_first(found)
        for finding in found:
            self._report_once(finding, step)
        self._before = frozenset(str(finding["signature"]) for finding in found)

    def _report_once(self, finding: dict[str, Any], step: int) -> None:
        signature = finding["signature"]
        is_once = signature not in self._before and step < self._total
        is_early = signature in _AT_FIRST and (step < 2 * self._warmup or is_once)
        if signature in self._reported or finding["confidence"] == "low" or is_early:
            return
        self._reported.add(signature)
        self._run.written.report(
            Incident(
                kind=KIND,
                step=step,
                decision="only reported",
                reason=f"{signature}: {finding['evidence']}",
                detail={name: finding[name] for name in ("signature", "try", "confidence")},
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
    return _entropy(counts)


def text_columns(share: Sequence[MicroBatch]) -> dict[str, float]:
    """The entropy and the repetition of rank 0's first tokens in a step; none with too few.

    ``entropy``: of the counted tokens, in nats, as :func:`unigram_entropy`. ``repeated``: the share
    of the 4-grams of a sequence that it has had before.
    """
    rows: list[NDArray[np.int64]] = []
    for row in (row for batch in share for row in batch.targets.numpy()):
        rows.append(row[row != NOT_COUNTED][:_TOKENS])
        if sum(map(len, rows)) >= _TOKENS:
            break
    else:
        return {}
    grams, different = 0, 0
    for row in rows:
        hashes = np.zeros(max(len(row) - _GRAM + 1, 0), dtype=np.int64)
        for place in range(_GRAM):
            hashes = hashes * _PRIME + row[place : place + len(hashes)]  # modulo 2^64
        grams += len(hashes)
        different += len(np.unique(hashes))
    entropy = _entropy(np.bincount(np.concatenate(rows)))
    return {"entropy": round(entropy, 4), "repeated": round(1 - different / max(grams, 1), 4)}


def _entropy(counts: NDArray[np.int64]) -> float:
    """In nats, corrected for small samples; 0 for no tokens."""
    counts = counts[counts > 0]
    if not len(counts):
        return 0.0
    share = counts / counts.sum()
    return float(-(share * np.log(share)).sum() + (len(counts) - 1) / (2 * counts.sum()))
