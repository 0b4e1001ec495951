"""Settings and what was found become the actors of one run.

Three phases: ``build`` makes what holds state, ``resume`` fills it, ``begin`` writes the first line
and makes what acts. Each takes what the one before gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from runner.checkpoint.memory.tier import MemoryParts
from runner.checkpoint.remote.upload import Uploads
from runner.checkpoint.ring import Ring
from runner.config.schema import DebugKind, Precision
from runner.config.validate import is_zero
from runner.data.cursor import Indices, SampleStream
from runner.data.dataset import Dataset
from runner.data.feed import Feed, few, named_samples
from runner.engine.determinism import repeats_bits
from runner.engine.protocol import Engine, MicroStep
from runner.explain.bundle import Bundles
from runner.explain.probe import Bench
from runner.explain.replay import Replay
from runner.fault.inject import FaultInjector
from runner.fault.spec import parse_faults
from runner.fault.wrap import wrap_feed, wrap_group, wrap_heart
from runner.health.checks import PaceInspector, ReplicaInspector
from runner.health.device_check import check_devices
from runner.model.blueprint import GuestBlueprint
from runner.observe.alert import CommandAlerts
from runner.observe.backlog import Backlog
from runner.observe.goodput import Past, past
from runner.observe.metrics import Metrics, held_out_before
from runner.policy.decision.history import Incident
from runner.policy.retention.records import Tier
from runner.policy.straggler import Stragglers
from runner.report.writer import PageWriter
from runner.run_dir.build_info import code_digest, ranks_on, versions
from runner.session import parts
from runner.session.group import RankGroup
from runner.session.opening import (
    Corpus,
    Inventory,
    Lease,
    RunJournal,
    identity_of,
    open_slots,
)
from runner.session.optim import schedule
from runner.startup.mixture import settle_mixture
from runner.startup.model_check import quick_checks, refuse_or_say, works_of
from runner.startup.resume import Resumed, resume_from
from runner.startup.shared_memory import memory_every
from runner.system import output
from runner.system.error import CheckpointError, ConfigError, RankError
from runner.system.json_lines import iter_lines
from runner.system.process import host_name
from runner.train.checkpoints import Checkpoints, Preemption, Proofs, SaveSchedule
from runner.train.corpus_check import CorpusCheck, ResumedOn, known_digest
from runner.train.curve_reader import CurveReader
from runner.train.evaluate import Evaluator, FixedSet
from runner.train.explaining import Evidence, ExplainingGuard, ExplainRules
from runner.train.final_proof import LastProof
from runner.train.guard import Guard
from runner.train.loop import Loop
from runner.train.periodic import Periodic
from runner.train.recovery import Recovery
from runner.train.report import Outputs, Reporter, Tracker
from runner.train.source_columns import SourceColumns
from runner.train.state import TrainState
from runner.train.step import Stepper, StepRules
from runner.train.step_runner import StepPlanner, StepRunner

# Of watchdog.straggler_factor. What slows a GPU in a fixed computation is its own throttling.
_STRAGGLER_FACTOR, _DEVICE_FACTORS = 2.0, {"cuda": 1.2}

_YES_NO = {True: "yes", False: "no"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """All that a command has in its hands before anything is built."""

    group: RankGroup
    lease: Lease
    corpus: Corpus
    inventory: Inventory
    written: RunJournal


@dataclass(frozen=True, slots=True, kw_only=True)
class Machinery:
    """What holds the state of a run: weights, checkpoints, counters, lines not yet written."""

    engine: Engine
    faults: FaultInjector
    tier: MemoryParts
    backlog: Backlog
    ring: Ring
    state: TrainState


@dataclass(frozen=True, slots=True, kw_only=True)
class Actors:
    """What acts on it from the first step on, but for the loop."""

    feed: Feed
    reporter: Reporter
    stepper: Stepper
    steps: StepRunner
    periodic: Periodic
    saves: SaveSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """An open run: its loop, and what must be closed and summed up after it."""

    opened: Opened
    machinery: Machinery
    feed: Feed
    reporter: Reporter
    loop: Loop
    pages: PageWriter | None

    @property
    def ring(self) -> Ring:
        """Its checkpoints."""
        return self.machinery.ring

    @property
    def engine(self) -> Engine:
        """Its weights and optimizer state."""
        return self.machinery.engine

    @property
    def state(self) -> TrainState:
        """Its counters and the guard's memory."""
        return self.machinery.state


