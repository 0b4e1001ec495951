"""What a command may ask for, and what happens when the world around a run misbehaves."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.drills.compare import assert_same_run
from tests.run import Result, finish, metrics_step, start, train

FOUR_RANKS = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}


# -- settings


@pytest.mark.parametrize(
    ("override", "env", "words"),
    [
        ("guard.persits=2", {}, ["guard.persits", "guard.persist"]),
        pytest.param("steps=many", {}, ["steps=many", "int"], marks=pytest.mark.full),
        ("batch.global_size=3", FOUR_RANKS, ["batch.global_size=3", "4 ranks"]),
        pytest.param("optim.lr=-1", {}, ["optim.lr=-1", "greater than 0"], marks=pytest.mark.full),
        pytest.param(
            "checkpoint.every=2",
            {},
            ["checkpoint.every=2", "checkpoint.clean_after=5"],
            marks=pytest.mark.full,
        ),
        ("faults=[poison@step=3]", {}, ["poison", "needs samples"]),
        pytest.param("data.skip=[[9,3]]", {}, ["data.skip", "half-open"], marks=pytest.mark.full),
    ],
)
def test_a_mistake_is_told_in_one_clear_line(
    tmp_path: Path, override: str, env: dict[str, str], words: list[str]
) -> None:
    refused = train(tmp_path / "run", override, ranks=0, env=env)
    assert refused.code == 2, refused.tail
    assert "Traceback" not in refused.text and refused.text.count("\n") == 1, refused.text
    assert refused.text.startswith("error: ")
    assert all(word in refused.text for word in words), refused.text
    assert not (tmp_path / "run").exists(), "nothing was begun"


def test_another_trajectory_is_refused_unless_allowed(tmp_path: Path, clean_alone: Result) -> None:
    out = tmp_path / "run"
    shutil.copytree(clean_alone.out, out)
    refused = train(out, "optim.lr=1e-3", "guard.persist=4", "steps=65", ranks=0)
    assert refused.code == 2, refused.tail
    for words in (
        "optim.lr: was 0.003, now 0.001",
        "guard.persist: was 3, now 4",
        "schedule.total: was 60, now 65",
        "resume.allow=[optim.lr,schedule.total,guard.persist]",
        "resume.allow_change=true",
    ):
        assert words in refused.text, refused.tail
    assert "Traceback" not in refused.text
    assert (out / "summary.json").read_text() == (clean_alone.out / "summary.json").read_text()
    allowed = finish(out, "optim.lr=1e-3", "steps=65", "resume.allow_change=true", ranks=0)
    assert allowed.summary["steps"] == 65 and len(allowed.metrics()) == 65
    refused = train(out, "steps=70", "schedule.total=65", ranks=0)
    assert refused.code == 2 and "optim.lr: was 0.001, now 0.003" in refused.text, refused.tail


# -- ranks that disagree


def test_a_rank_that_is_elsewhere_is_named(tmp_path: Path, clean: Result) -> None:
    faults = "faults=[mismatch@step=25,rank=1]"
    apart = train(tmp_path / "run", faults)
    assert apart.code != 0
    assert apart.summary["status"] == "failed", apart.tail
    assert "ranks drifted apart: step: rank 1: 26; the others: 25" in apart.summary["reason"]
    assert apart.journal("failed"), apart.tail
    assert_same_run(finish(tmp_path / "run", faults), clean)


# -- data that breaks while training


def test_a_file_cut_short_while_training(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.bin"
    tokens = np.random.default_rng(1).integers(0, 64, size=40_000, dtype=np.uint16)
    tokens.tofile(corpus)
    whole = corpus.read_bytes()
    settings = (
        "data.kind=tokens",
        f"data.path={corpus}",
        "data.token_dtype=uint16",
        "data.vocab_size=64",
        "data.max_unreadable=0",  # else some are skipped first
    )
    untouched = finish(tmp_path / "untouched", *settings)
    slow = (*settings, "faults=[slow@step=12-60,seconds=0.25]")
    started = start(tmp_path / "run", *slow)
    started.until(lambda out: metrics_step(out) >= 15)
    os.truncate(corpus, len(whole) // 4)
    broken = started.wait()
    assert broken.code != 0
    assert broken.summary["status"] == "failed", broken.tail
    reason = broken.summary["reason"]
    assert "rank " in reason and str(corpus) in reason and "end early" in reason
    assert broken.metrics()[-1]["action"] == "apply", "no step was poisoned"
    corpus.write_bytes(whole)
    again = finish(tmp_path / "run", *settings)
    assert_same_run(again, untouched)


# -- asked to stop


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_to_one_worker(tmp_path: Path, clean: Result, rank: int) -> None:
    slow = "faults=[slow@step=20-60,seconds=0.25]"
    started = start(tmp_path / "run", slow)
    started.until(lambda out: metrics_step(out) >= 23)
    [worker] = [pid for pid in started.workers() if rank_of(pid) == rank]
    os.kill(worker, signal.SIGTERM)
    stopped = started.wait(timeout=60)
    summary = stopped.summary
    assert (summary["status"], summary["exit_code"]) == ("preempted", 75), stopped.tail
    assert 23 <= summary["steps"] < 60
    assert list((stopped.out / "ring").glob(f"*-step-{summary['steps']:08d}/COMMITTED"))
    again = finish(tmp_path / "run")
    assert again.journal("start")[-1]["step"] == summary["steps"], "nothing is done twice"
    assert_same_run(again, clean)


def rank_of(pid: int) -> int:
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return int(next(v for v in variables if v.startswith(b"RANK=")).removeprefix(b"RANK="))


# -- nowhere to save


@pytest.mark.full  # always: tests/drills/test_disk.py, a ring that cannot be written
def test_a_save_that_fails_is_an_incident(tmp_path: Path, clean: Result) -> None:
    """A file stands where checkpoint 4 (step 30) wants its folder."""
    out = tmp_path / "run"
    (out / "ring").mkdir(parents=True)
    (out / "ring" / "writing-000004-000001").write_text("in the way")
    run = finish(out)
    [line] = run.journal("save_failed")
    assert line["step"] == 30 and line["decision"] == "go on", line
    assert "rank 0" in line["reason"] and "clean checkpoint of step 20 stands" in line["reason"]
    assert_same_run(run, clean)
    assert not list((out / "ring").glob("*-step-00000030"))


def test_a_first_save_that_fails_ends_the_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    (out / "ring").mkdir(parents=True)
    (out / "ring" / "writing-000001-000001").write_text("in the way")
    refused = train(out, ranks=0)
    assert refused.code == 4, refused.tail
    assert refused.summary["exit_code"] == 4
    assert "there is no clean checkpoint" in refused.summary["reason"]
    assert "Traceback" not in refused.text


@pytest.mark.full  # tests/drills/test_disk.py
def test_a_full_disk(tmp_path: Path, clean: Result) -> None:
    """A checkpoint of this model takes 0.4 MB; the disk holds three."""
    out = tmp_path / "run"
    disk = out / "ring"
    disk.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        run = train(out, "checkpoint.keep=9")
        failed = run.journal("save_failed")
        assert failed and all(line["decision"] == "go on" for line in failed), run.tail
        assert all("No space left" in line["reason"] for line in failed)
        assert run.metrics() == clean.metrics() and run.digest == clean.digest, run.tail
        # Every step was taken, but the end state is not on the disk: that is not "done".
        assert run.code != 0 and (run.summary["status"], run.summary["exit_code"]) == ("failed", 1)
        assert "the end state could not be saved" in run.summary["reason"], run.tail
    finally:
        subprocess.run(["umount", str(disk)], check=True)
