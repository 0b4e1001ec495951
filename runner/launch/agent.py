"""torchrun with two changes to what it does when a rank fails.

It prints one line about the failed ranks. torchrun's own traceback, some thirty lines, would hide
the message of the rank.

With a varying number of nodes the rendezvous stays open. torchrun closes it for every node and for
good: a node that was cut off and comes back would be refused, and so would be the others at their
next restart.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.run import main

from runner.system.exit_codes import EXIT_CRASH

_MOST_NAMED = 8  # failed ranks of this node
_close = DynamicRendezvousHandler.shutdown


def shutdown(self: DynamicRendezvousHandler) -> bool:
    """Close the rendezvous, but only after a success; torchrun also calls this during an error."""
    return _close(self) if sys.exc_info()[1] is None else True


def run(arguments: Sequence[str]) -> int:
    """Run torchrun with ``arguments``; returns its exit code."""
    if _is_elastic(arguments):
        DynamicRendezvousHandler.shutdown = shutdown  # type: ignore[method-assign]
    try:
        main(arguments)
    except ChildFailedError as error:
        with contextlib.suppress(OSError):  # nobody may be reading any more
            sys.stderr.write(summary(error) + "\n")
            sys.stderr.flush()
        return EXIT_CRASH
    return 0


def summary(error: ChildFailedError) -> str:
    """One line with the failed ranks of this node, the first to fail first."""
    first, _ = error.get_first_failure()
    ranks = [first, *(rank for rank in sorted(error.failures) if rank != first)]
    ends = [f"rank {rank} {_end(error.failures[rank])}" for rank in ranks[:_MOST_NAMED]]
    if len(ranks) > _MOST_NAMED:
        ends.append(f"{len(ranks) - _MOST_NAMED} more")
    return "torchrun: " + ", ".join(ends)


def _end(failure: ProcessFailure) -> str:
    if failure.exitcode >= 0:
        return f"(pid {failure.pid}) ended with exit code {failure.exitcode}"
    try:
        name = signal.Signals(-failure.exitcode).name
    except ValueError:
        name = f"signal {-failure.exitcode}"
    return f"(pid {failure.pid}) was killed by {name}"


def _is_elastic(arguments: Sequence[str]) -> bool:
    return any(word.startswith("--nnodes=") and ":" in word for word in arguments)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
