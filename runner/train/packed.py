"""The layout of the FP64 vector that is summed over all ranks once a step.

A rank packs ``LOSS`` to ``JOBS``, then the sums of :mod:`runner.train.source_losses`. The gate and
the judge read the sums, to which the device appends ``LOSS_PER_TOKEN``, ``GRAD_NORM`` and
``CLOSED``.
"""

from __future__ import annotations

from runner.distributed.agreement import FINGERPRINT_SIZE

LOSS, GRAD_SQUARE, NONFINITE, TOKENS, GATES, STOP, UNREADABLE, KEPT, OBSERVERS = range(9)
FINGERPRINT = 9
JOBS = FINGERPRINT + FINGERPRINT_SIZE  # two counts per background queue: done, failed
LOSS_PER_TOKEN, GRAD_NORM, CLOSED = range(-3, 0)
