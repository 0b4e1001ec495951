"""Corpora of tokens: raw files, ``.npy``, Megatron.

Owns the choice of reader by file name and the check that every id fits the vocabulary.
Must not know how text becomes tokens, nor the configuration: arguments are plain values,
only messages name the keys a user would change.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from runner.config.schema import DataConfig, TokenDtype
from runner.data.dataset import (
    Dataset,
    TokenFile,
    TokenStream,
    Windows,
    contents_of,
    cumulative,
    digest,
    file_size,
    fingerprint_files,
    first_outside,
    is_sampled,
    name_in_files,
    require_ids,
    spread,
    unreadable,
)
from runner.system.error import DataError

SCAN_ALL_BYTES: Final = 256 << 20
_SCAN_BLOCK: Final = 1 << 16
_HEADERS: Final = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_SHOWN_IDS: Final = 64  # fewer ids prove nothing


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    """One file of the corpus. ``document_starts`` is None where the format has none."""

    tokens: TokenFile
    files: tuple[Path, ...]
    document_starts: npt.NDArray[np.int64] | None = None
    width: int | None = None  # width of a table: tokens in a row
    is_raw: bool = False  # the file does not say its type


def open_tokens(data: DataConfig, *, scan_all_bytes: int = SCAN_ALL_BYTES) -> Dataset:
    """Open token files as one stream, in the order given.

    A path is a ``.npy`` file of integers (with two dimensions its rows are the samples), a
    Megatron corpus (``NAME``, ``NAME.idx``, or ``NAME.bin`` beside ``NAME.idx``), a raw
    little-endian file of ``token_dtype``, or a directory, which stands for its ``.npy`` and
    ``.bin`` files by name.

    Ids are checked in full for corpora up to ``scan_all_bytes``, in blocks from head to
    tail beyond that, and in every sample when it is read.

    Raises:
        DataError: see the messages; each names the file or the key.
    """
    if not data.path:
        raise DataError("data.path=[] names no token file; give .npy, .bin or Megatron files")
    paths = [inside for path in data.path for inside in _expand(Path(path).expanduser())]
    parts = [_open_part(path, data.token_dtype) for path in paths]
    for part in parts:
        if part.is_raw:
            _require_width(part.tokens, data.vocab_size)
    whole = sum(part.tokens.num_bytes for part in parts) <= scan_all_bytes
    known_size = _require_vocab_size(data.vocab_size, parts, whole)
    end_id = _end_id(data.end_token, known_size)
    for part in parts:
        for start, block in _blocks(part.tokens, whole):
            require_ids(block, known_size, str(part.tokens.path), start)
    width = _width(parts, data.seq_len)
    stream = TokenStream([part.tokens for part in parts])
    names = [part.tokens.path.name for part in parts]
    is_isolated = data.isolate_documents and width is None
    starts = _boundaries(parts, stream) if is_isolated else None
    files = [(path.name, path) for part in parts for path in part.files]
    layout = [[part.tokens.dtype, part.tokens.num_tokens] for part in parts]
    windows = Windows(
        stream=stream,
        name=partial(name_in_files, names, stream.starts, "tokens")
        if width is None
        else partial(_name_row, names, stream.starts, width),
        seq_len=data.seq_len,
        vocab_size=known_size,
        source=digest([fingerprint_files(files), layout]),
        starts_between=None if starts is None else partial(_between, starts),
        end_token=_marking_token(parts, end_id) if is_isolated else None,
        width=width,
    )
    windows.contents = contents_of(len(parts), sum(part.tokens.num_bytes for part in parts))
    windows.sampled_files = files if is_sampled(sum(file_size(path) for _, path in files)) else ()
    return windows


def _name_row(
    names: Sequence[str], starts: npt.NDArray[np.int64], width: int, start: int, _: int
) -> str:
    number = int(np.searchsorted(starts, start, side="right")) - 1
    return f"{names[number]} row {(start - int(starts[number])) // width}"


def _between(starts: npt.NDArray[np.int64], low: int, high: int) -> npt.NDArray[np.int64]:
    first, last = np.searchsorted(starts, (low, high), side="left")
    return starts[first:last]


def _expand(path: Path) -> list[Path]:
    """Expand one path. A prefix wins over a directory of the same name: Megatron writes both."""
    if not path.is_dir() or _beside(path, ".idx").is_file():
        return [path]
    try:
        files = sorted(entry for entry in path.iterdir() if entry.suffix in (".npy", ".bin"))
    except OSError as error:
        raise unreadable(path, error) from error
    visible = [entry for entry in files if not entry.name.startswith(".")]
    if not visible:
        raise DataError(f"data.path={path}: the directory holds no .npy or .bin file")
    return visible


def _open_part(path: Path, token_dtype: TokenDtype) -> _Part:
    index = _megatron_index(path)
    if index is not None:
        tokens, starts = open_megatron(index)
        return _Part(tokens=tokens, files=(index, tokens.path), document_starts=starts)
    if path.suffix == ".npy":
        return _open_npy(path)
    return _Part(tokens=_open_raw(path, token_dtype), files=(path,), is_raw=True)


def _require_width(tokens: TokenFile, vocab_size: int | None) -> None:
    """
    Raises:
        DataError: the first ids show that ``data.token_dtype`` has another width than the file.
    """
    head = tokens.read(0, min(tokens.num_tokens, _SCAN_BLOCK) // 2 * 2)
    size = head.dtype.itemsize
    other = None
    if size == 2 and head.size >= _SHOWN_IDS and not head[1::2].any():
        other = "uint32"  # small ids, whose upper halves are 0
    elif size == 4 and vocab_size is not None and first_outside(head, vocab_size) is not None:
        fits = first_outside(head.view("<u2"), vocab_size) is None
        other = "uint16" if fits else None
    if other is not None:
        raise DataError(
            f"{tokens.path}: its first ids make no sense as {head.dtype.name}, and do as {other}; "
            f"set data.token_dtype={other}"
        )


def _width(parts: Sequence[_Part], seq_len: int) -> int | None:
    """The width of the rows, where the files are tables.

    Raises:
        DataError: some are tables and some are not, or their rows differ, do not fit or lack.
    """
    widths = {part.width: part.tokens.path for part in parts}
    if len(widths) > 1:
        differing = ", ".join(
            f"{path} has " + (f"rows of {width} tokens" if width else "one dimension")
            for width, path in widths.items()
        )
        raise DataError(f"data.path: {differing}; all files must be alike")
    [(width, path)] = widths.items()
    if width is not None and not 2 <= width <= seq_len + 1:
        raise DataError(
            f"{path}: its rows have {width} tokens, and a sample has 2 to data.seq_len + 1 "
            f"(data.seq_len={seq_len}); set data.seq_len={max(width - 1, 1)}, or save it with "
            "one dimension to have windows cut"
        )
    if width is not None and not any(part.tokens.num_tokens for part in parts):
        raise DataError(f"{path}: holds no rows; give more data in data.path")
    return width


def _megatron_index(path: Path) -> Path | None:
    if path.suffix == ".idx":
        return path
    if path.suffix == ".bin" and path.with_suffix(".idx").is_file():
        return path.with_suffix(".idx")
    prefixed = _beside(path, ".idx")
    return prefixed if not path.is_file() and prefixed.is_file() else None


def _beside(path: Path, ending: str) -> Path:
    """Append a suffix; ``with_suffix`` would replace the ``.v2`` of a prefix ``corpus.v2``."""
    return path.with_name(path.name + ending)


def _open_raw(path: Path, token_dtype: TokenDtype) -> TokenFile:
    size = file_size(path)
    if token_dtype is TokenDtype.auto:
        raise DataError(
            f"{path}: a raw file does not say the type of its tokens; set data.token_dtype to "
            "uint8, uint16, uint32, int32 or uint64 (now auto)"
        )
    dtype = np.dtype(token_dtype.value).newbyteorder("<")
    if size % dtype.itemsize:
        raise DataError(
            f"{path}: {size} bytes are no whole number of {token_dtype.value} tokens "
            f"({dtype.itemsize} bytes each); the file is truncated or data.token_dtype is wrong"
        )
    return TokenFile(path=path, dtype=dtype.str, num_tokens=size // dtype.itemsize)


def _open_npy(path: Path) -> _Part:
    size = file_size(path)
    try:
        with path.open("rb") as handle:
            version = np.lib.format.read_magic(handle)
            if version not in _HEADERS:
                raise ValueError(f"version {version} is unknown")
            shape, by_columns, dtype = _HEADERS[version](handle)
            offset = handle.tell()
    except OSError as error:
        raise unreadable(path, error) from error
    # numpy reads the header as Python source: a hostile one also raises SyntaxError, TokenError...
    except Exception as error:
        raise DataError(f"{path}: is no .npy file ({error}); save it with numpy.save") from error
    if len(shape) not in (1, 2) or dtype.kind not in "iu" or (by_columns and len(shape) == 2):
        raise DataError(
            f"{path}: holds {dtype} of shape {list(shape)}{', by columns' if by_columns else ''}; "
            "allowed are integers of one dimension, or of two whose rows are the samples"
        )
    num_tokens = math.prod(shape)
    if min(shape) < 0 or size != offset + num_tokens * dtype.itemsize:
        raise DataError(
            f"{path}: declares {num_tokens} tokens of {dtype}, but {size - offset} bytes follow "
            "its header; the file is truncated or damaged, write it again"
        )
    tokens = TokenFile(path=path, dtype=dtype.str, num_tokens=num_tokens, offset_bytes=offset)
    return _Part(tokens=tokens, files=(path,), width=shape[1] if len(shape) == 2 else None)


def _require_vocab_size(vocab_size: int | None, parts: Sequence[_Part], whole: bool) -> int:
    if vocab_size is not None:
        return vocab_size
    blocks = (block for part in parts for _, block in _blocks(part.tokens, whole))
    largest = max((int(block.max()) for block in blocks), default=0)
    which = "all" if whole else "sampled"
    raise DataError(
        f"data.vocab_size is not set and token files do not say it; the largest id in {which} "
        f"tokens is {largest}, so at least {largest + 1}"
    )


def _end_id(end_token: int | str | None, vocab_size: int) -> int | None:
    if isinstance(end_token, str):
        raise DataError(
            f"data.end_token={end_token}: token files hold ids, and no texts of tokens; give the id"
        )
    if end_token is not None and not 0 <= end_token < vocab_size:
        raise DataError(
            f"data.end_token={end_token} is not in 0..{vocab_size - 1} (data.vocab_size)"
        )
    return end_token


def _blocks(tokens: TokenFile, whole: bool) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """(number of the first token, tokens) of what is looked at when a corpus is opened."""
    for start, stop in spread(tokens.num_tokens, block=_SCAN_BLOCK, whole=whole):
        yield start, tokens.read(start, stop)


def _boundaries(parts: Sequence[_Part], stream: TokenStream) -> npt.NDArray[np.int64] | None:
    """Document starts that the formats have. A file's end also ends a document."""
    known = [
        np.append(part.document_starts, part.tokens.num_tokens) + start
        for part, start in zip(parts, stream.starts[:-1], strict=True)
        if part.document_starts is not None
    ]
    return np.unique(np.concatenate(known)) if known else None


def _marking_token(parts: Sequence[_Part], end_token: int | None) -> int | None:
    """The end token, if a file has no boundaries of its own."""
    without = [part.tokens.path for part in parts if part.document_starts is None]
    if not without:
        return None
    if end_token is None:
        raise DataError(
            f"data.end_token is not set, and {without[0]} does not say where its documents end; "
            "set data.end_token to the id that ends one, or data.isolate_documents=false"
        )
    return end_token


# Megatron's index, as its IndexedDataset writes it, little endian: magic (9 bytes), version u64,
# dtype code u8, number of sequences u64, number of document indices u64, then int32 lengths
# [sequences], int64 byte pointers [sequences], int64 document indices [documents], and in
# multimodal corpora int8 modes [sequences]. Document d is sequences [indices[d], indices[d + 1]).
# Nothing in it is trusted: each declared size is compared with the file's before anything is
# allocated.
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
