"""Finds a rank that silently computes wrongly: every rank computes the same micro-batch.

Most faults of a device raise no error. At intervals each rank computes the same micro-batch with
the gate closed, another rank's each time, and the bits of each sequence's loss, of its gradient at
the embedding, and of each weight's gradient before it is reduced are compared: devices of one kind
must give the same. It costs one micro-batch (under ZeRO a step, because DeepSpeed counts them), and
a wait for the device.

Between two ranks that differ, or two against two, no majority shows which are wrong. The weights of
a checkpoint from before the difference do: those ranks are at fault that no longer compute what all
once computed with them.

Not detected: a fault in the sum over ranks or in the update alone; gradients inside of blocks that
are compiled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from runner.checkpoint.ring import CheckpointRing
from runner.data.cursor import BatchPlan
from runner.data.feed import MicroBatch
from runner.engine.modes import drop_gradients
from runner.engine.protocol import MicroStep
from runner.explain.probe import CleanWeights
from runner.health.rank_checks import DeviceFault, ReplicaInspector, device_kind, sum_of_words
from runner.policy.decision.history import Incident
from runner.policy.outlier_ranks import (
    ByRank,
    Opinion,
    changed_ranks,
    differing,
    dissent,
    named,
    opinion_on,
)
from runner.policy.retention.records import Record, State, on_disk
from runner.system.error import LeaveError
from runner.system.generators import kept_generators
from runner.system.parsing import json_text
from runner.system.process import host_name
from runner.train.run import EngineRun
from runner.train.save_schedule import SaveSchedule

_DIGEST_BYTES = 6  # what a double holds exactly
_FACTOR = 0x3F58476D1CE4E5B9  # odd: no micro-batch's checksum is lost


class SameBatch:
    """Computes a micro-batch on every rank."""

    def __init__(self, run: EngineRun, seed: int) -> None:
        self._engine, self._feed, self._ranks = run.engine, run.feed, run.observers.ranks
        self._stop = run.group.stop_look.through(self._ranks)
        self._kind = device_kind(run.group.device)  # devices of one kind give equal bits
        self._seed = seed
        self.repeats_bits = run.repeats_bits
        self._gradients = OwnGradients(run.engine.network)

    def batches(self, plan: BatchPlan, number: int) -> list[MicroBatch] | None:
        """One rank's micro-batch, the same on all ranks; None if a rank cannot read it.

        Collective.
        """
        self._stop.now()
        with kept_generators(self._engine.device):
            read = self._feed.read_again(plan, number % self._ranks.world_size)
        batches = list(read[: self._engine.works_a_step])
        failed = any(batch.unreadable for batch in batches)
        return None if self._ranks.sum([float(failed)])[0] else batches

    def compute(self, batches: Sequence[MicroBatch]) -> ByRank:
        """Compute once; of each rank the kind of its device and its numbers. Collective."""
        return self._ranks.gather([self._kind, self._own_numbers(batches)])

    def _own_numbers(self, batches: Sequence[MicroBatch]) -> list[float]:
        """Compute without changing the state.

        Returns:
            The sequences' losses and gradient norms; then a digest of all gradients, or where bits
            do not repeat the norm of each.
        """
        device = self._engine.device
        works = [
            MicroStep(batch=batch.to(device), seed=self._seed + number)
            for number, batch in enumerate(batches)
        ]
        self._ranks.ready()
        with kept_generators(device):
            with self._gradients.over():
                sums = self._engine.accumulate(self._stop.over(works))
            drop_gradients(self._engine)
        sequences = sums.sequences.to_host()
        own = self.by_parameter()
        gradients = [_digest(own)] if self.repeats_bits else list(own.values())
        return [*sequences.losses, *sequences.gradient_norms, *gradients]

    def by_parameter(self) -> dict[str, Any]:
        """Of this rank's gradients by themselves: checksums, or norms where bits do not repeat."""
        heard = self._gradients
        return heard.checksums() if self.repeats_bits else heard.norms()


def _digest(checksums: Mapping[str, int]) -> float:
    """A number that changes with any of them, the same on every machine."""
    text = json_text(checksums, sort_keys=True)
    return float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:_DIGEST_BYTES], "big"))


