"""A memory limit for single processes, so that the kernel's OOM killer ends one. Needs root."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


class MemoryGroup:
    """``with MemoryGroup() as group: group.enter(pid, limit_bytes)``.

    Made below this process's own group, whose limits go on to hold.
    """

    def __enter__(self) -> MemoryGroup:
        """
        Raises:
            OSError: no such group can be made here.
        """
        parent, self._limit = _own_group()
        self._folder = Path(tempfile.mkdtemp(prefix="holdfast-test-", dir=parent))
        if not (self._folder / self._limit).exists():
            self._folder.rmdir()
            raise OSError(f"{parent} gives its children no memory controller")
        return self

    def enter(self, pid: int, limit_bytes: int) -> None:
        """Limit memory that the process allocates from now on."""
        (self._folder / self._limit).write_text(str(limit_bytes))
        (self._folder / "cgroup.procs").write_text(str(pid))

    def __exit__(self, *_: object) -> None:
        limit = time.monotonic() + 5
        while self._folder.exists() and time.monotonic() < limit:
            with contextlib.suppress(OSError):  # the dead need a moment to leave
                self._folder.rmdir()
                return
            time.sleep(0.05)


def unavailable() -> str | None:
    """Why memory cannot be limited here; None if it can."""
    try:
        with MemoryGroup():
            return None
    except OSError as error:
        return f"no memory cgroup can be made here ({error})"


def _own_group() -> tuple[Path, str]:
    """This process's group for memory, and the name of its limit: of cgroup v1, or v2."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    groups = {names: path for _, names, path in (line.split(":", 2) for line in lines)}
    for names, path in groups.items():
        if "memory" in names.split(","):
            return _ROOT / "memory" / path.lstrip("/"), "memory.limit_in_bytes"
    if "" not in groups or os.geteuid() != 0:
        raise OSError("no cgroup file system, or not root")
    return _ROOT / groups[""].lstrip("/"), "memory.max"
