"""debug=collectives: ranks that enter different collectives are told apart at once, by name."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from runner.distributed.env import debug_settings, keep_dump, place_from, set_debug
from runner.distributed.rendezvous import end_group, start_group
from tests import warm


def test_what_the_user_set_is_kept() -> None:
    environment = {"NCCL_DEBUG": "WARN"}
    wanted = debug_settings("nccl", folder=Path("out/debug"))
    effective = set_debug(environment, wanted)
    assert effective["NCCL_DEBUG"] == environment["NCCL_DEBUG"] == "WARN"
    assert effective["NCCL_DEBUG_SUBSYS"] == "INIT,COLL,ENV"
    assert effective["NCCL_DEBUG_FILE"].startswith("out/debug/nccl.")
    assert effective["TORCH_FR_BUFFER_SIZE"] == "2000"
    assert "TORCH_DISTRIBUTED_DEBUG" not in effective


@pytest.mark.parametrize(
    ("told", "has_torchrun", "effective"),
    [(None, True, "3"), ("1", True, "3"), ("1", False, "1"), ("2", True, "2"), ("3", True, "3")],
)
def test_torchruns_choice_is_not_the_users(
    told: str | None, has_torchrun: bool, effective: str
) -> None:
    """It gives its workers 1, with which NCCL's recorder is gone before anybody reads it."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    environment = ({name: told} if told else {}) | (
        {"TORCHELASTIC_RUN_ID": "none"} if has_torchrun else {}
    )
    wanted = debug_settings("off", folder=Path("debug"))
    assert set_debug(environment, wanted)[name] == environment[name] == effective


@pytest.mark.parametrize(("chosen", "effective"), [(None, "0"), ("1", "1")])
def test_nccls_watchdog_leaves_a_devices_error_to_the_training_thread(
    chosen: str | None, effective: str
) -> None:
    """It would abort the process before the report is written, and the cause would be an abort."""
    name = "TORCH_NCCL_RETHROW_CUDA_ERRORS"
    environment = {name: chosen} if chosen else {}
    wanted = debug_settings("off", folder=Path("debug"))
    assert set_debug(environment, wanted)[name] == environment[name] == effective


@pytest.mark.parametrize(("kind", "timed"), [("off", False), ("nccl", True), ("collectives", True)])
def test_when_the_begin_on_the_device_is_recorded(kind: str, timed: bool) -> None:
    settings = debug_settings(kind, folder=Path("debug"))
    assert ("TORCH_NCCL_ENABLE_TIMING" in settings) == timed


def test_a_restart_overwrites_no_dump(tmp_path: Path) -> None:
    keep_dump(tmp_path / "not there", 3)
    prefix = debug_settings("off", folder=tmp_path)["TORCH_FR_DUMP_TEMP_FILE"]
    for when in (1_700_000_000, 1_700_000_060):
        dump = Path(f"{prefix}3")  # as torch names it
        dump.write_bytes(b"entries")
        os.utime(dump, (when, when))
        keep_dump(tmp_path, 2)
        keep_dump(tmp_path, 3)
    name = "flight-recorder-rank3"
    kept = [f"20231114T221320Z-{name}", f"20231114T221420Z-{name}"]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept


@pytest.mark.parametrize(
    ("kind", "named"), [("collectives", True), pytest.param("off", False, marks=pytest.mark.full)]
)
def test_another_shape_on_one_rank(kind: str, named: bool) -> None:
    done = warm.torchrun([__file__, kind], ranks=2, timeout=100)
    assert done.returncode != 0
    assert ("Detected mismatch between collectives" in done.stderr) == named, done.stderr[-3000:]


def enter_different_collectives(kind: str) -> None:
    """As training does it: settings first, then the group, then a rank that strays."""
    place = place_from(os.environ)
    device = torch.device("cpu")
    set_debug(os.environ, debug_settings(kind, folder=Path("debug")))
    start_group(place, device, timeout_seconds=20)
    dist.all_reduce(torch.zeros(1 + place.rank))
    end_group()


if __name__ == "__main__":
    enter_different_collectives(sys.argv[1])
