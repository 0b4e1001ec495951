"""What was read in a curve: a signature, where, why, what to try."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from runner.reading.curve import Curve

Confidence = Literal["low", "medium", "high"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One signature.

    Args:
        signature: one of :data:`SIGNATURES`.
        first: the first row of the curve that it speaks of.
        last: the last one.
        evidence: one sentence with the numbers seen.
        remedy: what to try.
        confidence: how seldom healthy curves look like that.
    """

    signature: str
    first: int
    last: int
    evidence: str
    remedy: str
    confidence: Confidence

    def to_json(self, curve: Curve) -> dict[str, Any]:
        """Plain values; rows are counted from 0 and both ends belong to it, as with steps."""
        return {
            "signature": self.signature,
            "rows": [self.first, self.last],
            "steps": [int(curve.steps[self.first]), int(curve.steps[self.last])],
            "evidence": self.evidence,
            "try": self.remedy,
            "confidence": self.confidence,
        }


# Each signature and what it means, in the order in which they are told.
SIGNATURES = {
    "not_finite": "a loss that is NaN or infinite",
    "divergence": "the loss ends well above its best",
    "spike": "the loss jumps and comes back",
    "level_shift": "the loss jumps once and goes on from the new level",
    "rate_too_high": "the loss suffers where the rate is high, or stays where it was early",
    "rate_too_low": "the loss falls slowly and as steadily at the end as in the beginning",
    "warmup_too_long": "the rate still rises while the loss has hardly moved",
    "vanishing_gradients": "little or no gradient, in all layers or in the first ones",
    "degenerate_batches": "batches of few different tokens",
    "plateau": "the loss stays high, and nothing logged says why",
    "floor_early": "the rate is at its floor for a long time, and progress ended with it",
    "norm_creep": "the gradient norm rises through the whole run",
    "overfitting": "the held-out loss rises while the training loss falls",
    "held_out_below_training": "the held-out loss is far below the training loss",
    "held_out_stalls": "the held-out loss stands while the training loss falls on",
    "memorised": "training data is known by heart, and nothing is held out",
    "epoch_steps": "the loss falls by a step where an epoch begins",
    "oscillation": "the held-out loss swings without a trend",
    "data_order": "the loss repeats a pattern again and again",
}
