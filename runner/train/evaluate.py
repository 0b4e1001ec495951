"""The held-out loss on a fixed set of samples, agreed among the ranks like a step.

All ranks learn of a problem (a sample that one rank cannot read, a loss that is not finite,
no counted token) with the loss; it becomes a journal line and does not end the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

from runner.data.cursor import Indices
from runner.data.dataset import Dataset
from runner.data.feed import Feed, describe
from runner.distributed.agreement import Ranks
from runner.engine.protocol import Engine, Evaluated
from runner.policy.decision.history import Incident
from runner.policy.decision.signals import NUM_LANES, all_equal, lanes
from runner.policy.decision.unreadable import Unreadable
from runner.system.error import RankError

# Places in the FP64 vector that is summed over ranks.
_LOSS, _TOKENS, _NONFINITE, _UNREADABLE = range(4)
_LANES = 4
_SQUARES = _LANES + NUM_LANES
_GROUPS = _SQUARES + NUM_LANES
_MOST_TOLD = 8  # samples that one rank names, and that a sentence names


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wrong:
    """What was wrong with an evaluation; ``who`` names samples."""

    reason: str
    who: list[Unreadable]
    num_unreadable: int
    num_nonfinite: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FixedSet:
    """Samples for repeated evaluation.

    ``indices`` are data set indices, the same at every evaluation and on any world size; ``what``
    names the set; ``groups`` is int64 [len(indices)], each sample's place in ``names``.
    """

    indices: Indices
    what: str = "held-out samples"
    names: tuple[str, ...] = ()
    groups: Indices | None = None


class Evaluator:
    """Computes the loss of ``samples``.

    Args:
        report: takes incidents, alike on every rank; one that a restart repeats is kept once.
        step: applied updates so far.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        feed: Feed,
        dataset: Dataset,
        ranks: Ranks,
        samples: FixedSet,
        report: Callable[[Incident], None],
        step: Callable[[], int],
    ) -> None:
        self._engine = engine
        self._dataset = dataset
        self._ranks = ranks
        self._samples = samples
        self._indices = samples.indices
        self._report = report
        self._step = step
        self._batches = feed.fixed(self._indices) if len(self._indices) else []
        self._told = ""
        self._by_group: dict[str, float] = {}

    def loss(self) -> float | None:
        """The loss in nats per token over the readable samples. Collective.

        NaN or infinite if a sample's loss is; None when nothing is held out, or no token counts.

        Raises:
            RankError: ranks are at different evaluations; raised alike on all of them.
        """
        if not self._batches:
            return None
        found = self._engine.evaluate([batch.to(self._engine.device) for batch in self._batches])
        sums = self._ranks.sum([*self._own_numbers(found), *self._own_groups(found)])
        if not all_equal(
            sums[_LANES:_SQUARES], sums[_SQUARES : _SQUARES + NUM_LANES], self._ranks.world_size
        ):
            identities = self._ranks.gather(self._identity())
            raise RankError(f"ranks drifted apart in an evaluation: {identities} by rank")
        loss = sums[_LOSS] / sums[_TOKENS] if sums[_TOKENS] else None
        groups = zip(self._samples.names, sums[_GROUPS::2], sums[_GROUPS + 1 :: 2], strict=True)
        self._by_group = {name: total / count for name, total, count in groups if count}
        if loss is None or not math.isfinite(loss) or sums[_NONFINITE] or sums[_UNREADABLE]:
            self._tell(found, is_counted=loss is not None)
        return loss

    def by_group(self) -> dict[str, float]:
        """The last loss of each group by name, without groups in which no token counts."""
        return dict(self._by_group)

    def _own_groups(self, found: Evaluated) -> list[float]:
        """The summed loss and the token count of each group, on this rank."""
        sums = [0.0] * (2 * len(self._samples.names))
        if self._samples.groups is None:
            return sums
        for batch, losses in zip(self._batches, found.losses, strict=True):
            rows = zip(batch.positions, losses.tolist(), batch.counts(), strict=True)
            for place, loss, count in rows:
                if place is not None and count:
                    group = int(self._samples.groups[place])
                    sums[2 * group] += loss
                    sums[2 * group + 1] += count
        return sums

    def _own_numbers(self, found: Evaluated) -> list[float]:
        numbers = [float(n) for n in lanes(repr(self._identity()))]
        total = float(found.total.item())
        return [
            total,
            float(found.num_tokens),
            float(not math.isfinite(total)),
            float(any(batch.unreadable for batch in self._batches)),
            *numbers,
            *(n * n for n in numbers),
        ]

    def _identity(self) -> list[int]:
        return [self._step(), len(self._indices), int(self._indices.sum()), len(self._batches)]

    def _tell(self, found: Evaluated, *, is_counted: bool) -> None:
        """Report a problem, unless the last evaluation had the same. Collective."""
        wrong = self._wrong(found, is_counted=is_counted)
        if wrong.reason == self._told:
            return
        self._told = wrong.reason
        self._report(
            Incident(
                kind="evaluation",
                step=self._step(),
                decision="go on",
                reason=wrong.reason,
                ranks=tuple(sorted({one.rank for one in wrong.who})),
                sample_ids=tuple(one.name for one in wrong.who),
                detail={
                    "places": [one.position for one in wrong.who],
                    "indices": [one.index for one in wrong.who],
                    "errors": [one.words for one in wrong.who],
                    "num_unreadable": wrong.num_unreadable,
                    "num_nonfinite": wrong.num_nonfinite,
                },
            )
        )

    def _wrong(self, found: Evaluated, *, is_counted: bool) -> _Wrong:
        """The problem from all ranks' samples, the same on all ranks."""
        unreadable = [one for batch in self._batches for one in batch.unreadable]
        nonfinite = self._nonfinite(found)
        own = [
            [len(unreadable), [asdict(one) for one in unreadable[:_MOST_TOLD]]],
            [len(nonfinite), [asdict(one) for one in nonfinite[:_MOST_TOLD]]],
        ]
        by_rank = self._ranks.gather(own)
        numbers, who = [0, 0], []
        for at in (0, 1):
            numbers[at] = sum(of_rank[at][0] for of_rank in by_rank)
            rows = [Unreadable(**row) for of_rank in by_rank for row in of_rank[at][1]]
            who.append(sorted(rows, key=lambda one: one.position)[:_MOST_TOLD])
        of = f"of {len(self._indices)} {self._samples.what}"
        words = [
            *_sentence(numbers[0], f"{of} cannot be read and are left out", who[0]),
            *_sentence(numbers[1], f"{of} have a loss that is not finite", who[1]),
            *([] if is_counted else [f"no token {of} counts: there is no loss"]),
        ]
        return _Wrong(
            reason="; ".join(words),
            who=[*who[0], *who[1]],
            num_unreadable=numbers[0],
            num_nonfinite=numbers[1],
        )

    def _nonfinite(self, found: Evaluated) -> list[Unreadable]:
        """This rank's sequences whose loss is NaN or infinite."""
        rows = []
        for batch, losses in zip(self._batches, found.losses, strict=True):
            for place, loss in zip(batch.positions, losses.tolist(), strict=True):
                if place is not None and not math.isfinite(loss):
                    index = int(self._indices[place])
                    rows.append(
                        Unreadable(
                            rank=self._ranks.rank,
                            position=place,
                            index=index,
                            name=describe(self._dataset, index),
                            words=f"loss {loss}",
                            refused=False,
                        )
                    )
        return rows


def _sentence(number: int, what: str, who: list[Unreadable]) -> list[str]:
    if not number:
        return []
    named = "; ".join(f"{one.name} on rank {one.rank}: {one.words}" for one in who)
    rest = f"; and {number - len(who)} more" if number > len(who) else ""
    return [f"{number} {what}: {named}{rest}"]
