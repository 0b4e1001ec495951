"""File operations that survive a crash. Knows nothing of checkpoints.

The rule behind all of them: data is fsynced before the name that publishes it, and the
directory is fsynced after, or a power cut may show the name without the data.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from runner.system.parsing import json_text

_BLOCK_BYTES = 1 << 22


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to a system error, which lacks it for a descriptor."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def sync_directory(folder: Path) -> None:
    """Make the names in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with naming(folder):
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents durable: a file is no safer than its folder's name."""
    missing = []
    path = folder
    while not path.exists():
        missing.append(path)
        path = path.parent
    for path in reversed(missing):
        path.mkdir(exist_ok=True)  # another process may make it at the same time
        sync_directory(path.parent)


def write_durably(path: Path, data: bytes, *, ending: str = ".tmp") -> None:
    """Create or replace ``path`` whole: temporary name, fsync, rename, fsync of the folder.

    Args:
        ending: of the temporary name; one of its own where several may write ``path`` at once.
    """
    temporary = path.with_name(path.name + ending)
    with naming(path), temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_directory(path.parent)


def write_json(
    path: Path, tree: Mapping[str, Any], *, most_bytes: int | None = None, indent: int | None = 1
) -> None:
    """:func:`write_durably` of canonical JSON; see :func:`runner.system.parsing.json_text`.

    Raises:
        OSError: it cannot be written, or has more than ``most_bytes``; then nothing is written.
    """
    data = json_text(tree, indent=indent, sort_keys=True).encode() + b"\n"
    if most_bytes is not None and len(data) > most_bytes:
        message = f"would have {len(data)} bytes; at most {most_bytes} are read back"
        raise OSError(errno.EFBIG, message, str(path))
    write_durably(path, data)


def replace_for_writing(path: Path, *, length: int, check: Callable[[], None]) -> None:
    """Replace a file by a copy of its first ``length`` bytes, or by an empty one.

    A process that has the old file open writes to an unlinked one. And no process replaces it
    without the right: one that stalls in here until another has done the same finds either that
    ``check`` refuses, or that its copy is gone.

    Args:
        check: raises when this process may no longer write here. Between processes that both
            may, the last one wins.
    """
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    stale = list(path.parent.glob(f"{path.name}.*.tmp"))
    check()  # after the check: a later process made its copy later, and keeps it
    for other in stale:
        other.unlink(missing_ok=True)
    with naming(path), draft.open("wb") as fresh:
        if path.exists():
            with path.open("rb") as old:
                _copy(old, fresh, length)
        fresh.flush()
        os.fsync(fresh.fileno())
    try:
        check()
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    draft.rename(path)
    sync_directory(path.parent)


def _copy(source: BinaryIO, target: BinaryIO, length: int) -> None:
    """The first ``length`` bytes."""
    while length > 0 and (block := source.read(min(length, _BLOCK_BYTES))):
        target.write(block)
        length -= len(block)


def open_regular(path: Path, *, follow: bool = False, writable: bool = False) -> BinaryIO:
    """Open a plain file for reading: no pipe that would block, no device.

    Args:
        follow: whether ``path`` itself may be a symbolic link.
        writable: open it for writing as well.

    Raises:
        OSError: it is something else, or cannot be read.
    """
    no_follow = 0 if follow else os.O_NOFOLLOW
    try:
        mode = os.O_RDWR if writable else os.O_RDONLY
        descriptor = os.open(path, mode | os.O_NONBLOCK | no_follow)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a symbolic link", str(path)) from None
        raise
    with naming(path):
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "is no plain file", str(path))
        return os.fdopen(descriptor, "r+b" if writable else "rb")


def read_bounded(path: Path, limit: int, *, follow: bool = False) -> bytes:
    """Read a plain file of at most ``limit`` bytes, from the disk, not the page cache.

    Raises:
        OSError: it is larger, something else, or cannot be read.
    """
    with naming(path), open_regular(path, follow=follow) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        # Not limit + 1: read() takes memory for as much as it may return.
        size = min(os.fstat(file.fileno()).st_size, limit)
        data = file.read(size + 1)
        if size < len(data) <= limit:  # it has grown, or is one of /proc, which have no size
            data += file.read(limit + 1 - len(data))
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"has more than {limit} bytes", str(path))
    return data


def blocks(file: BinaryIO) -> Iterator[bytes]:
    """Yield the file's bytes in blocks, bypassing the page cache where the kernel allows it."""
    # A digest of cached pages would prove nothing about the disk.
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    while block := file.read(_BLOCK_BYTES):
        yield block


def file_digest(path: Path) -> str:
    """SHA-256 (hex) of a file."""
    digest = hashlib.sha256()
    with naming(path), open_regular(path) as file:
        for block in blocks(file):
            digest.update(block)
    return digest.hexdigest()


def remove_folder(folder: Path) -> None:
    """Delete a folder that nothing refers to any more."""
    shutil.rmtree(folder)
    sync_directory(folder.parent)
