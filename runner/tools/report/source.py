"""Numbers of each source of a mixture, from columns of the metrics; see ``source_columns``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.tools.report.grid import Grid
from runner.tools.report.side_files import number, whole

_MOST_SOURCES = 256
_SAMPLES, _LOSS, _TRAINED = "samples/", "eval_loss/", "loss/"


class SourceFold:
    """Samples and held-out losses by the source's name.

    Attributes:
        samples: how many of the attempted steps came from each.
        losses: the held-out losses, one row per source, one column per evaluation.
        newest: the last held-out loss of each.
        trained: the training losses of applied steps, one row per source, one column per step.
    """

    def __init__(self, columns: int) -> None:
        self.samples: dict[str, int] = {}
        self.losses = Grid(most_columns=columns)
        self.newest: dict[str, float] = {}
        self.trained = Grid(most_columns=columns)

    def add(self, line: Mapping[str, Any]) -> None:
        """Take one line of the metrics."""
        losses: dict[str, float | None] = {}
        trained: dict[str, float | None] = {}
        for key, value in line.items():
            if key.startswith(_SAMPLES):
                name = key[len(_SAMPLES) :]
                if name in self.samples or len(self.samples) < _MOST_SOURCES:
                    self.samples[name] = self.samples.get(name, 0) + whole(value)
            elif key.startswith(_LOSS) and len(losses) < _MOST_SOURCES:
                losses[key[len(_LOSS) :]] = number(value)
            elif key.startswith(_TRAINED) and len(trained) < _MOST_SOURCES:
                trained[key[len(_TRAINED) :]] = number(value)
        if trained and line.get("action") == "apply":
            self.trained.add(whole(line.get("step")), trained)
        if losses:
            self.losses.add(whole(line.get("step")), losses)
            self.newest |= {name: one for name, one in losses.items() if one is not None}
