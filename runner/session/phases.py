"""The values that each phase of a start passes to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runner.checkpoint.disk.directory import CheckpointDirectory
from runner.checkpoint.memory.tier import MemoryParts
from runner.checkpoint.ring import Ring
from runner.config.schema import RunConfig
from runner.data.cursor import SampleStream
from runner.data.dataset import Dataset
from runner.data.feed import Feed
from runner.data.mixture import MixtureOrder
from runner.distributed.observers import Observers
from runner.engine.protocol import Engine
from runner.fault.inject import FaultInjector
from runner.model.blueprint import Blueprint
from runner.observe.alert import CommandAlerts
from runner.observe.backlog import Backlog
from runner.observe.journal import Journal
from runner.observe.page_writer import PageWriter
from runner.observe.tracker import BackgroundTracker
from runner.policy.decision.history import Incident
from runner.run_dir.lease import RunLease
from runner.session.group import RankGroup
from runner.startup.restore import RemoteRun, RestoredRun, Restorer
from runner.startup.resume import RunInventory
from runner.train.checkpoints import SaveSchedule
from runner.train.loop import Loop
from runner.train.periodic import Periodic
from runner.train.report import Reporter
from runner.train.state import TrainState
from runner.train.step import Stepper
from runner.train.step_runner import StepRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to write to ``out``, and the settings in effect.

    Args:
        config: the settings, completed by decisions of this start.
        config_digest: their digest.
        run_lease: the run's lease; its number is this incarnation's.
        remote: listing of the object store when the lease was acquired; None without one.
    """

    config: RunConfig
    config_digest: str
    run_lease: RunLease
    remote: RemoteRun | None

    def directory(self, group: RankGroup) -> CheckpointDirectory:
        """The checkpoints on disk, writable while the lease holds."""
        return CheckpointDirectory(
            group.run_dir.ring, owner=self.run_lease.number, check=self.run_lease.check
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The data, its order, and the network whose sizes follow from the data."""

    dataset: Dataset
    stream: SampleStream
    validation: Dataset | None
    network: Blueprint

    @property
    def mixture(self) -> MixtureOrder | None:
        """The order of the sources; None unless there are several."""
        order = self.stream.order
        return order if isinstance(order, MixtureOrder) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What earlier incarnations left, in ``out`` or in the object store (``restored``)."""

    found: RunInventory
    restorer: Restorer | None
    restored: RestoredRun | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJournal:
    """The journal, and reporting: an incident is recorded, then printed."""

    journal: Journal
    group: RankGroup
    alerts: CommandAlerts | None = None
    trackers: Sequence[BackgroundTracker] = ()

    def report(self, incident: Incident) -> None:
        """Record an incident and print it."""
        self.journal.add(incident)
        self.group.console.incident(incident)

    def report_once(self, incident: Incident) -> None:
        """Report an incident once, even if a restart meets it again."""
        if self.journal.add_once(incident):
            self.group.console.incident(incident)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Everything that a command opens before it builds anything."""

    group: RankGroup
    lease: Lease
    corpus: Corpus
    inventory: Inventory
    written: RunJournal


@dataclass(frozen=True, slots=True, kw_only=True)
class Machinery:
    """The state of a run: weights, checkpoints, counters, unwritten lines.

    ``has_weights``: the engine has its initial weights already.
    """

    engine: Engine
    has_weights: bool
    faults: FaultInjector
    tier: MemoryParts
    backlog: Backlog
    ring: Ring
    state: TrainState


@dataclass(frozen=True, slots=True, kw_only=True)
class Actors:
    """Everything that acts on the state from the first step on, except the loop."""

    feed: Feed
    reporter: Reporter
    stepper: Stepper
    steps: StepRunner
    periodic: Periodic
    saves: SaveSchedule
    observers: Observers


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """An open run: its loop, and the parts to close after it."""

    opened: Opened
    machinery: Machinery
    feed: Feed
    reporter: Reporter
    loop: Loop
    pages: PageWriter | None

    @property
    def ring(self) -> Ring:
        """The run's checkpoints."""
        return self.machinery.ring

    @property
    def engine(self) -> Engine:
        """The engine with weights and optimizer state."""
        return self.machinery.engine

    @property
    def state(self) -> TrainState:
        """The counters and the guard's memory."""
        return self.machinery.state
