"""Proves the last checkpoint of a finished run, after which no clean steps can follow.

Instead, every value of the state must be finite, the held-out loss (or the loss of one more
forward pass over the last batch) within the guard's limits, and every byte on disk what was
written. Knows nothing of how a loss is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from runner.checkpoint.dtypes import is_finite
from runner.checkpoint.protocol import Ranks, ShardedState
from runner.checkpoint.ring import Ring
from runner.policy.decision.history import Incident
from runner.policy.retention.records import State
from runner.train.state import TrainState

Loss = Callable[[], float | None]  # nats per token, or None. Collective


class LastProof:
    """
    Args:
        last_batch: computes the loss over the batch that ends at the cursor.
        earlier: returns the newest held-out loss from before the last step.
        report: receives incidents, alike on every rank.
    """

    def __init__(
        self,
        *,
        ring: Ring,
        sharded: ShardedState,
        ranks: Ranks,
        state: TrainState,
        last_batch: Loss,
        earlier: Loss,
        report: Callable[[Incident], None],
    ) -> None:
        self._ring = ring
        self._sharded = sharded
        self._ranks = ranks
        self._state = state
        self._last_batch = last_batch
        self._earlier = earlier
        self._report = report

    def fault(self, held_out: Loss) -> str | None:
        """Prove the newest checkpoint on disk; returns why it is not clean, or None. Collective.

        A damaged checkpoint is tainted. One that fails for another reason is intact and can serve a
        restart.
        """
        ring = self._ring
        if ring.last_state is State.clean:  # a finished run was started again
            return None
        fault = self._fault_of_values() or self._fault_of_loss(held_out)
        fault = fault or "; ".join(ring.prove_last())
        if fault and ring.last_state is State.committed:
            self._report(
                Incident(
                    kind="unproven",
                    step=self._state.updates,
                    decision=f"end; the newest clean checkpoint is of step {ring.clean_step}",
                    reason=f"the last checkpoint failed its proof: {fault}",
                )
            )
        return fault or None

    def _fault_of_values(self) -> str | None:
        sound = [is_finite(shard.local) for shard in self._sharded.shards()]
        [num_unsound] = self._ranks.sum([float(not all(sound))])
        return f"{num_unsound:.0f} rank(s) hold NaN or Inf in the state" if num_unsound else None

    def _fault_of_loss(self, held_out: Loss) -> str | None:
        """Judge the end state by its loss, preferably held-out: the last batch was trained on.

        A held-out loss may be far above the training loss of a run that has memorised its data, or
        NaN because of one sample. So it counts against the state only relative to an earlier one.
        """
        baseline = self._state.baseline
        loss = held_out()
        if loss is not None and math.isfinite(loss):
            if loss <= baseline.end_limit():
                return None
            earlier = self._earlier()
            if earlier is not None:
                return _above("held-out loss", loss, baseline.end_limit(earlier))
        loss = self._last_batch()
        if loss is None or not math.isfinite(loss):
            return f"the loss over the last batch is {loss}"
        return _above("loss over the last batch", loss, baseline.end_limit())


def _above(what: str, loss: float, limit: float) -> str | None:
    return f"{what} {loss:.3f} > limit {limit:.3f}" if loss > limit else None
