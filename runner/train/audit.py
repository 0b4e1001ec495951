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

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from runner.data.cursor import BatchPlan
from runner.data.feed import MicroBatch
from runner.distributed.agreement import Ranks
from runner.engine.protocol import Engine, MicroStep
from runner.engine.randomness import same_randomness
from runner.health.heartbeat import Heartbeat
from runner.policy.decision.history import Incident
from runner.policy.restart import HARDWARE
from runner.system.error import RankError
from runner.system.parsing import json_text
from runner.train.own_gradients import OwnGradients

KIND = "audit"
_NOISE = 1e-2  # relative tolerance if the machine does not repeat bits
_REPEATS = 3  # computations before a rank is named
_DIGEST_BYTES = 6  # what a double holds exactly
_NAMED_GRADIENTS = 3


class Feed(Protocol):
    """The part of :class:`runner.data.feed.Feed` used here."""

    def read_again(self, plan: BatchPlan, rank: int) -> tuple[MicroBatch, ...]: ...


class Steps(Protocol):
    """The part of :class:`runner.train.step.Stepper` used here."""

    @property
    def newest_plan(self) -> BatchPlan | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRules:
    """
    Args:
        every: in updates.
        takes_whole_step: whether the engine computes only whole steps.
        repeats_bits: whether this machine gives the same bits for the same computation.
        seed: dropout seed.
        host, kind: host and kind of this rank's device; devices of one kind give equal bits.
        incarnation: number of this start.
    """

    every: int
    takes_whole_step: bool
    repeats_bits: bool
    seed: int
    host: str
    kind: str
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Opinion:
    """The result of a comparison: ``odd`` ranks differ from ``most``; between two ranks nothing
    shows which is wrong."""

    odd: tuple[int, ...] = ()
    is_clear: bool = False

    @property
    def agrees(self) -> bool:
        return not self.odd


class Auditor:
    """Compares the ranks.

    Args:
        report: receives incidents.
        distrust: called with the last step at which all agreed: checkpoints of later steps must not
            be used again.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        feed: Feed,
        steps: Steps,
        ranks: Ranks,
        heart: Heartbeat,
        rules: AuditRules,
        report: Callable[[Incident], None],
        distrust: Callable[[int], None],
    ) -> None:
        self._engine = engine
        self._feed = feed
        self._steps = steps
        self._ranks = ranks
        self._heart = heart
        self._rules = rules
        self._report = report
        self._distrust = distrust
        self._gradients = OwnGradients(engine.network)
        self._good_step = 0
        self._known: set[tuple[int, ...]] = set()

    def begin(self, good_step: int) -> None:
        """Record that the run resumes at ``good_step``, where no fault is known."""
        self._good_step = good_step

    def look(self, updates: int) -> None:
        """Audit if it is due. Collective.

        Raises:
            RankError: a rank computes wrongly each time, and its host can be excluded; raised on
                all.
        """
        plan = self._steps.newest_plan
        if updates % self._rules.every or self._ranks.world_size < 2 or plan is None:
            return
        self._heart.enter("explain")
        batches = self._batches(plan, updates // self._rules.every)
        if batches is None:
            return
        computed = [self._compare_ranks(batches)]
        if opinion_on(computed[0], exactly=self._rules.repeats_bits).agrees:
            self._good_step = updates
            return
        where: list[Mapping[str, Any]] = []
        while len(computed) < _REPEATS:
            computed.append(self._compare_ranks(batches))
            where = self._ranks.gather(self._by_parameter())
        self._judge(updates, computed, where)

    def _batches(self, plan: BatchPlan, number: int) -> list[MicroBatch] | None:
        """One rank's micro-batch, the same on all ranks; None if a rank cannot read it."""
        with same_randomness(self._engine.device):
            read = self._feed.read_again(plan, number % self._ranks.world_size)
        batches = list(read) if self._rules.takes_whole_step else list(read[:1])
        failed = any(batch.unreadable for batch in batches)
        return None if self._ranks.sum([float(failed)])[0] else batches

    def _compare_ranks(self, batches: Sequence[MicroBatch]) -> list[list[Any]]:
        """Compute once; of each rank the kind of its device and its numbers. Collective."""
        return self._ranks.gather([self._rules.kind, self._compute(batches)])

    def _compute(self, batches: Sequence[MicroBatch]) -> list[float]:
        """Compute without changing the state.

        Returns:
            The sequences' losses and gradient norms; then a digest of all gradients, or where bits
            do not repeat the norm of each.
        """
        device = self._engine.device
        works = [
            MicroStep(batch=batch.to(device), seed=self._rules.seed + number)
            for number, batch in enumerate(batches)
        ]
        with same_randomness(device):
            with self._gradients.over():
                sums = self._engine.accumulate(works)
            one = torch.ones((), device=device)
            self._engine.apply(skip=one, grad_scale=one, learning_rate=0.0)
        sequences = sums.sequences.to_host()
        own = self._by_parameter()
        gradients = [_digest(own)] if self._rules.repeats_bits else list(own.values())
        return [*sequences.losses, *sequences.gradient_norms, *gradients]

    def _by_parameter(self) -> dict[str, Any]:
        """Of this rank's gradients by themselves: checksums, or norms where bits do not repeat."""
        heard = self._gradients
        return heard.checksums() if self._rules.repeats_bits else heard.norms()

    def _judge(
        self, step: int, computed: Sequence[list[list[Any]]], where: Sequence[Mapping[str, Any]]
    ) -> None:
        """Judge several computations, and act on the result.

        Args:
            where: of each rank its gradients by parameter, of the last of them.
        """
        opinions = [opinion_on(one, exactly=self._rules.repeats_bits) for one in computed]
        ranks = named(computed, opinions)
        good = f"all ranks agreed at step {self._good_step}"
        if any(one.agrees for one in opinions):
            self._good_step = step
            whose = f"rank {ranks[0]} gave" if len(ranks) == 1 else "some rank gave"
            self._report_once(
                step, ranks, f"{whose} different bits for one micro-batch once; repeated, all agree"
            )
            return
        hosts = [str(host) for host in self._ranks.gather(self._rules.host)]
        if len(ranks) != 1:
            odd_ranks = " and ".join(map(str, opinions[0].odd))
            reason = (
                f"ranks {odd_ranks} give different bits for the same micro-batch, each time; "
                f"without a majority it is unknown which one is wrong; {good}"
            )
            self._report_once(step, opinions[0].odd, reason)
            return
        rank = ranks[0]
        kinds = [kind for kind, _ in computed[0]]
        other = next(r for r, kind in enumerate(kinds) if r != rank and kind == kinds[rank])
        reason = (
            f"rank {rank} on {hosts[rank]} gives other bits than the others for the same "
            f"micro-batch, {len(computed)} times of {len(computed)}"
            f"{differing(where[rank], where[other], exactly=self._rules.repeats_bits)}: its "
            f"device silently computes wrongly; {good}"
        )
        if len(set(hosts)) == 1:
            self._report_once(step, ranks, reason)
            return
        self._report(self._crash(step, rank, hosts[rank], reason))
        self._distrust(self._good_step)
        raise RankError(reason)

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

    def _crash(self, step: int, rank: int, host: str, reason: str) -> Incident:
        """The incident of a failed device: a supervisor excludes its host."""
        return Incident(
            kind="crash",
            step=step,
            decision="restart without this host, from a checkpoint no later than step "
            f"{self._good_step}",
            reason=reason,
            ranks=(rank,),
            detail={
                "incarnation": self._rules.incarnation,
                "cause": HARDWARE,
                "signature": f"audit: rank {rank}",
                "host": host,
                "traceback": "",
            },
        )


