"""The digest of every byte of a corpus, computed once and remembered for unchanged files.

A file counts as unchanged while its size, its inode and the times of its last
changes are the same. The notes only save time: a missing or damaged one is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from runner.data.dataset import digest, file_size, unreadable
from runner.system.files import open_regular, read_bounded

# Called during long work: a name for it, bytes done, bytes in all. May raise.
Progress = Callable[[str, int, int], None]

_WHAT: Final = "reading the corpus whole"
_LARGE_BYTES: Final = 1 << 26
_BLOCK_BYTES: Final = 1 << 22
_NOTE_BYTES: Final = 1 << 28
# Two changes within a clock tick look like one: a file that just changed is not remembered.
_SETTLED_NS: Final = 2_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """``sha256`` of the names, sizes and contents; ``files`` are (name, SHA-256) in order."""

    sha256: str
    num_bytes: int
    files: tuple[tuple[str, str], ...]


def notes_in(cache: Path) -> Path:
    """The folder for the notes in a cache directory."""
    return cache / "digests"


def stamp(files: Sequence[tuple[str, Path]]) -> str:
    """SHA-256 (hex) of names, paths, sizes, inodes and times of change, without reading.

    Raises:
        DataError: a file is missing.
    """
    return digest([_look(name, path) for name, path in files])


def whole_digest(
    files: Sequence[tuple[str, Path]], *, notes: Path | None, progress: Progress
) -> Whole:
    """Read all files, or use the note of an earlier reading.

    Args:
        files: (name, path), in the corpus' order.
        notes: directory of the notes; None: none are made.

    Raises:
        DataError: a file cannot be read.
    """
    before = stamp(files)
    note = notes / f"{before}.json" if notes is not None else None
    known = _read_note(note) if note is not None else None
    if known is not None:
        return known
    began = time.time_ns()
    total = sum(file_size(path) for _, path in files)
    digests: list[tuple[str, str]] = []
    done = 0
    for name, path in files:
        report = partial(of_all, progress, done, total)
        if len(files) > 1 and file_size(path) >= _LARGE_BYTES:
            # With a note of its own, so that an interrupted start need not read it again.
            of_file = whole_digest([(name, path)], notes=notes, progress=report)
            hashed, size = of_file.files[0][1], of_file.num_bytes
        else:
            try:
                hashed, size = hash_file(path, _WHAT, report)
            except OSError as error:
                raise unreadable(path, error) from error
        digests.append((name, hashed))
        done += size
    whole = Whole(sha256=digest(digests), num_bytes=done, files=tuple(digests))
    newest = max((max(_look(*file)[-2:]) for file in files), default=0)
    if note is not None and stamp(files) == before and newest + _SETTLED_NS < began:
        with contextlib.suppress(OSError):  # no room for a note: the next start reads again
            note.parent.mkdir(parents=True, exist_ok=True)
            draft = note.with_name(f".{note.name}.{secrets.token_hex(4)}")  # no need to sync it
            draft.write_text(json.dumps({"digest": digest(asdict(whole)), "whole": asdict(whole)}))
            os.replace(draft, note)
    return whole


def of_all(progress: Progress, before: int, total: int, what: str, size: int, _: int) -> None:
    """Turn a file's progress into that of all files."""
    progress(what, before + size, total)


def _look(name: str, path: Path) -> list[Any]:
    try:
        stat = path.stat()
    except OSError as error:
        raise unreadable(path, error) from error
    times = [stat.st_mtime_ns, stat.st_ctime_ns]
    return [name, str(path.absolute()), stat.st_size, stat.st_ino, *times]


def hash_file(path: Path, what: str, progress: Progress) -> tuple[str, int]:
    """SHA-256 (hex) and size of a file; ``progress`` gets ``what``, and 0 for the total.

    Raises:
        OSError: it cannot be read.
    """
    hashed, size = hashlib.sha256(), 0
    with open_regular(path, follow=True) as handle:
        while block := handle.read(_BLOCK_BYTES):
            hashed.update(block)
            size += len(block)
            progress(what, size, 0)
    return hashed.hexdigest(), size


def _read_note(note: Path) -> Whole | None:
    try:
        stored = json.loads(read_bounded(note, _NOTE_BYTES))
        if digest(stored["whole"]) != stored["digest"]:
            return None
        whole = stored["whole"]
        return Whole(**whole | {"files": tuple((name, sha256) for name, sha256 in whole["files"])})
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
