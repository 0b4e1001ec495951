"""Finds a rank that silently computes wrongly: every rank computes the same micro-batch.

Most faults of a device raise no error. At intervals each rank computes the same micro-batch with
the gate closed, another rank's each time, and the bits of each sequence's loss, of its gradient at
the embedding, and of each weight's gradient before it is reduced are compared: devices of one kind
must give the same. It costs one micro-batch (under ZeRO a step, because DeepSpeed counts them), and
a wait for the device.

Not detected: a fault in the sum over ranks or in the update alone; gradients inside of blocks that
are compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from runner.data.cursor import BatchPlan
from runner.data.feed import MicroBatch
from runner.distributed.observers import ObservedRanks
from runner.explain.agreed_numbers import AgreedNumbers
from runner.explain.same_batch import SameBatch
from runner.health.heartbeat import Heartbeat
from runner.policy.decision.history import Incident
from runner.policy.odd_ranks import ByRank, Opinion, differing, dissent, named, opinion_on
from runner.policy.restart import HARDWARE
from runner.system.error import LeaveError

KIND = "audit"
_REPEATS = 3  # computations before a rank is named
_TIES = (2, 4)  # world sizes at which half of the ranks may differ from the others


class Steps(Protocol):
    """The part of :class:`runner.train.step.Stepper` used here."""

    @property
    def newest_plan(self) -> BatchPlan | None: ...


class Replicas(Protocol):
    """The part of :class:`runner.health.checks.ReplicaInspector` used here."""

    @property
    def distrust(self) -> Callable[[int], None]: ...
    def look(self, step: int, good_step: int = 0) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRules:
    """
    Args:
        every: in updates.
        until: the update at which the run ends.
        host: of this rank.
        incarnation: number of this start.
    """

    every: int
    until: int
    host: str
    incarnation: int


class Auditor:
    """Compares the ranks.

    Args:
        agreed: what the ranks agreed on, to tell which of two is wrong.
        report: receives incidents.
        replicas: compares the copies of the weights before a device is blamed.
    """

    def __init__(
        self,
        *,
        same: SameBatch,
        steps: Steps,
        ranks: ObservedRanks,
        heart: Heartbeat,
        rules: AuditRules,
        agreed: AgreedNumbers,
        report: Callable[[Incident], None],
        replicas: Replicas,
    ) -> None:
        self._same = same
        self._steps = steps
        self._ranks = ranks
        self._heart = heart
        self._rules = rules
        self._report = report
        self._agreed = agreed
        self._replicas = replicas
        self._begun = self._good_step = 0
        self._known: set[tuple[int, ...]] = set()

    def begin(self, good_step: int) -> None:
        """Record that the run resumes at ``good_step``, where no fault is known."""
        self._begun = self._good_step = good_step
        self._agreed.keep_from_before(lambda: self._good_step)

    def is_due(self, updates: int) -> bool:
        """Whether :meth:`look` uses the state after exactly ``updates`` updates."""
        if self._ranks.world_size < 2:
            return False
        is_regular = updates % self._rules.every == 0
        return is_regular or self._is_start(updates) or self._is_for_checkpoint(updates)

    def _is_start(self, updates: int) -> bool:
        """Whether few ranks compute with the weights of this start, because an audit will follow.

        Not before the first step: it settles which micro-batches fit into memory.
        """
        if self._ranks.world_size not in _TIES or self._agreed.newest_step is not None:
            return False
        return updates == self._begun + 1 and self._begun + self._rules.every <= self._rules.until

    def _is_for_checkpoint(self, updates: int) -> bool:
        """Whether few ranks are compared where audits and checkpoints do not coincide."""
        newest = self._agreed.newest_step
        if self._ranks.world_size not in _TIES or newest is None:
            return False
        return updates - newest >= self._rules.every and self._agreed.is_saved(updates)

    def note(self, updates: int) -> None:
        """Note the number of updates, which is less after a rollback."""
        self._good_step = min(self._good_step, updates - 1)

    def look(self, updates: int) -> None:
        """Audit if it is due. Collective.

        Raises:
            LeaveError: a rank computes wrongly each time, and its host can be excluded; raised on
                all.
        """
        plan = self._steps.newest_plan
        if plan is None or not self.is_due(updates):
            return
        self._heart.enter("explain")
        batches = self._same.batches(plan, updates // self._rules.every)
        if batches is None:
            return
        if self._is_start(updates):
            self._agreed.begin(self._begun, batches)
            if updates % self._rules.every:
                return
        computed = [self._same.compute(batches)]
        if self._opinion(computed[0]).agrees:
            self._good_step = updates
            self._agreed.note_if_saved(updates, batches, computed[0])
            return
        where: list[Mapping[str, Any]] = []
        while len(computed) < _REPEATS:
            computed.append(self._same.compute(batches))
            where = self._ranks.gather(self._same.by_parameter())
        self._judge(updates, computed, where, batches)

    def _opinion(self, by_rank: ByRank) -> Opinion:
        return opinion_on(by_rank, exactly=self._same.repeats_bits)

    def _judge(
        self,
        step: int,
        computed: Sequence[ByRank],
        where: Sequence[Mapping[str, Any]],
        batches: Sequence[MicroBatch],
    ) -> None:
        """Judge several computations of ``batches``, and act on the result.

        Args:
            where: of each rank its gradients by parameter, of the last of them.
        """
        opinions = [self._opinion(one) for one in computed]
        ranks = named(computed, opinions)
        good = (
            f"all ranks agreed at step {self._good_step}"
            if self._good_step > self._begun
            else f"no audit since the start at step {self._begun} found all ranks agreed"
        )
        if any(one.agrees for one in opinions):
            self._good_step = step
            whose = f"rank {ranks[0]} gave" if len(ranks) == 1 else "some rank gave"
            self._report_once(
                step, ranks, f"{whose} different bits for one micro-batch once; repeated, all agree"
            )
            return
        self._replicas.look(step, self._good_step)
        hosts = [str(host) for host in self._ranks.gather(self._rules.host)]
        before = None if len(ranks) == 1 else self._agreed.changed(batches)
        if before is not None and set(before.ranks) < set(opinions[0].odd):
            ranks = before.ranks
        if not ranks:
            words = dissent(computed[0], opinions[0], exactly=self._same.repeats_bits)
            self._report_once(step, opinions[0].odd, f"{words}; {good}")
            return
        rank, is_one = ranks[0], len(ranks) == 1
        kinds = [kind for kind, _ in computed[0]]
        sound = [other for other in range(len(kinds)) if other not in ranks]
        other = min(sound, key=lambda other: kinds[other] != kinds[rank])
        who = " and ".join(f"{one} on {hosts[one]}" for one in ranks)
        reason = (
            f"rank{'' if is_one else 's'} {who} give{'s' if is_one else ''} other bits than the "
            f"others for the same micro-batch, {len(computed)} times of {len(computed)}"
            f"{differing(where[rank], where[other], exactly=self._same.repeats_bits)}"
            f"{before.sentence if before else ''}: {'its device' if is_one else 'their devices'} "
            f"silently compute{'s' if is_one else ''} wrongly; {good}"
        )
        if len(set(hosts)) == 1:
            self._report_once(step, ranks, reason)
            return
        self._report(self._crash(step, ranks, hosts[rank], reason))
        self._replicas.distrust(self._good_step)
        raise LeaveError(reason)

    def _report_once(self, step: int, ranks: tuple[int, ...], reason: str) -> None:
        """Report ranks, once for each set of ranks."""
        if ranks in self._known:
            return
        self._known.add(ranks)
        self._report(
            Incident(
                kind=KIND,
                step=step,
                decision="only reported: check the device",
                reason=reason,
                ranks=ranks,
                detail={"good_before": self._good_step},
            )
        )

    def _crash(self, step: int, ranks: tuple[int, ...], host: str, reason: str) -> Incident:
        """The incident of a failed device: a supervisor excludes its host."""
        return Incident(
            kind="crash",
            step=step,
            decision="restart without this host, from a checkpoint no later than step "
            f"{self._good_step}",
            reason=reason,
            ranks=ranks,
            detail={
                "incarnation": self._rules.incarnation,
                "cause": HARDWARE,
                "signature": f"audit: rank {ranks[0]}",
                "host": host,
                "traceback": "",
            },
        )
