"""The held-out loss on a fixed set of samples, agreed among the ranks like a step.

All ranks learn of a problem together with the loss: a sample that one rank cannot read, a loss that
is not finite, or no counted token. It becomes a journal line and does not end the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

from runner.data.cursor import Indices
from runner.data.dataset import Dataset, describe
from runner.data.feed import Feed
from runner.distributed.agreement import Ranks
from runner.engine.protocol import Engine, Evaluated
from runner.health.preemption import StopLook
from runner.policy.decision.history import Incident
from runner.policy.decision.signals import NUM_LANES, all_equal, lanes
from runner.policy.decision.unreadable import Unreadable
from runner.system.error import RankError

# Indices into the FP64 vector that is summed over ranks.
_LOSS, _TOKENS, _NONFINITE, _UNREADABLE = range(4)
_LANES = 4
_SQUARES = _LANES + NUM_LANES
_GROUPS = _SQUARES + NUM_LANES
_MOST_NAMED = 8  # samples that one rank names, and that one sentence names


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """The problem with an evaluation; ``samples`` are the affected ones."""

    reason: str
    who: list[Unreadable]
    num_unreadable: int
    num_nonfinite: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FixedSet:
    """Samples for repeated evaluation.

    ``indices`` are data set indices, the same at every evaluation and world size; ``what`` names
    the set; ``groups`` is int64 [len(indices)], each sample's index into ``names``.
    """

    indices: Indices
    what: str = "held-out samples"
    names: tuple[str, ...] = ()
    groups: Indices | None = None


class Evaluator:
    """Computes the loss of ``samples``.

    Args:
        report: receives incidents, alike on every rank; records a repeated one only once.
        step: returns the applied updates so far.
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
        stop: StopLook,
    ) -> None:
        self._engine = engine
        self._dataset = dataset
        self._ranks = ranks
        self._samples = samples
        self._indices = samples.indices
        self._report = report
        self._step = step
        self._stop = stop
        self._batches = feed.fixed(self._indices) if len(self._indices) else []
        self._reported = ""
        self._by_group: dict[str, float] = {}

    def loss(self) -> float | None:
        """The loss in nats per token over the readable samples. Collective.

        NaN or infinite if a sample's loss is; None if nothing is held out or no token counts.

        Raises:
            RankError: ranks are at different evaluations; raised alike on all of them.
            StopRequested: a rank was asked to stop before the last batch.
        """
        if not self._batches:
            return None
        evaluated = self._engine.evaluate(
            self._stop.over([batch.to(self._engine.device) for batch in self._batches])
        )
        sums = self._ranks.sum([*self._own_numbers(evaluated), *self._own_groups(evaluated)])
        if not all_equal(
            sums[_LANES:_SQUARES], sums[_SQUARES : _SQUARES + NUM_LANES], self._ranks.world_size
        ):
            identities = self._ranks.gather(self._identity())
            raise RankError(f"ranks drifted apart in an evaluation: {identities} by rank")
        loss = sums[_LOSS] / sums[_TOKENS] if sums[_TOKENS] else None
        groups = zip(self._samples.names, sums[_GROUPS::2], sums[_GROUPS + 1 :: 2], strict=True)
        self._by_group = {name: total / count for name, total, count in groups if count}
        if loss is None or not math.isfinite(loss) or sums[_NONFINITE] or sums[_UNREADABLE]:
            self._report_problem(evaluated, is_counted=loss is not None)
        return loss

    def by_group(self) -> dict[str, float]:
        """The last loss of each group by name, without groups in which no token counts."""
        return dict(self._by_group)

    def _own_groups(self, evaluated: Evaluated) -> list[float]:
        """The summed loss and the token count of each group, on this rank."""
        sums = [0.0] * (2 * len(self._samples.names))
        if self._samples.groups is None:
            return sums
        for batch, losses in zip(self._batches, evaluated.losses, strict=True):
            rows = zip(batch.positions, losses.tolist(), batch.counts(), strict=True)
            for place, loss, count in rows:
                if place is not None and count:
                    group = int(self._samples.groups[place])
                    sums[2 * group] += loss
                    sums[2 * group + 1] += count
        return sums

    def _own_numbers(self, evaluated: Evaluated) -> list[float]:
        numbers = [float(n) for n in lanes(repr(self._identity()))]
        total = float(evaluated.total.item())
        return [
            total,
            float(evaluated.num_tokens),
            float(not math.isfinite(total)),
            float(any(batch.unreadable for batch in self._batches)),
            *numbers,
            *(n * n for n in numbers),
        ]

    def _identity(self) -> list[int]:
        return [self._step(), len(self._indices), int(self._indices.sum()), len(self._batches)]

    def _report_problem(self, evaluated: Evaluated, *, is_counted: bool) -> None:
        """Report a problem, unless the last evaluation had the same. Collective."""
        problem = self._problem(evaluated, is_counted=is_counted)
        if problem.reason == self._reported:
            return
        self._reported = problem.reason
        self._report(
            Incident(
                kind="evaluation",
                step=self._step(),
                decision="go on",
                reason=problem.reason,
                ranks=tuple(sorted({one.rank for one in problem.who})),
                sample_ids=tuple(one.name for one in problem.who),
                detail={
                    "places": [one.position for one in problem.who],
                    "indices": [one.index for one in problem.who],
                    "errors": [one.error for one in problem.who],
                    "num_unreadable": problem.num_unreadable,
                    "num_nonfinite": problem.num_nonfinite,
                },
            )
        )

    def _problem(self, evaluated: Evaluated, *, is_counted: bool) -> _Problem:
        """The problem from all ranks' samples, the same on all ranks."""
        unreadable = [one for batch in self._batches for one in batch.unreadable]
        nonfinite = self._nonfinite(evaluated)
        own = [
            [len(unreadable), [asdict(one) for one in unreadable[:_MOST_NAMED]]],
            [len(nonfinite), [asdict(one) for one in nonfinite[:_MOST_NAMED]]],
        ]
        by_rank = self._ranks.gather(own)
        numbers, samples = [0, 0], []
        for at in (0, 1):
            numbers[at] = sum(of_rank[at][0] for of_rank in by_rank)
            rows = [Unreadable(**row) for of_rank in by_rank for row in of_rank[at][1]]
            samples.append(sorted(rows, key=lambda one: one.position)[:_MOST_NAMED])
        of = f"of {len(self._indices)} {self._samples.what}"
        sentences = [
            *_sentence(numbers[0], f"{of} cannot be read and are left out", samples[0]),
            *_sentence(numbers[1], f"{of} have a loss that is not finite", samples[1]),
            *([] if is_counted else [f"no token {of} counts: there is no loss"]),
        ]
        return _Problem(
            reason="; ".join(sentences),
            who=[*samples[0], *samples[1]],
            num_unreadable=numbers[0],
            num_nonfinite=numbers[1],
        )

    def _nonfinite(self, evaluated: Evaluated) -> list[Unreadable]:
        """This rank's sequences whose loss is NaN or infinite."""
        rows = []
        for batch, losses in zip(self._batches, evaluated.losses, strict=True):
            for place, loss in zip(batch.positions, losses.tolist(), strict=True):
                if place is not None and not math.isfinite(loss):
                    index = int(self._indices[place])
                    rows.append(
                        Unreadable(
                            rank=self._ranks.rank,
                            position=place,
                            index=index,
                            name=describe(self._dataset, index),
                            error=f"loss {loss}",
                            refused=False,
                        )
                    )
        return rows


def _sentence(number: int, what: str, samples: list[Unreadable]) -> list[str]:
    if not number:
        return []
    named = "; ".join(f"{one.name} on rank {one.rank}: {one.error}" for one in samples)
    rest = f"; and {number - len(samples)} more" if number > len(samples) else ""
    return [f"{number} {what}: {named}{rest}"]
