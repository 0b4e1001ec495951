"""What the ranks computed with the weights of a checkpoint when all agreed.

Between two ranks that differ, or two against two, no majority shows which are wrong. The weights of
a checkpoint from before the difference do: those ranks are at fault that no longer compute what all
once computed with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runner.checkpoint.ring import Ring
from runner.data.feed import MicroBatch
from runner.explain.clean_weights import CleanWeights
from runner.explain.same_batch import SameBatch
from runner.policy.odd_ranks import ByRank, changed_ranks, opinion_on
from runner.policy.retention.records import Record, State, on_disk

_KEPT = 2  # the newest agreement's checkpoint may not be written yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """All ranks had the same numbers.

    Args:
        serial, step: of the checkpoint whose weights they computed with.
        batches: what each of them computed.
        by_rank: their numbers.
    """

    serial: int
    step: int
    batches: Sequence[MicroBatch]
    by_rank: ByRank


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """``ranks`` no longer compute what they did with the weights of ``step``; the others do."""

    ranks: tuple[int, ...]
    step: int

    @property
    def sentence(self) -> str:
        who = "it no longer gives" if len(self.ranks) == 1 else "they no longer give"
        return (
            f"; with the weights of the checkpoint of step {self.step} {who} the bits on which all "
            "agreed then, and the others do"
        )


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
        ring: Ring,
        is_saved: Callable[[int], bool],
    ) -> None:
        self._same = same
        self._weights = weights
        self._ring = ring
        self.is_saved = is_saved
        self._agreements: list[Agreement] = []

    @property
    def newest_step(self) -> int | None:
        """The step of the newest agreement; None without one."""
        return self._agreements[-1].step if self._agreements else None

    def keep_from_before(self, good_step: Callable[[], int]) -> None:
        """Have the ring keep a clean checkpoint of ``good_step()`` or earlier, and the one of the
        newest agreement: if a rank turns out to be wrong, later ones must not be used again."""

        def serials() -> set[int]:
            clean = self._on_disk(State.clean)
            before = [one.serial for one in clean if one.step <= good_step()]
            agreed = self._newest(clean)
            return {*sorted(before)[-1:], *([agreed.serial] if agreed else [])}

        self._ring.also_keep(serials)

    def begin(self, step: int, batches: Sequence[MicroBatch]) -> None:
        """Compute with the newest checkpoint of ``step`` or earlier; the state is restored.

        Collective.
        """
        loadable = self._on_disk(State.clean, State.committed)
        usable = [record for record in loadable if record.step <= step]
        if not usable:
            return
        record = max(usable, key=lambda one: one.serial)
        by_rank = self._weights.compute(record, lambda: self._same.compute(batches))
        if by_rank is not None:
            self._note(record.serial, record.step, batches, by_rank)

    def note_if_saved(self, updates: int, batches: Sequence[MicroBatch], by_rank: ByRank) -> None:
        """Note what the ranks computed with the present weights, if they are about to be saved."""
        if self.is_saved(updates):
            self._note(self._ring.next_serial, updates, batches, by_rank)

    def _note(self, serial: int, step: int, batches: Sequence[MicroBatch], by_rank: ByRank) -> None:
        if opinion_on(by_rank, exactly=self._same.repeats_bits).agrees:
            new = Agreement(serial=serial, step=step, batches=batches, by_rank=by_rank)
            self._agreements = [*self._agreements, new][-_KEPT:]

    def changed(self, batches: Sequence[MicroBatch]) -> Changed | None:
        """Compute the newest agreement again with its weights; the state is restored. Collective.

        Args:
            batches: what the ranks computed last. Micro-batches of another size may give other bits
                on a sound device too, so they prove nothing.

        Returns:
            None if no rank differs from what it computed then, or all do.
        """
        loadable = self._on_disk(State.clean, State.committed)
        agreement = self._newest(loadable)
        if agreement is None or _shapes(agreement.batches) != _shapes(batches):
            return None
        record = next(one for one in loadable if one.serial == agreement.serial)
        again = self._weights.compute(record, lambda: self._same.compute(agreement.batches))
        if again is None:
            return None
        ranks = changed_ranks(agreement.by_rank, again, exactly=self._same.repeats_bits)
        return Changed(ranks=ranks, step=agreement.step) if ranks else None

    def _newest(self, records: Sequence[Record]) -> Agreement | None:
        """The newest agreement whose checkpoint is among them."""
        stored = {(record.serial, record.step) for record in records}
        known = (one for one in reversed(self._agreements) if (one.serial, one.step) in stored)
        return next(known, None)

    def _on_disk(self, *states: State) -> list[Record]:
        return [record for record in on_disk(self._ring.records) if record.state in states]


def _shapes(batches: Sequence[MicroBatch]) -> list[list[int]]:
    return [one.shape for one in batches]
