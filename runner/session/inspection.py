"""Makes the periodic checks of the ranks: speed, replicas and devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from runner.config.validate import is_zero
from runner.data.feed import Feed
from runner.health.checks import PaceInspector, ReplicaInspector
from runner.health.device_check import device_kind
from runner.policy.straggler import Stragglers
from runner.session.phases import Machinery, Opened
from runner.startup.resume import Resumed
from runner.system.process import host_name
from runner.train.agreed_numbers import AgreedNumbers
from runner.train.audit import Auditor, AuditRules
from runner.train.checkpoints import SaveSchedule
from runner.train.clean_weights import CleanWeights
from runner.train.periodic import falls_due
from runner.train.report import Reporter
from runner.train.same_batch import SameBatch
from runner.train.step import Stepper

# Factor on watchdog.straggler_factor. A fixed computation is slow on a GPU only if it throttles.
_STRAGGLER_FACTOR, _DEVICE_FACTORS = 2.0, {"cuda": 1.2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspections:
    """The checks that run after an update.

    Args:
        look: called after each update with the update count; collective.
        is_due: whether it uses the state after exactly so many updates.
    """

    look: Callable[[int], None]
    is_due: Callable[[int], bool]


def inspections(
    opened: Opened,
    machinery: Machinery,
    resumed: Resumed,
    feed: Feed,
    stepper: Stepper,
    reporter: Reporter,
    saves: SaveSchedule,
) -> Inspections:
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

    auditor = _auditor(opened, machinery, resumed, feed, stepper, saves)

    def inspect_ranks(updates: int) -> None:
        if auditor is not None:
            auditor.look(updates)
        if falls_due(watchdog.straggler_every, updates):
            pace.look(updates)
        if falls_due(every, updates):
            replicas.look(updates)

    def is_due(updates: int) -> bool:
        if auditor is not None and auditor.is_due(updates):
            return True
        return falls_due(watchdog.straggler_every, updates) or falls_due(every, updates)

    return Inspections(look=inspect_ranks, is_due=is_due)


def _auditor(
    opened: Opened,
    machinery: Machinery,
    resumed: Resumed,
    feed: Feed,
    stepper: Stepper,
    saves: SaveSchedule,
) -> Auditor | None:
    """Make the audit for silent data corruption; None if it is off."""
    group, lease = opened.group, opened.lease
    config = lease.config
    if not config.debug.audit_every or group.place.world_size < 2:
        return None
    starts = [i for i in opened.written.journal.history.incidents if i.kind == "start"]
    same = SameBatch(
        engine=machinery.engine,
        feed=feed,
        ranks=group.ranks,
        kind=device_kind(group.device),
        seed=config.seed,
        takes_whole_step=is_zero(config.parallel.kind),
        repeats_bits=bool(starts and starts[-1].detail.get("repeats_bits")),
    )
    auditor = Auditor(
        same=same,
        steps=stepper,
        ranks=group.ranks,
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
                machinery.engine, machinery.ring, group.ranks, group.place.local_world_size
            ),
            ring=machinery.ring,
            is_saved=saves.is_due_on_disk,
        ),
        report=opened.written.report,
        distrust=machinery.ring.distrust_after,
    )
    auditor.begin(resumed.step)
    return auditor
