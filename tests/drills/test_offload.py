"""Weights, gradients and moments in the host's memory: the bits of a run without, real runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drills.compare import assert_same_end
from tests.drills.test_guests import POISON, SHORT
from tests.run import finish, skip_override

pytestmark = [pytest.mark.usefixtures("leaves_nothing"), pytest.mark.full]
OFFLOAD = "parallel.offload=cpu"


@pytest.mark.parametrize("engine", ["fsdp", "ddp"])
def test_it_is_the_run_without_it(tmp_path: Path, engine: str) -> None:
    told = [*SHORT, f"parallel={engine}"]
    plain = finish(tmp_path / "plain", *told, POISON)
    offloaded = finish(tmp_path / "offloaded", *told, OFFLOAD, POISON)
    assert offloaded.journal("rollback"), offloaded.tail
    assert_same_end(offloaded, plain)
    # To and fro from one command to the next, on other ranks, told what never to read.
    skip = skip_override(plain.summary["skipped"])
    turns = ((12, 2, [OFFLOAD]), (25, 1, []), (40, 3, [OFFLOAD]))
    for steps, ranks, more in turns:
        run = finish(tmp_path / "turns", *told, skip, *more, f"steps={steps}", ranks=ranks)
    assert run.summary["cursor"] == plain.summary["cursor"], run.tail