def opinion_on(by_rank: Sequence[Sequence[Any]], *, exactly: bool) -> Opinion:
    """Compare [kind of device, numbers] by rank, among ranks of the same kind only."""
    odd: list[int] = []
    is_clear = True
    for kind in dict.fromkeys(str(one[0]) for one in by_rank):
        members = {rank: one[1] for rank, one in enumerate(by_rank) if str(one[0]) == kind}
        groups: list[list[int]] = []
        for rank, numbers in members.items():
            alike = (g for g in groups if _alike(members[g[0]], numbers, exactly=exactly))
            group = next(alike, None)
            if group is None:
                groups.append([rank])
            else:
                group.append(rank)
        most = max(groups, key=len)
        is_majority = 2 * len(most) > len(members)
        is_clear = is_clear and is_majority
        if len(groups) > 1:
            odd += [
                rank for group in groups if group is not most or not is_majority for rank in group
            ]
    return Opinion(odd=tuple(sorted(odd)), is_clear=is_clear)


def named(
    computed: Sequence[Sequence[Sequence[Any]]], opinions: Sequence[Opinion]
) -> tuple[int, ...]:
    """The one rank at fault; empty if it is unknown.

    It is the rank outside the majority each time; without a majority, the only rank that does not
    repeat its own numbers.
    """
    against = [one for one in opinions if not one.agrees]
    if all(one.is_clear for one in against):
        ranks = set.intersection(*(set(one.odd) for one in against))
        alone = len(ranks) == 1 and all(len(one.odd) == 1 for one in against)
        return tuple(ranks) if alone else ()
    unsteady = [
        rank
        for rank, (_, first) in enumerate(computed[0])
        if any(not _alike(first, one[rank][1], exactly=True) for one in computed[1:])
    ]
    return tuple(unsteady) if len(unsteady) == 1 else ()


def differing(own: Mapping[str, Any], other: Mapping[str, Any], *, exactly: bool) -> str:
    """In words, the parameters whose gradients differ; empty where none do."""
    names = [
        name
        for name in own.keys() & other.keys()
        if not (
            own[name] == other[name]
            if exactly
            else _alike([own[name]], [other[name]], exactly=False)
        )
    ]
    if not names:
        return ""
    some = ", ".join(sorted(names)[:_NAMED_GRADIENTS])
    more = len(names) - _NAMED_GRADIENTS
    return f", in the gradients of {some}" + (f" and {more} more" if more > 0 else "")


def _digest(checksums: Mapping[str, int]) -> float:
    """A number that changes with any of them, the same on every machine."""
    text = json_text(checksums, sort_keys=True)
    return float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:_DIGEST_BYTES], "big"))


def _alike(one: Sequence[float], other: Sequence[float], *, exactly: bool) -> bool:
    if len(one) != len(other):
        return False
    floor = 0.0 if exactly else _NOISE
    return all(
        _bits(a) == _bits(b) or abs(a - b) <= floor * max(abs(a), abs(b)) > 0
        for a, b in zip(one, other, strict=True)
    )


def _bits(number: float) -> bytes:
    return struct.pack("<d", number)
