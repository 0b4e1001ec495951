"""File operations that survive a crash, and nothing about checkpoints.

The rule behind all of them: data is fsynced before the name that publishes it, and the
directory is fsynced after, or a power cut may show the name without the data.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK_BYTES = 1 << 22


def sync_directory(folder: Path) -> None:
    """Make the names in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, data: bytes) -> None:
    """Create or replace ``path`` whole: temporary name, fsync, rename, fsync of the folder."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_directory(path.parent)


def write_json(path: Path, value: Any) -> None:
    """:func:`write_durably` of canonical JSON. NaN is refused: it is no JSON."""
    text = json.dumps(value, allow_nan=False, indent=1, sort_keys=True)
    write_durably(path, text.encode() + b"\n")


def blocks(path: Path) -> Iterator[bytes]:
    """The file's bytes, some MiB at a time, past the page cache where the kernel allows it."""
    with path.open("rb") as file:
        # A digest of cached pages would prove nothing about the disk.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while block := file.read(_BLOCK_BYTES):
            yield block


def file_digest(path: Path) -> str:
    """SHA-256 (hex) of a file."""
    digest = hashlib.sha256()
    for block in blocks(path):
        digest.update(block)
    return digest.hexdigest()


def remove_folder(folder: Path) -> None:
    """Delete a folder that nothing refers to any more."""
    shutil.rmtree(folder)
    sync_directory(folder.parent)
