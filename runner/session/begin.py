"""Writes the journal line of a start, then makes and starts the actors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from runner.checkpoint.remote.upload import Uploads
from runner.config.odd_settings import odd_settings
from runner.config.schema import DebugKind, Offload
from runner.config.validate import is_zero
from runner.data.feed import Feed
from runner.distributed.observers import Failure, Observers
from runner.engine.determinism import repeats_bits
from runner.engine.protocol import MicroStep
from runner.fault.inject import FaultInjector
from runner.health.device_check import check_devices
from runner.observe.alert import CommandAlerts
from runner.observe.page_writer import PageWriter
from runner.policy.decision.history import Incident
from runner.policy.decision.spike_frequency import SpikeScore
from runner.policy.retention.records import Tier
from runner.session import parts
from runner.session.actors import Watchers, make_actors, make_loop
from runner.session.assemble import Assembly
from runner.session.explaining import note_ended_starts, observer_note
from runner.session.layers import SPIKES, Columns, make_layers, spike_score
from runner.session.memory_line import memory_line
from runner.session.optim import rules_matched
from runner.session.phases import Machinery, Opened, Run
from runner.session.quick import quick_preflight
from runner.session.side_lines import rank_times
from runner.session.start_line import start_incident, time_before
from runner.startup.memory_need import SavedActivations
from runner.startup.resume import Resumed, settle_mixture
from runner.system import output
from runner.system.error import RankError
from runner.system.json_lines import iter_lines
from runner.train.corpus_check import CorpusCheck, ResumedOn, known_digest
from runner.train.curve_reader import CURVE, CurveReader
from runner.train.layers import LAYERS
from runner.train.report import Outputs, Reporter
from runner.train.resume_check import ResumeCheck, recorded, repeats_as_before
from runner.train.source_columns import SourceColumns

_YES_NO = {True: "yes", False: "no"}


def begin(opened: Opened, machinery: Machinery, resumed: Resumed) -> Run:
    """Write the journal line of this start, and make the actors. Collective."""
    group, lease, corpus = opened.group, opened.lease, opened.corpus
    spent = time_before(group, resumed, opened.inventory.found.journal)
    feed = parts.feed(lease.config, corpus.dataset, corpus.stream, group.place, group.device)
    saved = SavedActivations()
    is_to_train = resumed.step < lease.config.steps
    repeats = _repeats_bits(opened, machinery, feed, saved) if is_to_train else None
    _greet(opened, machinery, resumed, repeats)
    observers = _observers(opened, machinery, resumed.step)
    if is_to_train:
        line = observers.alone("memory line", lambda: memory_line(opened, machinery, saved), "")
        group.console.say(line)
    columns, pages = SourceColumns(corpus.mixture), _page_writer(opened)
    all_columns = _all_columns(opened, machinery, resumed, observers, columns)
    recomputed = _recorded(opened, resumed)
    assembly = Assembly(
        group=group,
        lease=lease,
        written=opened.written,
        ring=machinery.ring,
        backlog=machinery.backlog,
        resumed=resumed,
    )
    assembly.open_reporter(
        lambda: _outputs(opened, assembly, all_columns, pages),
        lambda: parts.throughput(lease.config, corpus.network, group.place, group.device),
        total_steps=lease.config.steps,
        past=spent,
    )
    reporter = assembly.reporter
    _read_curve(opened, observers, reporter)
    # After the reporter has cut the metrics, so that lost lines are journalled once.
    start = start_incident(
        group,
        lease,
        resumed,
        spent,
        reason="command",
        parallel=lease.config.parallel.kind.value,
        data=corpus.dataset.fingerprint(),
    )
    words = parts.data_words(lease.config.data, corpus.dataset)
    start = replace(start, detail={**start.detail, "repeats_bits": repeats, "corpus": words})
    check = _resume_check(opened, resumed, recomputed, start)
    reporter.also_applied(
        lambda line: observers.alone("resume check", lambda: check.applied(line), None)
    )
    opened.written.journal.add(start)
    note_ended_starts(opened, observers)
    if lease.config.debug.check_devices:
        _check_devices(opened, machinery.faults, resumed.step)
    observers.together(
        "preflight", lambda: quick_preflight(opened, machinery, resumed, observers.ranks)
    )
    _settle_mixture(opened, machinery)
    uploads = _uploads(opened, machinery, resumed)
    # Snapshots of the previous incarnation were needed until here.
    machinery.ring.begin(uploads)
    corpus_check = _corpus_check(opened, machinery, resumed)
    corpus_check.begin()
    actors = make_actors(
        opened, machinery, assembly, feed, Watchers(columns, all_columns.layers, observers)
    )
    loop = make_loop(opened, machinery, assembly, actors, corpus_check)
    if pages is not None:
        pages.begin()
    return Run(
        opened=opened, machinery=machinery, feed=feed, reporter=reporter, loop=loop, pages=pages
    )


def _observers(opened: Opened, machinery: Machinery, step: int) -> Observers:
    group = opened.group
    observers = Observers(
        group.ranks,
        report=opened.written.report,
        recover=machinery.engine.recover,
        inject=machinery.faults.in_observer,
        last_words=observer_note(opened, group.place.rank),
    )
    observers.step = step
    return observers


def _all_columns(
    opened: Opened,
    machinery: Machinery,
    resumed: Resumed,
    observers: Observers,
    sources: SourceColumns,
) -> Columns:
    """Make the extra columns of a step's line. Collective."""
    layers = observers.together(LAYERS, lambda: make_layers(opened, machinery, resumed, observers))
    spikes = observers.together(SPIKES, lambda: spike_score(opened, resumed, observers.ranks))
    return Columns(
        sources,
        None if isinstance(layers, Failure) else layers,
        opened.written.report_once,
        observers,
        spikes if isinstance(spikes, SpikeScore) else SpikeScore(),
    )


