"""Where the documents of a text corpus lie in its tokens, and how to name them.

A corpus may have more documents than fit into memory: their starts stay in a file, and only
every thousandth is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from runner.data.dataset import TokenFile, overlaps
from runner.system.units import first_few

Starts = npt.NDArray[np.int64]

_STRIDE: Final = 1024
_ITEM_BYTES: Final = 8


class DocumentTable:
    """Starts of documents in a stream of ``num_tokens``, little-endian int64 in one file.

    A summary follows the starts: every thousandth of them, to find a place quickly.
    Holds no handle, like a TokenFile.
    """

    def __init__(self, *, path: Path, num_documents: int, num_tokens: int) -> None:
        self.num_documents = num_documents
        self._path = path
        self._num_tokens = num_tokens

    @property
    def num_bytes(self) -> int:
        return _ITEM_BYTES * (self.num_documents + self._num_summary)

    @staticmethod
    def summary_of(parts: Sequence[Starts]) -> Starts:
        """The summary of all starts, in order."""
        chunks: list[Starts] = []
        before = 0
        for part in parts:
            chunks.append(part[-before % _STRIDE :: _STRIDE])
            before += part.size
        return np.concatenate(chunks) if chunks else np.zeros(0, dtype="<i8")

    def between(self, low: int, high: int) -> Starts:
        """Starts in ``[low, high)``."""
        return self.read(self._number_behind(low), self._number_behind(high))

    def at(self, position: int) -> int:
        """The number of the document that the token at ``position`` belongs to."""
        return self._number_behind(position + 1) - 1

    def read(self, first: int, last: int) -> Starts:
        """Starts of documents ``[first, last)``; the summary follows them.

        Raises:
            DataError: the file is shorter than it was.
            OSError: the storage failed; starting again may help.
        """
        file = TokenFile(path=self._path, dtype="<i8", num_tokens=self.num_bytes // _ITEM_BYTES)
        return file.read(first, last)

    def span(self, number: int) -> tuple[int, int]:
        """A document's start and end: the start of the next."""
        starts = self.read(number, min(number + 2, self.num_documents)).tolist()
        begin, end = [*starts, self._num_tokens][:2]
        return begin, end

    @property
    def _num_summary(self) -> int:
        return -(-self.num_documents // _STRIDE)

    @cached_property
    def _summary(self) -> Starts:
        return self.read(self.num_documents, self.num_documents + self._num_summary)

    def _number_behind(self, position: int) -> int:
        """The number of the first document that begins at ``position`` or later."""
        block = max(int(np.searchsorted(self._summary, position, side="left")) - 1, 0)
        first = block * _STRIDE
        starts = self.read(first, min(first + _STRIDE, self.num_documents))
        return first + int(np.searchsorted(starts, position, side="left"))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextPlaces:
    """Names for stretches of a text corpus.

    Args:
        names: of the files.
        are_lines: whether a file's documents are its lines.
        firsts: int64 [files + 1], the number of each file's first document.
        unit: what a token is.
        num_begin_marks: tokens before each document that are not in the file; after
            it there is one.
    """

    documents: DocumentTable
    names: Sequence[str]
    are_lines: Sequence[bool]
    firsts: Starts
    unit: str
    num_begin_marks: int

    def name(self, start: int, stop: int) -> str:
        """Name a stretch: "json/decoder.py bytes 1200-1457", or "a.jsonl line 7 tokens 0-9"."""
        first, last = self.documents.at(start), self.documents.at(stop - 1)
        return first_few(
            list(overlaps(self.firsts, first, last + 1)),
            name=lambda piece: self._name(piece[0], piece[1], piece[2], start, stop),
            what=" files",
        )

    def _name(self, file: int, from_: int, to: int, start: int, stop: int) -> str:
        begins = int(self.firsts[file])
        first, last = begins + from_, begins + to - 1
        low, _ = self._within(first, start, stop)
        _, high = self._within(last, start, stop)
        name = self.names[file]
        if not self.are_lines[file]:
            return f"{name} {self.unit} {low}-{high}"
        word, begin = ("row", 0) if name.endswith(".parquet") else ("line", 1)
        if first == last:
            return f"{name} {word} {from_ + begin} {self.unit} {low}-{high}"
        return (
            f"{name} {word}s {from_ + begin}-{to - 1 + begin} (from {self.unit} {low} of the first "
            f"to {high} of the last)"
        )

    def _within(self, document: int, start: int, stop: int) -> tuple[int, int]:
        """The part of a document that ``[start, stop)`` covers, counted without marks."""
        begin, end = self.documents.span(document)
        begin += self.num_begin_marks
        length = end - 1 - begin
        low, high = max(start - begin, 0), max(min(stop - begin, length), 0)
        return min(low, length), high
