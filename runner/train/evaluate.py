"""The held-out loss on a fixed set of samples, agreed among the ranks like a step.

All ranks learn of a problem together with the loss: a sample that one rank cannot read, a loss that
is not finite, or no counted token. It becomes a journal line and does not end the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from runner.config.schema import EvalConfig, Goal
from runner.data.cursor import Indices
from runner.data.dataset import Dataset, describe
from runner.data.feed import Feed
from runner.data.mixture import Mixed, MixtureOrder
from runner.distributed.agreement import FINGERPRINT_SIZE
from runner.engine.protocol import Evaluated
from runner.policy.alert import EARLY_STOP
from runner.policy.columns import EVALUATED
from runner.policy.decision.history import Incident
from runner.policy.decision.skip_ledger import Unreadable
from runner.policy.retention.records import Record, State, on_disk
from runner.system.error import ConfigError
from runner.system.garbage import collect
from runner.system.json_lines import iter_lines, step_of
from runner.system.units import counted
from runner.train.agreed_step import MetricNames, StepInfo
from runner.train.run import EngineRun, RunJournal

# Indices into the FP64 vector that is summed over ranks.
_LOSS, _TOKENS, _NONFINITE, _UNREADABLE = range(4)
_FINGERPRINT = 4
_GROUPS = _FINGERPRINT + FINGERPRINT_SIZE
_PERPLEXITY, _MOST_NATS = f"{EVALUATED}perplexity", 700.0  # exp of more overflows
_MOST_NAMED = 8  # samples that one rank names, and that one sentence names


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FixedSet:
    """Samples for repeated evaluation.

    ``indices`` are data set indices, the same at every evaluation and world size; ``what`` names
    the set; ``groups`` is int64 [len(indices)], each sample's index into ``names``.
    """

    indices: Indices
    what: str = "held-out samples"
    names: tuple[str, ...] = ()
    groups: Indices | None = None


class Evaluator:
    """Computes the loss of ``samples`` of ``dataset``, which ``feed`` reads.

    Attributes:
        by_group: the last loss of each group by name, without groups in which no token counts.
        own: the last values of the model's own metrics, also by group as ``NAME/GROUP``.
    """

    def __init__(self, run: EngineRun, feed: Feed, dataset: Dataset, samples: FixedSet) -> None:
        self._engine = run.engine
        self._dataset = dataset
        self._ranks = run.ranks
        self._samples = samples
        self._indices = samples.indices
        self._report = run.written.report_once
        self._state = run.state
        self._stop = run.group.stop_look
        self._has_tokens = run.corpus.has_tokens
        self._batches = feed.fixed(self._indices) if len(self._indices) else []
        self._reported = ""
        self.columns: dict[str, float] = {}  # of the last evaluation, where anything counted
        self._names = MetricNames(
            run.ranks, "losses(batch), evaluated", are_evaluated=True, groups=samples.names
        )

    @classmethod
    def of(
        cls, run: EngineRun, settings: EvalConfig, feed_of: Callable[[Dataset], Feed]
    ) -> Evaluator:
        """On held-out samples, by source for a mixture; or on ``data.val_path``.

        Args:
            feed_of: makes this rank's loader of a data set.
        """
        corpus = run.corpus
        count = settings.samples if settings.every else 0
        if corpus.validation is not None:
            dataset = corpus.validation
            return cls(run, feed_of(dataset), dataset, spread_over(dataset, count))
        held_out = corpus.stream.held_out_indices(count)
        if settings.every and not len(held_out):
            run.group.console.say("no sample is held out (data.held_out): nothing to evaluate on")
        mixture = corpus.mixture
        samples = FixedSet(
            indices=held_out,
            names=mixture.names if mixture else (),
            groups=mixture.sources(held_out) if mixture else None,
        )
        return cls(run, run.feed, corpus.dataset, samples)

    def loss(self) -> float | None:
        """The loss in nats per token over the readable samples. Collective.

        NaN or infinite if a sample's loss is; None if nothing is held out or no token counts.

        Raises:
            RankError: ranks are at different evaluations; raised alike on all of them.
            StopRequested: a rank was asked to stop before the last batch.
        """
        if not self._batches:
            return None
        evaluated = self._engine.evaluate(
            self._stop.over([batch.to(self._engine.device) for batch in self._batches])
        )
        identity = {
            "evaluation at step": self._state.updates,
            "samples": len(self._indices),
            "their sum": int(self._indices.sum()),
            "batches": len(self._batches),
        }
        total = float(evaluated.total.item())
        own = [
            total,
            float(evaluated.count),
            float(not math.isfinite(total)),
            float(any(batch.unreadable for batch in self._batches)),
        ]
        metrics = self._names.pack(self._own_metrics(evaluated), torch.device("cpu"))
        of_groups = self._own_groups(evaluated)
        numbers = [*own, *self._ranks.fingerprint(identity), *of_groups]
        sums = self._ranks.sum([*numbers, *metrics.flags, *metrics.sums.tolist()])
        self._ranks.require_alike(sums[_FINGERPRINT:_GROUPS], identity)
        loss = sums[_LOSS] / sums[_TOKENS] if sums[_TOKENS] else None
        end = _GROUPS + len(of_groups)
        by_group = sums[_GROUPS:end]
        groups = zip(self._samples.names, by_group[::2], by_group[1::2], strict=True)
        of_model = metrics.read(sums[end:])
        self.columns = {
            **{f"eval_loss/{name}": total / count for name, total, count in groups if count},
            **{f"{EVALUATED}{name}": value for name, value in of_model.items()},
        }
        if loss is not None and self._has_tokens:
            self.columns.setdefault(_PERPLEXITY, math.exp(min(loss, _MOST_NATS)))
        if loss is None or not math.isfinite(loss) or sums[_NONFINITE] or sums[_UNREADABLE]:
            self._report_problem(evaluated, is_counted=loss is not None)
        return loss

    def all_columns(self, loss: float | None) -> dict[str, float | None]:
        """All numbers of the last evaluation by column; None: nothing counted."""
        names = [f"eval_loss/{name}" for name in self._samples.names]
        names += [f"{EVALUATED}{name}" for name in self._names.names]
        names += [_PERPLEXITY] * self._has_tokens
        return {**dict.fromkeys(names), **self.columns, "eval_loss": loss}

    def _own_groups(self, evaluated: Evaluated) -> list[float]:
        """The summed loss and the number of its terms of each group, on this rank."""
        sums = [0.0] * (2 * len(self._samples.names))
        if self._samples.groups is None:
            return sums
        parts = zip(self._batches, evaluated.losses, evaluated.counts, strict=True)
        for batch, losses, counts in parts:
            rows = zip(batch.positions, losses.tolist(), counts.tolist(), strict=True)
            for place, loss, count in rows:
                if place is not None and count:
                    group = int(self._samples.groups[place])
                    sums[2 * group] += loss
                    sums[2 * group + 1] += count
        return sums

    def _own_metrics(self, evaluated: Evaluated) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """This rank's sum and count of each of the model's metrics, in all and of each group."""
        sums, by_group = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        groups, names = self._samples.groups, self._samples.names
        for batch, metrics in zip(self._batches, evaluated.metrics, strict=True):
            for name, pair in metrics.items():
                rows = torch.stack([one.double().cpu() for one in pair])
                sums[name] = sums.get(name, 0.0) + rows.sum(dim=1)
                for group in names if groups is not None else ():
                    by_group.setdefault(f"{name}/{group}", torch.zeros(2, dtype=torch.float64))
                for place, row in zip(batch.positions, rows.T, strict=True):
                    if place is not None and groups is not None:
                        by_group[f"{name}/{names[int(groups[place])]}"] += row
        # A metric that the model itself calls as another one of a group has its own numbers.
        return {name: (pair[0], pair[1]) for name, pair in {**by_group, **sums}.items()}

    def _report_problem(self, evaluated: Evaluated, *, is_counted: bool) -> None:
        """Report a problem, unless the last evaluation had the same. Collective."""
        unreadable = [row for batch in self._batches for row in batch.unreadable]
        own = [
            [len(rows), [asdict(row) for row in rows[:_MOST_NAMED]]]
            for rows in (unreadable, self._nonfinite(evaluated))
        ]
        by_rank = self._ranks.gather(own)
        of = f"of {len(self._indices)} {self._samples.what}"
        numbers, named, sentences = [], list[Unreadable](), []
        for at, what in enumerate(
            ("cannot be read and are left out", "have a loss that is not finite")
        ):
            numbers.append(sum(of_rank[at][0] for of_rank in by_rank))
            rows = [Unreadable(**row) for of_rank in by_rank for row in of_rank[at][1]]
            first = sorted(rows, key=lambda row: row.position)[:_MOST_NAMED]
            sentences += _sentence(numbers[at], f"{of} {what}", first)
            named += first
        if not is_counted:
            sentences.append(f"no token {of} counts: there is no loss")
        reason = "; ".join(sentences)
        if reason == self._reported:
            return
        self._reported = reason
        self._report(
            Incident(
                kind="evaluation",
                step=self._state.updates,
                decision="go on",
                reason=reason,
                ranks=tuple(sorted({row.rank for row in named})),
                sample_ids=tuple(row.name for row in named),
                detail={
                    "places": [row.position for row in named],
                    "indices": [row.index for row in named],
                    "errors": [row.error for row in named],
                    "num_unreadable": numbers[0],
                    "num_nonfinite": numbers[1],
                },
            )
        )

    def _nonfinite(self, evaluated: Evaluated) -> list[Unreadable]:
        """This rank's sequences whose loss is NaN or infinite."""
        rows = []
        for batch, losses in zip(self._batches, evaluated.losses, strict=True):
            for place, loss in zip(batch.positions, losses.tolist(), strict=True):
                if place is not None and not math.isfinite(loss):
                    index = int(self._indices[place])
                    rows.append(
                        Unreadable(
                            rank=self._ranks.rank,
                            position=place,
                            index=index,
                            name=describe(self._dataset, index),
                            error=f"loss {loss}",
                            refused=False,
                        )
                    )
        return rows


