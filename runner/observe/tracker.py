"""Trackers: where numbers go besides ``metrics.jsonl``."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from runner.observe.metrics import MetricsLine


class Tracker(Protocol):
    """Takes each step's line; ``close`` makes everything visible."""

    def write(self, line: MetricsLine) -> None: ...
    def close(self) -> None: ...


class TensorBoardTracker:
    """Scalars under ``folder``; after a restart, points from ``first_step`` on are replaced."""

    def __init__(self, folder: Path, *, first_step: int) -> None:
        # Imported here: it costs a second, and few ranks and runs need it.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def write(self, line: MetricsLine) -> None:
        scalars = {
            "train/loss": line.loss,
            "train/grad_norm": line.grad_norm,
            "train/lr": line.lr,
            "train/tokens_per_second": line.tokens_per_second,
            "eval/loss": line.eval_loss,
            "guard/discarded": float(line.action != "apply"),
        }
        for name, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(name, value, line.step)

    def close(self) -> None:
        self._writer.close()
