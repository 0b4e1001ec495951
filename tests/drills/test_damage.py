"""P6, P7: damaged checkpoints are found, named and passed over; nothing unproven is clean."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from tests.drills.compare import assert_every_sample_once, assert_same_run
from tests.rows import full, full_but
from tests.run import Result, finish, train

UP_TO_60 = "schedule.total=60"
BF16 = "compute.precision=bf16"


@pytest.fixture(scope="module")
def part(runs: Path) -> Result:
    """40 of 60 steps in one process: checkpoints of steps 10 to 40."""
    return finish(runs / "part", "steps=40", UP_TO_60, ranks=0)


def newest(out: Path, nth: int = 1) -> Path:
    return sorted(folder for folder in (out / "ring").iterdir() if folder.is_dir())[-nth]


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 0x01
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


DAMAGE: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a flipped byte": ("rank-00000.bin", flip_a_byte),
    "a truncated shard": ("rank-00000.bin", truncate),
    "an empty shard": ("rank-00000.bin", lambda path: path.write_bytes(b"")),
    "a lost shard": ("rank-00000.bin", Path.unlink),
    "a damaged manifest": ("manifest.json", flip_a_byte),
    "a truncated manifest": ("manifest.json", truncate),
    "a lost manifest": ("manifest.json", Path.unlink),
    "a damaged marker": ("COMMITTED", truncate),
}


@pytest.mark.parametrize("what", full_but(["a flipped byte"], DAMAGE))
def test_the_older_one_is_used(
    tmp_path: Path, part: Result, clean_alone: Result, what: str
) -> None:
    out = tmp_path / "run"
    shutil.copytree(part.out, out)
    name, damage = DAMAGE[what]
    victim = newest(out)
    damage(victim / name)
    again = finish(out, ranks=0)
    [line] = again.journal("checkpoint_damaged")
    assert str(victim) in line["reason"], line
    assert str(victim.name) in flat(again.text), again.tail
    assert again.journal("start")[-1]["step"] == 30, again.tail
    assert_same_run(again, clean_alone)
    assert_every_sample_once(again)
    second = finish(out, ranks=0)
    assert len(second.journal("checkpoint_damaged")) <= 2
    assert second.digest == clean_alone.digest


def test_without_its_marker_it_was_never_there(
    tmp_path: Path, part: Result, clean_alone: Result
) -> None:
    out = tmp_path / "run"
    shutil.copytree(part.out, out)
    victim = newest(out)
    (victim / "COMMITTED").unlink()
    again = finish(out, ranks=0)
    assert f"removed {victim.name}: it was never committed" in flat(again.text), again.tail
    assert again.journal("start")[-1]["step"] == 30
    assert_same_run(again, clean_alone)


def test_slots_mixed_up(tmp_path: Path, part: Result, clean_alone: Result) -> None:
    """Shards swapped between two slots, a slot doubled, one elsewhere, and the clock set back."""
    out = tmp_path / "run"
    shutil.copytree(part.out, out)
    first, second = newest(out), newest(out, 2)
    shards = [folder / "rank-00000.bin" for folder in (first, second)]
    contents = [shard.read_bytes() for shard in shards]
    for shard, other in zip(shards, reversed(contents), strict=True):
        shard.write_bytes(other)
    third = newest(out, 3)
    shutil.copytree(third, third.with_name("0" + third.name))
    (out / "ring" / "000099-step-00000999").symlink_to(third)
    for path in (out / "ring").rglob("*"):
        os.utime(path, (0, 0), follow_symlinks=False)
    again = finish(out, ranks=0)
    assert again.journal("start")[-1]["step"] == 20, again.tail
    reasons = " ".join(line["reason"] for line in again.journal("checkpoint_damaged"))
    assert reasons.count("digest differs") == 2
    assert "moved or renamed" in reasons and "is a symbolic link" in reasons
    assert_same_run(again, clean_alone)
    assert_every_sample_once(again)


@pytest.mark.parametrize("name", ["rank-00000.bin", full("manifest.json")])
def test_all_damaged(tmp_path: Path, part: Result, name: str) -> None:
    out = tmp_path / "run"
    shutil.copytree(part.out, out)
    victims = sorted((out / "ring").glob(f"*/{name}"))
    assert len(victims) >= 3
    for victim in victims:
        flip_a_byte(victim)
    before = (out / "metrics.jsonl").read_bytes()
    refused = train(out, ranks=0)
    assert refused.code == 4, refused.tail
    assert all(victim.parent.name in flat(refused.text) for victim in victims), refused.tail
    assert "Traceback" not in refused.text
    assert (out / "metrics.jsonl").read_bytes() == before, "nothing is lost by the refusal"
    assert train(out, ranks=0).code == 4, "and nothing begins anew behind one's back"


def test_found_when_it_should_have_been_proven(tmp_path: Path, clean: Result) -> None:
    """Damaged on 2 ranks while still in its probation: it never becomes clean."""
    run = finish(
        tmp_path / "run",
        "faults=[corrupt_checkpoint@step=42]",
        "checkpoint.background=false",
        "checkpoint.keep=9",
    )
    [line] = run.journal("checkpoint_damaged")
    assert "of step 40" in line["reason"] and "rank-00000.bin" in line["reason"], line
    assert line["step"] >= 45, "when its probation was over"
    assert not list((run.out / "ring").glob("*-step-00000040/CLEAN"))
    assert len(list((run.out / "ring").glob("*/CLEAN"))) == 6, "0 to 30, 50, and the last one"
    assert_same_run(run, clean)


def flat(text: str) -> str:
    """Console lines may be wrapped."""
    return text.replace("\n", "")


# What a disk does that cannot read a sector any more, on rank 1 only. Checkpoints are verified
# with read and loaded with readinto.
FAILING_DISK = """
import errno, io, os
from runner.__main__ import main
from runner.checkpoint.disk import shards

