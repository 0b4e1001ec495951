"""The runner on a rank of which one is killed between the rendezvous and the lease.

The others wait for ever there, as over NCCL: none of them learns of the death from a collective.
``DIES`` names the rank that is killed, ``LOOKS`` says after how many beats a node counts as silent.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from torch.distributed.distributed_c10d import _get_default_store

from runner.__main__ import main
from runner.health import rank_monitor
from runner.session import inventory


def _never_returns(*_: object) -> None:
    store = _get_default_store()
    arrived = store.add("arrived", 1)
    if os.environ["RANK"] == os.environ["DIES"]:
        # While another rank still connects, gloo itself would break there.
        while arrived < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.05)
            arrived = store.add("arrived", 0)
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        time.sleep(1)


rank_monitor._SILENT_LOOKS = int(os.environ["LOOKS"])
inventory._require_equal_settings = _never_returns
sys.exit(main())
