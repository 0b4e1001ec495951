"""Processes of this machine: facts from /proc, and Linux calls that Python lacks.

Knows nothing of runs, ranks or torch.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import hashlib
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

# Fields of /proc/PID/stat after the command's name, see proc(5).
_STATE, _PARENT, _STARTED, _EXIT_CODE = 0, 1, 19, -1
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# linux/pidfd.h: struct pidfd_info begins with a mask (64 bits); what follows is not needed here, up
# to the status as wait(2) has it, its last four bytes.
_PIDFD_INFO_BYTES, _PIDFD_INFO_EXIT = 64, 1 << 3
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO_BYTES << 16 | 0xFF << 8 | 11
_LIBC = ctypes.CDLL(None)  # not after a fork: loading takes locks that another thread may hold

# Read before anything slow: the parent may be gone when torch is imported.
_FIRST = (os.getpid(), os.getppid())


def host_name() -> str:
    return socket.gethostname()


def boot_id() -> str:
    """The id of this boot of this machine; process ids mean nothing beyond it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def pid_namespace() -> str:
    """The id of this process's pid namespace; a container may have its own."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def started_at(pid: int) -> str | None:
    """When a process of this machine started, in kernel ticks; None if it does not exist.

    Together with the pid it identifies a process for good: pids are reused.
    """
    fields = stat_fields(pid)
    return None if not fields or _has_ended(fields) else fields[_STARTED]


def parent(pid: int) -> int | None:
    """The parent's process id, None when the process is gone; a zombie has one."""
    fields = stat_fields(pid)
    return int(fields[_PARENT]) if fields else None


def is_in_kernel(pid: int) -> bool:
    """Whether a process sleeps where no signal reaches it (state D)."""
    fields = stat_fields(pid)
    return bool(fields) and fields[_STATE] == "D"


def exit_status(pid: int) -> int | None:
    """How a zombie process ended: its exit code, or minus the signal.

    None: it is alive, or gone.
    """
    fields = stat_fields(pid)
    if not fields or not _has_ended(fields):
        return None
    return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE]))


def exit_status_by_pidfd(descriptor: int) -> int | None:
    """How a process ended whose parent has asked for it: its exit code, or minus the signal.

    Args:
        descriptor: its pidfd, opened while it was alive.

    Returns:
        None: it is alive or a zombie, or this kernel does not tell (before Linux 6.15).
    """
    info = bytearray(_PIDFD_INFO_BYTES)
    struct.pack_into("=Q", info, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    (mask,) = struct.unpack_from("=Q", info, 0)
    (status,) = struct.unpack_from("=i", info, _PIDFD_INFO_BYTES - 4)
    return os.waitstatus_to_exitcode(status) if mask & _PIDFD_INFO_EXIT else None


def own_process() -> dict[str, str | int]:
    """JSON that identifies this process for others: host, boot, pid, start."""
    pid = os.getpid()
    return {"host": host_name(), "boot": boot_id(), "pid": pid, "started": started_at(pid) or ""}


def parent_name() -> str:
    """A name for the process that started this one, unique among all machines.

    16 hex digits; empty where the parent is not visible.
    """
    pid = os.getppid()
    started = started_at(pid)
    if started is None:
        return ""
    identity = f"{host_name()} {boot_id()} {pid} {started}"
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def is_alive(process: Mapping[str, str | int]) -> bool | None:
    """Whether the process of :func:`own_process` is alive; None if on another machine."""
    if process["host"] != host_name() or process["boot"] != boot_id():
        return None
    return started_at(int(process["pid"])) == process["started"]


def signal_name(number: int) -> str:
    """``SIGKILL``, or ``signal 99`` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def num_oom_kills() -> int:
    """How often this machine's kernel has killed processes for lack of memory since boot."""
    try:
        text = Path("/proc/vmstat").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in text.splitlines() if "oom_kill " in line), 0)


def first_parent() -> int:
    """The process that started this one, not one that adopted it later."""
    pid, parent = _FIRST
    return parent if pid == os.getpid() else os.getppid()  # forked since


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel send this process SIGKILL when its parent ends.

    More exactly, when the parent's thread that started it ends. It survives an exec, but
    children do not inherit it. Elsewhere than on Linux nothing happens.

    Args:
        parent: its process id; if it is gone already, this process ends now.
    """
    if hasattr(_LIBC, "prctl"):
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def wake_without_parent() -> None:
    """Have the kernel continue this process, if it is stopped, when its parent ends; Linux only.

    It could not notice by itself, and would stay for ever.
    """
    if hasattr(_LIBC, "prctl"):
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def adopt_orphans(adopts: bool) -> None:
    """Set whether orphans among this process's descendants become its children; Linux only."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0)


