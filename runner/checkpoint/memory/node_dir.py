"""The folder in a node's shared memory where the ranks of one run keep their snapshots.

    /dev/shm/holdfast-UID/RUN/000003-rank-00001/    incarnation 3: owner.json, slot-0.bin ...

RUN is made from a random name in ``out`` and from its path. Each incarnation has folders of
its own: an older one that is still alive writes to files that the newer one has copied, verified
and unlinked. Only this user can write there; all input is checked nevertheless.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from runner.system.json_lines import read_object
from runner.system.process import pid_namespace

OWNER = "owner.json"
_RUN = re.compile(r"[0-9a-f]{32}")
_FOLDER = re.compile(r"([0-9]{6,7})-(?:rank|peer)-[0-9]{5,7}")
_OWNER_BYTES = 1 << 16
_ABANDONED_SECONDS = 86_400.0

OwnerProcess = Mapping[str, str | int]


class NodeDir:
    """
    Args:
        base: folder of a shared memory file system, such as ``/dev/shm``.
        run: 32 hex digits, the name of the run.
        out: the run's directory; absolute.
        process: this process, as :func:`runner.system.process.own_process` returns it.
        is_alive: tells whether a process is alive; None: it is of another machine or boot.
    """

    def __init__(
        self,
        base: Path,
        *,
        run: str,
        out: Path,
        process: OwnerProcess,
        is_alive: Callable[[OwnerProcess], bool | None],
    ) -> None:
        self._root = base / f"holdfast-{os.geteuid()}"
        self.folder = self._root / run
        self._out = out
        self._process = process
        self._is_alive = is_alive

    def open(self) -> None:
        """Make the folder.

        Raises:
            OSError: it cannot be made, or another user could write in it.
        """
        for folder in (self._root, self.folder):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            _check_private(folder)

    def of_rank(self, incarnation: int, rank: int, kind: str = "rank") -> Path:
        """``kind`` "peer": snapshots of a rank on another node."""
        return self.folder / f"{incarnation:06d}-{kind}-{rank:05d}"

    def make(self, folder: Path) -> None:
        """Make an empty folder that names its owner.

        Raises:
            OSError: it cannot be made.
        """
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)
        folder.mkdir(mode=0o700)
        owner = {"out": str(self._out), "process": dict(self._process), "pids": pid_namespace()}
        (folder / OWNER).touch(0o600)
        (folder / OWNER).write_text(json.dumps(owner))

    def is_trusted(self, folder: Path) -> bool:
        """Whether an earlier process of this boot made it.

        If the folder is on a disk, a power cut may leave any mixture of old and new files.
        """
        owner = _owner(folder) if folder.is_dir() and not folder.is_symlink() else None
        return owner is not None and bool(owner["process"]["boot"] == self._process["boot"])

    def is_left(self, folder: Path) -> bool:
        """Whether the process that made it is known to be dead, so that nothing in it changes."""
        owner = _owner(folder)
        # A process id of another namespace says nothing here.
        if owner is None or owner.get("pids") != pid_namespace():
            return False
        return self._is_alive(owner["process"]) is False

    def remove(self, folder: Path) -> None:
        """Delete one of these folders; mapped files disappear when their process ends."""
        shutil.rmtree(folder, ignore_errors=True)

    def remove_before(self, incarnation: int) -> None:
        """Delete what older incarnations left on this node."""
        for folder in self.of_ranks():
            if int(folder.name.split("-")[0]) < incarnation:
                self.remove(folder)

    def leave(self) -> None:
        """Delete the run's own folder when it is empty."""
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def of_ranks(self) -> list[Path]:
        """The folders of all ranks of all incarnations on this node."""
        return _folders(self.folder, _FOLDER)

    def num_bytes(self) -> int:
        """Bytes of all snapshots of this run on this node."""
        files: dict[int, int] = {}  # by inode: one that was taken over has two names
        for file in (file for folder in self.of_ranks() for file in folder.glob("*.bin")):
            with contextlib.suppress(OSError):
                files[file.lstat().st_ino] = file.lstat().st_blocks * 512
        return sum(files.values())

    def sweep(self) -> list[str]:
        """Remove folders of this user's runs that no later start will use; says which and why."""
        gone = []
        for folder in _folders(self._root, _RUN):
            if folder != self.folder and (out_and_why := self._abandoned(folder)):
                shutil.rmtree(folder, ignore_errors=True)
                gone.append(f"{folder} (of {out_and_why})")
        return gone

    def _abandoned(self, folder: Path) -> str:
        """The run and why its folder is not needed any more; empty while it is."""
        owners = [_owner(sub) for sub in _folders(folder, _FOLDER)]
        if any(owner and self._is_alive(owner["process"]) for owner in owners):
            return ""
        last = max((owner for owner in owners if owner), key=lambda o: str(o["out"]), default=None)
        age, why = _age_seconds(folder), ""
        if last is None:
            # Its ranks may be about to make their folders.
            why = "empty" if age >= _ABANDONED_SECONDS else ""
        elif not Path(last["out"]).is_dir():
            why = "that directory is gone"
        elif last["process"]["boot"] != self._process["boot"]:
            why = "from before the last boot"
        elif age > _ABANDONED_SECONDS:
            why = "ended more than a day ago"
        return f"out={last['out'] if last else '?'}: {why}" if why else ""


def free_bytes(folder: Path) -> int:
    """Bytes free for snapshots: the least of file system, machine and cgroup."""
    status = os.statvfs(folder)
    return max(0, min([status.f_bavail * status.f_frsize, *_free_memory()]))


def free_memory_bytes() -> int | None:
    """Bytes of host memory that are free: the least of machine and cgroup; None if unknown."""
    return min(_free_memory(), default=None)


def _free_memory() -> Iterator[int]:
    """Free memory of the machine, and of this process's cgroup (version 2).

    The latter counts shared memory.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError, IndexError):
        own = Path("/proc/self/cgroup").read_text().strip().splitlines()[-1].split(":")[-1]
        for folder in (Path("/sys/fs/cgroup") / own.lstrip("/"), Path("/sys/fs/cgroup")):
            limit = folder / "memory.max"
            if limit.is_file() and (text := limit.read_text().strip()) != "max":
                yield int(text) - int((folder / "memory.current").read_text())
                return


def _check_private(folder: Path) -> None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError(f"{folder}: is no directory of this user; remove it")
    if status.st_mode & 0o077:
        raise PermissionError(f"{folder}: others may look into it; chmod 700 it")


def _folders(parent: Path, name: re.Pattern[str]) -> list[Path]:
    try:
        folders = sorted(parent.iterdir())
    except OSError:
        return []
    return [p for p in folders if name.fullmatch(p.name) and p.is_dir() and not p.is_symlink()]


def _owner(folder: Path) -> dict[str, Any] | None:
    """The folder's owner; None if that is unknown."""
    owner = read_object(folder / OWNER, _OWNER_BYTES)
    process = owner.get("process")
    if not isinstance(process, dict) or type(process.get("pid")) is not int:
        return None
    texts = [owner.get("out"), *(process.get(name) for name in ("host", "boot", "started"))]
    return owner if all(isinstance(text, str) for text in texts) else None


def _age_seconds(folder: Path) -> float:
    """Seconds since anything in the folder last changed."""
    newest = 0.0
    for path in (folder, *folder.glob("*"), *folder.glob("*/*")):
        with contextlib.suppress(OSError):
            newest = max(newest, path.lstat().st_mtime)
    return time.time() - newest
