"""A finding in a curve: its signature, rows, evidence and remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from runner.tools.reading.curve import Curve

Confidence = Literal["low", "medium", "high"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One signature found in a curve.

    Args:
        signature: one of :data:`SIGNATURES`.
        first: the first row of the curve that shows it.
        last: the last row that shows it; -1: the curve's last.
        evidence: one sentence with the observed numbers.
        remedy: what to try.
        confidence: how rarely healthy curves look like this.
    """

    signature: str
    first: int
    evidence: str
    remedy: str
    last: int = -1
    confidence: Confidence = "medium"

    def to_json(self, curve: Curve) -> dict[str, Any]:
        """Plain values; rows count from 0, and ranges of rows and steps include both ends."""
        return {
            "signature": self.signature,
            "rows": [self.first, range(len(curve))[self.last]],
            "steps": [int(curve.steps[self.first]), int(curve.steps[self.last])],
            "evidence": self.evidence,
            "try": self.remedy,
            "confidence": self.confidence,
        }


# Each signature and its meaning, in the order in which findings are listed.
SIGNATURES = {
    "not_finite": "a loss that is NaN or infinite",
    "divergence": "the loss ends well above its best",
    "spike": "the loss jumps and comes back",
    "level_shift": "the loss jumps once and continues from the new level",
    "rate_too_high": "the loss rises or stalls while the rate is high",
    "rate_too_low": "the loss falls slowly, and as steadily at the end as at the start",
    "warmup_too_long": "the rate still rises while the loss has hardly moved",
    "vanishing_gradients": "little or no gradient, in all layers or in the first ones",
    "degenerate_batches": "batches with few distinct tokens",
    "plateau": "the loss stays high, and nothing logged explains it",
    "floor_early": "the rate reaches its floor early, and progress ends there",
    "norm_creep": "the gradient norm rises through the whole run",
    "overfitting": "the held-out loss rises while the training loss falls",
    "held_out_below_training": "the held-out loss is far below the training loss",
    "held_out_stalls": "the held-out loss stalls while the training loss keeps falling",
    "memorised": "the training data is memorised, and nothing is held out",
    "epoch_steps": "the loss drops where an epoch begins",
    "oscillation": "the held-out loss swings without a trend",
    "data_order": "the loss repeats a pattern again and again",
}
