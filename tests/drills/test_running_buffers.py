"""Running statistics are state: P1 to P5 and P13 for a network as vision models are.

Its stem is kept in evaluation mode, and each forward pass in training writes down all modes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from runner.__main__ import main
from tests.drills.compare import (
    assert_every_sample_once,
    assert_follows,
    assert_same_end,
    assert_same_run,
)
from tests.drills.test_mixture import sources
from tests.guests import Residual
from tests.rows import full
from tests.run import Result, finish, skip_override, train

pytestmark = pytest.mark.usefixtures("leaves_nothing")
SHORT = (
    *("steps=40", "schedule.total=40", "guard.min_history=8", "checkpoint.every=6"),
    *("checkpoint.clean_after=3", "batch.micro_size=8", "eval.every=8"),
)
PICTURES = ("model._target_=tests.guests.Residual", "data._target_=tests.guests.Images")
WORDS = (
    *("model._target_=tests.guests.Normed", "data.seq_len=16", "data.held_out=0.1"),
    sources(0.5, 0.3, 0.2),
)
LASTING, PASSING, KILL = "poison@samples=520-610", "nan_grad@step=11,rank=1", "kill@step=29,rank=0"
VERDICT = ("guard.remedy=verdict", "explain=full", "debug.audit_every=5")
ALL = ("optim.ema=0.9", "checkpoint.keep_best=true", *VERDICT)


def faults(*which: str) -> str:
    return f"faults=[{','.join(which)}]"


@pytest.fixture(autouse=True)
def modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MODES", str(tmp_path / "modes"))
    return tmp_path


def assert_own_modes(folder: Path) -> None:
    """At each forward pass in training of each run the modes were those of the constructor."""
    own = "".join("eT"[module.training] for module in Residual().modules())
    written = [path.read_text().split() for path in folder.glob("modes.*")]
    assert written and set().union(*written) == {own}


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, ["parallel=fsdp", *ALL]),
        full(2, ["parallel=ddp", "guard.sync=false"]),
        full(2, ["parallel=ddp", "guard.sync=false", *ALL]),
        full(1, ["parallel=single", "compute.recompute=blocks", *VERDICT]),
        full(4, ["parallel=hsdp", "parallel.shard_size=2", *ALL]),
        full(2, [*WORDS, "parallel=fsdp", *ALL]),
        full(2, ["parallel=zero1", *ALL]),
        full(2, ["parallel=zero2", *VERDICT]),
        full(2, ["parallel=zero3", *ALL]),
        full(2, ["parallel=fsdp", "compute.precision=bf16", *ALL]),
    ],
    ids=lambda value: "-".join(value[:2]) if isinstance(value, list) else str(value),
)
def test_what_was_bad_and_a_kill_leave_no_trace(
    tmp_path: Path, ranks: int, settings: list[str]
) -> None:
    model = () if WORDS[0] in settings else PICTURES
    how = [*SHORT, *model, *settings]
    passing = PASSING.replace("rank=1", f"rank={ranks - 1}")
    hit = train(tmp_path / "hit", *how, faults(LASTING, passing, KILL), ranks=ranks)
    assert hit.code != 0, hit.tail
    hit = finish(tmp_path / "hit", *how, faults(LASTING, passing, KILL), ranks=ranks)
    assert hit.summary["skipped"] and hit.summary["restarts"] == 1, hit.tail
    assert len(hit.journal("rollback")) + len(hit.journal("discard")) > 0, hit.tail
    if "guard.remedy=verdict" in settings:
        assert 11 in [line["step"] for line in hit.journal("redo")], hit.tail
    told = finish(tmp_path / "told", *how, skip_override(hit.summary["skipped"]), ranks=ranks)
    assert_same_end(hit, told)
    if model:
        assert_own_modes(tmp_path)


ELASTIC = ((12, "fsdp", 2), (25, "fsdp", 1), (40, "fsdp", 3))
ENGINES = ((8, "fsdp", 2), (16, "zero3", 2), (24, "zero1", 1), (32, "ddp", 3), (40, "zero2", 2))


@pytest.mark.full
@pytest.mark.parametrize("parts", [ELASTIC, ENGINES])
def test_other_ranks_and_engines_go_on_with_the_statistics(
    tmp_path: Path, parts: tuple[tuple[int, str, int], ...]
) -> None:
    """Other samples share a micro-batch then, so it is not the same run."""
    how = [*SHORT, *PICTURES, "compute.precision=bf16", "resume.allow_change=true"]
    whole = finish(tmp_path / "whole", *how, "parallel=fsdp")
    for steps, engine, ranks in parts:
        run = finish(tmp_path / "run", *how, f"parallel={engine}", f"steps={steps}", ranks=ranks)
    assert_every_sample_once(run)
    assert_follows(run, whole, within=0.4)
    theirs = dict(exported(whole, tmp_path / "theirs").named_buffers())
    for name, buffer in exported(run, tmp_path / "own").named_buffers():
        within = 0.1 if buffer.is_floating_point() else 0  # and counted once a step
        torch.testing.assert_close(buffer, theirs[name], rtol=within, atol=within, msg=name)
    assert_own_modes(tmp_path)


def exported(run: Result, folder: Path) -> Residual:
    assert main(["export", str(run.out), str(folder)]) == 0
    network = Residual()
    network.load_state_dict(load_file(folder / "model.safetensors"))
    return network


def test_they_are_exported_and_resumed(tmp_path: Path) -> None:
    how = [*SHORT, *PICTURES, "steps=12", "parallel=single"]
    run = finish(tmp_path / "run", *how, ranks=0)
    network = exported(run, tmp_path / "weights")
    assert int(network.num_seen) == 12 == int(network.stages[1].layers[4].num_batches_tracked)
    assert int(network.stem[1].num_batches_tracked) == 0
    again = finish(tmp_path / "run", *how, ranks=0)  # loads, and has nothing to do
    assert_same_run(again, run)
