"""Text files as documents: which files are read, and what a document is in each.

A plain file is one document. A ``.jsonl`` file, compressed or not, has one per line, in a field.
Files are read as a stream, with bounded memory whatever their size. Must not
know tokens, nor the cache.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from runner.data.dataset import file_size, unreadable
from runner.system.error import DataError
from runner.system.files import open_regular

PIECE_BYTES: Final = 1 << 20
_LINE_BYTES: Final = 1 << 28  # longer than any document of a text corpus
_ZSTD_BLOCK: Final = 1 << 14  # a hostile frame grows it some 30,000 times
_JSON_LINES: Final = ".jsonl"
_COMPRESSED: Final = (".gz", ".zst")
_NAMED_KEYS: Final = 8
_LEFT_OUT: Final = frozenset({"__pycache__"})
_LIBRARY_LEFT_OUT: Final = _LEFT_OUT | {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "site-packages",
    "dist-packages",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFile:
    """One file of the corpus; ``is_lines``: whether each line is a JSON object with a document."""

    name: str
    path: Path
    num_bytes: int
    is_lines: bool


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
            ``__pycache__`` are left out. Empty: the Python standard library's source.
        suffixes: name endings read from directories; ``.jsonl`` stands for ``.jsonl.gz`` and
            ``.jsonl.zst`` as well.
        field: the field of a JSON line with the document; None: such files are plain text.

    Raises:
        DataError: a path cannot be read, nothing matches, or every file is empty.
    """
    endings = tuple(suffixes)
    if field is not None and _JSON_LINES in endings:
        endings += tuple(_JSON_LINES + ending for ending in _COMPRESSED)
    if paths:
        roots = [Path(path).expanduser() for path in paths]
        pairs = [pair for root in roots for pair in _under(root, endings, len(roots) > 1)]
    else:
        library = Path(sysconfig.get_path("stdlib"))
        pairs = _walk(library, (".py",), _LIBRARY_LEFT_OUT)
    files = [
        TextFile(
            name=name,
            path=path,
            num_bytes=file_size(path),
            is_lines=field is not None and _without_compression(path.name).endswith(_JSON_LINES),
        )
        for name, path in pairs
    ]
    if not any(file.num_bytes for file in files):
        raise DataError(
            f"data.path={list(paths)}: all {len(files)} files are empty; give files with text"
        )
    return files


def _without_compression(name: str) -> str:
    stem, dot, ending = name.rpartition(".")
    return stem if dot + ending in _COMPRESSED else name


def _under(root: Path, endings: tuple[str, ...], several: bool) -> list[tuple[str, Path]]:
    """Files under a path: a file is taken whatever its ending, a directory is filtered."""
    if not root.is_dir():
        return [(root.name, root)]
    files = _walk(root, endings, _LEFT_OUT)
    return [(f"{root.name}/{name}" if several else name, path) for name, path in files]


def _walk(root: Path, endings: tuple[str, ...], left_out: frozenset[str]) -> list[tuple[str, Path]]:
    """(name relative to root, path) of each matching file, sorted by name."""
    selected: list[tuple[str, Path]] = []
    for folder, folders, files in os.walk(root, onerror=_refuse):
        folders[:] = [name for name in folders if not _is_hidden(name) and name not in left_out]
        matching = [
            Path(folder, name) for name in files if name.endswith(endings) and not _is_hidden(name)
        ]
        selected += [(path.relative_to(root).as_posix(), path) for path in matching]
    if not selected:
        raise DataError(
            f"data.path={root}: no file in it ends with one of {list(endings)}; "
            "change data.path or data.suffixes"
        )
    return sorted(selected)


def _is_hidden(name: str) -> bool:
    return name.startswith(".")


def _refuse(error: OSError) -> None:
    """Raise for an unreadable directory: os.walk would skip it, and the corpus would shrink."""
    raise unreadable(Path(error.filename), error) from error


# ---- what is in them


