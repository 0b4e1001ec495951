"""P10 on CUDA: the guard makes the host wait for nothing, and the run is the same.

Not run yet on a device: written on a machine without one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from runner.config.compose import compose
from runner.distributed.env import place_from
from runner.distributed.rendezvous import end_group, start_group
from runner.session.group import group_at_hand
from runner.session.session import open_run
from runner.train.loop import Loop
from scripts.bench.turns import own_device
from tests.drills.compare import assert_same_run
from tests.drills.test_late import AT_ONCE, LATE, TROUBLE, journal
from tests.run import TINY, finish

pytestmark = pytest.mark.gpu

# Nothing but steps, and two micro-batches in each.
QUIET = (
    "checkpoint.every=1000000",
    "checkpoint.memory_every=0",
    "eval.every=0",
    "watchdog.straggler_every=0",
    "track.every=1000000",
    "steps=1000000",
    "schedule=constant",
    "compute.precision=bf16",
    "data.workers=1",
    "batch.micro_size=16",
)


@pytest.fixture
def alone() -> Iterator[torch.device]:
    place = place_from({})
    device = own_device("cuda", place)
    start_group(place, device, timeout_seconds=60)
    yield device
    torch.cuda.set_sync_debug_mode("default")
    end_group()


def open_loop(out: Path, device: torch.device, *overrides: str) -> Loop:
    config = compose([*TINY, *QUIET, *overrides, f"out={out}"])
    loop = open_run(group_at_hand(config, place_from({}), device), config).loop
    loop.begin()
    return loop


@pytest.mark.parametrize("engine", ["single", "fsdp", "ddp"])
def test_no_step_makes_the_host_wait(tmp_path: Path, alone: torch.device, engine: str) -> None:
    loop = open_loop(tmp_path / "run", alone, f"parallel={engine}")
    for _ in range(40):  # allocates, arms the guard
        loop.step()
    # A loop of one's own that never looks at its loss has none either: any at all is ours.
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(50):
        loop.step()


def test_a_wait_would_be_seen(alone: torch.device) -> None:
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones((), device=alone).item()


def test_the_host_is_ahead_of_the_device(tmp_path: Path, alone: torch.device) -> None:
    """While the device still works on a step, the next one is launched already."""
    loop = open_loop(tmp_path / "run", alone)
    for _ in range(40):
        loop.step()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second in which no step can end
    before = torch.cuda.Event()
    before.record()
    steps = loop.steps
    step, steps._ahead = steps._ahead, None
    assert step is not None
    steps._ahead = steps._launch_after(step, loop.state)
    assert not before.query(), "launching waited for the device"
    torch.cuda.synchronize()


@pytest.mark.parametrize("engine", ["single", "fsdp"])
def test_late_is_the_same_run(tmp_path: Path, engine: str) -> None:
    trouble = TROUBLE.replace("rank=1", "rank=0")
    told = [f"parallel={engine}", "checkpoint.background=false", trouble]
    runs = [
        finish(tmp_path / str(number), *told, mode, ranks=1)
        for number, mode in enumerate((AT_ONCE, AT_ONCE, LATE))
    ]
    if runs[0].digest != runs[1].digest:
        pytest.skip("two runs of the same settings differ here: no kernel order to compare with")
    assert journal(runs[2]) == journal(runs[0])
    assert_same_run(runs[2], runs[0])


def test_a_killed_late_run_ends_the_same(tmp_path: Path) -> None:
    clean = finish(tmp_path / "clean", ranks=1)
    kill = "faults=[kill@step=33,rank=0]"
    out = tmp_path / "killed"
    again = finish(out, kill, ranks=1, restarts=1)
    if finish(tmp_path / "twice", ranks=1).digest != clean.digest:
        pytest.skip("two runs of the same settings differ here: no kernel order to compare with")
    assert_same_run(again, clean)
