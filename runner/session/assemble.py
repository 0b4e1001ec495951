"""What a run and a user's loop have alike: unwritten lines, reporter, guard and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from runner.checkpoint.ring import Ring
from runner.observe.backlog import Backlog
from runner.observe.metrics import Metrics
from runner.observe.throughput import Throughput
from runner.policy.decision.ladder import RemedyRules
from runner.run_dir.time_account import Past
from runner.session import parts
from runner.session.group import RankGroup
from runner.session.phases import Lease, RunJournal
from runner.session.side_lines import ring_lines
from runner.startup.resume import Resumed
from runner.train.best import BestCheckpoint
from runner.train.checkpoints import Checkpoints, Proofs, SaveSchedule
from runner.train.guard import Guard, Steps
from runner.train.recovery import Recovery
from runner.train.report import Outputs, Reporter


def backlog_of(lease: Lease, written: RunJournal) -> Backlog:
    """The lines that could not be written yet; with the journal's."""
    group = written.group
    backlog = Backlog(
        patience_seconds=lease.config.track.unwritten_seconds,
        ask_to_stop=group.stop.ask,
        from_first=group.ranks.from_first,
        say=group.console.say,
    )
    backlog.add(written.journal.file)
    return backlog


@dataclass(slots=True, kw_only=True)
class Assembly:
    """An opened run whose checkpoint is loaded; from it comes what acts on its steps."""

    group: RankGroup
    lease: Lease
    written: RunJournal
    ring: Ring
    backlog: Backlog
    resumed: Resumed
    reporter: Reporter = field(init=False)

    def outputs(self) -> Outputs:
        """Metrics and lines of the ring, on rank 0, and no trackers."""
        group, lease, journal = self.group, self.lease, self.written.journal
        return Outputs(
            metrics=Metrics(
                group.run_dir.metrics if group.is_first else None,
                length=self.resumed.metrics_bytes,
                check=lease.run_lease.check,
            ),
            trackers=[],
            console=group.console,
            journal=journal.add,
            ring_lines=ring_lines(lease, group, self.ring, journal),
        )

    def open_reporter(
        self,
        outputs: Callable[[], Outputs],
        throughput: Callable[[], Throughput],
        *,
        total_steps: int,
        past: Past,
    ) -> None:
        """Make :attr:`reporter`, which what follows needs. Collective."""
        journal = self.written.journal
        self.reporter = self.group.ranks.all_or_none(
            "opening the metrics",
            lambda: Reporter(
                outputs(),
                throughput=throughput(),
                history=journal.history,
                ring=self.ring,
                total_steps=total_steps,
                past=past,
                began=journal.began,
            ),
        )
        self.backlog.add(self.reporter.metrics_file)

    def saves(self, *, in_memory: bool, best: BestCheckpoint | None = None) -> SaveSchedule:
        """When checkpoints are due."""
        group, config, report = self.group, self.lease.config, self.written.report
        history, ranks = self.written.journal.history, group.ranks
        spent, step = self.reporter.spent, self.resumed.step
        disk = parts.cadence(config, group.place, step, history, ranks, spent, report)
        memory = parts.snapshot_times(config, history, ranks, report) if in_memory else None
        return SaveSchedule(disk=disk, memory=memory, best=best)

    def guard(
        self,
        steps: Steps,
        saves: SaveSchedule,
        *,
        rules: RemedyRules,
        proofs: Proofs,
        recovery: Callable[..., Recovery],
    ) -> tuple[Guard, Checkpoints]:
        """
        Args:
            recovery: makes it, given what all recoveries have.
        """
        ring, journal, reporter = self.ring, self.written.journal, self.reporter
        heart, backlog = self.group.heart, self.backlog
        guard = Guard(
            rules=rules,
            recovery=recovery(ring=ring, journal=journal, reporter=reporter, rules=rules),
            steps=steps,
            ring=ring,
            journal=journal,
            reporter=reporter,
            heart=heart,
            backlog=backlog,
        )
        checkpoints = Checkpoints(
            ring,
            schedule=saves,
            proofs=proofs,
            rules=rules,
            journal=journal,
            reporter=reporter,
            heart=heart,
            backlog=backlog,
        )
        return guard, checkpoints
