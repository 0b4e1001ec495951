"""Makes what acts from the first step on: loader, stepper, guard, loop."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from runner.config.validate import is_zero
from runner.data.cursor import Indices, SampleStream
from runner.data.dataset import Dataset
from runner.data.feed import Feed, named_samples
from runner.data.mixture import Mixed
from runner.explain.bundle import Bundles
from runner.explain.probe import Bench
from runner.explain.replay import Replay
from runner.fault.wrap import wrap_feed, wrap_group, wrap_heart
from runner.health.checks import PaceInspector, ReplicaInspector
from runner.health.device_check import device_kind
from runner.observe.metrics import held_out_before
from runner.policy.decision.ledger import Ledger
from runner.policy.decision.signals import StepSignals
from runner.policy.decision.way_back import Recorded, from_rows, recorded_in
from runner.policy.retention.records import Record, rollback_targets
from runner.policy.straggler import Stragglers
from runner.run_dir.build_info import code_digest, versions
from runner.session import parts
from runner.session.layers import Layers
from runner.session.optim import schedule
from runner.session.phases import Actors, Machinery, Opened
from runner.startup.resume import Resumed
from runner.system.json_lines import iter_lines
from runner.system.process import host_name
from runner.train.audit import Auditor, AuditRules
from runner.train.best import BestCheckpoint, held_out_losses
from runner.train.checkpoints import Checkpoints, Preemption, Proofs, SaveSchedule
from runner.train.corpus_check import CorpusCheck
from runner.train.evaluate import Evaluator, FixedSet
from runner.train.explaining import Evidence, ExplainingGuard, ExplainRules
from runner.train.final_proof import LastProof
from runner.train.guard import Guard
from runner.train.loop import Loop
from runner.train.periodic import Periodic
from runner.train.recovery import Recovery
from runner.train.rehearsal import Rehearsal
from runner.train.report import Reporter
from runner.train.retracing import Retracing
from runner.train.source_columns import SourceColumns
from runner.train.state import TrainState
from runner.train.step import Stepper, StepRules
from runner.train.step_runner import StepPlanner, StepRunner

# Of watchdog.straggler_factor. What slows a GPU in a fixed computation is its own throttling.
_STRAGGLER_FACTOR, _DEVICE_FACTORS = 2.0, {"cuda": 1.2}


def make_actors(
    opened: Opened,
    machinery: Machinery,
    resumed: Resumed,
    feed: Feed,
    reporter: Reporter,
    columns: SourceColumns,
    layers: Layers | None,
) -> Actors:
    group, config, written = opened.group, opened.lease.config, opened.written
    ring, backlog = machinery.ring, machinery.backlog
    stepper = _stepper(opened, machinery, feed)
    if layers is not None:
        stepper.watch(layers.watch)
    best = _best_checkpoint(opened, machinery, resumed)
    periodic = Periodic(
        evaluate=_evaluation(opened, machinery, feed, columns, best),
        evaluate_every=config.eval.every,
        inspect=_inspector(opened, machinery, resumed, feed, stepper, reporter),
        inspect_every=(
            config.watchdog.straggler_every,
            config.debug.replica_check_every,
            config.debug.audit_every,
        ),
        reporter=reporter,
        heart=group.heart,
    )
    saves = SaveSchedule(
        disk=parts.cadence(
            config,
            group.place,
            resumed.step,
            written.journal.history,
            group.ranks,
            reporter.spent,
            written.report,
        ),
        memory=parts.snapshot_times(config, written.journal.history, group.ranks, written.report)
        if machinery.tier.memory
        else None,
        best=best,
    )
    planner = StepPlanner(
        stream=opened.corpus.stream,
        journal=written.journal,
        schedule=schedule(config),
        progress=ring.progress,
        keeps_lines=backlog.look,
        stop=lambda: group.stop.is_set,
    )
    steps = StepRunner(
        stepper,
        planner,
        known_discards=resumed.known_discards,
        late=parts.reads_late(config, group.device),
        is_boundary=lambda updates: (
            updates >= config.steps or periodic.is_due(updates) or saves.is_due(updates)
        ),
    )
    return Actors(
        feed=feed,
        reporter=reporter,
        stepper=stepper,
        steps=steps,
        periodic=periodic,
        saves=saves,
    )


def make_loop(
    opened: Opened, machinery: Machinery, actors: Actors, corpus_check: CorpusCheck
) -> Loop:
    group, config, journal = opened.group, opened.lease.config, opened.written.journal
    ring, backlog, reporter = machinery.ring, machinery.backlog, actors.reporter
    untrained_loss = opened.corpus.network.untrained_loss
    rules = parts.remedy_rules(config, untrained_loss=untrained_loss)
    recovery = Recovery(
        stepper=actors.stepper,
        ring=ring,
        journal=journal,
        reporter=reporter,
        rules=rules,
        max_unreadable=config.data.max_unreadable,
        before_restore=lambda step: machinery.faults.at("rollback", step),
    )
    guard = Guard(
        rules=rules,
        recovery=recovery,
        steps=actors.steps,
        ring=ring,
        journal=journal,
        reporter=reporter,
        heart=group.heart,
        backlog=backlog,
    )
    explaining = parts.explain_rules(config)
    checkpoints = Checkpoints(
        ring,
        schedule=actors.saves,
        proofs=Proofs(last=_proof(opened, machinery, actors.feed), corpus=corpus_check),
        rules=rules,
        journal=journal,
        reporter=reporter,
        heart=group.heart,
        backlog=backlog,
    )
    return Loop(
        machinery.state,
        until=config.steps,
        steps=actors.steps,
        guard=_explaining(opened, machinery, actors, guard, explaining) if explaining else guard,
        checkpoints=checkpoints,
        periodic=actors.periodic,
        reporter=reporter,
        preemption=Preemption(stop=group.stop, reasons=group.asked_to_stop),
    )


def _explaining(
    opened: Opened, machinery: Machinery, actors: Actors, guard: Guard, rules: ExplainRules
) -> ExplainingGuard:
    """Make the guard that replays a bad step to find its cause first."""
    group, corpus, feed = opened.group, opened.corpus, actors.feed
    config, journal = opened.lease.config, opened.written.journal
    bench = Bench(
        engine=machinery.engine,
        feed=feed,
        ranks=group.ranks,
        heart=group.heart,
        may_watch=not config.model.compile,
    )
    replay = Replay(
        bench,
        known=lambda: _known_samples(
            corpus.stream, config.batch.global_size, machinery.state, journal.history.ledger
        ),
        host=host_name(),
        reread=feed.put,
    )
    bundles = _bundles(opened) if group.is_first else None
    return ExplainingGuard(
        guard,
        replay,
        rules=rules,
        stepper=actors.stepper,
        journal=journal,
        reporter=actors.reporter,
        evidence=Evidence(
            batch=lambda cursor: corpus.stream.plan(cursor, journal.history.ledger),
            names=lambda plan, positions: named_samples(corpus.dataset, plan, positions),
            bundles=bundles,
            incarnation=opened.lease.fence.number,
        ),
        retracing=_retracing(opened, machinery, actors, replay, bundles),
    )


def _retracing(
    opened: Opened,
    machinery: Machinery,
    actors: Actors,
    replay: Replay,
    bundles: Bundles | None,
) -> Retracing:
    """What follows a rollback for the weights' sake."""
    group, config, written = opened.group, opened.lease.config, opened.written
    history, ring, reporter = written.journal.history, machinery.ring, actors.reporter
    rules = parts.remedy_rules(config)

    def recorded(first: int, stop: int) -> dict[int, Recorded]:
        reporter.metrics_bytes(durably=False)  # so that they can be read
        rows = group.ranks.all_or_none(
            "reading the metrics",
            lambda: (
                recorded_in(iter_lines(group.run_dir.metrics), first, stop)
                if group.is_first
                else []
            ),
        )
        return from_rows(group.ranks.from_first(rows))

    def target(bad: StepSignals, state: TrainState) -> Record | None:
        """As the ladder has it (:func:`runner.policy.decision.ladder.decide`)."""
        onset = state.trouble.bad[0] if state.trouble.bad else None
        step, start = (onset.step, onset.start) if onset else (bad.step, bad.start)
        cursor = history.ledger.before(start, rules.margin * rules.batch)
        found = rollback_targets(ring.records, cursor=cursor, step=max(0, step - rules.back))
        return found[0] if found else None

    starts = [line for line in history.incidents if line.kind == "start"]
    return Retracing(
        replay=replay,
        recorded=recorded,
        is_exact=starts[-1].detail.get("repeats_bits") is True,
        target=target,
        rehearsal=Rehearsal(
            engine=machinery.engine,
            stepper=actors.stepper,
            planner=actors.steps.planner,
            ring=ring,
            history=history,
            fresh=lambda: TrainState(parts.judge_rules(config), rules),
        ),
        tell=written.report,
        bundles=bundles,
    )


