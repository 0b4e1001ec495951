"""Finds, signals and ends the processes of one attempt, also those that left its session.

torchrun gives each worker a session of its own, so neither a group nor a parent names them all;
a mark in the environment does, which children inherit. Linux: it reads /proc.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from runner.system.process import exit_status, is_in_kernel
from runner.system.process import parent as parent_of

MARK = "HOLDFAST_MARK"


def marked(mark: str) -> list[int]:
    """Ids of this user's processes that carry the mark, without zombies."""
    wanted = f"{MARK}={mark}"
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return [pid for pid in pids if wanted in _environment(pid)]


def ranks(mark: str) -> list[int]:
    """Ids of the marked processes that are ranks, without those that ranks started."""
    pids = [pid for pid in marked(mark) if _rank(pid) is not None]
    return [pid for pid in pids if parent_of(pid) not in pids]


def rank_of(pid: int) -> int:
    """The rank that a process is, or belongs to; 0 without a launcher."""
    rank = _rank(pid) or ""
    return int(rank) if rank.isdecimal() else 0


def is_there(pid: int) -> bool:
    """Whether a process is alive; a zombie is not."""
    return parent_of(pid) is not None and exit_status(pid) is None


def catches(pid: int, number: int) -> bool:
    """Whether the process already has a handler for this signal."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    masks = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")]
    return bool(masks) and bool(masks[0] >> (number - 1) & 1)


def send(pid: int, number: int) -> None:
    """Signal a process, unless it has just ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def end_all(mark: str, *, timeout_seconds: float = 10.0, stuck_seconds: float = 120.0) -> None:
    """Send SIGKILL until no marked process is left.

    Args:
        stuck_seconds: how long to wait for processes that sleep in the kernel (state D), as in a
            GPU's driver: they die when it returns, and hold the GPU's memory until then.
    """
    began = time.monotonic()
    while pids := marked(mark):
        waited = time.monotonic() - began
        if waited > (stuck_seconds if any(map(is_in_kernel, pids)) else timeout_seconds):
            break
        for pid in pids:
            send(pid, signal.SIGKILL)
        time.sleep(0.02)


def _environment(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # ended, or another user's
        return []


def _rank(pid: int) -> str | None:
    return next((entry[5:] for entry in _environment(pid) if entry.startswith("RANK=")), None)
