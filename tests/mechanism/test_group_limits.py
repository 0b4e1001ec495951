"""``parallel.timeout_seconds`` holds in each group that an engine makes, not only in the first."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from runner.config.compose import compose
from runner.distributed.env import place_from
from runner.session.group import join
from runner.session.session import open_run
from tests import warm
from tests.run import TINY

SECONDS = 47


@pytest.mark.parametrize(
    "engine", ["ddp", *(pytest.param(one, marks=pytest.mark.full) for one in ("hsdp", "zero3"))]
)
def test_every_group_has_the_limit(engine: str, tmp_path: Path) -> None:
    done = warm.torchrun([__file__, engine, str(tmp_path / "run")], ranks=2, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]


def limits() -> dict[str, float]:
    """Seconds by the description of each group of this process."""
    world = dist.distributed_c10d._world
    backends = {group: group._get_backend(torch.device("cpu")) for group in world.pg_map}
    return {
        f"{group.group_desc} {world.pg_names[group]}": backend.options._timeout.total_seconds()
        for group, backend in backends.items()
    }


def main(engine: str, out: str) -> None:
    more = {"hsdp": ["parallel.shard_size=1"], "zero3": ["compute.precision=bf16"]}.get(engine, [])
    overrides = [*TINY, f"parallel={engine}", f"parallel.timeout_seconds={SECONDS}", *more]
    config = compose([*overrides, f"out={out}"])
    with join(config, place_from(os.environ)) as group:
        run = open_run(group, config)
        by_group = limits()
        assert len(by_group) > 1 and set(by_group.values()) == {SECONDS}, by_group
        run.ring.close(wait=False, forget=True)
        run.feed.close()
        run.reporter.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
