"""Makes the parts that find the cause of a bad step, before and after a rollback."""

from __future__ import annotations

import numpy as np

from runner.config.schema import GuardConfig
from runner.data.cursor import Indices, SampleStream
from runner.data.feed import named_samples
from runner.data.mixture import MixtureOrder
from runner.distributed.observers import Observers
from runner.explain.bundle import Bundles
from runner.explain.clean_weights import CleanWeights
from runner.explain.explaining_guard import Evidence, ExplainingGuard, ExplainRules
from runner.explain.mark import ObserverNote
from runner.explain.probe import Bench
from runner.explain.rate_probe import RateProbe
from runner.explain.repeated_steps import RepeatedSteps
from runner.explain.replay import Replay
from runner.policy.decision.history import EXPLAIN, Incident
from runner.policy.decision.repeated_steps import Recorded, from_rows, recorded_in
from runner.policy.decision.signals import StepSignals
from runner.policy.decision.skip_ledger import Ledger
from runner.policy.retention.records import Record, rollback_targets
from runner.run_dir.build_info import versions
from runner.session.phases import Actors, Machinery, Opened
from runner.system.json_lines import iter_lines
from runner.system.process import host_name
from runner.train.guard import Guard
from runner.train.state import TrainState


def explaining_guard(
    opened: Opened, machinery: Machinery, actors: Actors, guard: Guard, rules: ExplainRules
) -> ExplainingGuard:
    """Make the guard that replays a bad step to find its cause first."""
    group, corpus, feed = opened.group, opened.corpus, actors.feed
    config, journal = opened.lease.config, opened.written.journal
    bench = Bench(
        engine=machinery.engine,
        feed=feed,
        ranks=actors.observers.ranks,
        heart=group.heart,
        stop=group.stop_look.through(actors.observers.ranks),
        may_watch=not config.compute.compile,
        unit=config.guard.loss_floor / GuardConfig().loss_floor,
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
            observers=actors.observers,
            bundles=bundles,
            incarnation=opened.lease.run_lease.number,
            mark=observer_note(opened, "explain"),
            later_mark=observer_note(opened, "later"),
        ),
        repeated_steps=_repeated_steps(opened, machinery, actors, replay, bundles),
    )


def note_ended_starts(opened: Opened, observers: Observers) -> None:
    """Leave out, and journal, what has ended the starts before this one. Collective."""
    group = opened.group
    paths = sorted(group.run_dir.debug.glob(group.run_dir.observer_note("*").name))
    notes = [ObserverNote(path) for path in paths if group.is_first]
    read = [(note, line) for note in notes if (line := note.read()) is not None]
    ended = {line.detail["observer"]: line.to_json() for _, line in read if line.reason}
    for name, line in group.ranks.from_first(ended).items():
        opened.written.report(Incident.from_json(line))
        if name != EXPLAIN:
            observers.leave_out(name)
    for note, line in read:
        if line.detail["observer"] in ended:
            note.remove()


def observer_note(opened: Opened, name: str | int) -> ObserverNote:
    """A note of this rank; those that have a name are rank 0's."""
    group = opened.group
    is_ours = group.is_first or isinstance(name, int)
    path = group.run_dir.observer_note(name) if is_ours else None
    return ObserverNote(path, opened.lease.run_lease.check)


def _repeated_steps(
    opened: Opened,
    machinery: Machinery,
    actors: Actors,
    replay: Replay,
    bundles: Bundles | None,
) -> RepeatedSteps:
    """Make the comparison of the steps after a rollback with the recorded ones."""
    group, config, written = opened.group, opened.lease.config, opened.written
    history, ring, reporter = written.journal.history, machinery.ring, actors.reporter
    guard, ranks = config.guard, actors.observers.ranks
    stop = group.stop_look.through(ranks)

    def recorded(first: int, stop: int) -> dict[int, Recorded]:
        reporter.metrics_bytes(durably=False)  # flush, so that they can be read
        rows = ranks.all_or_none(
            "reading the metrics",
            lambda: (
                recorded_in(iter_lines(group.run_dir.metrics), first, stop)
                if group.is_first
                else []
            ),
        )
        return from_rows(ranks.from_first(rows))

    def targets(bad: StepSignals, state: TrainState) -> list[Record]:
        """Rollback targets, as in :func:`runner.policy.decision.ladder.decide`."""
        onset = state.trouble.bad[0] if state.trouble.bad else None
        step, start = (onset.step, onset.start) if onset else (bad.step, bad.start)
        cursor = history.ledger.before(start, guard.margin * config.batch.global_size)
        return rollback_targets(ring.records, cursor=cursor, step=max(0, step - guard.back))

    starts = [line for line in history.incidents if line.kind == "start"]
    return RepeatedSteps(
        replay=replay,
        recorded=recorded,
        is_exact=starts[-1].detail.get("repeats_bits") is True,
        targets=targets,
        rate_probe=RateProbe(
            engine=machinery.engine,
            stepper=actors.stepper,
            planner=actors.steps.planner,
            ring=ring,
            history=history,
            fresh=lambda: TrainState(guard),
            known=replay.known_now,
            stop=stop,
        ),
        clean_weights=CleanWeights(
            machinery.engine, machinery.ring, ranks, group.place.local_world_size, stop
        ),
        report=written.report,
        bundles=bundles,
    )


def _bundles(opened: Opened) -> Bundles:
    group = opened.group
    return Bundles(
        group.run_dir.explanations,
        opened.corpus.dataset,
        seed=opened.lease.config.seed,
        facts={"host": host_name(), **versions(), **group.device_versions},
        check=opened.lease.run_lease.check,
        say=group.console.say,
    )


def _known_samples(stream: SampleStream, size: int, state: TrainState, ledger: Ledger) -> Indices:
    """Data set indices of samples that are known to be good, one step's worth.

    Held-out samples, of a mixture as the stream mixes them now; repeated if there are too few. If
    the corpus holds out none (``data.val_path``, ``data.held_out=0``), the samples of the newest
    applied step; none before the first.
    """
    order = stream.order
    if isinstance(order, MixtureOrder):
        held_out = order.held_out_like(size, state.cursor)
    else:
        held_out = stream.held_out_indices(size)
    if len(held_out):
        return np.resize(held_out, size)
    return stream.plan_before(state.cursor, ledger).indices if state.updates else held_out
