"""Makes loader, stepper, guard and loop, which act from the first step on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from runner.data.feed import Feed
from runner.distributed.observers import Observers
from runner.fault.wrap import wrap_feed, wrap_group, wrap_heart
from runner.policy.decision.ladder import RemedyRules
from runner.run_dir.build_info import code_digest
from runner.session import parts
from runner.session.assemble import Assembly
from runner.session.evaluation import best_checkpoint, evaluation, last_proof
from runner.session.explaining import explaining_guard
from runner.session.inspection import Parts, inspections
from runner.session.layers import Layers
from runner.session.optim import schedule
from runner.session.phases import Actors, Machinery, Opened
from runner.train.checkpoints import Preemption, Proofs
from runner.train.corpus_check import CorpusCheck
from runner.train.loop import Loop
from runner.train.periodic import Periodic
from runner.train.recovery import Recovery
from runner.train.source_columns import SourceColumns
from runner.train.step import Stepper, StepRules
from runner.train.step_runner import StepPlanner, StepRunner


@dataclass(frozen=True, slots=True)
class Watchers:
    """What only looks: the columns of sources, the layers, and all observers."""

    columns: SourceColumns
    layers: Layers | None
    observers: Observers


def make_actors(
    opened: Opened,
    machinery: Machinery,
    assembly: Assembly,
    feed: Feed,
    watchers: Watchers,
) -> Actors:
    observers, resumed, reporter = watchers.observers, assembly.resumed, assembly.reporter
    group, config, written = opened.group, opened.lease.config, opened.written
    ring, backlog = machinery.ring, machinery.backlog
    stepper = _stepper(opened, machinery, feed)
    if watchers.layers is not None:
        stepper.watch(watchers.layers.watch)
    best = best_checkpoint(opened, machinery, resumed)
    saves = assembly.saves(in_memory=machinery.tier.memory is not None, best=best)
    checks = inspections(
        opened, machinery, resumed, Parts(feed, stepper, reporter, saves, observers)
    )
    periodic = Periodic(
        evaluate=evaluation(opened, machinery, feed, watchers.columns, best),
        evaluate_every=config.eval.every,
        inspect=checks.look,
        is_inspection_due=checks.is_due,
        reporter=reporter,
        heart=group.heart,
    )
    planner = StepPlanner(
        stream=opened.corpus.stream,
        journal=written.journal,
        schedule=schedule(config),
        progress=ring.progress,
        keeps_lines=backlog.look,
        stop=lambda: group.stop.is_set,
        observers=observers,
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
        observers=observers,
    )


def make_loop(
    opened: Opened,
    machinery: Machinery,
    assembly: Assembly,
    actors: Actors,
    corpus_check: CorpusCheck,
) -> Loop:
    group, config = opened.group, opened.lease.config
    untrained_loss = opened.corpus.network.untrained_loss
    rules = RemedyRules(
        guard=config.guard, batch=config.batch.global_size, untrained_loss=untrained_loss
    )
    guard, checkpoints = assembly.guard(
        actors.steps,
        actors.saves,
        rules=rules,
        proofs=Proofs(last=last_proof(opened, machinery, actors.feed), corpus=corpus_check),
        recovery=partial(
            Recovery,
            stepper=actors.stepper,
            max_unreadable=config.data.max_unreadable,
            before_restore=lambda step: machinery.faults.at("rollback", step),
        ),
    )
    explaining = parts.explain_rules(config)
    return Loop(
        machinery.state,
        until=config.steps,
        steps=actors.steps,
        guard=explaining_guard(opened, machinery, actors, guard, explaining)
        if explaining
        else guard,
        checkpoints=checkpoints,
        periodic=actors.periodic,
        reporter=actors.reporter,
        preemption=Preemption(stop=group.stop, reasons=group.asked_to_stop, look=group.stop_look),
    )


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
