"""debug=collectives: ranks that enter different collectives are told apart at once, by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from runner.dist.debug import debug_settings, set_debug
from runner.dist.group import choose_device, end_group, start_group
from runner.dist.launcher import place_from


def test_what_the_user_set_is_kept() -> None:
    environment = {"NCCL_DEBUG": "WARN"}
    wanted = debug_settings("nccl", subsystems="COLL", folder=Path("out/debug"))
    effective = set_debug(environment, wanted)
    assert effective["NCCL_DEBUG"] == environment["NCCL_DEBUG"] == "WARN"
    assert effective["NCCL_DEBUG_SUBSYS"] == "COLL"
    assert effective["NCCL_DEBUG_FILE"].startswith("out/debug/nccl.")
    assert effective["TORCH_FR_BUFFER_SIZE"] == "2000"
    assert "TORCH_DISTRIBUTED_DEBUG" not in effective


@pytest.mark.parametrize(("kind", "named"), [("collectives", True), ("off", False)])
def test_another_shape_on_one_rank(kind: str, named: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         __file__, kind],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert ("Detected mismatch between collectives" in done.stderr) == named, done.stderr[-3000:]


def enter_different_collectives(kind: str) -> None:
    """As training does it: settings first, then the group, then a rank that strays."""
    place = place_from(os.environ)
    device = choose_device("cpu", place)
    set_debug(os.environ, debug_settings(kind, subsystems="", folder=Path("debug")))
    start_group(place, device, timeout_seconds=20)
    dist.all_reduce(torch.zeros(1 + place.rank))
    end_group()


if __name__ == "__main__":
    enter_different_collectives(sys.argv[1])
