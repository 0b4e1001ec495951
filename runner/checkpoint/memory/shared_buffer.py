"""A mapped file in shared memory, which outlives its process.

All pages are reserved when the file is made. A sparse file would give SIGBUS, not an error, when
the machine has no page left.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_128

from runner.checkpoint.manifest import ITEM_BYTES
from runner.system.error import CorruptCheckpoint

_BLOCK_BYTES = 1 << 23  # bytes digested at once
_TOUCH_BYTES = 1 << 24  # bytes mapped at once: madvise holds the interpreter's lock
_MADV_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14, which mmap does not name

# XXH3 detects accidental damage, which is enough for this user's own memory, and is three times as
# fast as the SHA-256 used on disk.
FAST = "xxh3"
_DIGESTS: Mapping[str, Callable[..., Any]] = {"xxh3": xxh3_128, "sha256": hashlib.sha256}
KINDS = frozenset(_DIGESTS)


class SharedBuffer:
    """``values``: FP32, 1-D, on the CPU; ``num_bytes`` of them in the file at ``path``.

    The owner decides what the bytes mean: elements of other types are stored in it as well.
    """

    def __init__(self, path: Path, mapped: mmap.mmap, num_bytes: int) -> None:
        self.path = path
        self.num_bytes = num_bytes
        count = num_bytes // ITEM_BYTES
        self.values = torch.frombuffer(mapped, dtype=torch.float32)[:count]
        self._mapped = mapped
        self._is_pinned = False

    @classmethod
    def make(cls, path: Path, num_bytes: int) -> SharedBuffer:
        """Make a new file with all its pages.

        Raises:
            OSError: no room, or the name is taken.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        size = max(num_bytes, mmap.PAGESIZE)
        try:
            os.posix_fallocate(descriptor, 0, size)
            mapped = mmap.mmap(descriptor, size)
        except OSError as error:
            path.unlink()
            raise OSError(error.errno, f"{error.strerror} ({size:,} bytes)", str(path)) from None
        finally:
            os.close(descriptor)
        _touch(mapped)
        return cls(path, mapped, num_bytes)

    @classmethod
    def open(cls, path: Path, num_bytes: int) -> SharedBuffer:
        """Open the file of an earlier process, to read only; see :func:`open_own`.

        Raises:
            OSError: the file is missing, another user's, or of another size.
        """
        descriptor = open_own(path, os.O_RDONLY)
        size = max(num_bytes, mmap.PAGESIZE)
        try:
            if os.fstat(descriptor).st_size != size:
                raise OSError(f"{path}: is not of {size:,} bytes")
            # Copy-on-write: torch accepts only writable memory.
            mapped = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)
        return cls(path, mapped, num_bytes)

    def pin(self) -> None:
        """Page-lock the memory, so that a GPU copies into it without the CPU.

        Raises:
            RuntimeError: the driver refuses.
        """
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        size = len(self._mapped)
        torch.cuda.check_error(int(runtime.cudaHostRegister(self.values.data_ptr(), size, 0)))
        self._is_pinned = True

    def forget_refusal(self, device: torch.device) -> None:
        """Clear the error of a refused :meth:`pin`. CUDA keeps each thread's last error, and would
        report it for the next kernel."""
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device)

    def unpin(self) -> None:
        """Undo :meth:`pin`; call it before the memory is freed."""
        if self._is_pinned:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(self.values.data_ptr())
            self._is_pinned = False

    def digest(self, *, kind: str = FAST, threads: int = 1, finite: bool = False) -> str:
        """``kind:hex``, a digest of the blocks' digests, so that several threads can compute it.

        Args:
            kind: ``xxh3``, or ``sha256`` as in earlier versions.
            finite: also refuse NaN and Inf.

        Raises:
            CorruptCheckpoint: a value is not finite.
        """
        make = _DIGESTS[kind]

        def block_digest(block: np.ndarray) -> bytes:
            if finite and not np.isfinite(block).all():
                raise CorruptCheckpoint(f"{self.path}: holds NaN or Inf")
            digest: bytes = make(block.data.cast("B")).digest()
            return digest

        whole = make()
        if threads == 1:
            parts: Iterator[bytes] = map(block_digest, self._blocks())
            for part in parts:
                whole.update(part)
        else:
            with ThreadPoolExecutor(max_workers=threads) as pool:
                for part in pool.map(block_digest, self._blocks()):
                    whole.update(part)
        return f"{kind}:{whole.hexdigest()}"

    def _blocks(self) -> Iterator[np.ndarray]:
        array, size = self.values.numpy(), _BLOCK_BYTES // ITEM_BYTES
        return (array[start : start + size] for start in range(0, len(array), size))


def open_own(path: Path, flags: int) -> int:
    """Open a plain file of this user, not a link; returns the descriptor.

    Raises:
        OSError: it is something else, or cannot be opened.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        return descriptor
    os.close(descriptor)
    raise OSError(f"{path}: is no plain file of this user")


def _touch(mapped: mmap.mmap) -> None:
    """Map every page now; otherwise the first snapshot would map them, page by page."""
    with contextlib.suppress(
        OSError
    ):  # has an effect only if the system allows huge pages for files
        mapped.madvise(mmap.MADV_HUGEPAGE)
    try:
        for start in range(0, len(mapped), _TOUCH_BYTES):
            length = min(_TOUCH_BYTES, len(mapped) - start)
            mapped.madvise(_MADV_POPULATE_WRITE, start, length)
    except OSError:
        np.frombuffer(mapped, dtype=np.uint8)[:: mmap.PAGESIZE] = 0