def take_input() -> int:
    """This process's standard input, as a descriptor of its own; what it starts reads nothing."""
    taken, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return taken


def unblock(descriptor: int) -> None:
    """Make writes to this pipe or terminal fail (EAGAIN) while it is full, not block.

    The file is reopened for that: the flag belongs to the open file, which other processes
    share (a shell would lose output). Files never make a writer wait; sockets and what may not
    be opened again stay as they are.
    """
    with contextlib.suppress(OSError):
        if not (stat.S_ISFIFO(os.fstat(descriptor).st_mode) or os.isatty(descriptor)):
            return
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        own = os.open(f"/proc/self/fd/{descriptor}", flags)
        try:
            os.dup2(own, descriptor)
        finally:
            os.close(own)


def answer_hangup(handler: Callable[[int, FrameType | None], None], *, always: bool) -> None:
    """Handle SIGHUP, the end of a terminal: a request to stop if output goes to it.

    With output elsewhere this process continues without its terminal, as under nohup; and where
    nohup (or a parent) has it ignored already. Main thread only.

    Args:
        always: treat it as a request, wherever the output goes and whatever was set.
    """
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    is_request = always or (os.isatty(1) and not is_ignored)
    signal.signal(signal.SIGHUP, handler if is_request else signal.SIG_IGN)


def stat_fields(pid: int) -> list[str]:
    """What /proc/PID/stat has after the command's name, see proc(5); empty if it is gone."""
    try:
        # A process may have named itself in any bytes, brackets among them.
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def _has_ended(fields: list[str]) -> bool:
    return fields[_STATE] in "ZX"


# Runs one of our commands in a process of its own, beside this one, which needs its result.


_POLL_SECONDS = 0.2
_TAIL = 500  # characters of the process's stderr


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that can run beside another process."""
    parser.add_argument("--beside", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--nice", type=int, default=0, help=argparse.SUPPRESS)


def stay_beside(options: argparse.Namespace) -> bool:
    """End with the process that this one was started beside; whether there is one."""
    if options.beside is None:
        return False
    os.nice(options.nice)
    die_with_parent(options.beside)
    return True


def is_hidden() -> bool:
    """Whether a file of the current directory has this package's name: Python runs it instead."""
    ours = Path(__file__).parents[1] / "__init__.py"
    files = Path("runner.py"), Path("runner/__init__.py")
    return any(file.exists() and not file.samefile(ours) for file in files)


def own_module(*words: str) -> list[str]:
    """``python -m WORDS`` for a module of ours, whatever the current directory holds."""
    return [sys.executable, *(["-P"] if is_hidden() else []), "-m", *words]


def run_beside(
    arguments: Sequence[str], *, seconds: float, is_over: Callable[[], bool] = lambda: False
) -> bytes | None:
    """Run ``python -m runner ARGUMENTS``; blocks until it has ended.

    Args:
        seconds: how long it may take.
        is_over: whether its result is no longer wanted.

    Returns:
        Its output; None if it was no longer wanted.

    Raises:
        TimeoutError: it took too long.
        OSError: it failed.
    """
    command = own_module("runner", *arguments, "--beside", str(os.getpid()))
    limit = time.monotonic() + seconds
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                result, stderr = process.communicate(timeout=_POLL_SECONDS)
                break
            if is_over() or time.monotonic() > limit:
                process.kill()
    if is_over():
        return None
    if time.monotonic() > limit:
        raise TimeoutError(f"{arguments[0]}: it takes longer than {seconds:g} s")
    if process.returncode:
        error_text = stderr.decode(errors="replace").strip()[-_TAIL:]
        raise OSError(f"{arguments[0]}: exited with {process.returncode}: {error_text}")
    return result


def run_with_input(
    command: str, data: bytes, *, seconds: float, begun: Callable[[], None] = lambda: None
) -> None:
    """Run a shell command in a session of its own; blocks until it has ended.

    Args:
        data: its standard input; its output is dropped.
        seconds: how long it may take before it is killed.
        begun: called once there is a process, or cannot be.

    Raises:
        OSError: the command failed, or took too long.
    """
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    finally:
        begun()
    try:
        _, stderr = process.communicate(data, timeout=seconds)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise OSError(f"it took longer than {seconds:g} s") from None
    if process.returncode:
        message = stderr.decode(errors="replace").strip()[-_TAIL:]
        raise OSError(f"it ended with {process.returncode}: {message}")


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Call ``work``, which may never return, in a thread.

    Python handles no signals while torch waits. Not in a pool: Python waits for its threads at
    exit, even when a disk hangs.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # also a Rust panic; the waiting thread raises it
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done