def _bundles(opened: Opened) -> Bundles:
    group = opened.group
    return Bundles(
        group.run_dir.explanations,
        opened.corpus.dataset,
        facts={"host": host_name(), **versions(), **group.device_versions},
        check=opened.lease.fence.check,
        say=group.console.say,
    )


def _known_samples(stream: SampleStream, size: int, state: TrainState, ledger: Ledger) -> Indices:
    """Data set indices of samples that are known to be good, as many as a step has.

    Held-out ones, repeated where there are fewer. Where nothing of the corpus is held out
    (``data.val_path``, ``data.held_out=0``), those that the newest applied step has read; none
    before the first.
    """
    held_out = stream.held_out_indices(size)
    if len(held_out):
        return np.resize(held_out, size)
    return stream.plan_before(state.cursor, ledger).indices if state.updates else held_out


def _stepper(opened: Opened, machinery: Machinery, feed: Feed) -> Stepper:
    group, lease = opened.group, opened.lease
    return Stepper(
        engine=machinery.engine,
        feed=wrap_feed(feed, machinery.faults),
        dataset=opened.corpus.dataset,
        ranks=wrap_group(group.ranks, machinery.faults),
        rules=StepRules(
            seed=lease.config.seed,
            clip=lease.config.optim.clip,
            guarded=lease.config.guard.enabled,
            config_digest=lease.config_digest,
            code=code_digest(),
            mixture=opened.corpus.mixture,
        ),
        heart=wrap_heart(group.heart, machinery.faults, machinery.ring),
        before_update=machinery.ring.before_update,
        distrust=machinery.ring.distrust_after,
    )