def build(opened: Opened) -> Machinery:
    """Make what holds the state; :func:`resume` fills it. Collective."""
    group, lease, corpus = opened.group, opened.lease, opened.corpus
    config = lease.config
    faults = FaultInjector(
        parse_faults(config.faults), rank=group.place.rank, markers=group.run_dir.faults
    )
    # Where nothing is loaded the weights are made, see :func:`resume`.
    engine = parts.engine(
        config, corpus.network, group.place, group.device, faults, has_weights=False
    )
    tier = open_slots(lease, group, engine, identity_of(lease, corpus))
    backlog = Backlog(
        patience_seconds=config.track.unwritten_seconds,
        ask_to_stop=group.stop.ask,
        from_first=group.ranks.from_first,
        say=group.console.say,
    )
    backlog.add(opened.written.journal.file)

    def before_write(step: int) -> None:
        faults.at("save", step)
        backlog.require_written()

    ring = Ring(
        lease.directory(group),
        sharded=engine,
        ranks=group.ranks,
        rules=parts.ring_rules(config),
        identity=identity_of(lease, corpus),
        report=opened.written.report,
        before_write=before_write,
        memory=tier,
    )
    faults.aim_at(newest_checkpoint=ring.newest, snapshots=ring.snapshot_files)
    return Machinery(
        engine=engine,
        faults=faults,
        tier=tier,
        backlog=backlog,
        ring=ring,
        state=TrainState(parts.judge_rules(config), parts.remedy_rules(config)),
    )


def resume(opened: Opened, machinery: Machinery) -> Resumed:
    """Load the newest usable checkpoint, or make the initial weights. Collective.

    Raises:
        ConfigError: a model from elsewhere cannot be trained exactly, or its weights not be read.
        CheckpointError: there are checkpoints, and none of them can be loaded.
        RankError: the same, and the object store does not answer.
    """
    resumed = _resume(opened, machinery)
    if resumed.is_fresh:
        # Not before: what is loaded overwrites all of it, and normal numbers take their time.
        config, ranks = opened.lease.config, opened.group.ranks
        parts.initialise(machinery.engine, config, opened.corpus.network, ranks)
    _check_model(opened, machinery.engine, is_fresh=resumed.is_fresh)
    return resumed


def _resume(opened: Opened, machinery: Machinery) -> Resumed:
    """Where no byte of the ring is right, from the object store."""
    group, inventory, written = opened.group, opened.inventory, opened.written
    ring, state = machinery.ring, machinery.state
    restorer = None if inventory.restored else inventory.restorer
    try:
        return resume_from(inventory.found, group.run_dir, ring, written.journal, state)
    except CheckpointError as error:
        if restorer is None:
            raise
        if restorer.silence:
            raise RankError(
                f"{error}; and checkpoint.remote does not answer ({restorer.silence}): start "
                "again when it does"
            ) from None
        ring.drain()
        restored = restorer.restore()
        if restored is None:
            raise
    for incident in restored.incidents:
        written.report(incident)
    found = replace(inventory.found, records=[restored.record], damaged=[])
    return resume_from(found, group.run_dir, ring, written.journal, state)


