"""Prepares the processes of one attempt, finds, signals and ends them.

A process is prepared, and becomes its command, by ``python -m runner.launch.process_tree JSON
COMMAND``. It is a separate exec, because only C code may run between fork and exec in a process
with threads: a lock that another thread held stays locked in the child, and ``Popen`` would wait
for ever.

torchrun gives each worker a session of its own, so neither a group nor a parent names them all;
a mark in the environment does, which children inherit. Linux: it reads /proc.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from runner.system.parsing import json_text
from runner.system.process import die_with_parent, exit_status, is_in_kernel, own_module, unblock
from runner.system.process import parent as parent_of

MARK = "HOLDFAST_MARK"
_SHIELDED = (signal.SIGTERM, signal.SIGUSR1)
_SHELLS = ("sh", "bash", "dash", "zsh", "ksh")
# Ignored by Python from its start, which a command would inherit; see ``restore_signals`` of Popen.
_PYTHON_IGNORES = ("SIGPIPE", "SIGXFSZ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """What a command's process does first, so that it dies with its parent.

    Args:
        parent: id of the process that starts the command.
        shielded: the command ignores SIGTERM and SIGUSR1 from its first instant.
        is_torchrun: writing must never block it: a torchrun that waits for a reader to report
            which rank failed never ends. Other programs may not know that a write can fail.
    """

    parent: int
    shielded: bool
    is_torchrun: bool

    def command(self, command: Sequence[str]) -> list[str]:
        """Prefix ``command`` with this preparation."""
        return own_module(__name__, json_text(asdict(self)), *command)

    @contextlib.contextmanager
    def beginning(self) -> Iterator[None]:
        """Block signals around the start of :meth:`command`, until the child ignores them."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SHIELDED if self.shielded else ())
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def apply(self) -> None:
        """Prepare this process."""
        die_with_parent(self.parent)
        if self.is_torchrun:
            unblock(1)
            unblock(2)
        if self.shielded:
            for number in _SHIELDED:
                signal.signal(number, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SHIELDED)


def main(arguments: Sequence[str]) -> None:
    """Become the command; never returns. If that fails, exits with 127 as a shell does."""
    Preparation(**json.loads(arguments[0])).apply()
    for name in _PYTHON_IGNORES:
        if number := getattr(signal, name, None):
            signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(arguments[1], list(arguments[1:]))
    except OSError as error:
        sys.stderr.write(f"error: {arguments[1]}: {error.strerror}\n")
        sys.exit(127)


def marked(mark: str) -> list[int]:
    """Ids of this user's processes that carry the mark, without zombies."""
    wanted = f"{MARK}={mark}"
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return [pid for pid in pids if wanted in _words(pid, "environ")]


def ranks(mark: str) -> list[int]:
    """Ids of the marked processes that are ranks, without those that ranks started."""
    pids = [pid for pid in marked(mark) if _rank(pid) is not None]
    return [pid for pid in pids if parent_of(pid) not in pids]


def beneath_shells(pid: int, mark: str, number: int) -> list[int]:
    """The process if it handles a signal; of a shell that does not, and would die of it, what it
    runs that does."""
    if catches(pid, number):
        return [pid]
    if "".join(_words(pid, "comm")).strip() not in _SHELLS:
        return []
    below = [one for one in marked(mark) if parent_of(one) == pid]
    return [one for child in below for one in beneath_shells(child, mark, number)]


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


def _words(pid: int, file: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # ended, or another user's
        return []


def _rank(pid: int) -> str | None:
    return next((entry[5:] for entry in _words(pid, "environ") if entry.startswith("RANK=")), None)


if __name__ == "__main__":
    main(sys.argv[1:])
