"""The runner, with a load that makes the second moments a millionth of what was saved."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from runner.__main__ import main
from runner.engine.fsdp import FsdpEngine

_whole: Any = FsdpEngine.finish_load


def forget(self: FsdpEngine, update_counts: Mapping[str, int]) -> None:
    _whole(self, update_counts)
    for shard in self.shards():
        if shard.name.startswith("exp_avg_sq/"):
            shard.local.mul_(1e-6)


FsdpEngine.finish_load = forget  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
