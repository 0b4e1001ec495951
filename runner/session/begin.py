"""Builds an opened run (``build``), loads its checkpoint (``resume``), begins it (``begin``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from runner.checkpoint.protocol import Identity
from runner.checkpoint.ring import CheckpointRing
from runner.config.mappings import is_hf
from runner.config.schema import DebugKind, Offload, RunConfig
from runner.config.validate import odd_settings
from runner.data.dataset import Dataset, RecordDataset
from runner.data.feed import Feed, few
from runner.distributed.device import code_digest
from runner.distributed.observers import Observers
from runner.distributed.rendezvous import limit_groups
from runner.engine.modes import repeats_bits
from runner.engine.protocol import Engine, MicroStep
from runner.explain.audit import Auditor
from runner.explain.curve_reader import CurveReader, watch_spikes
from runner.explain.explaining_guard import ExplainingGuard, ExplainRules
from runner.explain.layers import watch_layers
from runner.explain.observer_note import ObserverNote, leave_out_ended
from runner.fault.inject import FaultInjector
from runner.fault.spec import parse_faults
from runner.fault.wrap import wrap_feed, wrap_group, wrap_heart
from runner.health.rank_checks import PaceInspector, ReplicaInspector, check_devices
from runner.model.blueprint import GuestBlueprint
from runner.model.quantised import quantised_layers, said_of
from runner.observe.page_writer import PageWriter
from runner.observe.side_lines import RankTimes, SideLines
from runner.policy.decision.history import Incident
from runner.policy.decision.ladder import RemedyRules
from runner.policy.outlier_ranks import RankPace, Stragglers
from runner.policy.retention.records import Tier
from runner.run_dir.lease import RunLease
from runner.run_dir.time_account import Past
from runner.session import parts
from runner.session.corpus import digest_notes, open_feed
from runner.session.inventory import Inventory, backlog_of, start_incident, time_before
from runner.session.parts import rules_matched, schedule
from runner.startup.checks import (
    TrialBatch,
    exactness_checks,
    refuse_or_say,
    running_buffers,
    sanity_checks,
    works_of,
)
from runner.startup.memory_need import SavedActivations, memory_line
from runner.startup.restore import RemoteRun
from runner.startup.resume import (
    ResumeCheck,
    recomputed,
    resume_from,
    settle_mixture,
    tested_before,
)
from runner.startup.shared_memory import open_memory
from runner.system.error import CheckpointError, ConfigError, RankError
from runner.system.generators import kept_generators
from runner.system.units import counted
from runner.train.checkpoints import Checkpoints, LastProof
from runner.train.corpus_check import CorpusCheck, known_digest
from runner.train.evaluate import (
    BestEvaluation,
    Evaluator,
    Inspection,
    Periodic,
    falls_due,
    source_columns,
)
from runner.train.loop import Loop
from runner.train.recovery import Recovery
from runner.train.report import Reporter
from runner.train.run import Corpus, EngineRun, RankGroup, Resumed, RunJournal, ring_directory
from runner.train.save_schedule import SaveSchedule
from runner.train.state import TrainState
from runner.train.step import Stepper, StepRules
from runner.train.step_guard import StepGuard
from runner.train.step_runner import StepPlanner, StepRunner

_YES_NO = {True: "yes", False: "no"}
_PREFLIGHT_ROWS = 2
# A straggler is slower than the median by this factor. The fixed computation is slow on a GPU only
# if that throttles, which makes it 10-40 % longer.
_STRAGGLER_FACTOR, _DEVICE_FACTORS = 2.0, {"cuda": 1.2}
# One slow comparison may be a page cache or a neighbour; a straggler is slow again and again.
_STRAGGLER_CHECKS = 3


@dataclass(slots=True, kw_only=True)
class FaultyRun(EngineRun):
    """A run with its faults on purpose, of which nothing in :mod:`runner.train` knows."""

    faults: FaultInjector


# -- build ---------------------------------------------------------------------------------


def build(
    group: RankGroup,
    config: RunConfig,
    lease: RunLease,
    identity: Identity,
    corpus: Corpus,
    inventory: Inventory,
    written: RunJournal,
) -> FaultyRun:
    """Make engine, checkpoints and counters; :func:`resume` fills them. Collective."""
    faults = FaultInjector(
        parse_faults(config.faults), rank=group.place.rank, markers=group.run_dir.faults
    )
    base = parts.quantised_base(group.ranks, corpus.network, group.device)
    if base is not None:
        group.console.say(said_of(len([*quantised_layers(corpus.network.twin_network)])))
    # Without a checkpoint :func:`resume` initialises the weights.
    engine = parts.engine(
        config, corpus.network, group.place, group.device, faults, has_weights=False
    )
    if ExplainRules.of(config.explain, config.guard, config.steps) is not None:
        parts.give_twin(engine, config, corpus.network, group.place, faults)
    limit_groups(config.parallel.timeout_seconds)
    has_weights = _keep_buffers(group, config, corpus, inventory, engine)
    memory = open_memory(
        config.checkpoint,
        group,
        engine,
        incarnation=lease.number,
        identity=identity,
        timeout_seconds=config.parallel.timeout_seconds,
    )
    backlog = backlog_of(config.track.unwritten_seconds, group, written)

    def before_write(step: int) -> None:
        faults.at("save", step)
        backlog.require_written()

    ring = CheckpointRing(
        ring_directory(group.run_dir, lease),
        sharded=engine,
        ranks=group.ranks,
        settings=config.checkpoint,
        identity=identity,
        report=written.report,
        before_write=before_write,
        memory=memory,
    )
    ring.show_restoring(group.console.work)
    return FaultyRun(
        group=group,
        lease=lease,
        identity=identity,
        written=written,
        backlog=backlog,
        ring=ring,
        state=TrainState(config.guard, base),
        corpus=corpus,
        engine=engine,
        faults=faults,
        memory=memory,
        has_weights=has_weights,
    )


def _keep_buffers(
    group: RankGroup, config: RunConfig, corpus: Corpus, inventory: Inventory, engine: Engine
) -> bool:
    """Settle which buffers are state: those of the run, or for a new one what a trial shows.

    Collective.

    Returns:
        Whether the trial has initialised the weights.
    """
    network, ranks = corpus.network, group.ranks
    if inventory.found.records:
        engine.running.keep(inventory.found.buffers)
        return False
    if not isinstance(network, GuestBlueprint) or not engine.running.has_any:
        return False
    parts.initialise(engine, config.seed, network, ranks)
    with _two_samples(group, engine, corpus, config.data.seq_len) as works:
        own = ranks.all_or_none("trying the model", lambda: running_buffers(engine, works))
    engine.running.keep({name for names in ranks.gather(own) for name in names})
    return True


@contextmanager
def _two_samples(
    group: RankGroup, engine: Engine, corpus: Corpus, seq_len: int
) -> Iterator[Sequence[MicroStep]]:
    """A step of two samples, for trials; they draw no random numbers of the run's. Collective."""
    with kept_generators(group.device):
        batch = group.ranks.all_or_none(
            "reading two samples", lambda: few(corpus.dataset, seq_len, 2)
        )
        yield works_of(batch, engine.works_a_step, group.device)


