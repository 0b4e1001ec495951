"""A run directory made before the modules were moved into rooms resumes to the same state.

``tests/data/run-before-the-rooms.tar.gz`` was written by the commit before the move, on two ranks:

    torchrun --standalone --nproc-per-node=2 -m runner out=run SETTINGS steps=20 \\
        faults=[nan_grad@step=7,rank=1]
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from tests.run import finish

pytestmark = pytest.mark.usefixtures("leaves_nothing")
ARCHIVE = Path(__file__).parents[1] / "data" / "run-before-the-rooms.tar.gz"
SETTINGS = (
    *("model.dim=8", "model.layers=1", "model.heads=2", "data.vocab_size=16", "data.seq_len=16"),
    *(
        "batch.global_size=8",
        "batch.micro_size=4",
        "schedule.total=60",
        "checkpoint.memory_every=0",
    ),
)


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.full)])
def test_it_resumes_to_the_digest_that_it_ended_with(tmp_path: Path, ranks: int) -> None:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    out = tmp_path / "run"
    before = json.loads((out / "summary.json").read_text())
    settings = [*SETTINGS, *(["parallel=single"] if ranks == 0 else [])]
    loaded = finish(out, *settings, "steps=20", ranks=ranks)
    assert loaded.digest == before["state_digest"], loaded.tail
    # The arithmetic after it is this machine's own; what was decided before it stands.
    longer = finish(out, *settings, "steps=40", ranks=ranks)
    assert longer.summary["skipped"] == before["skipped"] == [[49, 57]]
    assert sorted(longer.counted()) == list(range(1, 41))
    assert longer.summary["discarded_steps"] == 1 and longer.summary["restarts"] == 0