def begin(opened: Opened, machinery: Machinery, resumed: Resumed) -> Run:
    """Write the line of this start, and make what acts. Collective."""
    group, lease, corpus = opened.group, opened.lease, opened.corpus
    hosts = group.ranks.gather(host_name())
    past = _past(opened, resumed)
    feed = parts.feed(lease.config, corpus.dataset, corpus.stream, group.place, group.device)
    repeats = _repeats_bits(opened, machinery, feed) if resumed.step < lease.config.steps else None
    _greet(opened, resumed, repeats)
    if machinery.engine.waits_for_host:
        group.console.say(
            f"optim._target_={lease.config.optim._target_} does not look at found_inf: each step "
            "waits until the host has read its gate"
        )
    columns, pages = SourceColumns(corpus.mixture), _page_writer(opened)
    reporter = group.ranks.all_or_none(
        "opening the metrics", lambda: _reporter(opened, machinery, resumed, past, columns, pages)
    )
    machinery.backlog.add(reporter.metrics_file)
    # After the reporter has cut the metrics: what is journalled as lost is lost once.
    lost = group.ranks.from_first(past.lost)
    start = _start_incident(opened, resumed, hosts, lost)
    opened.written.journal.add(replace(start, detail={**start.detail, "repeats_bits": repeats}))
    if lease.config.debug.check_devices:
        _check_devices(opened, machinery.faults, resumed.step)
    _settle_mixture(opened, machinery)
    uploads = _uploads(opened, machinery, resumed)
    # Until now an earlier incarnation's snapshots were the ones to come back to.
    machinery.ring.begin(uploads)
    corpus_check = _corpus_check(opened, machinery, resumed)
    corpus_check.begin()
    actors = _actors(opened, machinery, resumed, feed, reporter, columns)
    loop = _loop(opened, machinery, actors, corpus_check)
    if pages is not None:
        pages.begin()
    return Run(
        opened=opened, machinery=machinery, feed=feed, reporter=reporter, loop=loop, pages=pages
    )


# -- parts of ``build`` and ``begin`` -------------------------------------------------------


def _check_model(opened: Opened, engine: Engine, *, is_fresh: bool) -> None:
    """Try a model from elsewhere on two samples; its state is left as it is. Collective.

    Raises:
        ConfigError: it cannot be trained exactly.
    """
    group, corpus, config = opened.group, opened.corpus, opened.lease.config
    network = corpus.network
    if not isinstance(network, GuestBlueprint):
        return
    batch = group.ranks.all_or_none(
        "reading two samples", lambda: few(corpus.dataset, config.data.seq_len, 2)
    )
    works = works_of(batch, parts.works_a_step(config, group.place), group.device)
    checks = group.ranks.all_or_none(
        "trying the model", lambda: quick_checks(network, engine, works)
    )
    signatures = group.ranks.gather(network.signature() if is_fresh else "")
    if len(set(signatures)) > 1:
        raise ConfigError(
            f"{network.told}: ranks build another model or other weights each "
            f"({signatures} by rank); it must not depend on the rank, the machine or the clock"
        )
    refuse_or_say(checks, network.told, group.console.say)


def _past(opened: Opened, resumed: Resumed) -> Past:
    """Where the time went before this start; the first rank's is the one that counts."""
    if not opened.group.is_first:
        return past([], [], [])
    path, length = opened.group.run_dir.metrics, resumed.metrics_bytes
    found = opened.inventory.found
    return past(iter_lines(path, stop=length), iter_lines(path, start=length), found.journal)


def _settle_mixture(opened: Opened, machinery: Machinery) -> None:
    written = opened.written
    incident = settle_mixture(opened.corpus.stream, written.journal, machinery.state)
    if incident is not None:
        written.report(incident)


def _page_writer(opened: Opened) -> PageWriter | None:
    """What keeps out/report.html; on rank 0 only."""
    group, minutes = opened.group, opened.lease.config.track.report_minutes
    if not group.is_first or minutes is None:
        return None
    return PageWriter(group.run_dir, every_seconds=60 * minutes, check=opened.lease.fence.check)


