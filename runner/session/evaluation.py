"""Makes the held-out evaluation, the best-checkpoint record and the proof of the last
checkpoint."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from runner.data.dataset import Dataset
from runner.data.feed import Feed
from runner.data.mixture import Mixed
from runner.observe.metrics import held_out_before
from runner.session import parts
from runner.session.phases import Machinery, Opened
from runner.startup.resume import Resumed
from runner.system.json_lines import iter_lines
from runner.train.best import BestCheckpoint, held_out_losses
from runner.train.evaluate import Evaluator, FixedSet
from runner.train.final_proof import LastProof
from runner.train.source_columns import SourceColumns


def evaluation(
    opened: Opened,
    machinery: Machinery,
    feed: Feed,
    columns: SourceColumns,
    best: BestCheckpoint | None,
) -> Callable[[], float | None]:
    """Make the evaluation: a held-out loss, from which columns and best checkpoint are updated."""
    evaluator = _evaluator(opened, machinery, feed)

    def evaluate() -> float | None:
        loss = evaluator.loss()
        if best is not None:
            best.evaluated(machinery.state.updates, loss)
        columns.evaluated(evaluator.by_group())
        return loss

    return evaluate


def _evaluator(opened: Opened, machinery: Machinery, feed: Feed) -> Evaluator:
    """Make the evaluation on held-out samples, by source for a mixture."""
    config, corpus = opened.lease.config, opened.corpus
    count = config.eval.samples if config.eval.every else 0
    if corpus.validation is not None:
        return _validator(opened, machinery, corpus.validation, count)
    held_out = corpus.stream.held_out_indices(count)
    if config.eval.every and not len(held_out):
        opened.group.console.say("no sample is held out (data.held_out): nothing to evaluate on")
    return Evaluator(
        engine=machinery.engine,
        feed=feed,
        dataset=corpus.dataset,
        ranks=opened.group.ranks,
        samples=FixedSet(
            indices=held_out,
            names=corpus.mixture.names if corpus.mixture else (),
            groups=corpus.mixture.sources(held_out) if corpus.mixture else None,
        ),
        report=opened.written.report_once,
        step=lambda: machinery.state.updates,
        stop=opened.group.stop_look,
    )


def _validator(opened: Opened, machinery: Machinery, dataset: Dataset, count: int) -> Evaluator:
    """Make the evaluation on samples of ``data.val_path``, spread evenly over it."""
    group, lease = opened.group, opened.lease
    samples = spread_over(dataset, count)
    loader = parts.feed(lease.config, dataset, opened.corpus.stream, group.place, group.device)
    return Evaluator(
        engine=machinery.engine,
        feed=loader,
        dataset=dataset,
        ranks=group.ranks,
        samples=samples,
        report=opened.written.report_once,
        step=lambda: machinery.state.updates,
        stop=group.stop_look,
    )


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


def best_checkpoint(
    opened: Opened, machinery: Machinery, resumed: Resumed
) -> BestCheckpoint | None:
    """Make the record of the checkpoint with the best held-out loss; None if it is switched off."""
    group = opened.group
    if not opened.lease.config.checkpoint.keep_best:
        return None
    lowest = group.ranks.all_or_none(
        "reading the metrics",
        lambda: (
            held_out_losses(iter_lines(group.run_dir.metrics, stop=resumed.metrics_bytes))
            if group.is_first
            else []
        ),
    )
    best = BestCheckpoint((int(step), float(loss)) for step, loss in group.ranks.from_first(lowest))
    machinery.ring.also_keep(lambda: best.serials(machinery.ring.records))
    return best


def last_proof(opened: Opened, machinery: Machinery, feed: Feed) -> LastProof:
    """Make the proof of the last checkpoint at the end of the run."""
    group, corpus, written = opened.group, opened.corpus, opened.written
    ranks, state = group.ranks, machinery.state

    def last_batch() -> float | None:
        plan = corpus.stream.plan_before(state.cursor, written.journal.history.ledger)
        evaluator = ranks.all_or_none(
            "reading the last batch",
            lambda: Evaluator(
                engine=machinery.engine,
                feed=feed,
                dataset=corpus.dataset,
                ranks=ranks,
                samples=FixedSet(indices=plan.indices, what="samples of the last batch"),
                report=written.report_once,
                step=lambda: state.updates,
                stop=group.stop_look,
            ),
        )
        return evaluator.loss()

    def earlier() -> float | None:
        measured = ranks.all_or_none(
            "reading the metrics",
            lambda: (
                held_out_before(group.run_dir.metrics, state.updates) if group.is_first else None
            ),
        )
        loss: float | None = ranks.from_first(measured)
        return loss

    return LastProof(
        ring=machinery.ring,
        sharded=machinery.engine,
        ranks=ranks,
        state=state,
        last_batch=last_batch,
        earlier=earlier,
        report=written.report,
    )