class Reader:
    """Reads the documents of files in order; ``done_bytes`` of the files are read."""

    def __init__(self, files: Sequence[TextFile], field: str | None) -> None:
        self._files = files
        self._field = field
        self.done_bytes = 0
        self.total_bytes = sum(file.num_bytes for file in files)

    def pieces(self) -> Iterator[tuple[int, Piece]]:
        """Yield (number of the file, piece) of every document; an empty one has one empty piece.

        Raises:
            DataError: a file cannot be read, or changed meanwhile; or a line is not a document.
        """
        before = 0
        for number, file in enumerate(self._files):
            with _opened(file) as raw:
                documents = self._of_lines(file, raw) if file.is_lines else _cut(raw)
                for piece in documents:
                    self.done_bytes = before + raw.tell()
                    yield number, piece
            before += file.num_bytes
            _refuse_changed(file)

    def _of_lines(self, file: TextFile, raw: BinaryIO) -> Iterator[Piece]:
        assert self._field is not None
        number = 1
        try:
            lines = _decompressed(file.path, raw)
            while line := lines.readline(_LINE_BYTES + 1):
                text = _document(line, self._field, f"{file.path} line {number}")
                yield from _cut(io.BytesIO(text))
                number += 1
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(
                f"{file.path} line {number}: cannot be decompressed ({error}); the file is "
                "truncated or damaged: write it again"
            ) from error


def _cut(handle: BinaryIO) -> Iterator[Piece]:
    """Cut one document into pieces of about 1 MiB."""
    piece, begins = _next(handle), True
    while True:
        following = _next(handle)
        yield Piece(text=piece, begins=begins, ends=not following)
        if not following:
            return
        piece, begins = following, False


def _next(handle: BinaryIO) -> bytes:
    piece = handle.read(PIECE_BYTES)
    return piece + handle.readline() if piece else piece


def _document(line: bytes, field: str, place: str) -> bytes:
    """The document in a JSON line, UTF-8.

    Raises:
        DataError: it has none.
    """
    advice = f'each line must be a JSON object with a string, such as {{"{field}": "..."}}'
    if len(line) > _LINE_BYTES:
        raise DataError(f"{place}: is longer than {_LINE_BYTES >> 20} MiB; {advice}")
    if not line.strip():
        raise DataError(f"{place}: is empty; {advice}")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        cause = str(error)[:200]
        raise DataError(f"{place}: is not JSON ({cause}); {advice}") from None
    text = value.get(field) if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise DataError(f"{place}: {_why_none(value, field)}; {advice}, or set data.field")
    return text.encode("utf-8", errors="replace")  # "\ud800" is valid JSON, but not a character


def _why_none(value: Any, field: str) -> str:
    if not isinstance(value, dict):
        return f"is no JSON object but {type(value).__name__}"
    if field in value:
        return f"{field!r} (data.field) is {type(value[field]).__name__}, no string"
    keys = ", ".join(repr(key)[:40] for key in list(value)[:_NAMED_KEYS]) or "nothing"
    return f"has no {field!r} (data.field), but {keys}"


def _refuse_changed(file: TextFile) -> None:
    size = file_size(file.path)
    if size != file.num_bytes:
        raise DataError(
            f"{file.path}: changed while it was read, from {file.num_bytes} to "
            f"{size} bytes; start again when it is complete"
        )


@contextlib.contextmanager
def _opened(file: TextFile) -> Iterator[BinaryIO]:
    try:
        with open_regular(file.path, follow=True) as raw:
            yield raw
    except OSError as error:
        raise unreadable(file.path, error) from error


def _decompressed(path: Path, raw: BinaryIO) -> BinaryIO:
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=raw, mode="rb")  # type: ignore[return-value]
    if path.suffix == ".zst":
        return io.BufferedReader(_Zstd(path, raw), PIECE_BYTES)
    return raw


class _Zstd(io.RawIOBase):
    """Reads consecutive Zstandard frames. The library's own reader accepts a torn one as whole.

    Raises:
        DataError: the library is missing, or a frame is damaged.
        EOFError: the last frame is torn.
    """

    def __init__(self, path: Path, raw: BinaryIO) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise DataError(
                f"{path}: needs the package zstandard: pip install zstandard, or decompress it"
            ) from error
        self._library: Any = zstandard
        self._path = path
        self._raw = raw
        self._frame: Any = None
        self._block = self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._block = self._block or self._raw.read(_ZSTD_BLOCK)
            if not self._block:
                if self._frame is not None:
                    raise EOFError("it ends inside a frame")
                return 0
            self._decompress()
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _decompress(self) -> None:
        if self._frame is None:
            self._frame = self._library.ZstdDecompressor().decompressobj()
        try:
            self._ready = self._frame.decompress(self._block)
        except self._library.ZstdError as error:
            raise DataError(
                f"{self._path}: cannot be decompressed ({error}); it is damaged: write it again"
            ) from error
        self._block = b""
        if self._frame.eof:
            self._block, self._frame = self._frame.unused_data, None
