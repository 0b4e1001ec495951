"""Packs short samples into full windows, each a document of its own for attention.

Which samples share a window is decided once, from their lengths, and stored in a file: samples in
order, as many as fit. Must not know how samples are made.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from runner.data.corpus_digest import Progress
from runner.data.dataset import NOT_COUNTED, Dataset, Sample, describe, digest
from runner.data.draws import Retries, draws, kept_while_drawing, seed_by_index
from runner.system.error import DataError, ReadError
from runner.system.units import first_few

_FORMAT: Final = "pack-1"
_MEASURED: Final = "pack-2"  # the files of earlier releases may hold lengths that were not known
_TOLD_EVERY: Final = 256


class Unpadded(Dataset, Protocol):
    """Samples of token ids that know their own lengths."""

    def unpadded(self, index: int) -> Sample:
        """At most ``seq_len + 1`` tokens. Raises as ``[index]``."""


def prepare_packs(
    dataset: Unpadded, *, seq_len: int, cache: Path, progress: Progress, retry_seconds: float
) -> tuple[Path, str]:
    """Find the file of packs in ``cache``, or read every sample and make it.

    Args:
        retry_seconds: how long a sample that the system refuses is asked for again.

    Returns:
        The file, and a line that says how many samples could not be read; empty if none.

    Raises:
        DataError: it cannot be written.
        ReadError: the system refused a sample, whose length is unknown: none is written.
    """
    name = digest([_MEASURED, dataset.fingerprint(), len(dataset), seq_len])
    place = cache / "packs" / f"{name}.npy"
    if _read(place, len(dataset)) is not None:
        return place, ""
    lengths, notice = _measured(dataset, seq_len, Retries(retry_seconds), progress)
    starts = pack(lengths, seq_len + 1)
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
    return place, notice


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

    What a sample draws at random may change its length. Where a pack's samples do not fit, each is
    read as when it was measured.

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
        self.draws = draws(dataset)
        self._dataset = dataset
        self._starts = starts
        self._seq_len = seq_len
        self.sampled_files = getattr(dataset, "sampled_files", ())

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> Sample:
        room = self._seq_len + 1
        samples = [self._dataset.unpadded(inside) for inside in self._inside(index)]
        if self.draws and sum(sample.tokens.size for sample in samples) > room:
            samples = [_as_measured(self._dataset, inside) for inside in self._inside(index)]
        if sum(sample.tokens.size for sample in samples) > room:
            raise DataError(
                f"{self.describe(index)} are longer than when they were packed: the data has "
                "changed; remove the folder packs in data.cache and start again"
            )
        tokens = np.zeros(room, dtype=np.int64)
        labels = np.full(room, NOT_COUNTED, dtype=np.int64)
        segments = np.zeros(room, dtype=np.int32)
        at = 0
        for number, sample in enumerate(samples):
            end = at + sample.tokens.size
            tokens[at:end] = sample.tokens
            labels[at:end] = sample.tokens if sample.labels is None else sample.labels
            segments[at:end] = number
            at = end
        segments[at:] = int(segments[at - 1]) + 1
        return Sample(tokens=tokens, labels=labels, segments=segments)

    def describe(self, index: int) -> str:
        return first_few(self._inside(index), name=self._dataset.describe)

    def fingerprint(self) -> str:
        return digest(
            [_FORMAT, self._dataset.fingerprint(), self._seq_len, digest(self._starts.tolist())]
        )

    def _inside(self, index: int) -> range:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is not in 0..{len(self) - 1}")
        return range(int(self._starts[index]), int(self._starts[index + 1]))


def _measured(
    dataset: Unpadded, seq_len: int, retries: Retries, progress: Progress
) -> tuple[list[int], str]:
    """Each sample's length, and a line on those that could not be read.

    An unreadable one fills a window, so that it alone is skipped. One that the system refused may
    be readable later: with any length for it the packs would depend on the moment.
    """
    lengths: list[int] = []
    unreadable: list[str] = []
    refused: list[str] = []
    with kept_while_drawing():
        for index in range(len(dataset)):
            if index % _TOLD_EVERY == 0:
                progress("measuring the samples", index, len(dataset))
            try:
                sample = retries(partial(_as_measured, dataset, index))
                lengths.append(int(sample.tokens.size))
            except Exception as error:
                lengths.append(seq_len + 1)
                problems = refused if isinstance(error, OSError) else unreadable
                problems.append(f"{describe(dataset, index)}: {type(error).__name__}: {error}")
    if refused:
        raise ReadError(
            f"data.pack=true: the system refused {len(refused)} of {len(dataset)} samples while "
            f"their lengths were measured, first {refused[0]}; start again when the storage "
            "answers. If a sample is lost, leave it out of the data set, or raise ValueError"
        )
    if not unreadable:
        return lengths, ""
    return lengths, (
        f"data.pack=true: {len(unreadable)} of {len(dataset)} samples cannot be read, and each is "
        f"given a window of its own; first {unreadable[0]}"
    )


def _as_measured(dataset: Unpadded, index: int) -> Sample:
    if draws(dataset):
        seed_by_index(index)
    return dataset.unpadded(index)


def _read(place: Path, num_samples: int) -> npt.NDArray[np.int64] | None:
    with contextlib.suppress(OSError, ValueError):
        starts: npt.NDArray[np.int64] = np.load(place, allow_pickle=False)
        is_list = starts.ndim == 1 and starts.dtype == np.int64 and starts.size > 1
        is_whole = is_list and starts[0] == 0 and starts[-1] == num_samples
        if is_whole and (np.diff(starts) > 0).all():
            return starts
    return None
