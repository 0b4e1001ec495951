"""Describes where the pieces of tensors lie, compactly, as arithmetic progressions over files.

Shards are cut evenly. For a tensor on 16,384 ranks, rank ``i`` holds ``count`` elements from
``start + i * step`` on. A list of these pieces would have 16,384 entries, too many for a manifest.
A :class:`PieceRun` is one entry; with replicas that each write a part it has two counters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from runner.system.parsing import whole

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PieceRun:
    """Pieces of one tensor, for ``i < num`` and ``j < repeats``: ``count`` elements from
    ``start + i * step + j * start_step`` on, in file ``file + i + j * file_step``.
    """

    file: int
    num: int
    start: int
    step: int
    count: int
    repeats: int
    file_step: int
    start_step: int

    def to_json(self) -> list[int]:
        return list(astuple(self))

    @classmethod
    def from_json(cls, values: Any, *, num_files: int) -> PieceRun:
        """
        Raises:
            ValueError: it is not a valid run over ``num_files`` files.
        """
        names = cls.__slots__
        if not isinstance(values, list) or len(values) != len(names):
            raise ValueError(f"run {str(values)[:80]}: {len(names)} numbers are needed")
        # Below 2 ** 50 every product of two of them that exceeds 64 bits is noticed.
        run = cls(*(whole(v, name, below=1 << 50) for v, name in zip(values, names, strict=True)))
        last = run.file + run.num - 1 + (run.repeats - 1) * run.file_step
        if run.num < 1 or run.repeats < 1 or run.count < 1 or last >= num_files:
            raise ValueError(f"run {values}: outside of the {num_files} files, or empty")
        if run.num * run.repeats > num_files:
            raise ValueError(f"run {values}: more pieces than the {num_files} files")
        return run

    def pieces(self) -> tuple[Numbers, Numbers]:
        """(starts, files): the flat start and the file number of each piece."""
        i = np.arange(self.num, dtype=np.int64)
        j = np.arange(self.repeats, dtype=np.int64)[:, None]
        starts = self.start + i * self.step + j * self.start_step
        files = self.file + i + j * self.file_step
        return starts.reshape(-1), files.reshape(-1)

    def intervals(self) -> list[tuple[int, int]]:
        """(start, count), with adjacent pieces merged."""
        count = self.count
        loops = sorted([(self.step, self.num), (self.start_step, self.repeats)])
        left = [(step, num) for step, num in loops if num > 1]
        while left and left[0][0] == count:
            count *= left.pop(0)[1]
        starts = [self.start]
        for step, num in left:
            starts = [start + at * step for start in starts for at in range(num)]
        return [(start, count) for start in starts]


def check_coverage(name: str, numel: int, intervals: Iterable[tuple[int, int]]) -> None:
    """
    Args:
        intervals: (start, count) of the pieces.

    Raises:
        ValueError: an element is missing or present twice.
    """
    at = 0
    for start, count in sorted(intervals):
        if start != at or count < 1:
            raise ValueError(f"{name}: elements from {at} on are missing or doubled")
        at += count
    if at != numel:
        raise ValueError(f"{name}: {at} of {numel} elements")


def compress(
    *, tensor: Numbers, start: Numbers, count: Numbers, file: Numbers
) -> dict[int, list[PieceRun]]:
    """Find the runs of each tensor with numpy, which blocks other threads only briefly.

    Args:
        tensor: number of each piece's tensor; beside its flat start, its count, and the number of
            its file.
    """
    if not len(tensor):
        return {}
    small = tensor.astype(np.uint16 if int(tensor.max()) < 1 << 16 else np.uint32)
    order = np.argsort(small, kind="stable")  # numpy sorts 16-bit numbers by radix
    tensor, start, count, file = (column[order] for column in (tensor, start, count, file))
    first = _begins((tensor, count), (file, start), need=(1, None))
    num, step = _lengths(first, start)
    tensor, start, count, file = (column[first] for column in (tensor, start, count, file))
    # Equal runs of the replicas come side by side.
    order = np.lexsort((start, file, count, step, num, tensor))
    tensor, start, count, file, num, step = (
        column[order] for column in (tensor, start, count, file, num, step)
    )
    first = _begins((tensor, count, num, step), (file, start), need=(None, None))
    repeats, start_step = _lengths(first, start)
    _, file_step = _lengths(first, file)
    numbers = [column[first] for column in (tensor, file, num, start, step, count)]
    numbers += [repeats, file_step, start_step]
    runs: dict[int, list[PieceRun]] = {}
    for number, *values in zip(*(column.tolist() for column in numbers), strict=True):
        runs.setdefault(number, []).append(PieceRun(*values))
    return runs


def _begins(
    equal: Sequence[Numbers], steady: Sequence[Numbers], need: Sequence[int | None]
) -> Numbers:
    """Rows at which a progression begins: INT64, rising.

    Within a progression ``equal`` columns are constant and ``steady`` columns grow evenly.

    Args:
        need: the step of each ``steady`` column; None: any positive step.
    """
    size = len(equal[0])
    links = np.ones(max(0, size - 1), dtype=bool)  # whether i + 1 may follow i
    for column in equal:
        links &= column[1:] == column[:-1]
    growth = [np.diff(column) for column in steady]
    for grown, by in zip(growth, need, strict=True):
        links &= (grown > 0) if by is None else (grown == by)
    begins = np.ones(size, dtype=bool)
    begins[1:] = ~links
    for grown in growth:  # the third row is as far from the second as that from the first
        begins[2:] |= links[:-1] & (grown[1:] != grown[:-1])
    return np.flatnonzero(begins).astype(np.int64)


def _lengths(first: Numbers, column: Numbers) -> tuple[Numbers, Numbers]:
    """Length and step of the progressions that begin at the rows ``first``."""
    num = np.diff(np.append(first, len(column)))
    second = np.minimum(first + 1, len(column) - 1)
    return num, np.where(num > 1, column[second] - column[first], 0)