def _reporter(
    opened: Opened,
    machinery: Machinery,
    resumed: Resumed,
    past: Past,
    columns: SourceColumns,
    pages: PageWriter | None,
) -> Reporter:
    """Metrics, trackers and the live line; files on rank 0 only."""
    group, lease, journal = opened.group, opened.lease, opened.written.journal
    config, check = lease.config, lease.fence.check
    outputs = Outputs(
        metrics=Metrics(
            group.run_dir.metrics if group.is_first else None,
            length=resumed.metrics_bytes,
            check=check,
        ),
        trackers=[
            *(
                parts.trackers(config, group.run_dir, resumed, lease.fence)
                if group.is_first
                else ()
            ),
            *opened.written.trackers,
        ],
        console=group.console,
        lost=lambda: _losses(pages, opened.written.alerts) if group.is_first else (),
        journal=journal.add,
        columns=columns.of,
    )
    reader = _curve_reader(opened, resumed)
    if reader is not None:
        outputs = replace(
            outputs,
            columns=lambda info, is_evaluated: {
                **columns.of(info, is_evaluated),
                **reader.columns(is_evaluated),
            },
            applied=reader.applied,
        )
    return Reporter(
        outputs,
        throughput=parts.throughput(config, opened.corpus.network, group.place, group.device),
        history=journal.history,
        ring=machinery.ring,
        total_steps=config.steps,
        past=past,
        began=journal.began,
    )


def _trackers(opened: Opened, resumed: Resumed) -> list[Tracker]:
    group, lease = opened.group, opened.lease
    if not group.is_first:
        return []
    files = parts.trackers(lease.config, group.run_dir, resumed, lease.fence)
    return [*files, *opened.written.trackers]


def _curve_reader(opened: Opened, resumed: Resumed) -> CurveReader | None:
    """What reads the run's own curve, where it is evaluated."""
    group, config, written = opened.group, opened.lease.config, opened.written
    if not (config.track.read and config.eval.every):
        return None
    past = iter_lines(group.run_dir.metrics, stop=resumed.metrics_bytes)
    return CurveReader(
        ranks=group.ranks,
        past=past if group.is_first else (),
        known=written.journal.history.incidents,
        total=config.steps,
        warmup=config.schedule.warmup,
        dataset=opened.corpus.dataset,
        tell=written.report,
    )


def _losses(*others: PageWriter | CommandAlerts | None) -> list[output.Loss]:
    """What went wrong with what this process says."""
    lost = [one.loss for one in others if one is not None]
    return [*output.losses(), *(loss for loss in lost if loss is not None)]


def _start_incident(
    opened: Opened, resumed: Resumed, hosts: list[str], lost: dict[str, float]
) -> Incident:
    group, lease = opened.group, opened.lease
    return Incident(
        kind="start",
        step=resumed.step,
        decision=f"go on from step {resumed.step}" if resumed.step else "begin",
        reason="command",
        detail={
            "incarnation": lease.fence.number,
            "world_size": group.place.world_size,
            "hosts": {host: ranks_on(host, hosts) for host in dict.fromkeys(hosts)},
            "parallel": lease.config.parallel.kind.value,
            "device": group.device.type,
            **versions(),
            **{name: told for name, told in group.device_versions.items() if name != "device"},
            "settings": lease.config_digest,
            "data": opened.corpus.dataset.fingerprint(),
            "debug": dict(group.debug),
            "lost": lost,
            "tier": resumed.tier.value if resumed.step else None,
        },
    )


def _check_devices(opened: Opened, faults: FaultInjector, step: int) -> None:
    """Try the device of each rank. Collective.

    Raises:
        RankError: one must not be trained on; it is journalled as a crash of the hardware.
    """
    group = opened.group
    fault = check_devices(
        group.device, group.ranks, group.console.say, is_spoilt=faults.spoils_product(step)
    )
    if fault is not None:
        incarnation = opened.lease.fence.number
        opened.written.report(fault.incident(step=step, incarnation=incarnation))
        raise RankError(fault.reason)


