"""DeepSpeed ZeRO under the same guard, the same ring, the same promises; and switching engines."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.drills.compare import assert_every_sample_once, assert_same_end
from tests.rows import full
from tests.run import Result, finish, skip_override, train

STAGES = ["zero1", "zero2", "zero3"]
# A NaN on each rank, a spike, and a range long enough to force a rollback.
ALL_FAULTS = (
    "nan_grad@step=12,rank=0,nan_loss@step=18,rank=1,"
    "spike@samples=800-803,scale=900,poison@samples=1200-1290"
)
UP_TO_60 = "schedule.total=60"
# Of the model's parameters the smaller half stays whole on each rank, the larger is cut up and
# gathered when it is needed. By DeepSpeed's own threshold all of this small model would stay whole.
SMALL = "stage3_param_persistence_threshold:1500"
# Different shapes of the same sums round differently: nats per token.
BF16_NOISE = 0.02
BF16 = "compute.precision=bf16"  # the others too, to compare with


def on(engine: str) -> list[str]:
    """Settings that choose ``engine``, ZeRO-3 with parameters of both kinds."""
    settings = f"parallel.deepspeed={{zero_optimization:{{{SMALL}}}}}"
    return [f"parallel={engine}", BF16, *([settings] if engine == "zero3" else [])]


# Stage 3 shares most of its code with the others, and some only with itself.
@pytest.mark.parametrize("stage", ["zero3", *(full(s) for s in ("zero1", "zero2"))])
def test_all_faults_are_survived_exactly(tmp_path: Path, stage: str) -> None:
    # Below every norm, so that each update is clipped.
    engine = [*on(stage), "optim.clip=0.2", "steps=52"]
    hit = finish(tmp_path / "hit", *engine, f"faults=[{ALL_FAULTS}]")
    verdicts = {line["detail"]["verdict"] for line in hit.journal("discard")}
    assert verdicts == {"NonFinite", "Spike"} and len(hit.journal("rollback")) == 1, hit.tail
    assert [line["ranks"] for line in hit.journal("discard")[:2]] == [[0], [1]], hit.tail
    told = finish(tmp_path / "told", *engine, skip_override(hit.summary["skipped"]))
    assert min(line["grad_norm"] for line in told.counted().values()) > 0.2
    assert not told.journal("discard"), told.tail
    assert_same_end(hit, told)
    assert_every_sample_once(hit)


@pytest.mark.twin
@pytest.mark.full
@pytest.mark.parametrize("stage", STAGES)
def test_killed_and_damaged_it_ends_the_same(
    tmp_path: Path, clean_bf16: Result, stage: str
) -> None:
    """SIGKILL, then a flipped byte in the newest checkpoint, then a kill again."""
    out = tmp_path / "run"
    faults = "faults=[kill@step=28,rank=1,corrupt_checkpoint@step=45,kill@step=46,rank=0]"
    # In the foreground, so that the checkpoint of step 40 is the newest at step 45 on any disk.
    engine = [*on(stage), "checkpoint.background=false", faults]
    for _ in range(2):
        killed = train(out, *engine)
        assert killed.code != 0 and "SIGKILL" in killed.text, killed.tail
    run = finish(out, *engine)
    assert run.journal("checkpoint_damaged"), run.tail
    # On two ranks every gradient is a sum of two, so that all engines give the same bits; only
    # the norm is added up in another order.
    assert run.digest == clean_bf16.digest, run.tail
    assert without_norms(run) == without_norms(clean_bf16), run.tail
    assert_every_sample_once(run)


@pytest.mark.full
def test_without_a_guard_deepspeed_skipping_for_ever_ends_in_a_halt(tmp_path: Path) -> None:
    program = tmp_path / "forced.py"
    program.write_text(FORCED.replace("== 10", ">= 10"))
    overrides = ["parallel=zero3", "guard=off"]
    run = train(tmp_path / "run", *overrides, ranks=0, program=program)
    assert run.code == 3 and "DeepSpeed itself skipped" in run.summary["reason"], run.tail
    assert len(run.journal("discard")) == 100 and not run.journal("rollback"), run.tail


FORCED = """
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.zero import stage3, stage_1_and_2
from runner.__main__ import run

