"""Prepares this process and becomes a command: ``python -m runner.launch.prepared JSON COMMAND``.

It is a separate exec, because only C code may run between fork and exec in a process with threads:
a lock that another thread held stays locked in the child, and ``Popen`` would wait for ever.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from runner.system.parsing import json_text
from runner.system.process import die_with_parent, unblock

_SHIELDED = (signal.SIGTERM, signal.SIGUSR1)
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
        return [sys.executable, "-m", __name__, json_text(asdict(self)), *command]

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


if __name__ == "__main__":
    main(sys.argv[1:])
