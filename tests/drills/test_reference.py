"""A real run, command line to metrics, against the formulas."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.config.compose import compose
from runner.policy.decision.skip_ledger import Ledger
from runner.session import parts
from runner.session.corpus import open_dataset, sample_stream
from tests.reference import Reference
from tests.rows import full
from tests.run import TINY, TWO_LAYERS, finish

# Below some norms and above others; a warm-up, a decay and a floor within the steps.
SETTINGS = (
    TWO_LAYERS,
    "steps=16",
    "schedule.warmup=4",
    "schedule.floor=0.3",
    "optim.clip=0.75",
    "optim.lr=0.004",
    "optim.weight_decay=0.2",
    "optim.eps=1e-4",
    "batch.global_size=7",
    "batch.micro_size=2",
    "model.z_loss=0.01",
    "eval.every=5",
    "eval.samples=4",
)


@pytest.mark.parametrize("ranks", [0, full(2), full(3)])
def test_a_run_trains_as_the_formulas_say(tmp_path: Path, ranks: int) -> None:
    run = finish(tmp_path / "run", *SETTINGS, ranks=ranks)
    config = compose([*TINY, *SETTINGS])
    dataset = open_dataset(config)
    stream, cursor = sample_stream(config, dataset), 0
    reference = Reference(config, parts.model_shape(config, dataset), dataset, ranks or 1)
    lines = run.counted()
    assert sorted(lines) == list(range(1, 17)), run.tail
    for line in lines.values():
        plan = stream.plan(cursor, Ledger())
        cursor = plan.stop
        told = reference.step(plan.indices.tolist())
        assert line["loss"] == pytest.approx(told.loss, rel=1e-5)
        assert line["grad_norm"] == pytest.approx(told.grad_norm, rel=1e-5)
        assert line["lr"] == pytest.approx(told.rate, rel=1e-12)
    norms = [line["grad_norm"] for line in lines.values()]
    assert min(norms) < config.optim.clip < max(norms), norms
