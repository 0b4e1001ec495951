"""What a file is by its first bytes: compressed text, which is decompressed, or no text at all."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from runner.system.error import DataError, imported

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
    if compression == ".zst":
        return io.BufferedReader(_Text(_zstd_frames(path, raw)), _TEXT_BLOCK)
    opener: Any = {".gz": gzip.GzipFile, ".bz2": bz2.BZ2File, ".xz": lzma.LZMAFile}[compression]
    opened = opener(fileobj=raw, mode="rb") if compression == ".gz" else opener(raw)
    return io.BufferedReader(_Text(_unpacked(opened)), _TEXT_BLOCK)


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


def _unpacked(opened: Any) -> Iterator[bytes]:
    """Turns the errors of the libraries into one; those of the storage stay as they are."""
    try:
        while block := opened.read1(_TEXT_BLOCK):
            yield block
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise Damaged(str(error)) from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise Damaged(str(error)) from error  # BadGzipFile, and what bz2 raises


def _zstd_frames(path: Path, raw: BinaryIO) -> Iterator[bytes]:
    """Reads consecutive Zstandard frames. The library's own reader accepts a torn one as whole.

    Raises:
        MissingPackage: the library is missing.
        Damaged: a frame is damaged, or the last one is torn.
    """
    zstandard = imported("zstandard", str(path), "text")
    frame: Any = None
    block = b""
    while block := block or raw.read(_ZSTD_BLOCK):
        frame = frame or zstandard.ZstdDecompressor().decompressobj()
        try:
            yield frame.decompress(block)
        except zstandard.ZstdError as error:
            raise Damaged(str(error)) from error
        block, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise Damaged("it ends inside a frame")