def _sentence(number: int, what: str, samples: list[Unreadable]) -> list[str]:
    if not number:
        return []
    named = "; ".join(f"{one.name} on rank {one.rank}: {one.error}" for one in samples)
    rest = f"; and {number - len(samples)} more" if number > len(samples) else ""
    return [f"{number} {what}: {named}{rest}"]


def spread_over(dataset: Dataset, count: int) -> FixedSet:
    """Up to ``count`` evenly spaced samples of each held-out set of ``data.val_path``."""
    sets = dataset.lengths if isinstance(dataset, Mixed) else {"": len(dataset)}
    indices, groups, first = [], [], 0
    for number, length in enumerate(sets.values()):
        size = min(count, length)
        indices.append(first + np.arange(size, dtype=np.int64) * length // max(size, 1))
        groups.append(np.full(size, number, dtype=np.int64))
        first += length
    is_named = isinstance(dataset, Mixed)
    return FixedSet(
        indices=np.concatenate(indices),
        what="samples of data.val_path",
        names=tuple(sets) if is_named else (),
        groups=np.concatenate(groups) if is_named else None,
    )


def source_columns(
    order: MixtureOrder | None, evaluator: Evaluator, info: StepInfo | None
) -> dict[str, float]:
    """The columns of a step, or of an evaluation (None); none for a step that was not computed.

    ``samples/NAME`` counts a step's samples; ``loss/NAME`` is their training loss, in nats a token,
    and ``eval_loss/NAME`` the held-out loss of a source or of a set of ``data.val_path``;
    ``eval_METRIC`` and ``eval_METRIC/NAME`` are the model's own metrics.

    Args:
        order: order of the samples of several sources; None without sources.
    """
    if info is None:
        return evaluator.columns
    if info.batch is None or order is None:
        return {}
    counts = np.bincount(order.sources(info.batch.indices), minlength=len(order.names)).tolist()
    samples = {f"samples/{name}": count for name, count in zip(order.names, counts, strict=True)}
    return samples | {
        f"loss/{name}": total / count
        for name, (total, count) in zip(order.names, info.source_sums, strict=False)
        if count and math.isfinite(total)
    }


# The checks at intervals of updates: the held-out loss, and the health of the ranks.


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What looks at the ranks after an update, as an observer.

    Args:
        is_due: whether it uses the state after exactly so many updates.
        look: called then; collective.
        note: called after each update.
    """

    observer: str
    is_due: Callable[[int], bool]
    look: Callable[[int], None]
    note: Callable[[int], None] = lambda updates: None


class Periodic:
    """Runs the checks that are due after an update.

    Args:
        evaluate: returns the held-out loss in nats per token; None if nothing is held out.
        evaluate_every: in applied updates; 0 means never.
    """

    def __init__(
        self,
        run: EngineRun,
        *,
        evaluate: Callable[[], float | None],
        evaluate_every: int,
        inspections: Sequence[Inspection],
    ) -> None:
        self._evaluate = evaluate
        self._evaluate_every = evaluate_every
        self._inspections = inspections
        self._observers = run.observers
        self._reporter = run.reporter
        self._heart = run.group.heart
        self._evaluated_at: tuple[int, float | None] = (-1, None)

    def is_due(self, updates: int) -> bool:
        """Whether anything here uses the state after exactly ``updates`` updates."""
        return falls_due(self._evaluate_every, updates) or any(
            self._is_inspected(one, updates) for one in self._inspections
        )

    def evaluate(self, updates: int) -> float | None:
        """The held-out loss, if it is due. Collective."""
        if not falls_due(self._evaluate_every, updates):
            return None
        self._heart.enter("evaluate")
        with self._reporter.stall("evaluation"):
            loss = self._evaluate()
        self._evaluated_at = updates, loss
        return loss

    def held_out_loss(self, updates: int) -> float | None:
        """The held-out loss of the current state, computed at most once. Collective."""
        known, loss = self._evaluated_at
        return loss if known == updates else self._evaluate()

    def inspect(self, updates: int) -> None:
        """Run the inspections that are due. Collective."""
        for inspection in self._inspections:
            inspection.note(updates)
            if self._is_inspected(inspection, updates):
                self._observers.together(inspection.observer, partial(inspection.look, updates))
        collect(updates)

    def _is_inspected(self, inspection: Inspection, updates: int) -> bool:
        return not self._observers.is_out(inspection.observer) and inspection.is_due(updates)


def falls_due(every: int, updates: int) -> bool:
    """Whether ``updates`` is a multiple of the interval; 0 means never."""
    return every > 0 and updates % every == 0


# The best of the evaluations so far: which checkpoint it is, and whether training may stop.


class BestEvaluation:
    """The values of ``eval.metric`` by update. The same on all ranks.

    Evaluations after ``updates`` never count for the state after ``updates``: a rollback undid
    them, so that a run that goes back or resumes decides as one that did neither.

    Args:
        values: of the evaluations before this start; see :func:`evaluations`.

    Attributes:
        saved_steps: returns the steps with a checkpoint. The best may have none any more, or never
            had one: it was tainted, or its save failed. Then a worse one is to be saved.
    """

    def __init__(self, settings: EvalConfig, values: Iterable[tuple[int, float]]) -> None:
        self._settings = settings
        self._sign = 1.0 if settings.goal is Goal.lowest else -1.0
        self._values = dict(values)
        self._best_at = -1
        self.saved_steps: Callable[[], Collection[int]] = lambda: self._values

    @classmethod
    def of(cls, run: EngineRun, settings: EvalConfig, *, is_kept: bool) -> BestEvaluation:
        """With the evaluations in the metrics, if some setting needs the best. Collective.

        Args:
            is_kept: the ring keeps the best checkpoint.
        """
        if not (is_kept or settings.stop_after):
            return cls(settings, ())  # a long run's metrics are not read at each start for nothing
        path, length, step = run.group.run_dir.metrics, run.resumed.metrics_bytes, run.resumed.step
        before = run.ranks.of_first(
            "reading the metrics",
            lambda: evaluations(iter_lines(path, stop=length), settings.metric),
        )
        best = cls(settings, ((int(at), float(value)) for at, value in before if at <= step))
        if is_kept:
            run.ring.keep_best(best.serials)
            best.saved_steps = run.ring.saved_steps
            if step in best._values and step not in run.ring.saved_steps():  # it is in memory only
                best.note(step, best._values[step])
        return best

    def evaluated(self, updates: int, evaluator: Evaluator, loss: float | None) -> None:
        """Record the evaluation of the current state.

        Raises:
            ConfigError: there is no such number; on all ranks.
        """
        columns = evaluator.all_columns(loss)
        metric = self._settings.metric
        if loss is not None and metric not in columns:
            raise ConfigError(
                f"eval.metric={metric}: is no number of an evaluation; these are "
                f"{', '.join(sorted(columns))}"
            )
        self.note(updates, columns.get(metric))

    def note(self, updates: int, value: float | None) -> None:
        """Record a value; one that is not finite, or None, is no evaluation."""
        self._values = {step: one for step, one in self._values.items() if step < updates}
        self._best_at = -1
        if value is None or not math.isfinite(value):
            return
        saved = self.saved_steps()
        others = [self._sign * one for step, one in self._values.items() if step in saved]
        if self._sign * value < min(others, default=math.inf):
            self._best_at = updates
        self._values[updates] = value

    def is_new(self, updates: int) -> bool:
        """Whether the state after ``updates`` updates is better than all that are saved, and so
        must be."""
        return self._best_at == updates

    def serials(self, records: Iterable[Record]) -> set[int]:
        """Serial of the best checkpoint on disk with a known value; empty without one.

        Of equal ones the first, as :meth:`ending` names it; of one step the newest.
        """
        known = [
            (self._sign * self._values[record.step], record.step, -record.serial)
            for record in on_disk(records)
            if record.step in self._values and record.state is not State.tainted
        ]
        return {-min(known)[2]} if known else set()

    def ended(self, written: RunJournal, updates: int) -> str:
        """:meth:`ending`, journalled once."""
        reason = self.ending(updates)
        if reason:
            written.report_once(
                Incident(kind=EARLY_STOP, step=updates, decision="end", reason=reason)
            )
        return reason

    def ending(self, updates: int) -> str:
        """Why the run ends after ``updates`` updates: eval.stop_after; empty to go on."""
        patience = self._settings.stop_after
        best = self.of_all(updates) if patience else None
        if best is None:
            return ""
        later = sum(best[0] < step <= updates for step in self._values)
        if later < patience:
            return ""
        return (
            f"stopped early: {self._settings.metric} {best[1]:.6g} of step {best[0]} is the "
            f"{self._settings.goal.value}, and none of {counted(later, 'evaluation')} since was "
            f"better (eval.stop_after={patience})"
        )

    def of_all(self, updates: float = math.inf) -> tuple[int, float] | None:
        """Update and value of the best evaluation, the first of equal ones."""
        values = [(self._sign * one, step) for step, one in self._values.items() if step <= updates]
        return (min(values)[1], self._sign * min(values)[0]) if values else None


def evaluations(lines: Iterable[Mapping[str, Any]], metric: str) -> list[tuple[int, float]]:
    """Update and value of each evaluation in the metrics that no rollback undid."""
    by_update: dict[int, float] = {}
    last = -1
    for line in lines:
        if line.get("action") != "apply":
            continue
        step, value = step_of(dict(line)), line.get(metric)
        if step <= last:
            by_update = {at: one for at, one in by_update.items() if at < step}
        last = step
        if isinstance(value, int | float) and math.isfinite(value):
            by_update[step] = float(value)
    return sorted(by_update.items())
