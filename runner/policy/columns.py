"""The columns of ``metrics.jsonl``: ours by name, and what further ones are about.

A new number needs two lines: its name and what it is about in ``_FURTHER``, and its value in the
columns of :meth:`runner.train.report.Reporter.line`, or by ``add_columns`` where it is computed.
"""

from __future__ import annotations

from typing import Final

# The fields of each line, see :class:`runner.observe.metrics.MetricsLine`.
FIELDS: Final = (
    *("step", "cursor", "samples", "loss", "grad_norm", "lr", "tokens", "tokens_per_second"),
    *("seconds", "data_wait_seconds", "verdict", "action", "eval_loss", "loss_limit"),
    *("norm_limit", "time", "stalls", "nonfinite"),
)
PACE_STEPS: Final = 20  # newest attempted ones, whose mean ``seconds`` is the pace that is shown
EVALUATED: Final = "eval_"  # begins the column of a metric in an evaluation
LAYERS, SOURCES, TEXT = "layers", "sources", "text"
# What our further columns are about, by their names before a slash.
_FURTHER: Final = {
    LAYERS: LAYERS,
    **dict.fromkeys(("samples", "loss", "eval_loss"), SOURCES),
    **dict.fromkeys(("corpus_entropy", "entropy", "repeated"), TEXT),
}


def is_ours(name: str) -> bool:
    """Whether a column of this name is one of ours, and so none of the user's."""
    head = name.partition("/")[0]
    return head in FIELDS or head in _FURTHER


def is_held_out(name: str) -> bool:
    """Whether it is the held-out loss, or that of one set: a loop gives these itself."""
    return name.partition("/")[0] == "eval_loss"


def kind_of(column: str) -> str:
    """What a further column is about: layers, sources, text; train or eval: of the user's."""
    own = "eval" if column.startswith(EVALUATED) else "train"
    return _FURTHER.get(column.partition("/")[0], own)
