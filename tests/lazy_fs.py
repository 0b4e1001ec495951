"""A file system (FUSE) that forgets what was not synced: python lazy_fs.py BACKING MOUNTPOINT

As LazyFS does it: written bytes stay in this process until fsync; killed, they are gone. Names are
changed in the backing folder at once.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

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


if __name__ == "__main__":
    fuse.FUSE(Lazy(sys.argv[1]), sys.argv[2], foreground=True, nothreads=True, hard_remove=True)