class OwnGradients:
    """Checksums of the gradients that this rank computes, before ranks are summed.

    Records them in the backward passes of ``network`` inside of :meth:`over`. In a reduced
    gradient a small error of one rank disappears. The gradient that autograd gives to a parameter
    is still this rank's own, and whole, on every engine.
    """

    def __init__(self, network: nn.Module) -> None:
        # A hook inside of a compiled block would have it compiled anew.
        self._compiled = tuple(
            f"{name}."
            for name, module in network.named_modules()
            if getattr(module, "_compiled_call_impl", None) is not None
        )
        self._modules = {
            name: module
            for name, module in network.named_modules()
            if not f"{name}.".startswith(self._compiled)
        }
        self._sums: dict[str, Tensor] = {}
        self._squares: dict[str, Tensor] = {}
        # The tensors themselves: an id alone could be another's by the next micro-batch.
        self._known: dict[int, Tensor] = {}
        self._handles: list[RemovableHandle] = []

    @contextmanager
    def over(self) -> Iterator[None]:
        """Record the gradients computed inside; earlier ones are dropped."""
        self._sums, self._squares = {}, {}
        # A shard is no leaf of the graph: its whole parameter is there from its module's forward
        # pass on. Parents too, for some use the parameters of modules that they never call.
        self._handles = [
            module.register_forward_pre_hook(partial(self._at_module, name))
            for name, module in self._modules.items()
        ]
        try:
            yield
        finally:
            for handle in self._handles:
                handle.remove()
            self._handles, self._known = [], {}

    def checksums(self) -> dict[str, int]:
        """Of each parameter that got a gradient, one that changes with any bit. Waits."""
        return _on_host(self._sums)

    def norms(self) -> dict[str, float]:
        """Of each parameter that got a gradient, its norm over all micro-batches. Waits."""
        return {name: square**0.5 for name, square in _on_host(self._squares).items()}

    def _at_module(self, prefix: str, module: nn.Module, inputs: object) -> None:
        for name, parameter in module.named_parameters(prefix):
            is_whole = not isinstance(parameter, DTensor) and parameter.requires_grad
            if not is_whole or id(parameter) in self._known or name.startswith(self._compiled):
                continue
            self._known[id(parameter)] = parameter
            heard = partial(self._at_gradient, name)
            self._handles.append(parameter.register_hook(heard))  # type: ignore[no-untyped-call]

    def _at_gradient(self, name: str, gradient: Tensor) -> None:
        if gradient.layout is not torch.strided or not gradient.is_floating_point():
            return
        checksum = sum_of_words(gradient)
        square = torch.linalg.vector_norm(gradient, dtype=torch.float32).double().square()
        if name in self._sums:
            checksum = self._sums[name] * _FACTOR + checksum
            square = self._squares[name] + square
        self._sums[name], self._squares[name] = checksum, square


def _on_host(numbers: dict[str, Tensor]) -> dict[str, Any]:
    """By name in order, with one wait."""
    names = sorted(numbers)
    values = torch.stack([numbers[name] for name in names]).tolist() if names else []
    return dict(zip(names, values, strict=True))


_REPEATS = 3  # computations before a rank is named
_TIES = (2, 4)  # world sizes at which half of the ranks may differ from the others
_KEPT = 2  # agreements; the newest one's checkpoint may not be written yet


@dataclass(frozen=True, slots=True)
class _Agreement:
    """All ranks had the same numbers: ``by_rank``, of ``batches``.

    They computed with the weights of the checkpoint ``serial``, of ``step``.
    """

    serial: int
    step: int
    batches: Sequence[MicroBatch]
    by_rank: ByRank


@dataclass(frozen=True, slots=True)
class Changed:
    """``ranks`` no longer compute what they did with the weights of ``step``; the others do."""

    ranks: tuple[int, ...]
    step: int


