"""Text files as documents: which files are read, and what a document is in each.

A plain file is one document. A ``.jsonl`` file has one per line, in a field; a Parquet table or a
``.csv`` file has one per row, in a column. Text may be compressed. Files are read as a stream, with
bounded memory whatever their size. Must not know tokens, nor the cache.
"""

from __future__ import annotations

import bz2
import contextlib
import csv
import gzip
import io
import itertools
import json
import lzma
import os
import sysconfig
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

from runner.data.dataset import file_size, unreadable
from runner.system.error import DataError, imported
from runner.system.files import open_regular

# What a file is by its first bytes: compressed text, which is decompressed, or no text at all.

HEAD_BYTES: Final = 8192
_TEXT_BLOCK: Final = 1 << 20
_ZSTD_BLOCK: Final = 1 << 14  # a hostile frame grows it some 30,000 times
_COMPRESSIONS: Final = {
    ".gz": b"\x1f\x8b",
    ".zst": b"\x28\xb5\x2f\xfd",
    ".bz2": b"BZh",
    ".xz": b"\xfd7zXZ\x00",
}
COMPRESSED: Final = tuple(_COMPRESSIONS)
_UNPACK: Final = "unpack it, and give the files in it"
_EXTRACT: Final = "write the text in it to a file of its own"
_CONVERT: Final = "convert it: iconv -f {} -t UTF-8"
_KINDS: Final = (  # magic, what it is, what to do
    (b"PK\x03\x04", "a zip archive", _UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (b"Rar!\x1a\x07", "a rar archive", _UNPACK),
    (b"\x04\x22\x4d\x18", "compressed by lz4", "decompress it"),
    (b"PAR1", "a Parquet table", "let its name end with .parquet"),
    (b"ARROW1", "an Arrow table", "give it to data=hf"),
    (b"\x93NUMPY", "a NumPy array", "give token ids to data=tokens"),
    (b"MMIDIDX", "a Megatron index", "give it to data=tokens"),
    (b"%PDF-", "a PDF", _EXTRACT),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", _EXTRACT),
    (b"SQLite format 3\x00", "an SQLite database", _EXTRACT),
    (b"\x89PNG\r\n", "a PNG picture", "give text"),
    (b"\xff\xd8\xff", "a JPEG picture", "give text"),
    (b"\xff\xfe\x00\x00", "UTF-32", _CONVERT.format("UTF-32")),
    (b"\xff\xfe", "UTF-16", _CONVERT.format("UTF-16")),
    (b"\xfe\xff", "UTF-16", _CONVERT.format("UTF-16")),
)


class Damaged(Exception):
    """Compressed data is torn or not what its name says."""


def compression_of(name: str, head: bytes) -> str | None:
    """The ending that stands for a file's compression, by its first bytes or its name."""
    for ending, magic in _COMPRESSIONS.items():
        # The three letters of bzip2 may begin a text; its blocks follow the digit of their size.
        if head.startswith(magic) and (ending != ".bz2" or head[4:10] in _BZ2_BLOCKS):
            return ending
    return next((ending for ending in COMPRESSED if name.endswith(ending)), None)


_BZ2_BLOCKS: Final = (b"1AY&SY", b"\x17rE8P\x90")  # the second: there is none


def refuse_what_is_no_text(path: Path, head: bytes) -> None:
    """
    Args:
        head: the first bytes, decompressed.

    Raises:
        DataError: they are not those of a text; names what they are.
    """
    for magic, kind, remedy in _KINDS:
        if head.startswith(magic):
            raise DataError(f"{path}: is no text but {kind}; {remedy}")
    if head[257:262] == b"ustar":
        raise DataError(f"{path}: is no text but a tar archive; {_UNPACK}")
    if b"\x00" in head:
        raise DataError(
            f"{path}: is no text: byte {head.index(0)} of it is NUL. Give text, or token ids to "
            "data=tokens"
        )


def decompressed(path: Path, raw: BinaryIO, compression: str | None) -> BinaryIO:
    """The text of a file; its ``read`` and ``readline`` raise :class:`Damaged`.

    Raises:
        DataError: the library for it is missing.
    """
    if compression is None:
        return raw
    errors: tuple[type[Exception], ...] = (EOFError, zlib.error, lzma.LZMAError)
    if compression == ".gz":
        blocks = iter(partial(gzip.GzipFile(fileobj=raw, mode="rb").read1, _TEXT_BLOCK), b"")
    elif compression == ".zst":
        zstandard = imported("zstandard", str(path), "text")
        blocks = _streams(lambda: zstandard.ZstdDecompressor().decompressobj(), raw, _ZSTD_BLOCK)
        errors += (zstandard.ZstdError,)
    else:
        made = bz2.BZ2Decompressor if compression == ".bz2" else lzma.LZMADecompressor
        blocks = _streams(made, raw, _TEXT_BLOCK, _TEXT_BLOCK)
    return io.BufferedReader(_Text(_unpacked(blocks, errors)), _TEXT_BLOCK)


class _Text(io.RawIOBase):
    """A file of blocks that are made one after another."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._ready = block
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def _unpacked(blocks: Iterator[bytes], errors: tuple[type[Exception], ...]) -> Iterator[bytes]:
    """Turns the errors of the libraries into one; those of the storage stay as they are."""
    try:
        yield from blocks
    except errors as error:
        raise Damaged(str(error)) from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise Damaged(str(error)) from error  # BadGzipFile, and what bz2 raises


def _streams(make: Callable[[], Any], raw: BinaryIO, size: int, *most: int) -> Iterator[bytes]:
    """Reads consecutive streams, and zeros that fill a file up behind one of them.

    The libraries' own readers accept a torn one as whole (zstandard), or take a damaged one for
    something else that follows the first (bz2, lzma).

    Args:
        size: bytes that are read at once; ``most``: that a decompressor gives at once, if it has a
            limit.

    Raises:
        EOFError: the last one is torn.
    """
    stream: Any = None
    block = b""
    while block := block or raw.read(size):
        if stream is not None and stream.eof:
            block = block.lstrip(b"\0")
            stream = None if block else stream
            continue
        stream = stream or make()
        yield stream.decompress(block, *most)
        while most and not (stream.eof or stream.needs_input):
            yield stream.decompress(b"", *most)
        block = stream.unused_data if stream.eof else b""
    if stream is None or not stream.eof:
        raise EOFError("it ends inside a frame")


PIECE_BYTES: Final = 1 << 20
_LINE_BYTES: Final = 1 << 28  # longer than any document of a text corpus
PYTHON_LIBRARY: Final = "python:library"  # as a path: the standard library's source
_JSON_LINES: Final = ".jsonl"
_TABLE: Final = ".parquet"
_CSV: Final = ".csv"
_ROWS_AT_ONCE: Final = 256
_TOLD_SHARE: Final = 1e-3  # of bytes that are not UTF-8
_NAMED_KEYS: Final = 8
_LEFT_OUT: Final = frozenset({"__pycache__"})
_LIBRARY_LEFT_OUT: Final = _LEFT_OUT.union(
    ("test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFile:
    """One file of the corpus.

    ``is_lines``: whether each line, or each row of a table, is a document of its own.
    ``compression`` is an ending such as ".gz", or None.
    """

    name: str
    path: Path
    num_bytes: int
    is_lines: bool
    compression: str | None = None

    @property
    def is_table(self) -> bool:
        return self.is_lines and self.name.endswith(_TABLE)

    @property
    def is_csv(self) -> bool:
        return self.is_lines and self.name.removesuffix(self.compression or "").endswith(_CSV)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a document, UTF-8, cut after a line: never inside a character."""

    text: bytes
    begins: bool
    ends: bool


# ---- which files


def find_files(paths: Sequence[str], suffixes: Sequence[str], field: str | None) -> list[TextFile]:
    """Find the corpus' files, in the order in which they are read.

    Args:
        paths: files, or directories read recursively in order of name; hidden entries and
            ``__pycache__`` are left out; or :data:`PYTHON_LIBRARY`.
        suffixes: name endings read from directories; ``.jsonl`` and ``.csv`` stand for their
            compressed forms as well.
        field: the field of a JSON line, or the column of a table, with the document; None: JSON
            lines and CSV are plain text.

    Raises:
        DataError: a path cannot be read or is no text, nothing matches, or every file is empty.
    """
    endings = tuple(suffixes)
    for one in {_JSON_LINES, _CSV} & set(endings) if field is not None else ():
        endings += tuple(one + ending for ending in COMPRESSED)
    if not paths:
        raise DataError(
            "data.path is not set; give the corpus as data.path=DIR (files and directories, "
            "several as [A,B]), or data=python for a try on the source of Python's standard library"
        )
    pairs = [pair for path in paths for pair in _under(path, endings, len(paths) > 1)]
    files = [_inspected(name, path, field) for name, path in pairs]
    if not any(file.num_bytes for file in files):
        raise DataError(
            f"data.path={list(paths)}: all {len(files)} files are empty; give files with text"
        )
    return files


def _inspected(name: str, path: Path, field: str | None) -> TextFile:
    """
    Raises:
        DataError: it cannot be read, or its first bytes are not those of a text.
    """
    with _opened(path) as raw:
        head = raw.read(HEAD_BYTES)
        compression = compression_of(name, head)
        stem = name.removesuffix(compression or "")
        is_table = name.endswith(_TABLE) and head.startswith(b"PAR1")
        if compression is not None:
            raw.seek(0)
            with contextlib.suppress(Damaged):  # reported when all of it is read
                refuse_what_is_no_text(path, decompressed(path, raw, compression).read(HEAD_BYTES))
        elif not is_table:
            refuse_what_is_no_text(path, head)
        num_bytes = raw.seek(0, 2)
    if is_table and field is None:
        raise DataError(f"{path}: set data.field to the column of the table that holds the text")
    return TextFile(
        name=name,
        path=path,
        num_bytes=num_bytes,
        is_lines=field is not None and stem.endswith((_JSON_LINES, _CSV, _TABLE)),
        compression=compression,
    )


def _under(text: str, endings: tuple[str, ...], several: bool) -> list[tuple[str, Path]]:
    """Files under a path: a file is taken whatever its ending, a directory is filtered."""
    if text == PYTHON_LIBRARY:
        return _walk(Path(sysconfig.get_path("stdlib")), (".py",), _LIBRARY_LEFT_OUT)
    root = Path(text).expanduser()
    if not root.is_dir():
        return [(root.name, root)]
    files = _walk(root, endings, _LEFT_OUT)
    return [(f"{root.name}/{name}" if several else name, path) for name, path in files]


def _walk(root: Path, endings: tuple[str, ...], left_out: frozenset[str]) -> list[tuple[str, Path]]:
    """(name relative to root, path) of each matching file, sorted by name."""
    selected: list[tuple[str, Path]] = []
    others: Counter[str] = Counter()
    for folder, folders, files in os.walk(root, onerror=_refuse):
        folders[:] = [n for n in folders if not n.startswith(".") and n not in left_out]
        selected += [
            (Path(folder, name).relative_to(root).as_posix(), Path(folder, name))
            for name in files
            if name.endswith(endings) and not name.startswith(".")
        ]
        others.update(_ending(name) or name for name in files)
    if not selected:
        held = ", ".join(f"{count} {ending}" for ending, count in others.most_common(_NAMED_KEYS))
        most = next((ending for ending, _ in others.most_common() if ending.startswith(".")), ".x")
        raise DataError(
            f"data.path={root}: no file in it ends with one of {list(endings)}; it holds "
            f"{held or 'none'}. Change data.path, or name the ending: 'data.suffixes=[{most}]'"
        )
    return sorted(selected)


def _ending(name: str) -> str:
    """``.parquet``; with a compression's also the one before it, such as ``.txt.zst``."""
    path = Path(name)
    return "".join(path.suffixes[-2 if path.suffix in COMPRESSED else -1 :])


def _refuse(error: OSError) -> None:
    """Raise for an unreadable directory: os.walk would skip it, and the corpus would shrink."""
    raise unreadable(Path(error.filename), error) from error


# ---- what is in them


class Reader:
    """Reads the documents of files in order; ``done_bytes`` of the files are read."""

    def __init__(self, files: Sequence[TextFile], field: str | None) -> None:
        self._files = files
        self._field = field
        self._num_plain = self._num_odd = 0  # bytes of plain text, and of them not UTF-8
        self._first_odd = ""
        self.done_bytes = 0
        self.total_bytes = sum(file.num_bytes for file in files)

    @property
    def notice(self) -> str:
        """A line on bytes that are not UTF-8, where they are more than a few."""
        if self._num_odd <= _TOLD_SHARE * self._num_plain:
            return ""
        return (
            f"data.path: {self._num_odd / self._num_plain:.1%} of the text is not UTF-8, first in "
            f"{self._first_odd}: a tokenizer sees U+FFFD there; convert it, such as with iconv"
        )

    def pieces(self) -> Iterator[tuple[int, Piece]]:
        """Yield (number of the file, piece) of every document; an empty one has one empty piece.

        Raises:
            DataError: a file cannot be read, or changed meanwhile; or a line is not a document.
        """
        before = 0
        for number, file in enumerate(self._files):
            with _opened(file.path) as raw:
                for piece in self._documents(file, raw):
                    self.done_bytes = before + raw.tell()
                    yield number, piece
            before += file.num_bytes
            size = file_size(file.path)
            if size != file.num_bytes:
                raise DataError(
                    f"{file.path}: changed while it was read, from {file.num_bytes} to {size} "
                    "bytes; start again when it is complete"
                )

    def _documents(self, file: TextFile, raw: BinaryIO) -> Iterator[Piece]:
        if file.is_table:
            yield from _of_table(file, raw, self._field or "")
            return
        read = 0
        try:
            text = decompressed(file.path, raw, file.compression)
            of_lines = _of_csv if file.is_csv else _of_lines
            for piece in of_lines(file, text, self._field) if file.is_lines else _cut(text):
                read += len(piece.text)
                if not file.is_lines:
                    self._count(file, piece.text)
                yield piece
        except Damaged as error:
            raise DataError(
                f"{file.path}: cannot be decompressed behind {read} bytes of text ({error}); the "
                "file is truncated or damaged: write it again"
            ) from error

    def _count(self, file: TextFile, text: bytes) -> None:
        self._num_plain += len(text)
        try:
            text.decode()
        except UnicodeDecodeError:
            # Each byte that is not UTF-8 becomes a surrogate, which cannot be encoded.
            decoded = text.decode(errors="surrogateescape")
            self._num_odd += len(decoded) - len(decoded.encode(errors="ignore").decode())
            self._first_odd = self._first_odd or str(file.path)


def _of_lines(file: TextFile, lines: BinaryIO, field: str | None) -> Iterator[Piece]:
    for number in itertools.count(1):
        line = lines.readline(_LINE_BYTES + 1)
        if not line:
            return
        yield from _cut(io.BytesIO(_document(line, field or "", f"{file.path} line {number}")))


def _of_csv(file: TextFile, lines: BinaryIO, field: str | None) -> Iterator[Piece]:
    """The documents of a CSV file with a header: its rows, in one column."""
    csv.field_size_limit(_LINE_BYTES)
    number = -1
    try:
        texts = (line.decode() for line in iter(lines.readline, b""))
        head = next(texts, "").removeprefix("\ufeff")
        separator = max(",\t;", key=head.count)
        rows = csv.reader(itertools.chain([head], texts), delimiter=separator, strict=True)
        columns = next(rows, [])
        if field not in columns:
            named = ", ".join(columns[:_NAMED_KEYS])[:300]
            raise DataError(f"{file.path}: has no column {field!r} (data.field), but {named}")
        at = columns.index(field)
        for row in filter(None, rows):  # a blank line is no row
            number += 1
            if len(row) != len(columns):
                raise DataError(
                    f"{file.path} row {number}: has {len(row)} cells, and the header {len(columns)}"
                )
            yield from _cut(io.BytesIO(row[at].encode()))
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{file.path} row {number + 1}: cannot be read ({error})") from error


def _of_table(file: TextFile, raw: BinaryIO, field: str) -> Iterator[Piece]:
    """The documents of a Parquet table: its rows, in one column."""
    pyarrow = imported("pyarrow", str(file.path), "hf")
    parquet = imported("pyarrow.parquet", str(file.path), "hf")
    number = 0
    try:
        table = parquet.ParquetFile(raw)
        columns = table.schema_arrow.names
        if field not in columns:
            named = ", ".join(columns[:_NAMED_KEYS])
            raise DataError(f"{file.path}: has no column {field!r} (data.field), but {named}")
        # Without threads of its own: loading processes are forked later.
        for rows in table.iter_batches(_ROWS_AT_ONCE, columns=[field], use_threads=False):
            for text in rows.column(0).to_pylist():
                if not isinstance(text, str):
                    raise DataError(
                        f"{file.path} row {number}: {field!r} (data.field) is "
                        f"{type(text).__name__}, no string; leave such rows out"
                    )
                yield from _cut(io.BytesIO(text.encode()))
                number += 1
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        cause = " ".join(str(error).split())[:300]
        raise DataError(f"{file.path} row {number}: cannot be read ({cause})") from error


def _cut(handle: BinaryIO) -> Iterator[Piece]:
    """Cut one document into pieces of about 1 MiB."""
    piece, begins, ends = b"", True, False
    while not ends:
        following = handle.read(PIECE_BYTES)
        following += handle.readline() if following else b""
        ends = not following
        if piece or ends:
            yield Piece(text=piece, begins=begins, ends=ends)
            begins = False
        piece = following


def _document(line: bytes, field: str, place: str) -> bytes:
    """The document in a JSON line, UTF-8.

    Raises:
        DataError: it has none.
    """
    if len(line) > _LINE_BYTES:
        why = f"is longer than {_LINE_BYTES >> 20} MiB"
    elif not line.strip():
        why = "is empty"
    else:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            why = f"is not JSON ({str(error)[:200]})"
        else:
            text = value.get(field) if isinstance(value, dict) else None
            if isinstance(text, str):
                # "\ud800" is valid JSON, but not a character
                return text.encode("utf-8", errors="replace")
            why = _why_none(value, field)
    raise DataError(
        f'{place}: {why}; each line must be a JSON object with a string, such as {{"{field}": '
        '"..."}, or set data.field'
    )


def _why_none(value: Any, field: str) -> str:
    """Why a value of JSON has no document."""
    if not isinstance(value, dict):
        return f"is no JSON object but {type(value).__name__}"
    if field in value:
        return f"{field!r} (data.field) is {type(value[field]).__name__}, no string"
    keys = ", ".join(repr(key)[:40] for key in list(value)[:_NAMED_KEYS]) or "nothing"
    return f"has no {field!r} (data.field), but {keys}"


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with open_regular(path, follow=True) as raw:
            yield raw
    except OSError as error:
        raise unreadable(path, error) from error
