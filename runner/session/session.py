"""Runs one training command on one rank, in phases."""

from __future__ import annotations

from dataclasses import asdict, replace

from runner.checkpoint.protocol import Identity
from runner.config.compose import digest, flat
from runner.config.schema import RunConfig
from runner.config.validate import check, check_extras
from runner.distributed.env import RankEnv
from runner.fault.spec import parse_faults
from runner.observe.page_writer import PageWriter
from runner.policy.decision.history import Incident
from runner.policy.retention.records import Tier, on_disk
from runner.run_dir.paths import keep_for_owner
from runner.session.begin import FaultyRun, begin, build, resume
from runner.session.group import join
from runner.session.inventory import (
    acquire_lease,
    open_corpus,
    open_journal,
    settle_memory,
    settled,
    take_inventory,
    with_steps,
)
from runner.session.summary import RunEnd, at_a_stop, collect_digest, sum_up
from runner.system.error import EXIT_DONE, EXIT_HALTED, EXIT_PREEMPTED, Preempted, RunnerError
from runner.system.garbage import collected_at_boundaries
from runner.train.run import EngineRun, RankGroup

# Longest wait for the report page at the end; less after a stop request.
_PAGE_SECONDS, _PAGE_SECONDS_ASKED = 30.0, 3.0
_STATUS = {EXIT_HALTED: "halted", EXIT_PREEMPTED: "preempted"}


def train(config: RunConfig, place: RankEnv) -> int:
    """Run one training command; returns the exit code.

    Raises:
        RunnerError: the run could not begin; raised on every rank alike.
    """
    keep_for_owner()
    check(config, world_size=place.world_size)
    parse_faults(config.faults)  # raises for a typing mistake before any process waits for another
    check_extras(config)
    with join(config, place) as group:
        run = open_run(group, config)
        with collected_at_boundaries():
            end = fit(run)
        return close(run, end)


def open_run(group: RankGroup, config: RunConfig) -> FaultyRun:
    """Acquire the run directory, build the run, and resume what ``out`` holds.

    Raises:
        RunnerError: the run cannot begin, or a rank was asked to stop; raised on every rank alike.
    """
    with group.left_at_a_stop("before the first step"):
        lease, remote = acquire_lease(group, config)
        config = settled(group, config, remote)
        corpus = open_corpus(group, config)
        config = with_steps(group, config, corpus)
        identity = Identity(
            config_digest=digest(flat(config)), data_fingerprint=corpus.dataset.fingerprint()
        )
        inventory = take_inventory(group, config, lease, remote, corpus)
        written = open_journal(group, config, lease, identity, inventory)
        config = replace(config, batch=settle_memory(config.batch, inventory, written))
        group.times.mark("opening")
        run = build(group, config, lease, identity, corpus, inventory, written)
        group.times.mark("model")
        resume(run, config, inventory)
        group.times.mark("state")
        if run.resumed.tier is Tier.disk:  # the loop saves what was in memory only
            group.stop_look.now()
        begin(run, config, inventory, remote)
        return run


def fit(run: EngineRun) -> RunEnd:
    """Train until the run is done, halted, preempted or failed."""
    try:
        reason = run.loop.run()
    except RunnerError as error:
        status = _STATUS.get(error.exit_code, "failed")
        if status == "halted":
            run.ring.drain()  # let writes in progress finish
        else:  # a halt already has its own journal line
            run.written.journal.add(
                Incident(
                    kind=status,
                    step=run.state.updates,
                    decision="end",
                    reason=str(error),
                    detail={"stalls": run.reporter.take_stalls()},
                )
            )
        in_time = not isinstance(error, Preempted) or error.in_time
        return RunEnd(status=status, exit_code=error.exit_code, reason=str(error), in_time=in_time)
    return RunEnd(status="done", exit_code=EXIT_DONE, reason=reason)


def close(run: EngineRun, end: RunEnd) -> int:
    """Finish pending work and write the summary; returns the exit code."""
    group, ring = run.group, run.ring
    group.heart.enter("finish")
    if ring.uploads is not None and end.status in ("done", "halted"):
        ring.uploads.finish(on_disk(ring.records))
    ring.close(wait=end.in_time, forget=_is_over(run, end))
    run.feed.close()
    run.reporter.close()
    if run.rank_times is not None:
        run.rank_times.close()
    run.backlog.finish()

    def is_late() -> bool:
        return group.stop.is_late

    clock = at_a_stop(is_late) if end.status == "preempted" else is_late
    digest = collect_digest(run.engine, group.ranks, clock) if end.in_time else None
    summary = sum_up(
        run,
        end,
        global_size=run.corpus.stream.global_size,
        digest=digest,
        data=run.corpus.words,
        unit="nats/token" if run.corpus.has_tokens else "",
        has_page=run.pages is not None,
    )
    if summary is not None:
        for tracker in run.written.trackers:
            left = max(0.0, group.stop.left_seconds - _PAGE_SECONDS_ASKED)
            if warning := tracker.finish(asdict(summary), in_time=end.in_time, most_seconds=left):
                group.console.say(f"warning: {warning}")
    if run.written.alerts is not None:
        if end.status == "done":
            run.written.alerts.done(run.state.updates)
        run.written.alerts.close()
    if run.pages is not None:
        _write_last_page(run.pages, run, end)
    return end.exit_code


def _write_last_page(pages: PageWriter, run: EngineRun, end: RunEnd) -> None:
    """Write the last report page; a failure prints one line."""
    is_preempted = end.status == "preempted"
    may = end.in_time and not (is_preempted and run.group.stop.is_late)
    pages.finish(0.0 if not may else _PAGE_SECONDS_ASKED if is_preempted else _PAGE_SECONDS)
    if pages.loss is not None:
        run.group.console.say(f"warning: no {pages.loss.outlet} was written: {pages.loss.reason}")


def _is_over(run: EngineRun, end: RunEnd) -> bool:
    """Whether a later start will need nothing but the disk."""
    saved = run.ring.saved_step == run.state.updates
    return end.in_time and (end.status in ("done", "halted") or saved)