class Failing(io.BufferedReader):
    def {call}(self, *arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

def fails(path, **named):
    is_bad = os.environ["RANK"] == "1" and "{bad}" in path.parent.name
    return Failing(io.FileIO(path)) if is_bad else opened(path, **named)

opened, shards.open_regular = shards.open_regular, fails
raise SystemExit(main())
"""
ENGINES = full_but(
    [("fsdp", "read")], product(("fsdp", "zero1", "zero2", "zero3"), ("read", "readinto"))
)


@pytest.fixture(scope="module")
def part_of_two(runs: Path) -> Result:
    """40 of 60 steps on two ranks, with fsdp, in what ZeRO knows: checkpoints of 10 to 40."""
    return finish(runs / "part-of-two", "steps=40", UP_TO_60, BF16)


def failing_disk(folder: Path, call: str, bad: str) -> Path:
    program = folder / "failing_disk.py"
    program.write_text(FAILING_DISK.format(call=call, bad=bad))
    return program


@pytest.mark.parametrize(("engine", "call"), ENGINES)
def test_what_one_rank_cannot_read_is_passed_over_by_all(
    tmp_path: Path, part_of_two: Result, engine: str, call: str
) -> None:
    """While it is verified and while it is loaded, where some engines gather in between."""
    out, without = tmp_path / "run", tmp_path / "without"
    shutil.copytree(part_of_two.out, out)
    shutil.copytree(part_of_two.out, without)
    shutil.rmtree(newest(without))
    program = failing_disk(tmp_path, call, "step-00000040")
    run = finish(out, f"parallel={engine}", BF16, program=program)
    told, *later = run.journal("checkpoint_damaged")
    assert told["decision"] == "an older checkpoint is used", told
    # A rank that cannot verify it says so again when the checkpoint is due to be proven.
    assert len(later) == (call == "read"), later
    for line in (told, *later):
        assert "step-00000040/rank-0000" in line["reason"], line
        assert "Input/output error" in line["reason"], line
    assert "resuming at step 30 of 60" in run.text and not run.journal("crash"), run.tail
    # Not a run with one engine only: torch 2.15 rounds AdamW otherwise on DeepSpeed's flat tensor.
    twin = finish(without, f"parallel={engine}", BF16)
    assert "resuming at step 30 of 60" in twin.text and run.digest == twin.digest, run.tail
    assert_every_sample_once(run)


@pytest.mark.parametrize(
    "engine", ["zero2", full("fsdp")]
)  # fmt: skip
def test_what_one_rank_cannot_read_at_all_ends_in_the_disks_words(
    tmp_path: Path, part_of_two: Result, engine: str
) -> None:
    """Nothing is marked as damaged: the next start, on a disk that reads again, goes on."""
    out = tmp_path / "run"
    shutil.copytree(part_of_two.out, out)
    failed = train(
        out, f"parallel={engine}", "steps=42", UP_TO_60, BF16,
        program=failing_disk(tmp_path, "readinto", "-step-"),
    )  # fmt: skip
    assert failed.code == 1, failed.tail
    assert "can be loaded" in failed.text and "Input/output error" in failed.text, failed.tail
    assert failed.text.count("rank-0000") >= 4, "every checkpoint's file is named"
    assert not list((out / "ring").glob("*/TAINTED"))
