"""What Linux tells of processes and of this machine, under /proc."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

# Fields of /proc/PID/stat after the command's name, see proc(5).
_STATE, _PARENT, _STARTED, _EXIT_CODE = 0, 1, 19, -1


def host_name() -> str:
    return socket.gethostname()


def boot_id() -> str:
    """Names this boot of this machine; process numbers mean nothing beyond it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def started_at(pid: int) -> str | None:
    """When a process of this machine was started, in kernel ticks; None: there is none.

    Together with the pid it names a process for good: numbers are used again.
    """
    fields = _stat(pid)
    return None if not fields or _has_ended(fields) else fields[_STARTED]


def parent(pid: int) -> int | None:
    """The parent's process id, None when the process is gone; a zombie has one."""
    fields = _stat(pid)
    return int(fields[_PARENT]) if fields else None


def exit_status(pid: int) -> int | None:
    """How a process ended which nobody has reaped yet: its exit code, or minus the signal.

    None: it lives, or is gone.
    """
    fields = _stat(pid)
    if not fields or not _has_ended(fields):
        return None
    return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE]))


def own_process() -> dict[str, str | int]:
    """JSON that tells others which process this is: host, boot, pid, start."""
    pid = os.getpid()
    return {
        "host": host_name(),
        "boot": boot_id(),
        "pid": pid,
        "started": started_at(pid) or "",
    }


def is_alive(process: Mapping[str, str | int]) -> bool | None:
    """Whether the process of :func:`own_process` lives; None when it is another machine's."""
    if process["host"] != host_name() or process["boot"] != boot_id():
        return None
    return started_at(int(process["pid"])) == process["started"]


def num_oom_kills() -> int:
    """How often the kernel of this machine has killed for want of memory since it booted."""
    try:
        text = Path("/proc/vmstat").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in text.splitlines() if "oom_kill " in line), 0)


def _stat(pid: int) -> list[str]:
    try:
        # A process may have named itself in any bytes, brackets among them.
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def _has_ended(fields: list[str]) -> bool:
    return fields[_STATE] in "ZX"
