"""How long a corpus takes to become tokens: in batches once a node, against what was done before.

Before, every rank made its own tokens, a document at a time in one thread. Each side makes the
whole token cache with the runner's own code; what differs is how documents are encoded, and
whether the ranks of a node share one cache.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from runner.data.claim import Owners
from runner.data.text import TextSource, prepare_text
from runner.data.tokenizer import _TokenizerCodec
from runner.system.process import is_alive, own_process
from scripts.bench.plan import Plan
from scripts.bench.process import ROOT, MeasureError, environment, folder
from scripts.bench.ratio import paired
from scripts.bench.report import Row

_PAIRS = 25  # a fifth of it with --quick
_CORPUS_BYTES = 4 << 20
_VOCABULARY = 8192
_BATCHES, _ONE_BY_ONE = "batches", "one-by-one"
_RANKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How the ranks of a node come by their tokens."""

    ranks: int
    encoding: str
    shares_cache: bool


_NOW = Way(ranks=_RANKS, encoding=_BATCHES, shares_cache=True)
_COMPARED = {
    "in batches, one process": (
        Way(ranks=1, encoding=_BATCHES, shares_cache=True),
        "a document at a time, one process",
        Way(ranks=1, encoding=_ONE_BY_ONE, shares_cache=True),
    ),
    "once a node, two ranks": (
        _NOW,
        "each of two ranks for itself, in batches",
        Way(ranks=_RANKS, encoding=_BATCHES, shares_cache=False),
    ),
    "in batches once a node, two ranks": (
        _NOW,
        "each of two ranks for itself, a document at a time",
        Way(ranks=_RANKS, encoding=_ONE_BY_ONE, shares_cache=False),
    ),
}


def measure(plan: Plan) -> list[Row]:
    with folder() as own:
        num_bytes = write_corpus(own)
        return [
            _row(plan, own, label, pair, num_bytes=num_bytes) for label, pair in _COMPARED.items()
        ]


def _row(plan: Plan, own: Path, label: str, pair: tuple[Way, str, Way], *, num_bytes: int) -> Row:
    ours, against, theirs = pair
    taken: dict[Way, list[float]] = {ours: [], theirs: []}
    for number in range(plan.pairs(_PAIRS)):
        for way in (ours, theirs) if number % 2 else (theirs, ours):
            taken[way].append(seconds(own, way))
    row = Row(
        what=f"tokenising, {label}",
        against=against,
        ratio=paired(list(zip(taken[ours], taken[theirs], strict=True))),
        ours=float(np.median(taken[ours])),
        theirs=float(np.median(taken[theirs])),
        detail={"bytes": num_bytes, "vocabulary": _VOCABULARY, "cores": os.cpu_count()},
    )
    plan.say(f"  {row.what}: {row.ours:.3g} s, {against}: {row.theirs:.3g} s")
    return row


def write_corpus(own: Path, num_bytes: int = _CORPUS_BYTES) -> int:
    """The Python standard library's source and a BPE tokenizer that was trained on some of it.

    Returns:
        the bytes of the corpus.
    """
    import tokenizers

    corpus, written = own / "corpus", 0
    corpus.mkdir()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" not in path.parts and written < num_bytes:
            shutil.copyfile(path, corpus / f"{len(list(corpus.iterdir())):05}.py")
            written += path.stat().st_size
    files = [str(path) for path in sorted(corpus.iterdir())[:200]]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=_VOCABULARY, special_tokens=["</s>"], show_progress=False
    )
    tokenizer.train(files, trainer)
    tokenizer.save(str(own / "tokenizer.json"))
    return written


def seconds(own: Path, way: Way) -> float:
    """From the word to go until every rank has its tokens; imports are not counted.

    Raises:
        MeasureError: a rank failed.
    """
    caches = [own / f"cache-{0 if way.shares_cache else rank}" for rank in range(way.ranks)]
    module = [sys.executable, "-m", "scripts.bench.tokenise"]
    ranks = [
        subprocess.Popen(
            [*module, str(own), str(cache), way.encoding],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
            cwd=ROOT,
        )
        for cache in caches
    ]
    try:
        _heard(ranks)
        began = time.monotonic()
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("go\n")
            rank.stdin.flush()
        _heard(ranks)
        return time.monotonic() - began
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
        for cache in caches:
            shutil.rmtree(cache, ignore_errors=True)


def _heard(ranks: Sequence[subprocess.Popen[str]]) -> None:
    for rank in ranks:
        assert rank.stdout is not None
        if not rank.stdout.readline():
            raise MeasureError(f"a rank that tokenises ended with {rank.wait()}")


def _one_by_one(codec: _TokenizerCodec, texts: Sequence[bytes]) -> list[npt.NDArray[Any]]:
    """As it was: a document at a time."""
    decoded = (text.decode("utf-8", errors="replace") for text in texts)
    encoded = (codec.tokenizer.encode(text, add_special_tokens=False) for text in decoded)
    return [np.array(one.ids, dtype=np.uint32) for one in encoded]


def _rank(own: Path, cache: Path, encoding: str) -> None:
    if encoding == _ONE_BY_ONE:
        _TokenizerCodec.encode = _one_by_one  # type: ignore[method-assign]
    source = TextSource(
        paths=[str(own / "corpus")],
        suffixes=(".py",),
        tokenizer=str(own / "tokenizer.json"),
        cache=cache,
    )
    print("ready", flush=True)
    sys.stdin.readline()
    owners = Owners(own=own_process(), is_alive=is_alive)
    prepare_text(source, progress=lambda *_: None, owners=owners)
    print("done", flush=True)


if __name__ == "__main__":
    _rank(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
