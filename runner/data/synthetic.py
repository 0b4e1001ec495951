"""A synthetic language that a small model learns within some dozens of steps.

Owns a sparse Markov chain computed per index: no file, no state, the same tokens on every
machine. Must not use ``numpy.random.Generator``: numpy may change what its methods return
between versions, but not the raw words of Philox.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from runner.data.dataset import Sample, digest

SUCCESSORS: Final = 4
# Chances 0.70, 0.15, 0.10, 0.05: an entropy of 0.914 nats a token, the loss to reach.
_CUMULATIVE: Final = (0.70, 0.85, 0.95)
_WORD: Final = 2**64 - 1
_TABLE: Final = _WORD  # no sample has this index
_FORMAT: Final = "synthetic-1"


class SyntheticLanguage:
    """A Dataset of independent samples of a random Markov chain.

    Every token has four successors. Each of the four columns is a permutation of the
    vocabulary, so all tokens are equally frequent: the loss starts at ``ln(vocab_size)``
    and falls only for a model that looks at the token before.
    """

    def __init__(self, *, vocab_size: int, samples: int, seq_len: int, seed: int) -> None:
        self.vocab_size = vocab_size
        self._samples = samples
        self._seq_len = seq_len
        self._seed = seed
        self._next = _successors(vocab_size=vocab_size, seed=seed)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self._samples:
            raise IndexError(f"sample {index} is not in 0..{self._samples - 1}")
        words = _words(seed=self._seed, index=int(index), count=self._seq_len + 1)
        token = int(words[0]) % self.vocab_size
        walk = [token]
        for choice in _choices(words[1:]):
            token = self._next[token * SUCCESSORS + choice]
            walk.append(token)
        return Sample(tokens=np.array(walk, dtype=np.int64), segments=None)

    def describe(self, index: int) -> str:
        return f"synthetic sample {index}"

    def fingerprint(self) -> str:
        return digest([_FORMAT, self.vocab_size, self._samples, self._seq_len, self._seed])


def _words(*, seed: int, index: int, count: int) -> npt.NDArray[np.uint64]:
    """Raw words of the counter-based generator keyed by (seed, index)."""
    generator = np.random.Philox(key=(seed & _WORD) << 64 | index)
    return np.asarray(generator.random_raw(count), dtype=np.uint64)


def _successors(*, vocab_size: int, seed: int) -> list[int]:
    """Flat table: entry ``token * SUCCESSORS + choice`` is the token that follows."""
    words = _words(seed=seed, index=_TABLE, count=vocab_size * SUCCESSORS)
    table = np.argsort(words.reshape(SUCCESSORS, vocab_size), axis=1, kind="stable").T
    flat: list[int] = table.reshape(-1).tolist()
    return flat


def _choices(words: npt.NDArray[np.uint64]) -> list[int]:
    limits = np.array([round(chance * 2**32) for chance in _CUMULATIVE], dtype=np.uint64)
    chosen: list[int] = np.searchsorted(limits, words >> np.uint64(32), side="right").tolist()
    return chosen
