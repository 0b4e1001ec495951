"""Trains on two sources: of four samples three are library source, one is a list of words.

    python examples/mixture.py out=runs/mixture steps=100

Every line of runs/mixture/metrics.jsonl says how many samples came from each. Start it again
with SHARE=0.5 and resume.allow=[data.sources], and a longer run: the weights change, and no sample
is read twice or left out.
"""

import os
import sys
import sysconfig
from pathlib import Path

from runner.__main__ import main

FOLDER = Path("runs/mixture-data")


def write_words() -> Path:
    """A file of made-up sentences."""
    words = ["the run", "a rank", "every step", "one sample", "goes on", "ends", "is read", "waits"]
    lines = [f"{words[n % 4]} {words[4 + n * n % 4]} {n}.\n" for n in range(20_000)]
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "words.txt").write_text("".join(lines))
    return FOLDER / "words.txt"


if __name__ == "__main__":
    share = float(os.environ.get("SHARE", "0.25"))
    library = Path(sysconfig.get_path("stdlib"), "json")
    sources = (
        f"{{name: code, kind: text, path: {library}, weight: {1 - share}}}",
        f"{{name: words, kind: text, path: {write_words()}, weight: {share}}}",
    )
    sys.exit(main(["data.seq_len=64", *sys.argv[1:], f"data.sources=[{', '.join(sources)}]"]))
