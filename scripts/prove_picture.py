"""Draws docs/prove_resume.svg: which state differs from which step on, after planted mistakes.

    python -m scripts.prove_picture

It reads docs/records/prove-resume.jsonl, which ``python -m tests.prove_resume.table`` writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from runner.tools.report.drawing import svg
from runner.tools.report.markup import Html, tag

DOCS = Path(__file__).resolve().parent.parent / "docs"
RECORD, PICTURE = DOCS / "records" / "prove-resume.jsonl", DOCS / "prove_resume.svg"
# Rows of the picture: a case of the record, and what its script forgets.
SHOWN = {
    "plain-1-moments": "AdamW's moments",
    "plain-1-rng": "random states",
    "plain-1-sampler_restarted": "its place in the data",
    "plain-1-lr_reset": "the learning rate schedule",
    "plain-1-weights_bf16": "16 bits of each weight",
    "plain-1-batchnorm": "BatchNorm's statistics",
    "plain-1-ema_lost": "the averaged weights (EMA)",
}
COLUMNS = {
    "weights": "weights",
    "state": "optimizer",
    "options": "rate",
    "buffers": "buffers",
    "copies": "EMA",
    "batches": "batch",
    "random": "random",
    "losses": "loss",
}
STEPS = 4  # shown after the resume
_LEFT, _TOP, _WIDE, _HIGH = 190, 44, 80, 34
_WIDTH = _LEFT + _WIDE * len(COLUMNS) + 10
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#333}.head{font-weight:600}.same{fill:#e8efe8}"
    ".first{fill:#b4232c}.later{fill:#e9a23b}.on{fill:#fff;font-weight:600}"
)


def main() -> None:
    """Draw it."""
    rows = {row["case"]: row for row in map(json.loads, RECORD.read_text().splitlines())}
    height = _TOP + _HIGH * len(SHOWN) + 10
    shapes = [shape for place, case in enumerate(SHOWN) for shape in _row(place, rows[case])]
    heads = [
        _text(_LEFT + _WIDE * (n + 0.5), _TOP - 14, words, "head")
        for n, words in enumerate(COLUMNS.values())
    ]
    background = tag("rect", width=_WIDTH, height=height, fill="#fff")
    drawn = svg(
        "The first step after the resume at which each state differs",
        tag("style", Html(_STYLE)), background, _text(96, _TOP - 14, "the script forgets", "head"),
        *heads, *shapes, height=height, width=_WIDTH, xmlns="http://www.w3.org/2000/svg",
    )  # fmt: skip
    PICTURE.write_text(drawn + "\n")


def _row(place: int, row: Mapping[str, Any]) -> Iterator[Html]:
    """What is forgotten, and a cell for each state."""
    top = _TOP + _HIGH * place
    yield _text(96, top + 21, SHOWN[row["case"]])
    for number, name in enumerate(COLUMNS):
        after = row["since"].get(name, row["start"] + STEPS + 1) - row["start"]
        kind = "same" if after > STEPS else "later" if after else "first"
        left = _LEFT + _WIDE * number
        yield tag("rect", x=left + 2, y=top + 2, width=_WIDE - 4, height=_HIGH - 4, cls=kind)
        if after <= STEPS:
            words = f"step +{after}" if after else "at once"
            yield _text(left + _WIDE / 2, top + 21, words, "on")


def _text(x: float, y: float, words: str, cls: str | None = None) -> Html:
    return tag("text", words, x=f"{x:g}", y=y, text_anchor="middle", cls=cls)


if __name__ == "__main__":
    main()