def _repeats_bits(opened: Opened, machinery: Machinery, feed: Feed) -> bool:
    """Whether all ranks get the same bits from one micro-batch twice. Collective.

    The loaded weights are left as they are.
    """
    group, batch = opened.group, opened.lease.config.batch
    count = min(batch.global_size, batch.micro_size * group.place.world_size)
    (first, *_) = feed.fixed(np.arange(count) % len(opened.corpus.dataset))
    work = MicroStep(batch=first.to(group.device), seed=opened.lease.config.seed)
    # DeepSpeed reduces when it has seen as many as a step has.
    times = feed.num_micro_batches if is_zero(opened.lease.config.parallel.kind) else 1
    own = repeats_bits(machinery.engine, [work] * times)
    return group.ranks.sum([float(not own)])[0] == 0


def _greet(opened: Opened, resumed: Resumed, repeats: bool | None) -> None:
    group, config = opened.group, opened.lease.config
    say = group.console.say
    say(
        f"holdfast: {opened.corpus.network.num_parameters():,} parameters, "
        f"{len(opened.corpus.dataset):,} samples of "
        f"{config.data.seq_len} tokens, {config.parallel.kind.value} on "
        f"{group.place.world_size} x {group.device.type}, {config.model.precision.value}, "
        + ("" if repeats is None else f"this machine repeats bits: {_YES_NO[repeats]}, ")
        + f"out={group.run_dir.out}"
    )
    if repeats is False and not config.compute.deterministic:
        say(
            "a run that is resumed or rolled back follows the same samples, but not bit for bit; "
            "compute.deterministic=true may mend it"
        )
    if config.debug.kind is not DebugKind.off:
        effective = " ".join(f"{name}={value}" for name, value in group.debug.items())
        say(f"debug={config.debug.kind.value}: {effective}")
    if resumed.step >= config.steps:
        say(f"all {config.steps} steps are applied already")
    elif resumed.step:
        source = " from memory" if resumed.tier is Tier.memory else ""
        say(f"resuming at step {resumed.step} of {config.steps}{source}")
    for words in resumed.unused:
        say(f"snapshots in memory of no use: {words}")


def _corpus_check(opened: Opened, machinery: Machinery, resumed: Resumed) -> CorpusCheck:
    dataset, written = opened.corpus.dataset, opened.written
    journal = opened.inventory.found.journal
    return CorpusCheck(
        dataset=dataset,
        ranks=opened.group.ranks,
        ring=machinery.ring,
        resumed=ResumedOn(
            step=resumed.step,
            known=known_digest(journal, dataset.fingerprint()) if resumed.step else None,
            is_change_allowed=opened.lease.config.resume.allow_change,
        ),
        notes=parts.digest_notes(opened.lease.config),
        report=written.report,
        journal=written.journal.add,
        moved=lambda: opened.group.heart.enter("save"),
    )


def _uploads(opened: Opened, machinery: Machinery, resumed: Resumed) -> Uploads | None:
    """The journal has its first line by now."""
    lease, written, ring = opened.lease, opened.written, machinery.ring
    if lease.remote is None:
        return None
    for incident in lease.remote.incidents(resumed.step):
        written.report(incident)
    return lease.remote.uploads(
        lease.config,
        lease.directory(opened.group),
        queue=ring.upload_queue,
        ranks=opened.group.ranks,
        fence=lease.fence,
        tainted=written.journal.history.abandoned_serials(),
        report=written.report,
    )


