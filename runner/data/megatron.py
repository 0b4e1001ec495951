"""Reads the index of a Megatron corpus (``NAME.idx`` beside ``NAME.bin``).

Owns the layout of the ``.idx`` file, as Megatron-LM's ``IndexedDataset`` writes it. Must
not trust it: every declared size is compared with the file's real size before anything is
allocated, and whatever the bytes are, the only error is DataError.

Layout, little endian: magic (9 bytes), version u64, dtype code u8, number of sequences
u64, number of document indices u64, then int32 lengths [sequences], int64 byte pointers
[sequences], int64 document indices [documents], and in multimodal corpora int8 modes
[sequences]. Document ``d`` is sequences ``[indices[d], indices[d + 1])``.
"""

from __future__ import annotations

import struct
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from runner.data.dataset import TokenFile, cumulative, file_size, unreadable
from runner.system.error import DataError

MAGIC: Final = b"MMIDIDX\x00\x00"
_HEADER: Final = struct.Struct("<9sQBQQ")
_VERSION: Final = 1
_INTEGERS: Final = MappingProxyType({1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"})
_FLOATS: Final = MappingProxyType({6: "float64", 7: "float32"})


def open_megatron(index: Path) -> tuple[TokenFile, npt.NDArray[np.int64]]:
    """Open ``NAME.bin`` by its index ``NAME.idx``: its tokens, and where documents start.

    The starts are int64, strictly rising token offsets; empty documents are left out.

    Raises:
        DataError: a file is missing, truncated, inconsistent, does not hold integers, or its
            sequences do not lie one after another.
    """
    dtype, num_sequences, num_documents = _read_header(index)
    offset = _HEADER.size
    lengths = _read(index, dtype="<i4", count=num_sequences, offset=offset)
    offset += lengths.nbytes
    pointers = _read(index, dtype="<i8", count=num_sequences, offset=offset)
    offset += pointers.nbytes
    documents = _read(index, dtype="<i8", count=num_documents, offset=offset)
    if lengths.size and lengths.min() < 0:
        at = int(np.argmin(lengths))
        raise DataError(
            f"{index}: sequence {at} has length {int(lengths[at])}; the index is damaged, "
            "write the corpus again"
        )
    starts = cumulative(lengths)
    _check_layout(index, starts * np.dtype(dtype).itemsize, pointers)
    rises = documents.size > 0 and documents[0] == 0 and documents[-1] == num_sequences
    if not rises or (documents[1:] < documents[:-1]).any():
        raise DataError(
            f"{index}: document indices must rise from 0 to the number of sequences "
            f"({num_sequences}), found {documents[:3].tolist()}...{documents[-3:].tolist()}; "
            "write the corpus again"
        )
    tokens = TokenFile(path=index.with_suffix(".bin"), dtype=dtype, num_tokens=int(starts[-1]))
    return tokens, np.unique(starts[documents[:-1]])


def _read_header(index: Path) -> tuple[str, int, int]:
    """The type of tokens, and the numbers of sequences and documents.

    Python integers do not wrap, so a hostile count cannot slip below the real size.
    """
    size = file_size(index)
    raw = bytes(_read(index, dtype="u1", count=min(size, _HEADER.size), offset=0))
    if len(raw) < _HEADER.size or not raw.startswith(MAGIC):
        raise DataError(
            f"{index}: starts with {raw[:9]!r}, not with Megatron's {MAGIC!r} and a whole header; "
            "move it away if NAME.bin is a raw token file, else write the corpus again"
        )
    _, version, code, num_sequences, num_documents = _HEADER.unpack(raw)
    if version != _VERSION:
        raise DataError(f"{index}: Megatron index version {version}, only {_VERSION} is known")
    if code not in _INTEGERS:
        raise DataError(
            f"{index}: dtype code {code} ({_FLOATS.get(code, 'unknown')}) holds no token ids; "
            f"allowed are {sorted(_INTEGERS)} (integers)"
        )
    needed = _HEADER.size + 12 * num_sequences + 8 * num_documents
    if size not in (needed, needed + num_sequences):
        raise DataError(
            f"{index}: {num_sequences} sequences and {num_documents} documents need "
            f"{needed} bytes, the file has {size}; it is truncated or damaged, write it again"
        )
    return _INTEGERS[code], num_sequences, num_documents


def _read(path: Path, *, dtype: str, count: int, offset: int) -> npt.NDArray[Any]:
    """Read exactly ``count`` items. A count of -1 would mean "all" to numpy."""
    try:
        items = np.fromfile(path, dtype=dtype, count=count, offset=offset)
    except OSError as error:
        raise unreadable(path, error) from error
    if items.size != count:
        raise DataError(f"{path}: changed while it was read; start again when it is complete")
    return items


def _check_layout(index: Path, expected: npt.NDArray[np.int64], pointers: npt.NDArray[Any]) -> None:
    """``expected`` is where each sequence starts in the .bin file, in bytes, and its end."""
    apart = np.flatnonzero(pointers != expected[:-1])
    if apart.size:
        at = int(apart[0])
        raise DataError(
            f"{index}: sequence {at} starts at byte {int(pointers[at])} of the .bin file, "
            f"{int(expected[at])} is where the one before ends; only corpora whose sequences are "
            "contiguous can be read, write it again in order"
        )
    binary = index.with_suffix(".bin")
    binary_bytes = file_size(binary)
    if int(expected[-1]) != binary_bytes:
        raise DataError(
            f"{binary}: has {binary_bytes} bytes, its index says "
            f"{int(expected[-1])}; one of the two is truncated or from another corpus"
        )