# -- resume --------------------------------------------------------------------------------


def resume(run: EngineRun, config: RunConfig, inventory: Inventory) -> None:
    """Load the newest usable checkpoint, or initialise the weights. Collective.

    Raises:
        ConfigError: a user's model cannot be trained exactly, or its weights cannot be read.
        CheckpointError: there are checkpoints, and none of them can be loaded.
        RankError: no local checkpoint can be loaded, and the object store does not answer.
    """
    run.resumed = _resumed(run, inventory)
    run.group.console.close()  # ends the progress line
    if run.resumed.is_fresh and not run.has_weights:
        # Only now: a load overwrites all weights, and drawing random numbers takes time.
        parts.initialise(run.engine, config.seed, run.corpus.network, run.ranks)
    _check_model(run, config)


def _resumed(run: EngineRun, inventory: Inventory) -> Resumed:
    """Resume from the ring, or from the object store if every checkpoint is damaged."""
    ring, run_dir = run.ring, run.group.run_dir
    restorer = None if inventory.restored else inventory.restorer
    try:
        return resume_from(inventory.found, run_dir, ring, run.journal, run.state)
    except CheckpointError as error:
        if restorer is None:
            raise
        if silence := restorer.remote.silence:
            raise RankError(
                f"{error}; and checkpoint.remote does not answer ({silence}): start again when it "
                "does"
            ) from None
        ring.drain()
        restored = restorer.restore()
        if restored is None:
            raise
    for incident in restored.incidents:
        run.written.report(incident)
    only = replace(inventory.found, records=restored.records[::-1], damaged=[])
    return resume_from(only, run_dir, ring, run.journal, run.state)