class AgreedNumbers:
    """The newest agreements, alike on all ranks, and the checkpoints that they need.

    Args:
        is_saved: whether the state after so many updates is saved to disk.
    """

    def __init__(
        self,
        *,
        same: SameBatch,
        weights: CleanWeights,
        ring: CheckpointRing,
        is_saved: Callable[[int], bool],
    ) -> None:
        self._same, self._weights, self._ring, self.is_saved = same, weights, ring, is_saved
        self._agreements: list[_Agreement] = []

    @property
    def newest_step(self) -> int | None:
        """The step of the newest agreement; None without one."""
        return self._agreements[-1].step if self._agreements else None

    def keep_from_before(self, good_step: Callable[[], int]) -> None:
        """Have the ring keep a clean checkpoint of ``good_step()`` or earlier, and the one of the
        newest agreement: if a rank turns out to be wrong, later ones must not be used again."""

        def serials() -> set[int]:
            clean = self._on_disk(State.clean)
            before = [record.serial for record in clean if record.step <= good_step()]
            _, agreed = self._newest(clean) or (None, None)
            return {*sorted(before)[-1:], *([agreed.serial] if agreed else [])}

        self._ring.also_keep(serials)

    def begin(self, step: int, batches: Sequence[MicroBatch]) -> None:
        """Compute with the newest checkpoint of ``step`` or earlier; the state is restored.

        Collective.
        """
        loadable = self._on_disk(State.clean, State.committed)
        usable = [record for record in loadable if record.step <= step]
        if usable:
            record = max(usable, key=lambda record: record.serial)
            by_rank = self._weights.compute(record, lambda: self._same.compute(batches))
            self._note(record.serial, record.step, batches, by_rank)

    def note_if_saved(self, updates: int, batches: Sequence[MicroBatch], by_rank: ByRank) -> None:
        """Note what the ranks computed with the present weights, if they are about to be saved."""
        if self.is_saved(updates):
            self._note(self._ring.next_serial, updates, batches, by_rank)

    def _note(
        self, serial: int, step: int, batches: Sequence[MicroBatch], by_rank: ByRank | None
    ) -> None:
        if by_rank is not None and opinion_on(by_rank, exactly=self._same.repeats_bits).agrees:
            new = _Agreement(serial, step, batches, by_rank)
            self._agreements = [*self._agreements, new][-_KEPT:]

    def changed(self, batches: Sequence[MicroBatch]) -> Changed | None:
        """Compute the newest agreement again with its weights; the state is restored. Collective.

        Args:
            batches: what the ranks computed last. Micro-batches of another size may give other bits
                on a sound device too, so they prove nothing.

        Returns:
            None if no rank differs from what it computed then, or all do.
        """
        newest = self._newest(self._on_disk(State.clean, State.committed))
        if newest is None:
            return None
        record, agreement = newest
        if [batch.shape for batch in agreement.batches] != [batch.shape for batch in batches]:
            return None
        again = self._weights.compute(record, lambda: self._same.compute(agreement.batches))
        if again is None:
            return None
        ranks = changed_ranks(agreement.by_rank, again, exactly=self._same.repeats_bits)
        return Changed(ranks, agreement.step) if ranks else None

    def _newest(self, records: Sequence[Record]) -> tuple[Record, _Agreement] | None:
        """The newest agreement whose checkpoint is among them."""
        stored = {(record.serial, record.step): record for record in records}
        for agreement in reversed(self._agreements):
            if (agreement.serial, agreement.step) in stored:
                return stored[agreement.serial, agreement.step], agreement
        return None

    def _on_disk(self, *states: State) -> list[Record]:
        return [record for record in on_disk(self._ring.records) if record.state in states]


