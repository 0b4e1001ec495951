"""A run on one rank: the parts from which its loop and its features are made.

Opening a run makes its parts in the order in which they stand here; :class:`Run` is what a run of
ours and a user's loop have alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from runner.checkpoint.disk.directory import CheckpointDirectory
from runner.checkpoint.memory.tier import MemoryParts
from runner.checkpoint.protocol import Identity
from runner.checkpoint.ring import CheckpointRing
from runner.data.cursor import SampleStream
from runner.data.dataset import Dataset, RecordDataset
from runner.data.feed import Feed
from runner.data.mixture import MixtureOrder
from runner.distributed.agreement import Ranks
from runner.distributed.env import JobEnv, RankEnv
from runner.distributed.observers import Observers
from runner.distributed.rendezvous import Facts
from runner.engine.protocol import Engine
from runner.health.heartbeat import Heartbeat
from runner.health.preemption import StopLook, StopRequest, StopRequested, who_asked
from runner.health.rank_monitor import RankMonitor
from runner.model.blueprint import Blueprint
from runner.observe.console import Console
from runner.observe.journal import Journal
from runner.observe.page_writer import PageWriter
from runner.observe.side_lines import RankTimes
from runner.observe.tracker import BackgroundTracker, CommandAlerts
from runner.policy.decision.history import History, Incident
from runner.policy.retention.records import Tier
from runner.run_dir.lease import RunLease
from runner.run_dir.paths import RunDir
from runner.run_dir.start_times import StartTimes
from runner.system.error import Preempted
from runner.system.json_lines import Backlog
from runner.train.state import TrainState

if TYPE_CHECKING:  # they are made from a run
    from runner.train.loop import Loop
    from runner.train.report import Reporter
    from runner.train.step import Stepper


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """One rank in its process group.

    Args:
        debug: the collective-debugging settings in effect.
        peers: facts of this node's ranks, exchanged at the rendezvous.
        device_versions: device, driver and versions of libraries on this rank.
        times: where the time of this start goes.
    """

    place: RankEnv
    launch: JobEnv
    device: torch.device
    run_dir: RunDir
    stop: StopRequest
    stop_look: StopLook
    monitor: RankMonitor
    console: Console
    ranks: Ranks
    debug: Mapping[str, str] = field(default_factory=dict)
    peers: Sequence[Facts] = ()
    device_versions: Mapping[str, str] = field(default_factory=dict)
    times: StartTimes = field(default_factory=lambda: StartTimes({}))

    @property
    def heart(self) -> Heartbeat:
        """The heartbeat of this rank."""
        return self.monitor.heart

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the only writer of shared files."""
        return self.place.is_first

    def asked_to_stop(self) -> list[str]:
        """Who asked each rank to stop, by rank; empty for no request. Collective."""
        return list(self.ranks.gather(self.stop.reason))

    @contextmanager
    def left_at_a_stop(self, what: str) -> Iterator[None]:
        """Leave when a request to stop is seen inside, where there is nothing to save.

        Args:
            what: what is left, for the reason.

        Raises:
            Preempted: it was seen; on all ranks alike.
        """
        try:
            yield
        except StopRequested:
            who = who_asked(self.asked_to_stop())
            raise Preempted(f"asked to stop ({who}) {what}; this start trained nothing") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJournal:
    """The journal, and reporting: an incident is recorded, then printed."""

    journal: Journal
    console: Console
    alerts: CommandAlerts | None = None
    trackers: Sequence[BackgroundTracker] = ()

    def report(self, incident: Incident) -> None:
        """Record an incident and print it."""
        self.journal.add(incident)
        self.console.incident(incident)

    def report_once(self, incident: Incident) -> None:
        """Report an incident once, even if a restart meets it again."""
        if self.journal.add_once(incident):
            self.console.incident(incident)


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The data, its order, and the network whose sizes follow from the data.

    ``words`` says for a person where the samples come from.
    """

    dataset: Dataset
    stream: SampleStream
    validation: Dataset | None
    network: Blueprint
    words: str

    @property
    def has_tokens(self) -> bool:
        """Whether samples are token ids, so that losses are in nats per token."""
        return not isinstance(self.dataset, RecordDataset)

    @property
    def mixture(self) -> MixtureOrder | None:
        """The order of the sources; None unless there are several."""
        order = self.stream.order
        return order if isinstance(order, MixtureOrder) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Where this command resumes the run.

    ``known_discards`` were journalled after the loaded checkpoint: the loop judges them again
    instead of computing them again. ``unused`` says which snapshots in memory could not be used.
    """

    step: int
    metrics_bytes: int
    known_discards: list[Incident]
    tier: Tier = Tier.disk
    unused: tuple[str, ...] = ()
    is_fresh: bool = False


def ring_directory(run_dir: RunDir, lease: RunLease) -> CheckpointDirectory:
    """The checkpoints on disk, writable while the lease holds."""
    return CheckpointDirectory(run_dir.ring, owner=lease.number, check=lease.check)


@dataclass(slots=True, kw_only=True)
class Run:
    """An open run. ``resumed`` is set by loading its checkpoint, ``reporter`` after that.

    Args:
        lease: the right to write to ``out``; its number is this incarnation's.
        identity: has the digest of the settings as the user gave them.
    """

    group: RankGroup
    lease: RunLease
    identity: Identity
    written: RunJournal
    backlog: Backlog
    ring: CheckpointRing
    state: TrainState
    resumed: Resumed = field(init=False)
    reporter: Reporter = field(init=False)

    @property
    def ranks(self) -> Ranks:
        """The agreement among the ranks."""
        return self.group.ranks

    @property
    def journal(self) -> Journal:
        """The journal."""
        return self.written.journal

    @property
    def history(self) -> History:
        """What the journal's lines come to."""
        return self.written.journal.history


@dataclass(slots=True, kw_only=True)
class EngineRun(Run):
    """A run of ours: with data, model and engine, and with what acts on them from step to step.

    ``has_weights``: the engine has its initial weights already.
    """

    corpus: Corpus
    engine: Engine
    memory: MemoryParts
    has_weights: bool = False
    feed: Feed = field(init=False)
    observers: Observers = field(init=False)
    stepper: Stepper = field(init=False)
    loop: Loop = field(init=False)
    rank_times: RankTimes | None = None
    pages: PageWriter | None = None

    @property
    def repeats_bits(self) -> bool:
        """Whether this machine gives the same bits twice, by the newest start's line."""
        starts = [line for line in self.history.incidents if line.kind == "start"]
        return bool(starts and starts[-1].detail.get("repeats_bits"))