def _actors(
    opened: Opened,
    machinery: Machinery,
    resumed: Resumed,
    feed: Feed,
    reporter: Reporter,
    columns: SourceColumns,
) -> Actors:
    group, config, written = opened.group, opened.lease.config, opened.written
    ring, backlog = machinery.ring, machinery.backlog
    stepper = _stepper(opened, machinery, feed)
    evaluator = _evaluator(opened, machinery, feed)

    def evaluate() -> float | None:
        loss = evaluator.loss()
        columns.evaluated(evaluator.by_group())
        return loss

    periodic = Periodic(
        evaluate=evaluate,
        evaluate_every=config.eval.every,
        inspect=_inspector(opened, machinery, resumed, stepper),
        inspect_every=(config.watchdog.straggler_every, config.debug.replica_check_every),
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
        memory_every=memory_every(config.checkpoint) if machinery.tier.memory else 0,
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


def _loop(opened: Opened, machinery: Machinery, actors: Actors, corpus_check: CorpusCheck) -> Loop:
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
    """The guard, with replays to find the cause first."""
    group, corpus, feed = opened.group, opened.corpus, actors.feed
    config, journal = opened.lease.config, opened.written.journal
    bench = Bench(engine=machinery.engine, feed=feed, ranks=group.ranks, heart=group.heart)
    replay = Replay(
        bench,
        known=lambda: _known_samples(corpus.stream, config.batch.global_size),
        host=host_name(),
        bf16=config.model.precision is Precision.bf16,
        reread=feed.put,
    )
    return ExplainingGuard(
        guard,
        replay,
        rules=rules,
        stepper=actors.stepper,
        journal=journal,
        reporter=actors.reporter,
        batch=lambda cursor: corpus.stream.plan(cursor, journal.history.ledger),
        evidence=Evidence(
            names=lambda plan, positions: named_samples(corpus.dataset, plan, positions),
            bundles=_bundles(opened) if group.is_first else None,
            incarnation=opened.lease.fence.number,
        ),
    )


def _bundles(opened: Opened) -> Bundles:
    group = opened.group
    return Bundles(
        group.run_dir.incidents,
        opened.corpus.dataset,
        facts={"host": host_name(), **versions(), **group.device_versions},
        check=opened.lease.fence.check,
        say=group.console.say,
    )


def _known_samples(stream: SampleStream, size: int) -> Indices:
    """Held-out samples, as many as a step has: over again where there are fewer."""
    found = stream.held_out_indices(size)
    return np.resize(found, size) if len(found) else found


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
        ),
        heart=wrap_heart(group.heart, machinery.faults),
        before_update=machinery.ring.before_update,
        distrust=machinery.ring.distrust_after,
    )


def _evaluator(opened: Opened, machinery: Machinery, feed: Feed) -> Evaluator:
    """On the held-out samples, of a mixture by source."""
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
    """On samples of ``data.val_path``, as far apart as there are."""
    group, lease = opened.group, opened.lease
    size = min(count, len(dataset))
    indices = np.arange(size, dtype=np.int64) * len(dataset) // max(size, 1)
    loader = parts.feed(lease.config, dataset, opened.corpus.stream, group.place, group.device)
    return Evaluator(
        engine=machinery.engine,
        feed=loader,
        dataset=dataset,
        ranks=group.ranks,
        samples=FixedSet(indices=indices, what="samples of data.val_path"),
        report=opened.written.report_once,
        step=lambda: machinery.state.updates,
    )


def _inspector(
    opened: Opened, machinery: Machinery, resumed: Resumed, stepper: Stepper
) -> Callable[[int], None]:
    """What is looked at after an update."""
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
    )
    replicas = ReplicaInspector(
        ranks=group.ranks,
        engine=machinery.engine,
        report=opened.written.report,
        distrust=ring.distrust_after,
        next_serial=lambda: ring.next_serial,
        good_step=resumed.step,
    )

    def look(updates: int) -> None:
        if watchdog.straggler_every and updates % watchdog.straggler_every == 0:
            pace.look(updates)
        if every and updates % every == 0:
            replicas.look(updates)

    return look


def _proof(opened: Opened, machinery: Machinery, feed: Feed) -> LastProof:
    """Of the last checkpoint, at the end of the run."""
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
        told = ranks.all_or_none(
            "reading the metrics",
            lambda: (
                held_out_before(group.run_dir.metrics, state.updates) if group.is_first else None
            ),
        )
        found: float | None = ranks.from_first(told)
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
