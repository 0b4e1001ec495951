"""P6: what is proven, when, and that how long a proof takes decides nothing."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
from safetensors import safe_open

from runner.__main__ import main
from tests.drills.compare import assert_every_sample_once, assert_same_end
from tests.rows import full
from tests.run import EVALUATED, Result, finish, skip_override, train

SMALL = ("compute.precision=fp32", "steps=26", "checkpoint.memory_every=0")

# Every proof takes a second; a step of these models takes milliseconds.
SLOW = """
import time
from runner.checkpoint.disk import tier as disk_tier
verify = disk_tier.verify_files

def slowly(*arguments, finite, **more):
    if finite:
        time.sleep(1)
    verify(*arguments, finite=finite, **more)

disk_tier.verify_files = slowly
if __name__ == "__main__":
    from runner.__main__ import run
    run()
"""


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    program = tmp_path / "slow.py"
    program.write_text(SLOW)
    return program


def told(out: Path, hit: Result, *overrides: str, ranks: int = 2) -> Result:
    """The run that never reads what the other one skipped."""
    return finish(out, *SMALL, *overrides, skip_override(hit.summary["skipped"]), ranks=ranks)


@pytest.mark.parametrize("ranks", [2, full(1)])
def test_bad_first_batches_are_skipped_however_slow_the_proof(
    tmp_path: Path, slow: Path, ranks: int
) -> None:
    bad = "faults=[poison@samples=0-95]"
    hit = finish(tmp_path / "hit", *SMALL, bad, program=slow, ranks=ranks)
    [line] = hit.journal("rollback")
    assert line["detail"]["to_step"] == 0 and line["samples"][0] == 0, hit.tail
    assert_same_end(hit, told(tmp_path / "told", hit, ranks=ranks))
    assert_every_sample_once(hit)


@pytest.mark.full
def test_the_untrained_state_is_proven_after_a_kill_before_its_proof(
    tmp_path: Path, slow: Path
) -> None:
    """Committed, and the process gone before the mark: the next start proves it at once."""
    settings = (*SMALL, "faults=[poison@samples=0-95,kill@step=1,rank=0]")
    killed = train(tmp_path / "hit", *settings, program=slow, ranks=0)
    assert marks(killed.out) == {0: {"COMMITTED"}}, killed.tail
    hit = finish(tmp_path / "hit", *settings, program=slow, ranks=0)
    [line] = hit.journal("rollback")
    assert line["detail"]["to_step"] == 0, hit.tail
    assert_every_sample_once(hit)


def test_a_proof_under_way_is_waited_for_before_a_halt(tmp_path: Path, slow: Path) -> None:
    """Nothing older is clean: whether the run goes on rests on the proof that is under way."""
    bad = "faults=[poison@samples=525-599,kill@step=13,rank=0]"
    settings = (*SMALL, "checkpoint.background=false", bad)
    killed = train(tmp_path / "hit", *settings, ranks=0)
    assert marks(killed.out)[10] == {"COMMITTED"}, killed.tail
    [untrained] = (killed.out / "ring").glob("*-step-00000000")
    shutil.rmtree(untrained)
    hit = finish(tmp_path / "hit", *settings, program=slow, ranks=0)
    [line] = hit.journal("rollback")
    assert line["detail"]["to_step"] == 10 and line["detail"]["onset_step"] == 17, hit.tail
    assert not hit.journal("halt")
    assert_every_sample_once(hit)


@pytest.mark.parametrize("every", [3, full(5)])
def test_scattered_bad_steps_with_one_checkpoint_kept(tmp_path: Path, every: int) -> None:
    """What is proven between them must not take the place of what lies before them."""
    settings = (f"checkpoint.every={every}", "checkpoint.clean_after=1", "checkpoint.keep=1")
    bad = "faults=[nan_grad@step=15,rank=0,nan_grad@step=18,rank=1,nan_grad@step=21,rank=0]"
    hit = finish(tmp_path / "hit", *SMALL, *settings, bad)
    [line] = hit.journal("rollback")
    assert line["detail"]["onset_step"] == 15, hit.tail
    assert 13 - 2 * every < line["detail"]["to_step"] <= 13
    assert_same_end(hit, told(tmp_path / "told", hit, *settings))
    assert_every_sample_once(hit)


NO_HELD_OUT = ("eval.every=0",)

# The last update ruins the weights, after the gate has let it through.
RUINED = """
from runner.train.step import Stepper
launch = Stepper.launch

def ruining(self, order, ledger, **more):
    pending = launch(self, order, ledger, **more)
    if order.step == 26:
        for shard in self._engine.shards():
            if shard.name.startswith("param/"):
                shard.local.mul_(30.0)
    return pending

Stepper.launch = ruining
if __name__ == "__main__":
    from runner.__main__ import run
    run()
"""

# What is read back of the last checkpoint is not what was written, so many times.
DAMAGED = """
from runner.checkpoint.disk import tier as disk_tier
from runner.fault.wrap import flip_bit
verify, times = disk_tier.verify_files, [TIMES]