def _recorded(opened: Opened, resumed: Resumed) -> list[list[float]]:
    """Read the recorded steps that will be recomputed, before their lines are cut. Collective."""
    group = opened.group
    rows = group.ranks.all_or_none(
        "reading the metrics",
        lambda: (
            recorded(iter_lines(group.run_dir.metrics, start=resumed.metrics_bytes), resumed.step)
            if group.is_first and resumed.step
            else []
        ),
    )
    return [list(row) for row in group.ranks.from_first(rows)]


def _resume_check(
    opened: Opened, resumed: Resumed, rows: list[list[float]], start: Incident
) -> ResumeCheck:
    incidents = opened.written.journal.history.incidents
    starts = [at for at, one in enumerate(incidents) if one.kind == "start"]
    before = incidents[starts[-1]].detail if starts else None
    since = incidents[starts[-1] :] if starts else []
    is_changed = any(one.kind == "setting_changed" for one in since)  # as the command allowed
    return ResumeCheck(
        resumed.step,
        [] if is_changed else rows,
        exactly=repeats_as_before(before, start.detail),
        report=opened.written.report,
    )


def _settle_mixture(opened: Opened, machinery: Machinery) -> None:
    written = opened.written
    incident = settle_mixture(
        opened.corpus.stream,
        written.journal,
        machinery.state,
        reached=opened.inventory.found.last_cursor,
    )
    if incident is not None:
        written.report(incident)


def _page_writer(opened: Opened) -> PageWriter | None:
    """Make the writer of out/report.html, on rank 0 only."""
    group, minutes = opened.group, opened.lease.config.track.report_minutes
    if not group.is_first or minutes is None:
        return None
    return PageWriter(
        group.run_dir.out, every_seconds=60 * minutes, check=opened.lease.run_lease.check
    )


