"""Where each number stands in the FP64 vector that is summed over all ranks once a step.

A rank packs ``LOSS`` to ``JOBS``, and behind the jobs what :mod:`runner.train.source_losses`
gives. The gate and the judge read the sums; the device appends ``LOSS_PER_TOKEN``, ``GRAD_NORM``
and ``CLOSED`` to them.
"""

from __future__ import annotations

from runner.distributed.agreement import FINGERPRINT_SIZE

LOSS, GRAD_SQUARE, NONFINITE, TOKENS, GATES, STOP, UNREADABLE, KEPT = range(8)
FINGERPRINT = 8
JOBS = FINGERPRINT + FINGERPRINT_SIZE  # done and failed of each queue of background work
LOSS_PER_TOKEN, GRAD_NORM, CLOSED = range(-3, 0)
