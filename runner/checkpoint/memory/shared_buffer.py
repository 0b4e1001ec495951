"""A mapped file in shared memory, which outlives its process.

All pages are reserved when the file is made. A sparse file would give SIGBUS, not an error, when
the machine has no page left.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from xxhash import xxh3_128

from runner.checkpoint.manifest import ITEM_BYTES
from runner.system.error import CorruptCheckpoint
from runner.system.files import open_regular

_BLOCK_BYTES = 1 << 23  # bytes digested at once
_TOUCH_BYTES = 1 << 24  # bytes mapped at once: madvise holds the interpreter's lock
_MADV_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14, which mmap does not name

# XXH3 detects accidental damage, which is enough for this user's own memory, and is three times as
# fast as the SHA-256 used on disk.
_KIND = "xxh3"


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
    def open(cls, path: Path, num_bytes: int, *, is_own: bool = False) -> SharedBuffer:
        """Open the file of an earlier process, to read only.

        Args:
            is_own: to write as well; nobody else does.

        Raises:
            OSError: the file is missing, or of another size.
        """
        size = max(num_bytes, mmap.PAGESIZE)
        with open_regular(path, writable=is_own) as file:
            if os.fstat(file.fileno()).st_size != size:
                raise OSError(f"{path}: is not of {size:,} bytes")
            # Copy-on-write: torch accepts only writable memory.
            access = mmap.ACCESS_WRITE if is_own else mmap.ACCESS_COPY
            mapped = mmap.mmap(file.fileno(), size, access=access)
        if is_own:
            _touch(mapped)
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

    def digest(self, *, threads: int = 1, finite: bool = False) -> str:
        """``xxh3:hex``, a digest of the blocks' digests, so that several threads can compute it.

        Args:
            finite: also refuse NaN and Inf.

        Raises:
            CorruptCheckpoint: a value is not finite.
        """

        def block_digest(block: np.ndarray) -> bytes:
            if finite and not np.isfinite(block).all():
                raise CorruptCheckpoint(f"{self.path}: holds NaN or Inf")
            return xxh3_128(block.data.cast("B")).digest()

        array, size = self.values.numpy(), _BLOCK_BYTES // ITEM_BYTES
        blocks = [array[start : start + size] for start in range(0, len(array), size)]
        if threads == 1:
            parts = b"".join(map(block_digest, blocks))
        else:
            with ThreadPoolExecutor(max_workers=threads) as pool:
                parts = b"".join(pool.map(block_digest, blocks))
        return f"{_KIND}:{xxh3_128(parts).hexdigest()}"


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