def damaging(entry, names, *, finite, **more):
    if finite and entry.manifest.step == 26 and times[0]:
        times[0] -= 1
        for name in names:
            flip_bit(entry.folder / name)
    verify(entry, names, finite=finite, **more)

disk_tier.verify_files = damaging
if __name__ == "__main__":
    from runner.__main__ import run
    run()
"""


def export(out: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What it says."""
    assert main(["export", str(out), str(folder)]) == 0
    return capsys.readouterr().out.splitlines()


def metadata(folder: Path) -> dict[str, str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return dict(file.metadata())


@pytest.mark.parametrize(("ranks", "settings"), [(2, EVALUATED), full(0, NO_HELD_OUT)])
def test_a_finished_run_exports_its_last_step(
    tmp_path: Path, ranks: int, settings: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    run = finish(tmp_path / "run", *SMALL, "steps=20", *settings, ranks=ranks)
    assert marks(run.out)[20] == {"COMMITTED", "CLEAN"}, run.tail
    assert run.summary["reason"] == "all steps applied" and not run.journal("unproven")
    [told] = export(run.out, tmp_path / "weights", capsys)
    assert told == f"exported step 20 of 20 (clean) to {tmp_path / 'weights'}"
    made = metadata(tmp_path / "weights")
    assert (made["step"], made["digest"]) == ("20", run.digest)
    assert len(run.metrics()) == 20, "one more forward pass is no step"


def test_a_killed_run_exports_an_older_one_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = (*SMALL, "checkpoint.background=false", "faults=[kill@step=23,rank=0]")
    killed = train(tmp_path / "run", *settings, ranks=0)
    assert killed.code == -signal.SIGKILL, killed.tail
    first, *why = export(killed.out, tmp_path / "early", capsys)
    assert first.startswith("exported step 10 of 26 (clean)"), why
    assert why == [
        "step 20 is not exported: not proven: too few clean steps have followed it yet",
        "the run has not reached step 26: its newest checkpoint is of 20",
    ]
    run = finish(killed.out, *settings, ranks=0)
    [told] = export(run.out, tmp_path / "weights", capsys)
    assert told.startswith("exported step 26 of 26 (clean)")
    assert metadata(tmp_path / "weights")["digest"] == run.digest


@pytest.mark.parametrize(
    ("ranks", "settings", "what"),
    [
        (0, EVALUATED, "held-out loss"),
        full(0, NO_HELD_OUT, "loss over the last batch"),
        full(2, EVALUATED, "held-out loss"),
    ],
)
def test_a_last_update_that_ruined_the_weights_is_not_exported(
    tmp_path: Path,
    ranks: int,
    settings: tuple[str, ...],
    what: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program = tmp_path / "ruined.py"
    program.write_text(RUINED)
    hit = finish(tmp_path / "hit", *SMALL, *settings, ranks=ranks, program=program)
    [line] = hit.journal("unproven")
    assert f"failed its proof: {what} " in line["reason"] and "> limit" in line["reason"], hit.tail
    assert line["step"] == 26 and "newest clean checkpoint is of step 20" in line["decision"]
    assert f"but the last checkpoint is not clean: {what}" in hit.summary["reason"]
    assert marks(hit.out)[26] == {"COMMITTED"}
    first, why = export(hit.out, tmp_path / "weights", capsys)
    assert first.startswith("exported step 20 of 26 (clean)") and line["reason"] in why
    if settings is EVALUATED:
        again = finish(hit.out, *SMALL, *settings, ranks=ranks)
        assert again.digest == hit.digest, "nothing is gained by another start, and nothing lost"
        assert marks(hit.out)[26] == {"COMMITTED"} and len(again.journal("unproven")) == 2


def test_a_last_checkpoint_that_is_damaged_is_written_once_more(tmp_path: Path) -> None:
    program = tmp_path / "damaged.py"
    program.write_text(DAMAGED.replace("TIMES", "1"))
    run = finish(tmp_path / "run", *SMALL, ranks=0, program=program)
    [line] = run.journal("checkpoint_damaged")
    assert "of step 26" in line["reason"], run.tail
    assert marks(run.out)[26] == {"COMMITTED", "CLEAN"}


@pytest.mark.full
def test_a_last_checkpoint_that_no_disk_keeps_is_an_error(tmp_path: Path) -> None:
    program = tmp_path / "damaged.py"
    program.write_text(DAMAGED.replace("TIMES", "9"))
    lost = train(tmp_path / "lost", *SMALL, ranks=0, program=program)
    assert lost.code == 1 and lost.summary["status"] == "failed", lost.tail
    assert "the end state could not be saved" in lost.summary["reason"]
    # Restarted, as its exit code asks for: from the checkpoint before.
    mended = finish(lost.out, *SMALL, ranks=0)
    assert mended.digest == finish(tmp_path / "run", *SMALL, ranks=0).digest
    assert marks(lost.out)[26] == {"COMMITTED", "CLEAN"}


def marks(out: Path) -> dict[int, set[str]]:
    """Step of each checkpoint on disk to the marks in its folder."""
    folders = (out / "ring").glob("[0-9]*-step-*")
    return {
        int(folder.name[-8:]): {path.name for path in folder.iterdir() if path.name.isupper()}
        for folder in folders
    }
