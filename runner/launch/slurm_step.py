"""A job step that lasts over attempts: one ``srun``, whose processes take orders from its input.

Slurm passes the standard input of an srun on to all its processes. An order is a JSON line: the
arguments of ``runner launch`` for one attempt, and the variables that belong to the attempt.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from runner.system.environment import changeable
from runner.system.parsing import json_text
from runner.system.process import take_input

NODE_COMMAND = "slurm-node"  # takes the orders
_OWN = "HOLDFAST_"  # variables of an attempt; the others are the job's
_END_SECONDS = 3.0


class JobStep:
    """Starts the command of each attempt in the step that is there, or in a new one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[Any] | None = None
        self._words: list[str] = []  # of its srun

    def popen(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str],
        is_asked_to_stop: object,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """``subprocess.Popen`` of an srun; the same one while it lives, on the same nodes.

        Args:
            args: what follows :data:`NODE_COMMAND` is the order's.
            is_asked_to_stop: not needed; nothing is waited for.
        """
        place = list(args).index(NODE_COMMAND) + 1
        words = list(args[:place])
        own = {name: value for name, value in env.items() if name.startswith(_OWN)}
        order = json_text({"arguments": list(args[place:]), "environment": own}) + "\n"
        if words != self._words or not self._gave(order):
            self.close()
            self._words = words
            self._process = subprocess.Popen(words, env=env, stdin=subprocess.PIPE, **options)
            self._gave(order)
        assert self._process is not None
        return self._process

    def _gave(self, order: str) -> bool:
        """Write an order to the step; False where it has ended."""
        process = self._process
        if process is None or process.stdin is None or process.poll() is not None:
            return False
        with contextlib.suppress(OSError):
            process.stdin.write(order.encode())
            process.stdin.flush()
            return True
        return False

    def close(self) -> None:
        """Let its processes end, which they do when there are no more orders."""
        process, self._process, self._words = self._process, None, []
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(OSError):
            process.stdin.close()
        for end in (process.terminate, process.kill):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
                return
            end()
        process.wait()


def orders() -> Iterator[list[str]]:
    """The arguments of each order, with its variables set; in the process on a node.

    Between orders a request to stop is for the other nodes, whose part has not ended yet.
    """
    with os.fdopen(take_input()) as source:
        for line in source:
            order = json.loads(line)
            changeable().update(order["environment"])
            yield order["arguments"]
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
