"""Text files as a corpus: tokenised once, kept in a cache, read from there.

Two parts, for two kinds of processes: :func:`prepare_text` may take hours and is for one process
of a node; :func:`open_prepared` is for all. Must not know ranks, nor the configuration: only
messages name the keys a user would change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from runner.data.cache import Job, cached, load
from runner.data.claim import Owners
from runner.data.corpus_digest import Progress, notes_in, whole_digest
from runner.data.dataset import (
    Dataset,
    TokenStream,
    Windows,
    contents_of,
    digest,
    fingerprint_files,
    is_sampled,
)
from runner.data.documents import find_files
from runner.data.tokenizer import Mark, open_codec
from runner.system.error import DataError

_FORMAT: Final = "holdfast-text-2"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSource:
    """Where text is and how it becomes tokens.

    Attributes:
        paths: files, or directories read recursively in order of name; hidden entries and
            ``__pycache__`` are left out; or :data:`runner.data.documents.PYTHON_LIBRARY`.
        suffixes: name endings read from directories; ``.jsonl`` stands for its compressed forms
            as well.
        field: of a JSON line or a table's row, that holds the document; None: JSON lines are text
            like others.
        tokenizer: a Hugging Face tokenizers JSON file or its folder, or None for bytes: 257 ids,
            256 ends a document.
        begin_token, end_token: see :func:`runner.data.tokenizer.open_codec`.
        cache: directory of token caches; one is added under the corpus' fingerprint.
    """

    paths: Sequence[str]
    suffixes: Sequence[str]
    tokenizer: str | None
    cache: Path
    field: str | None = "text"
    begin_token: Mark = None
    end_token: Mark = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A verified cache, and notes for a person on how it was made."""

    place: Path
    notice: str


def prepare_text(
    source: TextSource, *, progress: Progress, owners: Owners | None = None
) -> Prepared:
    """Put the tokens into the cache: find them, wait for the process that makes them, or make them.

    Args:
        progress: called with the progress; if it raises, no file is left.

    Raises:
        DataError: a path cannot be read, nothing matches, the corpus is empty, a JSON line holds
            no document, the tokenizer is not valid or does not say what ends a document, or
            the cache cannot be written.
    """
    cache = source.cache.expanduser()
    files = find_files(source.paths, source.suffixes, source.field)
    codec = open_codec(source.tokenizer, begin_token=source.begin_token, end_token=source.end_token)
    named = [(file.name, file.path) for file in files]
    fingerprint = fingerprint_files(named)
    identity: list[str | None] = [_FORMAT, fingerprint, codec.identity]
    if any(file.is_lines for file in files):
        identity.append(source.field)
    if any(file.compression and not file.is_lines for file in files):
        identity.append("decompressed")  # earlier releases took the compressed bytes for text
    if is_sampled(sum(file.num_bytes for file in files)):
        identity.append(whole_digest(named, notes=notes_in(cache), progress=progress).sha256)
    place = cache / digest(identity)
    job = Job(files=files, field=source.field, codec=codec, source=fingerprint)
    index = cached(place, job, progress=progress, owners=owners)
    return Prepared(place=place, notice=index.words)


def open_prepared(place: Path, *, seq_len: int, isolate_documents: bool) -> Dataset:
    """Open a cache that :func:`prepare_text` of this or another process has verified.

    Args:
        seq_len: tokens the model sees; a sample has one more.
        isolate_documents: whether samples carry segments.

    Raises:
        DataError: it is gone or damaged, or too short for one sample.
    """
    index = load(place, progress=None)
    if index is None:
        raise DataError(
            f"data.cache={place.parent}: {place.name} cannot be read by this process, and was "
            "whole a moment ago; give a directory that all processes of the node see"
        )
    windows = Windows(
        stream=TokenStream([index.tokens_at(place)]),
        places=index.places_at(place),
        seq_len=seq_len,
        vocab_size=index.vocab_size,
        source=digest([index.source, index.tokens_sha256]),
        document_starts=index.documents_at(place) if isolate_documents else None,
    )
    windows.contents = contents_of(len(index.files), index.num_bytes)
    return windows