def _evaluation(
    opened: Opened,
    machinery: Machinery,
    feed: Feed,
    columns: SourceColumns,
    best: BestCheckpoint | None,
) -> Callable[[], float | None]:
    """What computes the held-out loss and says it to whom it concerns. Collective."""
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
    )


def _validator(opened: Opened, machinery: Machinery, dataset: Dataset, count: int) -> Evaluator:
    """Make the evaluation on samples of ``data.val_path``, spread evenly over it."""
    group, lease = opened.group, opened.lease
    samples = _spread_over(dataset, count)
    loader = parts.feed(lease.config, dataset, opened.corpus.stream, group.place, group.device)
    return Evaluator(
        engine=machinery.engine,
        feed=loader,
        dataset=dataset,
        ranks=group.ranks,
        samples=samples,
        report=opened.written.report_once,
        step=lambda: machinery.state.updates,
    )


def _spread_over(dataset: Dataset, count: int) -> FixedSet:
    """Up to ``count`` samples of each held-out set of ``data.val_path``, at equal distances."""
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


def _inspector(
    opened: Opened,
    machinery: Machinery,
    resumed: Resumed,
    feed: Feed,
    stepper: Stepper,
    reporter: Reporter,
) -> Callable[[int], None]:
    """Make the checks that follow an update."""
    group, config, ring = opened.group, opened.lease.config, machinery.ring
    watchdog, every = config.watchdog, config.debug.replica_check_every
    pace = PaceInspector(
        ranks=group.ranks,
        device=group.device,
        stragglers=Stragglers(
            factor=watchdog.straggler_factor or _STRAGGLER_FACTOR,
            device_factor=watchdog.straggler_factor or _DEVICE_FACTORS.get(group.device.type),
            checks=watchdog.straggler_checks,
        ),
        take_seconds=stepper.take_seconds,
        report=opened.written.report,
        note=reporter.paces,
    )
    replicas = ReplicaInspector(
        ranks=group.ranks,
        engine=machinery.engine,
        report=opened.written.report,
        distrust=ring.distrust_after,
        next_serial=lambda: ring.next_serial,
        good_step=resumed.step,
    )

    auditor = _auditor(opened, machinery, resumed, feed, stepper)

    def look(updates: int) -> None:
        if auditor is not None:
            auditor.look(updates)
        if watchdog.straggler_every and updates % watchdog.straggler_every == 0:
            pace.look(updates)
        if every and updates % every == 0:
            replicas.look(updates)

    return look


def _best_checkpoint(
    opened: Opened, machinery: Machinery, resumed: Resumed
) -> BestCheckpoint | None:
    """What finds the checkpoint with the best held-out loss; None where none is asked for."""
    group = opened.group
    if not opened.lease.config.checkpoint.keep_best:
        return None
    told = group.ranks.all_or_none(
        "reading the metrics",
        lambda: (
            held_out_losses(iter_lines(group.run_dir.metrics, stop=resumed.metrics_bytes))
            if group.is_first
            else []
        ),
    )
    best = BestCheckpoint((int(step), float(loss)) for step, loss in group.ranks.from_first(told))
    machinery.ring.also_keep(lambda: best.serials(machinery.ring.records))
    return best


def _auditor(
    opened: Opened, machinery: Machinery, resumed: Resumed, feed: Feed, stepper: Stepper
) -> Auditor | None:
    """What looks for a rank that computes wrongly in silence; None where it is not to."""
    group, lease = opened.group, opened.lease
    config = lease.config
    if not config.debug.audit_every or group.place.world_size < 2:
        return None
    starts = [i for i in opened.written.journal.history.incidents if i.kind == "start"]
    auditor = Auditor(
        engine=machinery.engine,
        feed=feed,
        steps=stepper,
        ranks=group.ranks,
        heart=group.heart,
        rules=AuditRules(
            every=config.debug.audit_every,
            takes_whole_step=is_zero(config.parallel.kind),
            repeats_bits=bool(starts and starts[-1].detail.get("repeats_bits")),
            seed=config.seed,
            host=host_name(),
            kind=device_kind(group.device),
            incarnation=lease.fence.number,
        ),
        report=opened.written.report,
        distrust=machinery.ring.distrust_after,
    )
    auditor.begin(resumed.step)
    return auditor


def _proof(opened: Opened, machinery: Machinery, feed: Feed) -> LastProof:
    """Make the proof of the last checkpoint, at the end of the run."""
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
        found: float | None = ranks.from_first(measured)
        return found

    return LastProof(
        ring=machinery.ring,
        sharded=machinery.engine,
        ranks=ranks,
        state=state,
        last_batch=last_batch,
        earlier=earlier,
        report=written.report,
    )
