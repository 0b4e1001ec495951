"""Order, bytes and waits of the CUDA path, on a device that is only pretended."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

TORCH = "2.13."  # whose interfaces the stub implements


def _why_not() -> str:
    if shutil.which("g++") is None:
        return "no g++: the pretended device is compiled here"
    if torch.version.cuda is not None:
        return "this torch has CUDA itself: see tests/gpu"
    if not torch.__version__.startswith(TORCH):
        return f"the pretended device is made for torch {TORCH}*, this is {torch.__version__}"
    return ""


pytestmark = pytest.mark.skipif(bool(_why_not()), reason=_why_not())

NOTHING = "as it is"
LEFT_OUT = [
    "the update waits for the copy",
    "the copy waits for the step",
    "the digest waits for the copy",
    "the host waits for the numbers",
    "FSDP2 waits for the optimizer",
]
# What crosses between host and device in a step: tokens and targets of two micro-batches, the
# numbers that a rank tells, and those that come back.
COPIES = 2 * 2 + 1 + 1


@lru_cache
def run(program: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", f"tests.pretended.{program}", *arguments]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, check=False, timeout=850
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def check_order(result: dict[str, Any]) -> None:
    assert result["races"] == []
    assert result["waits"] == [], "launching a step made the host wait"
    assert sum(result["copies"].values()) == COPIES, result["copies"]
    # Of the numbers and of the snapshot's copy: the core is left to the threads that hash.
    assert result["spins"] == [], "the host keeps a core busy while it waits"


def test_nothing_overtakes_and_an_omission_is_noticed() -> None:
    result = run("order", f"{NOTHING},{LEFT_OUT[0]}")
    check_order(result[NOTHING])
    assert any("_fused_adamw_" in race for race in result[LEFT_OUT[0]]["races"])


@pytest.mark.full
@pytest.mark.parametrize("engine", ["ddp", "hsdp"])
def test_nothing_overtakes_on_other_layouts(engine: str) -> None:
    shard = ["parallel.shard_size=4"] if engine == "hsdp" else []
    check_order(run("order", NOTHING, f"parallel={engine}", *shard)[NOTHING])


GUARDED = "late,at once,spinning,Guard,Ring,Guard overlapping"  # one process for two tests


def test_a_guarded_loop_that_reads_late_never_waits() -> None:
    found = run("guarded", GUARDED)
    assert found["late"]["waits"] == found["late"]["races"] == found["late"]["spins"] == []
    assert found["late"]["copies"] == 2  # the numbers there, and their sums back
    assert found["at once"]["waits"] != []
    assert [at.partition(":")[0] for at in found["spinning"]["spins"]] == ["train/agreed_step.py"]


def test_nothing_overtakes_the_copy_of_a_loops_state() -> None:
    found = run("guarded", GUARDED)
    assert found["Guard"]["races"] == found["Ring"]["races"] == []
    races = " ".join(found["Guard overlapping"]["races"])
    assert "_fused_adamw_" in races and "lerp_" in races, "the trace does not see them"


@pytest.mark.full
def test_every_omission_is_noticed() -> None:
    result = run("order", ",".join(LEFT_OUT))
    assert {variant: bool(result[variant]["races"]) for variant in LEFT_OUT} == dict.fromkeys(
        LEFT_OUT, True
    )


# Bytes. A parameter has 12 of state: the weight in FP32 and two moments.

LLAMA = (
    *("model=llama_8b", "model.vocab_size=128256", "compute.compile=false"),
    *("data.seq_len=8192", "batch.micro_size=1"),
)
PARAMETERS = 8_030_261_248
# GiB at the peak of a step with one sequence of 8,192 tokens, by ranks.
PEAKS = {8: 21.89, 64: 10.86, 1024: 9.54}
ROUNDED = 0.08  # whole rows for each rank, and the allocator's 512 bytes
PEAK_OF_TWO_LAYERS = 5.91  # one sequence of 2,048 tokens, 1,024 ranks
TWO_LAYERS = 2 * 128256 * 4096 + 2 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096)


def test_the_state_is_twelve_bytes_a_parameter_and_large_logits_are_not_held() -> None:
    small = [*LLAMA, "model.layers=2", "data.seq_len=2048", "batch.global_size=1024"]
    result = run("memory", "1024", "1", *small)
    state = 12 * TWO_LAYERS / 1024 / 2**30
    assert result["state"] == pytest.approx(state, rel=ROUNDED)
    assert result["made"] == pytest.approx(result["state"], rel=0.03), "made whole, then cut"
    assert result["after"] == pytest.approx(result["state"], abs=0.02), (
        "something is left of a step"
    )
    assert result["peak"] == pytest.approx(PEAK_OF_TWO_LAYERS, rel=0.03), result["peak_at"]


@pytest.mark.full
@pytest.mark.parametrize("ranks", sorted(PEAKS))
def test_peak_of_llama_8b(ranks: int) -> None:
    result = run("memory", str(ranks), "1", *LLAMA, f"batch.global_size={ranks}")
    assert result["state"] == pytest.approx(12 * PARAMETERS / ranks / 2**30, rel=ROUNDED)
    assert result["peak"] == pytest.approx(PEAKS[ranks], rel=0.03), result["peak_at"]
    # Gathered twice, forward and backward, in BF16; the root once. Reduced once, in FP32.
    assert result["collectives"] == {"_allgather_base_": 65, "_reduce_scatter_base_": 33}
    assert result["gib"]["_reduce_scatter_base_"] == pytest.approx(4 * PARAMETERS / 2**30, rel=0.01)


@pytest.mark.full
def test_hsdp_crosses_nodes_once_and_keeps_no_whole_gradient() -> None:
    """Four micro-batches on 8 nodes of 8."""
    result = run("memory", "64", "4", *LLAMA, "batch.global_size=256", "parallel=hsdp")
    each = "parallel.reduce_each_micro_batch=true"
    every = run("memory", "64", "4", *LLAMA, "batch.global_size=256", "parallel=hsdp", each)
    # A whole gradient would be 26 GiB more. Where each micro-batch is summed between nodes FSDP2
    # (torch 2.13) also keeps what it sums (_all_reduce_state) until the next layer's is under way.
    assert 0.9 * every["peak"] < result["peak"] < 1.02 * every["peak"]
    assert result["collectives"]["allreduce_"] == 33
    assert every["collectives"]["allreduce_"] == 4 * 33
    for one in (result, every):
        assert one["collectives"]["_reduce_scatter_base_"] == 4 * 33
