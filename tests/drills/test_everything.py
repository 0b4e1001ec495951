"""All features at once, with bad samples, a spoilt device for a moment, and a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run import TWO_LAYERS, finish, skip_override

MIXTURE = (
    "data.sources=[{name: code, weight: 1, samples: 600, seed: 1},"
    "{name: web, weight: 3, samples: 3000, seed: 2}]"
)
EVERYTHING = (
    *("debug.audit_every=6", "track.layers_every=5", "debug.replica_check_every=9"),
    *("debug.preflight=true", "explain=full", "guard.remedy=verdict", "guard.sync=false"),
    *("eval.every=8", "optim.ema=0.9", "checkpoint.keep_best=true", "checkpoint.memory_every=4"),
    *("track.tensorboard=true", "track.every=5", "watchdog.straggler_every=7", MIXTURE, TWO_LAYERS),
)
BAD, TRANSIENT, KILL = "poison@samples=700-701", "flip_grad@step=30,rank=1", "kill@step=38,rank=0"


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp", marks=pytest.mark.full)])
def test_a_run_with_everything_on_ends_as_the_run_told_to_skip(tmp_path: Path, engine: str) -> None:
    words = (*EVERYTHING, f"parallel={engine}")
    faults = f"faults=[{BAD},{TRANSIENT},{KILL}]"
    hit = finish(tmp_path / "hit", *words, faults, restarts=1)
    assert hit.summary["restarts"] == 1, hit.tail
    assert hit.summary["skipped"] == [[700, 702]], hit.tail
    causes = [line["detail"]["cause"]["cause"] for line in hit.journal("redo")]
    assert "data" in causes, hit.tail
    told = finish(tmp_path / "told", *words, skip_override(hit.summary["skipped"]))
    assert told.digest == hit.digest
