"""What a command may ask for, and what happens when the world around a run misbehaves."""

from __future__ import annotations

import os
import shutil
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
        ("batch.global_size=3", FOUR_RANKS, ["batch.global_size=3", "4 ranks"]),
        ("faults=[poison@step=3]", {}, ["poison", "needs samples"]),
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
    slow = (*settings, "faults=[slow@step=12-60,seconds=0.1]")
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


# -- nowhere to save


def test_a_first_save_that_fails_ends_the_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    (out / "ring").mkdir(parents=True)
    (out / "ring" / "writing-000001-000001").write_text("in the way")
    refused = train(out, ranks=0)
    assert refused.code == 4, refused.tail
    assert refused.summary["exit_code"] == 4
    assert "there is no clean checkpoint" in refused.summary["reason"]
    assert "Traceback" not in refused.text


SLOW_FIRST = """
import os, time
from runner.config import compose as module

compose = module.compose

def late(*arguments, **named):
    if os.environ["RANK"] == "0":
        time.sleep(1)
    return compose(*arguments, **named)

module.compose = late
from runner.__main__ import run
run()
"""


def test_a_refusal_is_read_though_rank_0_is_the_last_to_meet_it(tmp_path: Path) -> None:
    """torchrun ends all others at the first rank that leaves, and rank 0 alone reports."""
    program = tmp_path / "program.py"
    program.write_text(SLOW_FIRST)
    result = train(tmp_path / "run", "parallel=fsdb", program=program)
    assert result.code != 0 and "parallel=fsdb" in result.text, result.tail