def _check_model(run: EngineRun, config: RunConfig) -> None:
    """Test a user's model on two samples; its state does not change. Collective.

    Raises:
        ConfigError: it cannot be trained exactly.
    """
    network, engine, ranks, say = run.corpus.network, run.engine, run.ranks, run.group.console.say
    if not isinstance(network, GuestBlueprint):
        return
    with _two_samples(run.group, engine, run.corpus, config.data.seq_len) as works:
        checks = ranks.all_or_none(
            "trying the model", lambda: exactness_checks(network, engine, works)
        )
    signatures = ranks.gather(network.signature() if run.resumed.is_fresh else "")
    if len(set(signatures)) > 1:
        raise ConfigError(
            f"{network.setting}: ranks build different models or weights ({signatures} by rank); "
            "the model must not depend on the rank, the machine or the clock"
        )
    refuse_or_say(checks, network.setting, say)
    # What logits take that cannot be made in parts; the trials have computed some.
    one = getattr(engine.objective, "logits_bytes", 0)
    mib = one * config.batch.micro_size / (1 << 20)
    if 0 < config.model.loss_chunk_mib < mib:
        say(
            f"{network.setting}: the logits of a micro-batch are held whole, {mib:,.0f} MiB in "
            "FP32 and as much for their gradient: they can be made in parts "
            "(model.loss_chunk_mib) where get_output_embeddings() gives a plain nn.Linear, and "
            "not with parallel=zero3"
        )


# -- begin ---------------------------------------------------------------------------------


def begin(
    run: FaultyRun, config: RunConfig, inventory: Inventory, remote: RemoteRun | None
) -> None:
    """Write the journal line of this start, and make what acts from step to step. Collective."""
    group, corpus = run.group, run.corpus
    journal_before = inventory.found.journal
    spent = time_before(group, run.resumed, journal_before)
    run.feed = _feed(run, config, corpus.dataset)
    run.stepper = _stepper(run, config)
    saved = SavedActivations()
    is_to_train = run.resumed.step < config.steps
    rows = recomputed(run)  # before the reporter cuts the metrics
    start = start_incident(
        run,
        spent,
        reason="command",
        parallel=config.parallel.kind.value,
        unit="nats per token" if run.corpus.has_tokens else "",
        counted="tokens" if run.corpus.has_tokens else "samples",
    )
    known = tested_before(run, rows, start) if is_to_train else None
    is_to_test = is_to_train and known is None
    repeats = _repeats_bits(run, config, saved) if is_to_test else known
    _greet(run, config, repeats)
    run.observers = Observers(
        group.ranks,
        report=run.written.report,
        recover=run.engine.recover,
        inject=run.faults.in_observer,
        last_words=ObserverNote.of(run, group.place.rank),
    )
    run.observers.step = run.resumed.step
    if is_to_test:
        line = run.observers.alone(
            "memory line", lambda: memory_line(run, config.parallel, config.compute, saved), ""
        )
        group.console.say(line)
    _open_reporter(run, config, spent)
    detail = {**start.detail, "repeats_bits": repeats, "corpus": corpus.words}
    start = replace(start, detail=detail)
    check = ResumeCheck(run, rows, start)
    run.reporter.also_applied(
        lambda line: run.observers.alone("resume check", lambda: check.applied(line), None)
    )
    if (alerts := run.written.alerts) is not None:
        run.reporter.also_applied(lambda line: alerts.applied(line.step))
    run.journal.add(start)
    leave_out_ended(run)
    if config.debug.check_devices:
        _check_devices(run)
    if known is None:
        run.observers.together("preflight", lambda: quick_preflight(run, config))
    mixture = settle_mixture(
        corpus.stream, run.journal, run.state, reached=inventory.found.last_cursor
    )
    if mixture is not None:
        run.written.report(mixture)
    # Ends what the ring keeps of the previous incarnation: its snapshots were needed until here.
    run.ring.begin(remote.uploads(run, config.checkpoint) if remote else None)
    fingerprint = run.identity.data_fingerprint
    corpus_check = CorpusCheck(
        run,
        known=known_digest(journal_before, fingerprint) if run.resumed.step else None,
        notes=digest_notes(config.data),
        may_change=config.resume.allow_change,
    )
    corpus_check.begin()
    run.loop = _loop(run, config, corpus_check)
    if run.pages is not None:
        run.pages.begin()


