"""The swarm: cases that once failed, some of fixed seeds, and what it is made of."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scripts.swarm import case, swarm
from scripts.swarm.case import Break, Case, from_json, simpler, size
from scripts.swarm.draw import draw
from scripts.swarm.play import Counter, reached
from scripts.swarm.twins import Leg, Twins
from tests.mutants import ROOT

HERE = Path(__file__).parent
# Always those that found something, and of those that only bring features together the one whose
# ranks, engine and weights change in between. The others are half a minute each.
ALWAYS = (
    *("adafactor-killed-before-a-checkpoint", "asked-to-stop-beside-a-tracker-that-hangs"),
    "mixture-with-new-weights-on-other-ranks",
    "loop-stopped-behind-a-rollback-to-the-start",
)
KEPT = [
    pytest.param(path, marks=() if path.stem in ALWAYS else pytest.mark.full, id=path.stem)
    for path in sorted((HERE / "cases").glob("*.json"))
]
# About ten processor seconds each; half a minute with more ranks.
SEEDS = [pytest.param(seed, marks=[pytest.mark.full] if seed else []) for seed in range(14)]


@pytest.fixture(scope="module")
def bench() -> Iterator[swarm.Bench]:
    with swarm.bench() as one:
        yield one


@pytest.mark.parametrize("file", KEPT)
def test_a_kept_case_passes(bench: swarm.Bench, file: Path) -> None:
    assert bench.failures(case.read(file)) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_a_drawn_case_passes(bench: swarm.Bench, seed: int) -> None:
    one = draw(seed)
    assert bench.failures(one) == [], one.describe()


def test_a_layout_has_a_twin_of_its_own_which_is_made_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """FSDP on two ranks adds in another order than on three; the settings are the same."""
    made: list[int] = []

    def make(_: Twins, case: Case, *rest: object) -> int:
        time.sleep(0.05)
        made.append(case.ranks)
        return case.ranks

    monkeypatch.setattr(Twins, "_make", make)
    twins, legs = Twins(tmp_path, tmp_path, Counter()), [Leg(0, 30, 30)]
    wanted = [2, 3, 2, 3]
    with ThreadPoolExecutor(4) as pool:
        got = pool.map(lambda n: twins.of(Case(engine="fsdp", ranks=n), legs, []), wanted)
        assert list(got) == wanted
    assert sorted(made) == [2, 3]


def test_a_discard_counts_where_a_kill_came_before_its_metrics(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 16, "cursor": 147}\n')
    assert reached(tmp_path) == (16, 147)
    lines = ['{"kind": "start", "step": 0, "samples": null}',
             '{"kind": "discard", "step": 17, "samples": [147, 156]}', '{"kind": "cra']  # fmt: skip
    (tmp_path / "journal.jsonl").write_text("\n".join(lines))
    assert reached(tmp_path) == (17, 156)


def test_a_case_is_json_and_drawn_alike_each_time() -> None:
    for seed in range(300):
        one = draw(seed)
        assert draw(seed) == one
        assert from_json(json.loads(one.describe())) == one


def test_a_case_is_shrunk_feature_by_feature() -> None:
    whole = Case(ranks=2, engine="ddp", ema=True, faults=("kill@step=3",), breaks=(Break(ranks=1),))
    smaller = list(simpler(whole))
    assert all(size(one) < size(whole) or one.breaks != whole.breaks for one in smaller)
    assert {one.ema for one in smaller} == {True, False} and any(not one.faults for one in smaller)


@pytest.mark.parametrize("patch", sorted((HERE / "mutants").glob("*.patch")), ids=lambda p: p.stem)
def test_a_mutant_fits_the_code(patch: Path, tmp_path: Path) -> None:
    """Else make it anew from its mend; ``python -m scripts.swarm --prove`` looks for each."""
    from scripts.swarm.prove import put_in

    shutil.copytree(ROOT / "runner", tmp_path / "runner")
    put_in(patch, tmp_path)
