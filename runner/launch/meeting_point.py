"""Hosts the rendezvous of a run on a head node that no longer takes part in it.

The rendezvous needs nothing of the head but its store. Ends some seconds after the run did.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from runner.run_dir.paths import RunDir

_POLL_SECONDS = 1.0
# A run that has not moved for so long has been given up by its other nodes.
_SILENT_SECONDS = 3600.0
# For the nodes to wait for each other in this store, once their ranks are done.
_LAST_SECONDS = 15.0
_ENDS = ("done", "halted", "preempted")


def command(out: Path, head: tuple[str, int]) -> list[str]:
    """The command that hosts the rendezvous."""
    return [sys.executable, "-m", "runner.launch.meeting_point", str(out), head[0], str(head[1])]


def main(arguments: Sequence[str]) -> None:
    """
    Args:
        arguments: the run's directory; host and port of the place.
    """
    # Not above: the supervisor only needs the command, and nothing of torch.
    from torch.distributed import TCPStore

    out, host, port = Path(arguments[0]), arguments[1], int(arguments[2])
    began = time.time()
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, multi_tenant=True)
    while not _is_over(RunDir(out), began):
        time.sleep(_POLL_SECONDS)
    time.sleep(_LAST_SECONDS)
    del store


def _is_over(run: RunDir, began: float) -> bool:
    summary = run.stored_summary() or {}
    if summary.get("status") in _ENDS and run.summary.stat().st_mtime > began:
        return True
    moved = run.metrics.stat().st_mtime if run.metrics.exists() else began
    return time.time() - max(moved, began) > _SILENT_SECONDS


if __name__ == "__main__":
    main(sys.argv[1:])