def _feed(run: EngineRun, config: RunConfig, dataset: Dataset) -> Feed:
    """This rank's loader of a data set."""
    return open_feed(config, dataset, run.corpus.stream, run.group.place, run.group.device)


def _open_reporter(run: EngineRun, config: RunConfig, spent: Past) -> None:
    """Make the reporter, and what adds to its lines. Collective."""
    group, track, corpus = run.group, config.track, run.corpus
    throughput = parts.throughput(track, run.corpus.network, group.place, group.device)
    run.reporter = group.ranks.all_or_none(
        "opening the metrics",
        lambda: Reporter(
            run,
            total_steps=config.steps,
            records_a_step=0 if corpus.has_tokens else config.batch.global_size,
            judged_by=config.eval.metric,
            past=spent,
            throughput=throughput,
            alone=run.observers.alone,
        ),
    )
    run.backlog.add(run.reporter.metrics_file)
    if group.is_first:
        check = run.lease.check
        if track.report_minutes is not None:
            every = 60 * track.report_minutes
            run.pages = PageWriter(group.run_dir.out, every_seconds=every, check=check)
            run.reporter.also_lost(run.pages)
        if config.watchdog.straggler_every:
            lines = SideLines(
                group.run_dir.rank_times, check=check, attempt=lambda: run.journal.attempt
            )
            run.rank_times = RankTimes(lines, every=config.watchdog.straggler_every)
    watch_spikes(run)
    warmup = config.schedule.warmup
    watch_layers(
        run,
        config.optim,
        every=track.layers_every,
        warmup=warmup,
        is_compiled=config.compute.compile,
    )
    if track.read and config.eval.every:
        CurveReader.attach(run, total=config.steps, warmup=warmup)


def _check_devices(run: FaultyRun) -> None:
    """Test the device of each rank. Collective.

    Raises:
        RankError: one is faulty; the journal records a hardware crash.
    """
    group, step = run.group, run.resumed.step
    is_spoilt = run.faults.spoils_product(step)
    fault = check_devices(group.device, group.ranks, group.console.say, is_spoilt=is_spoilt)
    if fault is not None:
        run.written.report(fault.incident(step=step, incarnation=run.lease.number))
        raise RankError(fault.reason)


def _repeats_bits(run: EngineRun, config: RunConfig, saved: SavedActivations) -> bool:
    """Whether one micro-batch gives the same bits twice on all ranks. Collective.

    The loaded weights do not change.
    """
    group = run.group
    count = min(config.batch.global_size, config.batch.micro_size * group.place.world_size)
    (first, *_) = run.feed.fixed(np.arange(count) % len(run.corpus.dataset))
    saved.samples = len(first.positions)
    work = MicroStep(batch=first.to(group.device), seed=config.seed)
    own = repeats_bits(run.engine, [work] * run.engine.works_a_step, saved)
    return group.ranks.sum([float(not own)])[0] == 0