def _outputs(
    opened: Opened, assembly: Assembly, columns: Columns, pages: PageWriter | None
) -> Outputs:
    """With trackers, columns, and the lines of ranks; files on rank 0 only."""
    group = opened.group
    return replace(
        assembly.outputs(),
        trackers=opened.written.trackers,
        lost=lambda: _losses(pages, opened.written.alerts) if group.is_first else (),
        columns=columns.of,
        eval_columns=columns.sources.of_evaluation,
        rank_times=rank_times(opened.lease, group, opened.written.journal),
        alone=columns.observers.alone,
    )


def _read_curve(opened: Opened, observers: Observers, reporter: Reporter) -> None:
    """Have the run's own curve read at evaluations. Collective."""
    config, written = opened.lease.config, opened.written
    if not (config.track.read and config.eval.every):
        return
    reader = observers.together(
        CURVE,
        lambda: CurveReader(
            observers=observers,
            metrics=reporter.metrics_file,
            known=written.journal.history.incidents,
            total=config.steps,
            warmup=config.schedule.warmup,
            dataset=opened.corpus.dataset,
            report=written.report,
        ),
    )
    if isinstance(reader, CurveReader):
        reporter.also_eval_columns(reader.columns)
        reporter.also_applied(reader.applied)


def _losses(*outputs: PageWriter | CommandAlerts | None) -> list[output.Loss]:
    """List the outputs whose lost lines become incidents."""
    lost = [one.loss for one in outputs if one is not None]
    return [*output.losses(), *(loss for loss in lost if loss is not None)]


def _check_devices(opened: Opened, faults: FaultInjector, step: int) -> None:
    """Test the device of each rank. Collective.

    Raises:
        RankError: one is faulty; the journal records a hardware crash.
    """
    group = opened.group
    fault = check_devices(
        group.device, group.ranks, group.console.say, is_spoilt=faults.spoils_product(step)
    )
    if fault is not None:
        incarnation = opened.lease.run_lease.number
        opened.written.report(fault.incident(step=step, incarnation=incarnation))
        raise RankError(fault.reason)


def _repeats_bits(
    opened: Opened, machinery: Machinery, feed: Feed, saved: SavedActivations
) -> bool:
    """Whether one micro-batch gives the same bits twice on all ranks. Collective.

    The loaded weights do not change.
    """
    group, batch = opened.group, opened.lease.config.batch
    count = min(batch.global_size, batch.micro_size * group.place.world_size)
    (first, *_) = feed.fixed(np.arange(count) % len(opened.corpus.dataset))
    saved.samples = len(first.positions)
    work = MicroStep(batch=first.to(group.device), seed=opened.lease.config.seed)
    # DeepSpeed reduces only after all micro-batches of a step.
    times = feed.num_micro_batches if is_zero(opened.lease.config.parallel.kind) else 1
    own = repeats_bits(machinery.engine, [work] * times, saved)
    return group.ranks.sum([float(not own)])[0] == 0


def _greet(opened: Opened, machinery: Machinery, resumed: Resumed, repeats: bool | None) -> None:
    group, config = opened.group, opened.lease.config
    say = group.console.say
    words = parts.data_words(config.data, opened.corpus.dataset)
    say(
        f"holdfast: {opened.corpus.network.num_parameters():,} parameters, "
        f"{len(opened.corpus.dataset):,} samples of "
        f"{config.data.seq_len} tokens from {words}, "
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
    elif machinery.engine.waits_for_host:
        say(
            f"optim._target_={config.optim._target_} ignores found_inf: each step waits until the "
            "host has read its gate"
        )
    if config.optim.groups and not resumed.step:
        matched = rules_matched(config, opened.corpus.network)
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
    """Make the uploads. The journal must already have the line of this start."""
    lease, written, ring = opened.lease, opened.written, machinery.ring
    if lease.remote is None:
        return None
    for incident in lease.remote.incidents(resumed.step):
        written.report(incident)
    uploads = lease.remote.uploads(
        lease.config,
        lease.directory(opened.group),
        queue=ring.upload_queue,
        ranks=opened.group.ranks,
        run_lease=lease.run_lease,
        tainted=written.journal.history.abandoned_serials(),
        report=written.report,
    )
    uploads.show = opened.group.console.work
    return uploads
