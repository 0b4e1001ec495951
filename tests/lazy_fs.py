"""A file system (FUSE) that forgets what was not synced: python lazy_fs.py BACKING MOUNT TROUBLE

As LazyFS does it: written bytes stay in this process until fsync; killed, they are gone. Names are
changed in the backing folder at once. While a file TROUBLE has "ERROR PATTERN [PID]" in it,
operations on paths of that pattern fail so, of that process or of all.
"""

from __future__ import annotations

import errno
import os
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, ClassVar

import fuse


class Lazy(fuse.Operations):  # type: ignore[misc]
    """Passes operations on to the backing folder, but bytes only when they are synced."""

    def __init__(self, backing: str) -> None:
        self._backing = backing
        self._dirty: dict[str, bytearray] = {}

    def _real(self, path: str) -> str:
        return self._backing + path

    def _contents(self, path: str) -> bytearray:
        if path not in self._dirty:
            with open(self._real(path), "rb") as file:
                self._dirty[path] = bytearray(file.read())
        return self._dirty[path]

    # Reading

    def getattr(self, path: str, fh: Any = None) -> dict[str, Any]:
        try:
            status = os.lstat(self._real(path))
        except OSError as error:
            raise fuse.FuseOSError(error.errno or errno.EIO) from None
        keys = ("st_atime", "st_ctime", "st_gid", "st_mode", "st_mtime", "st_nlink", "st_size",
                "st_uid", "st_ino")  # fmt: skip
        attributes = {key: getattr(status, key) for key in keys}
        if path in self._dirty:
            attributes["st_size"] = len(self._dirty[path])
        return attributes

    def readdir(self, path: str, fh: Any) -> list[str]:
        return [".", "..", *os.listdir(self._real(path))]

    def read(self, path: str, size: int, offset: int, fh: Any) -> bytes:
        if path in self._dirty:
            return bytes(self._dirty[path][offset : offset + size])
        with open(self._real(path), "rb") as file:
            file.seek(offset)
            return file.read(size)

    def open(self, path: str, flags: int) -> int:
        return 0

    # Changing bytes: in here only

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        os.close(os.open(self._real(path), os.O_CREAT | os.O_WRONLY | os.O_TRUNC, mode))
        self._dirty.pop(path, None)
        return 0

    def write(self, path: str, data: bytes, offset: int, fh: Any) -> int:
        contents = self._contents(path)
        contents.extend(bytes(max(0, offset - len(contents))))
        contents[offset : offset + len(data)] = data
        return len(data)

    def truncate(self, path: str, length: int, fh: Any = None) -> None:
        contents = self._contents(path)
        del contents[length:]
        contents.extend(bytes(length - len(contents)))

    def fsync(self, path: str, datasync: int, fh: Any) -> int:
        if path in self._dirty:
            with open(self._real(path), "wb") as file:
                file.write(self._dirty.pop(path))
        return 0

    # Changing names: at once

    def rename(self, old: str, new: str) -> None:
        os.rename(self._real(old), self._real(new))
        self._dirty.pop(new, None)
        for path in list(self._dirty):
            if path == old or path.startswith(old + "/"):
                self._dirty[new + path[len(old) :]] = self._dirty.pop(path)

    def unlink(self, path: str) -> None:
        os.unlink(self._real(path))
        self._dirty.pop(path, None)

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._real(path), mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(self._real(path))

    def link(self, target: str, source: str) -> None:
        if source in self._dirty:
            self.fsync(source, 0, None)
        os.link(self._real(source), self._real(target))

    def utimens(self, path: str, times: Any = None) -> None:
        os.utime(self._real(path), times)

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self._real(path), mode)


class Ill(Lazy):
    """EDQUOT: what takes room fails. ESTALE: everything does; what was not synced is lost, and a
    file that was open before stays stale when the storage is back, as NFS has it.
    """

    _TAKES_ROOM = ("create", "write", "mkdir", "link")
    _HANDLE_AT: ClassVar = dict(read=3, write=3, fsync=2, truncate=2, getattr=1, flush=1)

    def __init__(self, backing: str, trouble: str) -> None:
        super().__init__(backing)
        self._trouble, self._opened, self._stale = Path(trouble), 0, 0

    def __call__(self, op: str, *args: Any) -> Any:
        told = self._trouble.read_text().split() if self._trouble.exists() else []
        is_ill = bool(told) and fnmatch(args[0], told[1]) and _asks(told[2:])
        is_stale = is_ill and told[0] == "ESTALE"
        if is_stale and len(told) == 2:  # on all nodes
            self._stale = self._opened
            self._dirty.clear()
        handle = (args[self._HANDLE_AT.get(op, 9) :] or (None,))[0]
        if is_stale or (handle and handle <= self._stale):
            raise fuse.FuseOSError(errno.ESTALE)
        if is_ill and op in self._TAKES_ROOM:
            raise fuse.FuseOSError(getattr(errno, told[0]))
        return super().__call__(op, *args)

    def open(self, path: str, flags: int) -> int:
        self._opened += 1
        return self._opened

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        super().create(path, mode)
        return self.open(path, 0)


def _asks(pids: list[str]) -> bool:
    """Whether the process asks; any does if none is named."""
    _, _, thread = fuse.fuse_get_context()
    return not pids or f"Tgid:\t{pids[0]}\n" in Path(f"/proc/{thread}/status").read_text()


if __name__ == "__main__":
    disk = Ill(sys.argv[1], sys.argv[3])
    fuse.FUSE(disk, sys.argv[2], foreground=True, nothreads=True, hard_remove=True)
