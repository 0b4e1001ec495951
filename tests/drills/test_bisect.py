"""launch/bisect.sh under git's own bisection: the commit that made a training bad is found."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

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
        return self.head(self.embedding(input_ids)) * SCALE
"""
_SETTINGS = (
    *(
        "model._target_=net.Net",
        "data=synthetic",
        "data.vocab_size=32",
        "data.seq_len=16",
        "batch.global_size=8",
    ),
    *("batch.micro_size=8", "parallel=single", "eval.every=0", "checkpoint.every=10", "steps=20"),
    *("guard.max_rollbacks=0", "explain=off", "debug.preflight=false", "track.report_minutes=null"),
)


def _git(repository: Path, *words: str) -> str:
    own = ("-c", "user.name=a", "-c", "user.email=a@b")
    command = ["git", *own, *words]
    # Of the drill's own folder, as on a user's machine: the commits' module comes first.
    paths = os.pathsep.join([str(repository), str(ROOT)])
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=repository, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
def test_the_commit_that_made_it_bad_is_found(tmp_path: Path) -> None:
    _git(tmp_path, "init", "-q")
    commits = []
    # The second does not even begin, which says nothing about it.
    for scale in ("1.0", "NOTHING", "0.9", "float('nan')", "float('inf')"):
        (tmp_path / "net.py").write_text(_NET.replace("SCALE", scale))
        _git(tmp_path, "add", "net.py")
        _git(tmp_path, "commit", "-qm", f"scale {scale}")
        commits.append(_git(tmp_path, "rev-parse", "HEAD").strip())
    _git(tmp_path, "bisect", "start", commits[-1], commits[0])
    script = str(ROOT / "launch/bisect.sh")
    said = _git(tmp_path, "bisect", "run", "bash", script, *_SETTINGS)
    assert f"{commits[3]} is the first bad commit" in said