class Auditor:
    """Compares the ranks.

    Args:
        same: computes a micro-batch on all.
        agreed: what the ranks agreed on, to tell which of two is wrong.
        every: steps between audits; ``until``: the last step of the run.
        replicas: compares the copies of the weights before a device is blamed.
    """

    def __init__(
        self,
        run: EngineRun,
        *,
        same: SameBatch,
        agreed: AgreedNumbers,
        replicas: ReplicaInspector,
        every: int,
        until: int,
    ) -> None:
        self._run, self._same, self._agreed, self._replicas = run, same, agreed, replicas
        self._ranks = run.observers.ranks
        self._every, self._until = every, until
        self._host = host_name()
        self._begun = self._good_step = 0
        self._known: set[tuple[int, ...]] = set()

    @classmethod
    def of(
        cls,
        run: EngineRun,
        replicas: ReplicaInspector,
        saves: SaveSchedule,
        *,
        every: int,
        until: int,
        seed: int,
    ) -> Auditor | None:
        """None if it is off; ``seed``: the run's."""
        if not every or run.group.place.world_size < 2:
            return None
        same = SameBatch(run, seed)
        agreed = AgreedNumbers(
            same=same, weights=CleanWeights(run), ring=run.ring, is_saved=saves.is_due_on_disk
        )
        auditor = cls(run, same=same, agreed=agreed, replicas=replicas, every=every, until=until)
        auditor.begin(run.resumed.step)
        return auditor

    def begin(self, good_step: int) -> None:
        """Record that the run resumes at ``good_step``, where no fault is known."""
        self._begun = self._good_step = good_step
        self._agreed.keep_from_before(lambda: self._good_step)

    def is_due(self, updates: int) -> bool:
        """Whether :meth:`look` uses the state after exactly ``updates`` updates."""
        is_regular = updates % self._every == 0
        return is_regular or self._is_start(updates) or self._is_for_checkpoint(updates)

    def _is_start(self, updates: int) -> bool:
        """Whether two or four ranks are compared after the first update of this start.

        A later audit needs their numbers to tell which ranks are wrong. Not before that update,
        which settles which micro-batches fit into memory.
        """
        if self._ranks.world_size not in _TIES or self._agreed.newest_step is not None:
            return False
        return updates == self._begun + 1 and self._begun + self._every <= self._until

    def _is_for_checkpoint(self, updates: int) -> bool:
        """Whether two or four ranks are compared because a checkpoint is saved between audits."""
        newest = self._agreed.newest_step
        if self._ranks.world_size not in _TIES or newest is None:
            return False
        return updates - newest >= self._every and self._agreed.is_saved(updates)

    def note(self, updates: int) -> None:
        """Note the number of updates, which is less after a rollback."""
        self._good_step = min(self._good_step, updates - 1)

    def look(self, updates: int) -> None:
        """Audit if it is due. Collective.

        Raises:
            LeaveError: a rank computes wrongly each time, and its host can be excluded; raised on
                all.
        """
        plan = self._run.stepper.newest_plan
        if plan is None or not self.is_due(updates):
            return
        self._run.group.heart.enter("explain")
        batches = self._same.batches(plan, updates // self._every)
        if batches is None:
            return
        if self._is_start(updates):
            self._agreed.begin(self._begun, batches)
            if updates % self._every:
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
        opinions = [self._opinion(by_rank) for by_rank in computed]
        ranks = named(computed, opinions)
        good = (
            f"all ranks agreed at step {self._good_step}"
            if self._good_step > self._begun
            else f"no audit since the start at step {self._begun} found all ranks agreed"
        )
        if any(opinion.agrees for opinion in opinions):
            self._good_step = step
            whose = f"rank {ranks[0]} gave" if len(ranks) == 1 else "some rank gave"
            self._report_once(
                step, ranks, f"{whose} different bits for one micro-batch once; repeated, all agree"
            )
            return
        self._replicas.look(step, self._good_step)
        hosts = [str(host) for host in self._ranks.gather(self._host)]
        before = None if len(ranks) == 1 else self._agreed.changed(batches)
        if before is not None and set(before.ranks) < set(opinions[0].odd):
            ranks = before.ranks
        if not ranks:
            words = dissent(computed[0], opinions[0], exactly=self._same.repeats_bits)
            self._report_once(step, opinions[0].odd, f"{words}; {good}")
            return
        kinds = [kind for kind, _ in computed[0]]
        sound = [rank for rank in range(len(kinds)) if rank not in ranks]
        other = min(sound, key=lambda rank: kinds[rank] != kinds[ranks[0]])
        at = differing(where[ranks[0]], where[other], exactly=self._same.repeats_bits)
        reason = f"{_accusation(ranks, hosts, len(computed), at, before)}; {good}"
        if len(set(hosts)) == 1:
            self._report_once(step, ranks, reason)
            return
        fault = DeviceFault(ranks=ranks, host=hosts[ranks[0]], reason=reason)
        crash = fault.incident(
            step=step,
            incarnation=self._run.lease.number,
            signature=f"audit: rank {ranks[0]}",
            decision="restart without this host, from a checkpoint no later than step "
            f"{self._good_step}",
        )
        self._run.written.report(crash)
        self._replicas.distrust(self._good_step)
        raise LeaveError(reason)

    def _report_once(self, step: int, ranks: tuple[int, ...], reason: str) -> None:
        """Report ranks, once for each set of ranks."""
        if ranks in self._known:
            return
        self._known.add(ranks)
        self._run.written.report(
            Incident(
                kind="audit",
                step=step,
                decision="only reported: check the device",
                reason=reason,
                ranks=ranks,
                detail={"good_before": self._good_step},
            )
        )


def _accusation(
    ranks: Sequence[int], hosts: Sequence[str], times: int, at: str, before: Changed | None
) -> str:
    """In words, how these ranks compute wrongly."""
    is_one, end = len(ranks) == 1, ""
    if before is not None:
        end = (
            f"; with the weights of the checkpoint of step {before.step} "
            f"{'it no longer gives' if is_one else 'they no longer give'} the bits on which all "
            "agreed then, and the others do"
        )
    return (
        f"rank{'' if is_one else 's'} {' and '.join(f'{rank} on {hosts[rank]}' for rank in ranks)} "
        f"give{'s' if is_one else ''} other bits than the others for the same micro-batch, "
        f"{times} times of {times}{at}{end}: "
        f"{'its device silently computes' if is_one else 'their devices silently compute'} wrongly"
    )