def _greet(run: EngineRun, config: RunConfig, repeats: bool | None) -> None:
    group, corpus, resumed = run.group, run.corpus, run.resumed
    say = group.console.say
    weights = corpus.network.parameters().values()
    trained = sum(one.numel() for one in weights if one.requires_grad)
    is_frozen = any(not one.requires_grad for one in weights)
    say(
        f"holdfast: {corpus.network.num_parameters():,} parameters"
        f"{f' ({trained:,} of them trained)' if is_frozen else ''}, "
        f"{counted(len(corpus.dataset), 'sample')} "
        + (f"of {config.data.seq_len} tokens " if corpus.has_tokens else "")
        + f"from {corpus.words}, "
        f"{config.parallel.kind.value} on "
        f"{group.place.world_size} x {group.device.type}, {config.compute.precision.value}, "
        + ("" if repeats is None else f"this machine repeats bits: {_YES_NO[repeats]}, ")
        + f"out={group.run_dir.out}"
    )
    if repeats is False and not config.compute.deterministic:
        say(
            "a run that is resumed or rolled back follows the same samples, but not bit for bit; "
            "compute.deterministic=true may fix it"
        )
    if config.parallel.offload is Offload.cpu and group.device.type == "cuda":
        say(
            "parallel.offload=cpu: weights and moments are in host memory; each step waits until "
            "gradients have arrived and the host has applied the update"
        )
    elif run.engine.waits_for_host:
        say(
            f"optim._target_={config.optim._target_} ignores found_inf: each step waits until the "
            "host has read its gate"
        )
    if config.optim.groups and not resumed.step:
        matched = rules_matched(config.optim, corpus.network)
        counts = ", ".join(f"{match!r} takes {count} tensors" for match, count in matched)
        say(f"optim.groups: {counts}")
    for sentence in odd_settings(config) if not resumed.step else []:
        say(f"warning: {sentence}")
    if config.debug.kind is not DebugKind.off:
        effective = " ".join(f"{name}={value}" for name, value in group.debug.items())
        say(f"debug={config.debug.kind.value}: {effective}")
    if resumed.step >= config.steps:
        say(f"all {config.steps} steps are applied already")
    elif resumed.step:
        source = " from memory" if resumed.tier is Tier.memory else ""
        say(f"resuming at step {resumed.step} of {config.steps}{source}")
    for reason in resumed.unused:
        say(f"snapshots in memory that cannot be used: {reason}")


def quick_preflight(run: EngineRun, config: RunConfig) -> None:
    """Test the model; report each failed check once per run. Collective."""
    group, resumed = run.group, run.resumed
    dataset, ranks = run.corpus.dataset, run.observers.ranks
    if not config.debug.preflight or isinstance(dataset, RecordDataset):
        return
    # A compiled model would be compiled again for other shapes.
    if resumed.step >= config.steps or config.compute.compile:
        return
    rows = min(_PREFLIGHT_ROWS, config.batch.micro_size)
    is_untrained = resumed.is_fresh and config.model._target_ is None and not is_hf(config.model)
    # A data set or a model of the user's may draw from any generator when it is asked.
    with kept_generators(group.device):
        batch = ranks.all_or_none(
            "reading two samples", lambda: few(dataset, config.data.seq_len, rows)
        )
        trial = TrialBatch(
            batch=batch,
            works=run.engine.works_a_step,
            vocab_size=dataset.vocab_size,
            untrained_loss=run.corpus.network.untrained_loss if is_untrained else None,
            sum=ranks.sum,
        )
        checks = sanity_checks(run.engine, trial)
    for check in checks:
        if check.holds is False:
            run.written.report_once(
                Incident(
                    kind="preflight",
                    step=resumed.step,
                    decision="only reported",
                    reason=f"{check.name}: {check.found}. Remedy: {check.remedy}",
                    detail={"check": check.name},
                )
            )


# -- the loop ------------------------------------------------------------------------------


def _stepper(run: FaultyRun, config: RunConfig) -> Stepper:
    faults, ring = run.faults, run.ring
    return Stepper(
        engine=run.engine,
        feed=wrap_feed(run.feed, faults),
        dataset=run.corpus.dataset,
        ranks=wrap_group(run.ranks, faults),
        rules=StepRules(
            seed=config.seed,
            clip=config.optim.clip,
            guarded=config.guard.enabled,
            config_digest=run.identity.config_digest,
            code=code_digest(),
            mixture=run.corpus.mixture,
        ),
        heart=wrap_heart(run.group.heart, faults, ring),
        before_update=ring.before_update,
        distrust=ring.distrust_after,
    )


