"""torchrun with three changes to what it does when a rank fails.

It prints one line about the failed ranks. torchrun's own traceback, some thirty lines, would hide
the message of the rank.

With several nodes the rendezvous stays open. torchrun closes it for every node and for good: a node
that was cut off and comes back would be refused, and so would be the others at their next restart,
if another process than their torchrun hosts the store.

A node whose device is at fault, or that is taken back, leaves a run of a varying number of nodes;
torchrun would start its ranks again.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerGroup
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.run import main

from runner.health.leave import leave_after_exit_functions
from runner.health.notice import taken_back
from runner.launch import torchrun
from runner.launch.crash_evidence import evidence, has_to_leave, journal_lines
from runner.system.error import EXIT_CRASH
from runner.system.process import signal_name

_MOST_NAMED = 8  # failed ranks of this node
_NODES = "--nnodes="
_close = DynamicRendezvousHandler.shutdown
_restart = SimpleElasticAgent._restart_workers


class LeftOutError(Exception):
    """The others go on without this node."""


def shutdown(self: DynamicRendezvousHandler) -> bool:
    """Close the rendezvous, but only after a success; torchrun also calls this during an error."""
    return _close(self) if sys.exc_info()[1] is None else True


def run(arguments: Sequence[str]) -> int:
    """Run torchrun with ``arguments``; returns its exit code."""
    given = [word.removeprefix(_NODES) for word in arguments if word.startswith(_NODES)]
    nodes = torchrun.parse_nodes(given[0] if given else "1")
    if nodes.most > 1:
        DynamicRendezvousHandler.shutdown = shutdown  # type: ignore[method-assign]
    if nodes.is_elastic:
        config = torchrun.settings(torchrun.overrides_of(arguments))
        restart = restart_or_leave(Path(config.out), nodes.least, config.preempt.notice)
        SimpleElasticAgent._restart_workers = restart  # type: ignore[method-assign]
    try:
        main(arguments)
    except (ChildFailedError, LeftOutError) as error:
        text = summary(error) if isinstance(error, ChildFailedError) else f"torchrun: {error}"
        with contextlib.suppress(OSError):  # nobody may be reading any more
            sys.stderr.write(text + "\n")
            sys.stderr.flush()
        return EXIT_CRASH
    return 0


def restart_or_leave(
    out: Path, least: int, notice: str
) -> Callable[[SimpleElasticAgent, WorkerGroup], None]:
    """What restarts the ranks of this node, unless the run goes on without it.

    Args:
        least: nodes without which there is no run.
        notice: ``preempt.notice``.
    """
    node, since = os.uname().nodename, journal_lines(out)

    def restart(self: SimpleElasticAgent, group: WorkerGroup) -> None:
        nonlocal since
        leaves = has_to_leave(evidence(out, since=since), node=node, least=least)
        why = "its hardware is at fault" if leaves else taken_back(notice)
        since = journal_lines(out)
        if why:
            self._stop_workers(group)
            raise LeftOutError(f"{node} leaves the run: {why}")
        _restart(self, group)

    return restart


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
    return f"(pid {failure.pid}) was killed by {signal_name(-failure.exitcode)}"


if __name__ == "__main__":
    leave_after_exit_functions(run(sys.argv[1:]))
