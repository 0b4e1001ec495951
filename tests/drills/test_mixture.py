"""P3-P5 of a mixture: sources by weight under poison, a kill, other ranks and other weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from runner.data.mixture import MixtureOrder, Phase
from tests.drills.compare import assert_same_end
from tests.rows import full
from tests.run import Result, finish, skip_override, train

LENGTHS = {"code": 60, "talk": 40, "web": 300}
SMALL = (
    "batch.global_size=16",
    "checkpoint.every=10",
    "eval.every=10",
    "eval.samples=4",
    "data.held_out=0.1",
)
POISON = "poison@samples=200-269"


def sources(code: float, talk: float, web: float) -> str:
    weights = {"code": code, "talk": talk, "web": web}
    entries = [
        f"{{name: {name}, weight: {weight}, samples: {LENGTHS[name]}, seed: {seed}}}"
        for seed, (name, weight) in enumerate(weights.items())
    ]
    return f"data.sources=[{', '.join(entries)}]"


def order_of(run: Result) -> MixtureOrder:
    """As the journal tells it."""
    lines = [line["detail"] for line in run.journal("mixture")]
    made = MixtureOrder(LENGTHS, seed=0, held_out_share=0.1, weights=lines[0]["weights"])
    made.load([Phase(start=line["start"], weights=line["weights"]) for line in lines])
    return made


def assert_accounted(run: Result) -> None:
    """Every position before the end is in one step that counts, held out, or in the ledger; no
    source gives a sample again before it has given all; the columns tell what was read."""
    order = order_of(run)
    positions = np.arange(run.summary["cursor"], dtype=np.int64)
    indices = order.indices(positions)
    readable = ~order.is_held_out(indices)
    for start, stop in run.summary["skipped"]:
        readable[start:stop] = False
    used = np.zeros(len(positions), dtype=np.int64)
    for line in run.counted().values():
        start, stop = line["samples"]
        used[start:stop] += readable[start:stop]
        own = indices[start:stop][readable[start:stop]]
        found = Counter(order.names[number] for number in order.sources(own).tolist())
        assert {name: line[f"samples/{name}"] for name in order.names} == {
            name: found[name] for name in order.names
        }, line
        # Samples are of one length: the losses of the sources add up to that of the step.
        assert {name for name in order.names if f"loss/{name}" in line} == set(found), line
        total = sum(count * line[f"loss/{name}"] for name, count in found.items())
        assert total / sum(found.values()) == pytest.approx(line["loss"], rel=1e-6), line
    assert (used == readable).all(), positions[used != readable]
    numbers = order.sources(indices)
    for number, name in enumerate(order.names):
        given = indices[numbers == number].tolist()
        for at in range(0, len(given), LENGTHS[name]):
            epoch = given[at : at + LENGTHS[name]]
            assert len(set(epoch)) == len(epoch), f"{name} repeats\n{run.tail}"


@pytest.mark.twin
def test_poison_and_a_kill_end_as_if_told_and_other_ranks_and_weights_lose_nothing(
    tmp_path: Path,
) -> None:
    mixed, total = sources(1, 0.5, 3), "schedule.total=40"
    sick = finish(
        tmp_path / "sick", mixed, *SMALL, "steps=30", total,
        f"faults=[{POISON},kill@step=27,rank=1]", restarts=1,
    )  # fmt: skip
    assert sick.journal("rollback") and sick.summary["restarts"] == 1, sick.tail
    assert any(": synthetic sample" in name for name in sick.journal("rollback")[0]["sample_ids"])
    told = finish(
        tmp_path / "told", mixed, *SMALL, "steps=30", total, skip_override(sick.summary["skipped"])
    )
    assert_same_end(sick, told)
    assert_accounted(sick)
    evaluated = sick.counted()[30]
    assert all(0 < evaluated[f"eval_loss/{name}"] < 6 for name in LENGTHS), evaluated

    # On from there: other weights on one rank, then three.
    cursor = sick.summary["cursor"]
    changed, allow = sources(3, 0, 1), "resume.allow=[data.sources]"
    finish(sick.out, changed, allow, *SMALL, "steps=35", total, ranks=0)
    three = finish(sick.out, changed, allow, *SMALL, "steps=40", total, ranks=3)
    starts = [line["detail"]["start"] for line in three.journal("mixture")]
    assert starts == [0, cursor], three.tail
    assert three.summary["steps"] == 40
    assert any(line["detail"].get("key") == "data.sources" for line in
               three.journal("setting_changed"))  # fmt: skip
    assert_accounted(three)
    late = [line for step, line in three.counted().items() if step > 30]
    assert not any(line["samples/talk"] for line in late)
    assert sum(line["samples/code"] for line in late) > sum(line["samples/web"] for line in late)


@pytest.mark.twin
@pytest.mark.full
@pytest.mark.parametrize("parallel", ["zero1", "ddp", "hsdp"])
def test_other_engines_end_alike(tmp_path: Path, parallel: str) -> None:
    mixed = (sources(1, 0.5, 3), *SMALL, "steps=30", f"parallel={parallel}")
    sick = finish(tmp_path / "sick", *mixed, f"faults=[{POISON},kill@step=27,rank=1]", restarts=1)
    told = finish(tmp_path / "told", *mixed, skip_override(sick.summary["skipped"]))
    assert sick.journal("rollback"), sick.tail
    assert_same_end(sick, told)
    assert_accounted(sick)


@pytest.mark.twin
@pytest.mark.full
def test_new_weights_behind_a_skip_begin_where_they_do_in_a_run_that_was_told(
    tmp_path: Path,
) -> None:
    """Killed behind the skip, and resumed from the checkpoint before it, with other weights."""
    first, then = sources(1, 0.5, 3), (sources(3, 0, 1), "resume.allow=[data.sources]")
    usual = (*SMALL, "steps=40", "guard.remedy=verdict")
    killed = "kill@step=27,rank=1"
    bad = train(tmp_path / "sick", first, *usual, f"faults=[poison@samples=364,{killed}]")
    told = train(tmp_path / "told", first, *usual, "data.skip=[[364,365]]", f"faults=[{killed}]")
    assert bad.code and told.code
    sick = finish(tmp_path / "sick", *then, *usual, f"faults=[poison@samples=364,{killed}]")
    twin = finish(tmp_path / "told", *then, *usual, "data.skip=[[364,365]]", f"faults=[{killed}]")
    assert sick.summary["skipped"] == [[364, 365]], sick.tail
    starts = [line["detail"]["start"] for line in sick.journal("mixture")]
    assert starts == [line["detail"]["start"] for line in twin.journal("mixture")] == [0, 365]
    assert_same_end(sick, twin)


@pytest.mark.parametrize("names", [("code", "web"), full(("web", "code"))])
def test_of_two_levels_only_the_bad_sample_is_skipped(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    """Known good samples are of both sources: else the harder one's stand out, 3 nats above."""
    mixed = ", ".join(
        f"{{name: {name}, _target_: tests.guests.Babble, arguments: {{words: {words}}}}}"
        for name, words in zip(names, (2, 64), strict=True)
    )
    run = finish(
        tmp_path / "run", f"data.sources=[{mixed}]", "guard.remedy=verdict", "steps=45",
        "faults=[poison@samples=1000,spike@samples=1300,scale=400]",
    )  # fmt: skip
    assert [line["detail"]["skipped"] for line in run.journal("redo")] == [[1000], [1300]], run.tail
    assert run.summary["skipped"] == [[1000, 1001], [1300, 1301]], run.tail
