"""Text files as a corpus: found, made into tokens once, kept in a cache.

Owns which files are read, how text becomes tokens, and the cache of the result. Must not
trust the cache: it is built by several processes at once and outlives crashes, so a
directory counts only when its digests agree, and a damaged one is built again.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

import numpy as np
import numpy.typing as npt

from runner.data.dataset import (
    Dataset,
    Places,
    TokenFile,
    TokenStream,
    Windows,
    cumulative,
    digest,
    file_size,
    fingerprint_files,
    unreadable,
)
from runner.error import DataError
from runner.files import sync_directory

BYTE_VOCAB_SIZE: Final = 257
BYTE_END: Final = 256
END_NAMES: Final = ("</s>", "<|endoftext|>", "<eos>", "<|end_of_text|>", "[SEP]")

_FORMAT: Final = "holdfast-text-1"
_TOKENS: Final = "tokens.bin"
_INDEX: Final = "index.json"
_PIECE_BYTES: Final = 1 << 20
_LEFT_OUT: Final = frozenset({"__pycache__"})
_LIBRARY_LEFT_OUT: Final = _LEFT_OUT | {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "site-packages",
    "dist-packages",
}


class Codec(Protocol):
    """How bytes of text become token ids."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_token(self) -> int: ...

    @property
    def identity(self) -> str:
        """Changes whenever the same text would become other tokens."""

    def encode(self, text: bytes) -> npt.NDArray[Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Document:
    name: str
    path: Path
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Index:
    """What ``index.json`` holds beside its own digest; ``starts`` has the total at its end."""

    dtype: str
    tokens_sha256: str
    source: str
    names: list[str]
    starts: list[int]
    num_bytes: list[int]

    def tokens_at(self, place: Path) -> TokenFile:
        return TokenFile(path=place / _TOKENS, dtype=self.dtype, num_tokens=self.starts[-1])


def open_text(
    *,
    paths: Sequence[str],
    suffixes: Sequence[str],
    tokenizer: str | None,
    seq_len: int,
    isolate_documents: bool,
    cache: Path,
) -> Dataset:
    """Open text files as one stream of tokens, an end token after each file.

    Args:
        paths: files, or directories read recursively in order of name; hidden entries and
            ``__pycache__`` are left out. Empty: the Python standard library's source.
        suffixes: name endings read from directories.
        tokenizer: a Hugging Face tokenizers JSON file, or None for bytes: 257 ids, 256
            ends a document.
        seq_len: tokens the model sees; a sample has one more.
        isolate_documents: whether samples carry segments.
        cache: directory of token caches; one is added under the corpus' fingerprint.

    Raises:
        DataError: a path cannot be read, nothing matches, the corpus is empty or too
            short, the tokenizer is no such file, or the cache cannot be written.
    """
    documents = _find(paths, suffixes)
    codec = _ByteCodec() if tokenizer is None else _open_tokenizer(Path(tokenizer).expanduser())
    source = fingerprint_files([(document.name, document.path) for document in documents])
    place = cache.expanduser() / digest([_FORMAT, source, codec.identity])
    index = _cached(place, documents, codec, source)
    starts = np.array(index.starts, dtype=np.int64)
    return Windows(
        stream=TokenStream([index.tokens_at(place)]),
        places=_places(index, starts, exact_bytes=tokenizer is None),
        seq_len=seq_len,
        vocab_size=codec.vocab_size,
        source=digest([source, index.tokens_sha256]),
        document_starts=starts[:-1] if isolate_documents else None,
    )


def _places(index: _Index, starts: npt.NDArray[np.int64], *, exact_bytes: bool) -> Places:
    """One token is one byte without a tokenizer, so offsets in a file are exact."""
    if exact_bytes:
        return Places(names=index.names, starts=starts, unit="bytes", marks=1)
    return Places(names=index.names, starts=starts, unit="tokens")


# ---- which files


def _find(paths: Sequence[str], suffixes: Sequence[str]) -> list[_Document]:
    if paths:
        roots = [Path(path).expanduser() for path in paths]
        found = [pair for root in roots for pair in _under(root, suffixes, len(roots) > 1)]
    else:
        library = Path(sysconfig.get_path("stdlib"))
        found = _walk(library, (".py",), _LIBRARY_LEFT_OUT)
    documents = [_Document(name=name, path=path, num_bytes=file_size(path)) for name, path in found]
    if not any(document.num_bytes for document in documents):
        raise DataError(
            f"data.path={list(paths)}: all {len(documents)} files are empty; give files with text"
        )
    return documents


def _under(root: Path, suffixes: Sequence[str], several: bool) -> list[tuple[str, Path]]:
    """A file named by the user is read whatever its ending; a directory is filtered."""
    if not root.is_dir():
        return [(root.name, root)]
    found = _walk(root, suffixes, _LEFT_OUT)
    return [(f"{root.name}/{name}" if several else name, path) for name, path in found]


def _walk(root: Path, suffixes: Sequence[str], left_out: frozenset[str]) -> list[tuple[str, Path]]:
    """(name relative to root, path) of each matching file, sorted by name."""
    found: list[tuple[str, Path]] = []
    for folder, folders, files in os.walk(root, onerror=_refuse):
        folders[:] = [name for name in folders if not _is_hidden(name) and name not in left_out]
        matching = [
            Path(folder, name)
            for name in files
            if name.endswith(tuple(suffixes)) and not _is_hidden(name)
        ]
        found += [(path.relative_to(root).as_posix(), path) for path in matching]
    if not found:
        raise DataError(
            f"data.path={root}: no file in it ends with one of {list(suffixes)}; "
            "change data.path or data.suffixes"
        )
    return sorted(found)


def _is_hidden(name: str) -> bool:
    return name.startswith(".")


def _refuse(error: OSError) -> None:
    """os.walk skips a directory it cannot read unless told not to: a corpus that shrinks."""
    raise unreadable(Path(error.filename), error) from error


# ---- how text becomes tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class _ByteCodec:
    vocab_size: int = BYTE_VOCAB_SIZE
    end_token: int = BYTE_END
    identity: str = "bytes"

    def encode(self, text: bytes) -> npt.NDArray[Any]:
        return np.frombuffer(text, dtype=np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TokenizerCodec:
    path: Path
    tokenizer: Any
    vocab_size: int
    end_token: int
    identity: str

    def encode(self, text: bytes) -> npt.NDArray[Any]:
        decoded = text.decode("utf-8", errors="replace")
        try:
            encoded = self.tokenizer.encode(decoded, add_special_tokens=False)
        except Exception as error:  # the library's own, and bare: a vocabulary with a hole, say
            raise DataError(
                f"data.tokenizer={self.path}: cannot encode the corpus ({str(error)[:500]}); "
                "mend it, or null for bytes"
            ) from error
        return np.array(encoded.ids, dtype=np.uint32)


def _open_tokenizer(path: Path) -> Codec:
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(
            f"data.tokenizer={path} needs the package tokenizers: pip install tokenizers"
        ) from error
    try:
        contents = path.read_bytes()
        tokenizer = tokenizers.Tokenizer.from_buffer(contents)
    # The library raises bare Exception for a file it cannot read as a tokenizer.
    except Exception as error:
        raise DataError(
            f"data.tokenizer={path}: is no readable tokenizers JSON file ({str(error)[:500]}); "
            "give a tokenizer.json, or null for bytes"
        ) from error
    vocab_size, end_token = _vocabulary(tokenizer.get_vocab())
    return _TokenizerCodec(
        path=path,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        end_token=end_token,
        identity=digest([tokenizers.__version__, hashlib.sha256(contents).hexdigest(), end_token]),
    )


def _vocabulary(vocab: dict[str, int]) -> tuple[int, int]:
    """(vocab size, end token); ids may have holes, so the largest counts, not how many."""
    size = max(vocab.values(), default=-1) + 1
    known = [vocab[name] for name in END_NAMES if name in vocab]
    return (size, known[0]) if known else (size + 1, size)


# ---- the cache


def _cached(place: Path, documents: Sequence[_Document], codec: Codec, source: str) -> _Index:
    index = _load(place)
    if index is not None:
        return index
    # Not mkdtemp: its private mode would hide a shared cache from other users.
    draft = place.with_name(f".{place.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        draft.mkdir(parents=True)
        _build(draft, documents, codec, source)
        _publish(draft, place)
    except OSError as error:
        raise DataError(
            f"data.cache={place.parent}: the token cache cannot be written ({error}); "
            "give a directory that is writable and has room"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    index = _load(place)
    if index is None:
        raise DataError(
            f"data.cache={place.parent}: {place.name} does not read back as it was written; "
            "give a directory on storage that works"
        )
    return index


def _load(place: Path) -> _Index | None:
    """The index of a whole cache; None if there is none or anything in it disagrees."""
    try:
        stored = json.loads((place / _INDEX).read_text())
        if digest(stored["index"]) != stored["digest"]:
            return None
        index = _Index(**stored["index"])
        tokens = index.tokens_at(place)
        if tokens.path.stat().st_size != tokens.num_bytes:
            return None
        return index if _sha256(tokens.path) == index.tokens_sha256 else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _build(draft: Path, documents: Sequence[_Document], codec: Codec, source: str) -> None:
    dtype = "<u2" if codec.vocab_size <= 2**16 else "<u4"
    with (draft / _TOKENS).open("wb") as out:
        lengths = [_write_document(out, document, codec, dtype) for document in documents]
        _sync(out)
    index = _Index(
        dtype=dtype,
        tokens_sha256=_sha256(draft / _TOKENS),
        source=source,
        names=[document.name for document in documents],
        starts=cumulative(lengths).tolist(),
        num_bytes=[document.num_bytes for document in documents],
    )
    stored = {"digest": digest(asdict(index)), "index": asdict(index)}
    with (draft / _INDEX).open("wb") as out:
        out.write(json.dumps(stored).encode())
        _sync(out)
    sync_directory(draft)


def _write_document(out: BinaryIO, document: _Document, codec: Codec, dtype: str) -> int:
    """Append one file and its end token; the number of tokens written."""
    num_tokens, num_bytes = 1, 0
    for piece in _pieces(document.path):
        ids = codec.encode(piece)
        out.write(ids.astype(dtype).tobytes())
        num_tokens, num_bytes = num_tokens + ids.size, num_bytes + len(piece)
    if num_bytes != document.num_bytes:
        raise DataError(
            f"{document.path}: changed while it was read, from {document.num_bytes} to "
            f"{num_bytes} bytes; start again when it is complete"
        )
    out.write(np.array(codec.end_token, dtype=dtype).tobytes())
    return num_tokens


def _pieces(path: Path) -> Iterator[bytes]:
    """The file in pieces of about 1 MiB, cut after a line: never inside a UTF-8 character."""
    try:
        with path.open("rb") as handle:
            while piece := handle.read(_PIECE_BYTES):
                yield piece + handle.readline()
    except OSError as error:
        raise unreadable(path, error) from error


def _publish(draft: Path, place: Path) -> None:
    """Give the draft its name; where another process was first, use what it made.

    A damaged cache is mended file by file: the same corpus gives the same bytes, so two
    processes that mend at once, or a third that reads, never find a file missing.
    """
    try:
        os.rename(draft, place)
    except OSError:
        if not place.is_dir():
            raise
        if _load(place) is None:
            os.replace(draft / _TOKENS, place / _TOKENS)
            os.replace(draft / _INDEX, place / _INDEX)
            sync_directory(place)
    sync_directory(place.parent)


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _sync(out: BinaryIO) -> None:
    out.flush()
    os.fsync(out.fileno())
