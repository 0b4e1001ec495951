"""``bisect``: the commit, and the file of the data, that made a training bad are found."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from runner.command.bisect import first_bad
from tests.run import TINY

ROOT = Path(__file__).parents[2]
_NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 8)
        self.head = nn.Linear(8, vocab_size)

    def forward(self, input_ids):
        scale = torch.where(input_ids == 195, float("nan"), SCALE)
        return self.head(self.embedding(input_ids)) * scale[..., None]
"""
_TRAIN = (
    *(sys.executable, "-m", "runner", "model._target_=net.Net", "data.seq_len=16"),
    *("batch.global_size=8", "batch.micro_size=8", "parallel=single", "eval.every=0", "steps=20"),
    *("checkpoint.every=10", "guard.max_rollbacks=0", "explain=off", "debug.preflight=false"),
    *("track.report_minutes=null", "data.workers=0"),
)


def _run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # Of the drill's own folder, as on a user's machine: the commits' module comes first.
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    for who in ("AUTHOR", "COMMITTER"):
        env |= {f"GIT_{who}_NAME": "a", f"GIT_{who}_EMAIL": "a@b"}
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def _bisect(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return _run(folder, sys.executable, "-m", "runner", "bisect", *words)


def _commits(folder: Path, texts: Sequence[str]) -> list[str]:
    """One commit of net.py after another; their names."""
    assert _run(folder, "git", "init", "-q").returncode == 0
    for text in texts:
        (folder / "net.py").write_text(text)
        assert _run(folder, "git", "add", "net.py").returncode == 0
        assert _run(folder, "git", "commit", "-qm", text[-20:]).returncode == 0
    return _run(folder, "git", "rev-list", "--reverse", "HEAD").stdout.split()


def test_the_first_file_that_is_bad_by_itself_is_found() -> None:
    names = [*"abcdefg"]
    for bad in ("a", "d", "g", "cf"):
        assert first_bad(names, lambda files, bad=bad: not {*bad}.isdisjoint(files)) == bad[0]
    assert first_bad(names, lambda files: False) is None


def test_git_is_driven_by_the_exit_code_and_left_as_it_was(tmp_path: Path) -> None:
    commits = _commits(tmp_path, ["exit 0", "exit 0 #", "exit 3", "exit 3 #"])
    done = _bisect(tmp_path, "--commits", commits[0], "HEAD", "--", "sh", "net.py")
    assert f"{commits[2]} is the first bad commit" in done.stdout, done.stdout + done.stderr
    assert _run(tmp_path, "git", "rev-parse", "HEAD").stdout.strip() == commits[3]
    for code, told in ((0, 0), (3, 1), (2, 125)):
        assert _bisect(tmp_path, "--", "sh", "-c", f"exit {code}").returncode == told


def test_a_halt_under_torchrun_is_bad(tmp_path: Path) -> None:
    """torchrun ends with 1, also where the guard has halted."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", *_TRAIN[1:3]]
    words += ["out={out}", *TINY, "guard.max_rollbacks=0", "explain=off", "steps=20"]
    words += ["faults=[poison@samples=100-900000]"]
    done = _bisect(tmp_path, "--", sys.executable, *words)
    assert done.returncode == 1, done.stdout + done.stderr


@pytest.mark.full
def test_the_commit_that_made_it_bad_is_found(tmp_path: Path) -> None:
    # The second does not even begin, which says nothing about it.
    scales = ("1.0", "NOTHING", "0.9", "float('nan')", "float('inf')")
    commits = _commits(tmp_path, [_NET.replace("SCALE", scale) for scale in scales])
    data = ("data=synthetic", "data.vocab_size=32")
    done = _bisect(tmp_path, "--commits", commits[0], commits[-1], "--", *_TRAIN, *data)
    assert f"{commits[3]} is the first bad commit" in done.stdout, done.stdout + done.stderr


@pytest.mark.full
def test_the_file_that_made_it_bad_is_found(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(_NET.replace("SCALE", "1.0"))
    files = [tmp_path / f"part {number}.txt" for number in range(4)]
    for number, file in enumerate(files):
        file.write_text(("some wörds, \n" if number == 2 else "some words, \n") * 400)
    done = _bisect(
        tmp_path, "--files", *map(str, files), "--", *_TRAIN, "data=text", "data.path={files}"
    )
    assert f"{files[2]} is the first bad file" in done.stdout, done.stdout + done.stderr