calls = 0

def wrong(*_):
    global calls
    calls += 1
    return calls == 10  # two of them are tries at the start, of whether bits repeat

bf16_optimizer.is_invalid_grad_norm = stage3.is_invalid_grad_norm = wrong
original = stage_1_and_2.DeepSpeedZeroOptimizer.step

def step(self, closure=None):
    self.check_grad_overflow = True
    self.check_overflow = lambda **_: setattr(self, "overflow", wrong())
    original(self)

stage_1_and_2.is_invalid_grad_norm = lambda norm: False
stage_1_and_2.DeepSpeedZeroOptimizer.step = step
run()
"""


def without_norms(run: Result) -> list[dict[str, Any]]:
    """Nor the gate's limit, which follows from them, nor those of the layers."""
    norms = ("grad_norm", "norm_limit", "layers/")
    return [
        {name: value for name, value in line.items() if not name.startswith(norms)}
        for line in run.metrics()
    ]


WRITERS = [("fsdp", 2), ("ddp", 2), ("zero1", 2), ("zero2", 3), ("zero3", 2)]
READERS = ("fsdp", "ddp", *STAGES)
ALWAYS = {("zero3", "fsdp"), ("fsdp", "zero1")}
# Each engine reads what each other one wrote, on one, two or three ranks in turn.
MATRIX = [
    pytest.param(
        *(*writer, reader, 1 + (at + place + 2) % 3),
        marks=() if (writer[0], reader) in ALWAYS else pytest.mark.full,
    )
    for at, writer in enumerate(WRITERS)
    for place, reader in enumerate(READERS)
    if writer[0] != reader
]


@pytest.fixture(scope="session")
def written(runs: Path) -> dict[tuple[str, int], Result]:
    """30 steps by each writer; filled as asked for."""
    return {}


@pytest.mark.parametrize(("writer", "writer_ranks", "reader", "reader_ranks"), MATRIX)
def test_any_engine_reads_what_another_wrote(
    tmp_path: Path,
    runs: Path,
    written: dict[tuple[str, int], Result],
    clean_bf16: Result,
    writer: str,
    writer_ranks: int,
    reader: str,
    reader_ranks: int,
) -> None:
    key = (writer, writer_ranks)
    if key not in written:
        out = runs / f"written-{writer}-{writer_ranks}"
        written[key] = finish(
            out, f"parallel={writer}", BF16, "steps=30", UP_TO_60, ranks=writer_ranks
        )
    before = written[key]
    out = tmp_path / "run"
    shutil.copytree(before.out, out)
    read = [*on(reader), UP_TO_60]
    loaded = finish(out, *read, "steps=30", ranks=reader_ranks)
    assert loaded.digest == before.digest, "loaded, nothing done: the same state"
    # The digest alone would not show parameters that were not remade from the FP32 ones.
    after = finish(out, *read, "steps=60", ranks=reader_ranks)
    assert_every_sample_once(after)
    for step, line in after.counted().items():
        expected = clean_bf16.counted()[step]
        assert abs(line["loss"] - expected["loss"]) < BF16_NOISE, f"step {step}\n{after.tail}"
        assert line["lr"] == expected["lr"] and line["samples"] == expected["samples"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        # All keys, and DeepSpeed's own refusals: tests/mechanism/test_zero_contract.py.
        (["parallel.deepspeed={gradient_clipping:1.0}"], "parallel.deepspeed.gradient_clipping"),
        (["compute.precision=fp32"], "needs compute.precision=bf16"),
    ],
)
def test_what_would_break_a_promise_is_refused(
    tmp_path: Path, overrides: list[str], words: str
) -> None:
    refused = train(tmp_path / "run", "parallel=zero2", *overrides, ranks=0)
    assert refused.code == 2 and words in refused.text, refused.tail
    assert "Traceback" not in refused.text
