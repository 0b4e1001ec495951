"""Packs short samples into full windows, each a document of its own for attention.

Which samples share a window is decided once, from their lengths, and stored in a file: samples in
order, as many as fit. Must not know how samples are made.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from runner.data.corpus_digest import Progress
from runner.data.dataset import NOT_COUNTED, Dataset, Sample, digest
from runner.system.error import DataError

_FORMAT: Final = "pack-1"
_NAMED: Final = 3
_TOLD_EVERY: Final = 256


class Unpadded(Dataset, Protocol):
    """Samples of token ids that know their own lengths."""

    def unpadded(self, index: int) -> Sample:
        """At most ``seq_len + 1`` tokens. Raises as ``[index]``."""


def prepare_packs(dataset: Unpadded, *, seq_len: int, cache: Path, progress: Progress) -> Path:
    """Find the file of packs in ``cache``, or read every sample and make it.

    Raises:
        DataError: it cannot be written.
    """
    name = digest([_FORMAT, dataset.fingerprint(), len(dataset), seq_len])
    place = cache / "packs" / f"{name}.npy"
    if _read(place, len(dataset)) is not None:
        return place
    starts = pack(
        [_length(dataset, index, seq_len, progress) for index in range(len(dataset))], seq_len + 1
    )
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        draft = place.with_name(f".{name}.{secrets.token_hex(4)}.npy")
        try:
            np.save(draft, starts)
            os.replace(draft, place)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(
            f"data.cache={cache}: the file of packs cannot be written ({error}); give a directory "
            "that is writable and has room"
        ) from error
    return place


def pack(lengths: list[int], room: int) -> npt.NDArray[np.int64]:
    """Starts of packs of consecutive samples that fit into ``room``, and their end."""
    starts, used = [0], 0
    for number, length in enumerate(lengths):
        if number > starts[-1] and used + length > room:
            starts.append(number)
            used = 0
        used += length
    return np.array([*starts, len(lengths)], dtype=np.int64)


class Packed:
    """A Dataset of packs.

    Raises:
        DataError: the file is gone.
    """

    def __init__(self, dataset: Unpadded, place: Path, *, seq_len: int) -> None:
        starts = _read(place, len(dataset))
        if starts is None:
            raise DataError(
                f"data.cache={place.parent}: {place.name} cannot be read by this process, and was "
                "whole a moment ago; give a directory that all processes of the node see"
            )
        self.vocab_size = dataset.vocab_size
        self._dataset = dataset
        self._starts = starts
        self._seq_len = seq_len
        self.sampled_files = getattr(dataset, "sampled_files", ())

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> Sample:
        room = self._seq_len + 1
        tokens = np.zeros(room, dtype=np.int64)
        labels = np.full(room, NOT_COUNTED, dtype=np.int64)
        segments = np.zeros(room, dtype=np.int32)
        at = 0
        for number, inside in enumerate(self._inside(index)):
            sample = self._dataset.unpadded(inside)
            end = at + sample.tokens.size
            if end > room:
                raise DataError(
                    f"{self._dataset.describe(inside)} is longer than when it was packed: the data "
                    "has changed; remove the folder packs in data.cache and start again"
                )
            tokens[at:end] = sample.tokens
            labels[at:end] = sample.tokens if sample.labels is None else sample.labels
            segments[at:end] = number
            at = end
        segments[at:] = int(segments[at - 1]) + 1
        return Sample(tokens=tokens, labels=labels, segments=segments)

    def describe(self, index: int) -> str:
        inside = self._inside(index)
        named = [self._dataset.describe(one) for one in inside[:_NAMED]]
        rest = len(inside) - len(named)
        return ", ".join(named) + (f" and {rest} more" if rest else "")

    def fingerprint(self) -> str:
        return digest(
            [_FORMAT, self._dataset.fingerprint(), self._seq_len, digest(self._starts.tolist())]
        )

    def _inside(self, index: int) -> range:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is not in 0..{len(self) - 1}")
        return range(int(self._starts[index]), int(self._starts[index + 1]))


def _length(dataset: Unpadded, index: int, seq_len: int, progress: Progress) -> int:
    """A sample's length; an unreadable one fills a window, so that it alone is skipped."""
    if index % _TOLD_EVERY == 0:
        progress("measuring the samples", index, len(dataset))
    try:
        return int(dataset.unpadded(index).tokens.size)
    except Exception:
        return seq_len + 1


def _read(place: Path, num_samples: int) -> npt.NDArray[np.int64] | None:
    with contextlib.suppress(OSError, ValueError):
        starts: npt.NDArray[np.int64] = np.load(place, allow_pickle=False)
        is_whole = starts.ndim == 1 and starts.dtype == np.int64 and starts.size > 1
        if (
            is_whole
            and starts[0] == 0
            and starts[-1] == num_samples
            and (np.diff(starts) > 0).all()
        ):
            return starts
    return None
