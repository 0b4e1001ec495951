"""Runs one of our commands in a process of its own, beside this one, which needs its result."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from runner.system.process import die_with_parent

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


def run_beside(
    arguments: Sequence[str],
    *,
    seconds: float,
    is_over: Callable[[], bool] = lambda: False,
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
    command = [sys.executable, "-m", "runner", *arguments, "--beside", str(os.getpid())]
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
