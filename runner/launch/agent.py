"""torchrun for a varying number of nodes: an agent that fails leaves the rendezvous open.

torchrun closes the rendezvous when it ends with an error, for every node and for good: one that
was cut off and comes back would be refused, and so would be the others at their next restart.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.run import main

_close = DynamicRendezvousHandler.shutdown


def shutdown(self: DynamicRendezvousHandler) -> bool:
    """Close the rendezvous, but only after a success; torchrun also calls this during an error."""
    return _close(self) if sys.exc_info()[1] is None else True


if __name__ == "__main__":
    DynamicRendezvousHandler.shutdown = shutdown  # type: ignore[method-assign]
    main()
