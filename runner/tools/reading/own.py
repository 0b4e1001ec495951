"""The curve of a run that is in progress, from the lines that it has written so far."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np

from runner.system.json_lines import iter_lines
from runner.tools.reading.curve import CORPUS_ENTROPY, HELD_OUT, LEARNING_RATE, Curve

_FIELDS = ("step", "loss", "grad_norm", "lr", "eval_loss")


def curve_of_run(metrics: Path, stop: int, corpus_entropy: float | None) -> Curve:
    """The applied steps in the first ``stop`` bytes of the metrics."""
    columns = {name: array("d") for name in _FIELDS}
    for line in iter_lines(metrics, stop=stop):
        if line.get("action") == "apply":
            for name, column in columns.items():
                value = line.get(name)
                column.append(float(value) if isinstance(value, int | float) else np.nan)
    steps, loss, grad_norm, rate, held_out = (np.array(columns[name]) for name in _FIELDS)
    further = {LEARNING_RATE: rate, HELD_OUT: held_out}
    if corpus_entropy:
        further[CORPUS_ENTROPY] = np.full(len(loss), corpus_entropy)
    return Curve.of(steps, loss, grad_norm, further)