def _loop(run: FaultyRun, config: RunConfig, corpus_check: CorpusCheck) -> Loop:
    group, state = run.group, run.state
    is_kept = config.checkpoint.keep_best
    best_evaluation = BestEvaluation.of(run, config.eval, is_kept=is_kept)
    best = best_evaluation if is_kept else None
    in_memory = run.memory.memory is not None
    saves = SaveSchedule.of(run, config.checkpoint, in_memory=in_memory, best=best)
    inspections = _inspections(run, config, saves)
    evaluator = Evaluator.of(run, config.eval, partial(_feed, run, config))
    run.reporter.add_columns("sources", partial(source_columns, run.corpus.mixture, evaluator))

    def evaluate() -> float | None:
        loss = evaluator.loss()
        # Not the proof of the end state: its number is in no metrics, so no later start has it.
        if falls_due(config.eval.every, state.updates):
            best_evaluation.evaluated(state.updates, evaluator, loss)
        return loss

    periodic = Periodic(
        run, evaluate=evaluate, evaluate_every=config.eval.every, inspections=inspections
    )
    planner = StepPlanner(run, schedule(config.schedule, peak=config.optim.lr, steps=config.steps))
    steps = StepRunner(
        run.stepper,
        planner,
        known_discards=run.resumed.known_discards,
        # Signals are read one step late: as guard.sync says, else only on CUDA.
        late=group.device.type == "cuda" if config.guard.sync is None else not config.guard.sync,
        is_boundary=lambda updates: (
            updates >= config.steps or periodic.is_due(updates) or saves.is_due(updates)
        ),
    )
    rules = RemedyRules(
        guard=config.guard,
        batch=config.batch.global_size,
        untrained_loss=run.corpus.network.untrained_loss,
    )
    recovery = Recovery(
        run,
        suspects=run.stepper.suspects,
        rules=rules,
        max_unreadable=config.data.max_unreadable,
        before_restore=partial(run.faults.at, "rollback"),
    )
    guard = StepGuard(run, rules=rules, recovery=recovery, steps=steps)
    guard.leaves = True
    explaining = ExplainRules.of(config.explain, config.guard, config.steps)
    checkpoints = Checkpoints(
        run, schedule=saves, rules=rules, last=LastProof.of(run), corpus=corpus_check
    )
    return Loop(
        state=state,
        until=config.steps,
        steps=steps,
        guard=guard
        if explaining is None
        else ExplainingGuard.of(
            explaining, run, guard, planner, seed=config.seed, is_compiled=config.compute.compile
        ),
        checkpoints=checkpoints,
        periodic=periodic,
        reporter=run.reporter,
        ended_early=partial(best_evaluation.ended, run.written),
    )


def _inspections(run: EngineRun, config: RunConfig, saves: SaveSchedule) -> list[Inspection]:
    """The checks of the ranks: wrong results, speed, replicas."""
    group, watchdog, observers = run.group, config.watchdog, run.observers

    def note(step: int, paces: Sequence[RankPace]) -> None:
        if run.rank_times is not None:
            observers.alone("rank times", partial(run.rank_times.note, step, paces), None)

    pace = PaceInspector(
        ranks=observers.ranks,
        device=group.device,
        stragglers=Stragglers(
            factor=_STRAGGLER_FACTOR,
            device_factor=_DEVICE_FACTORS.get(group.device.type),
            checks=_STRAGGLER_CHECKS,
        ),
        take_seconds=run.stepper.take_seconds,
        report=run.written.report,
        note=note,
    )
    replicas = ReplicaInspector(
        ranks=observers.ranks,
        engine=run.engine,
        report=run.written.report,
        distrust=run.ring.distrust_after,
        next_serial=lambda: run.ring.next_serial,
        good_step=run.resumed.step,
    )
    inspections = [
        Inspection(
            observer="pace", is_due=partial(falls_due, watchdog.straggler_every), look=pace.look
        ),
        Inspection(
            observer="replicas",
            is_due=partial(falls_due, config.debug.replica_check_every),
            look=replicas.look,
        ),
    ]
    auditor = observers.together(
        "audit",
        lambda: Auditor.of(
            run,
            replicas,
            saves,
            every=config.debug.audit_every,
            until=config.steps,
            seed=config.seed,
        ),
    )
    if not isinstance(auditor, Auditor):
        return inspections
    audit = Inspection(
        observer="audit", is_due=auditor.is_due, look=auditor.look, note=auditor.note
    )
    return [audit, *inspections]
