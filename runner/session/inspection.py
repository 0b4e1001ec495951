"""Makes the periodic checks of the ranks: speed, replicas and devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from runner.config.validate import is_zero
from runner.data.feed import Feed
from runner.distributed.observers import Observers
from runner.explain.agreed_numbers import AgreedNumbers
from runner.explain.audit import Auditor, AuditRules
from runner.explain.clean_weights import CleanWeights
from runner.explain.same_batch import SameBatch
from runner.health.checks import PaceInspector, ReplicaInspector
from runner.health.device_check import device_kind
from runner.policy.straggler import Stragglers
from runner.session.phases import Machinery, Opened
from runner.startup.resume import Resumed
from runner.system.process import host_name
from runner.train.checkpoints import SaveSchedule
from runner.train.periodic import falls_due
from runner.train.report import Reporter
from runner.train.step import Stepper

# Factor on watchdog.straggler_factor. A fixed computation is slow on a GPU only if it throttles.
_STRAGGLER_FACTOR, _DEVICE_FACTORS = 2.0, {"cuda": 1.2}


AUDIT = "audit"  # the observer


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspections:
    """The checks that run after an update.

    Args:
        look: called after each update with the update count; collective.
        is_due: whether it uses the state after exactly so many updates.
    """

    look: Callable[[int], None]
    is_due: Callable[[int], bool]


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of the run that the checks use."""

    feed: Feed
    stepper: Stepper
    reporter: Reporter
    saves: SaveSchedule
    observers: Observers


def inspections(opened: Opened, machinery: Machinery, resumed: Resumed, used: Parts) -> Inspections:
    group, config, ring = opened.group, opened.lease.config, machinery.ring
    watchdog, every = config.watchdog, config.debug.replica_check_every
    observers = used.observers
    pace = PaceInspector(
        ranks=observers.ranks,
        device=group.device,
        stragglers=Stragglers(
            factor=watchdog.straggler_factor or _STRAGGLER_FACTOR,
            device_factor=watchdog.straggler_factor or _DEVICE_FACTORS.get(group.device.type),
            checks=watchdog.straggler_checks,
        ),
        take_seconds=used.stepper.take_seconds,
        report=opened.written.report,
        note=used.reporter.paces,
    )
    replicas = ReplicaInspector(
        ranks=observers.ranks,
        engine=machinery.engine,
        report=opened.written.report,
        distrust=ring.distrust_after,
        next_serial=lambda: ring.next_serial,
        good_step=resumed.step,
    )

    result = observers.together(AUDIT, lambda: _auditor(opened, machinery, resumed, used, replicas))
    auditor = result if isinstance(result, Auditor) else None

    def is_audit_due(updates: int) -> bool:
        return auditor is not None and not observers.is_out(AUDIT) and auditor.is_due(updates)

    def inspect_ranks(updates: int) -> None:
        if auditor is not None:
            auditor.note(updates)
            if is_audit_due(updates):
                observers.together(AUDIT, lambda: auditor.look(updates))
        if falls_due(watchdog.straggler_every, updates):
            observers.together("pace", lambda: pace.look(updates))
        if falls_due(every, updates):
            observers.together("replicas", lambda: replicas.look(updates))

    def is_due(updates: int) -> bool:
        is_other = falls_due(watchdog.straggler_every, updates) or falls_due(every, updates)
        return is_other or is_audit_due(updates)

    return Inspections(look=inspect_ranks, is_due=is_due)


def _auditor(
    opened: Opened,
    machinery: Machinery,
    resumed: Resumed,
    used: Parts,
    replicas: ReplicaInspector,
) -> Auditor | None:
    """Make the audit for silent data corruption; None if it is off."""
    group, lease, ranks = opened.group, opened.lease, used.observers.ranks
    config, stop = lease.config, group.stop_look.through(ranks)
    if not config.debug.audit_every or group.place.world_size < 2:
        return None
    starts = [i for i in opened.written.journal.history.incidents if i.kind == "start"]
    same = SameBatch(
        engine=machinery.engine,
        feed=used.feed,
        ranks=ranks,
        kind=device_kind(group.device),
        seed=config.seed,
        takes_whole_step=is_zero(config.parallel.kind),
        repeats_bits=bool(starts and starts[-1].detail.get("repeats_bits")),
        stop=stop,
    )
    auditor = Auditor(
        same=same,
        steps=used.stepper,
        ranks=ranks,
        heart=group.heart,
        rules=AuditRules(
            every=config.debug.audit_every,
            until=config.steps,
            host=host_name(),
            incarnation=lease.run_lease.number,
        ),
        agreed=AgreedNumbers(
            same=same,
            weights=CleanWeights(
                machinery.engine, machinery.ring, ranks, group.place.local_world_size, stop
            ),
            ring=machinery.ring,
            is_saved=used.saves.is_due_on_disk,
        ),
        report=opened.written.report,
        replicas=replicas,
    )
    auditor.begin(resumed.step)
    return auditor
