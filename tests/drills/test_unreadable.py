"""Samples that cannot be read, in training and in evaluation: real runs on a broken corpus."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from runner.data.cursor import SampleStream
from tests.drills.compare import BATCH, HELD_OUT, SAMPLES, SEED, assert_same_run
from tests.rows import full
from tests.run import Result, finish, train

STREAM = SampleStream.of_one(
    num_samples=SAMPLES, seed=SEED, held_out_share=HELD_OUT, global_size=BATCH
)
EVALUATED = ("steps=20", "eval.every=10", "eval.samples=10")

# A corpus some of whose samples cannot be read, for each rank and loader process.
PROGRAM = """
import errno, os, time
import numpy as np
from dataclasses import replace
from runner.__main__ import run
from runner.data.synthetic import SyntheticLanguage
from runner.system.error import DataError

BROKEN = {broken}
READ = SyntheticLanguage.__getitem__
DESCRIBE = SyntheticLanguage.describe
refused = set()

def broken(self, index):
    kind, sample = BROKEN.get(int(index)), READ(self, index)
    if kind == "gone":
        raise DataError("the file is shorter than it was")
    if kind == "refused" or (kind == "stutter" and index not in refused):
        refused.add(index)
        raise OSError(errno.EIO, "Input/output error", "/corpus/7")
    if kind == "id":
        return replace(sample, tokens=sample.tokens + self.vocab_size)
    if kind == "masked":
        return replace(sample, segments=np.arange(len(sample.tokens), dtype=np.int32))
    return sample

def describe(self, index):
    if int(index) in BROKEN and BROKEN[int(index)] == "refused":
        raise OSError(errno.EIO, "Input/output error")
    return DESCRIBE(self, index)

SyntheticLanguage.__getitem__ = broken
SyntheticLanguage.describe = describe
{more}
run()
"""

# The loss of one held-out sample is NaN, whatever the weights.
NAN_LOSS = """
import torch
from runner.engine.forward import Forward
BAD = torch.from_numpy(READ(SyntheticLanguage(vocab_size=64, samples={samples}, seq_len={seq_len},
                                              seed=0), {index}).tokens[1:])
EVALUATE = Forward.evaluate

def evaluate(self, batches):
    told, losses = EVALUATE(self, batches), []
    for batch, of_batch in zip(batches, told.losses):
        is_bad = (batch.targets == BAD).all(dim=1)
        losses.append(torch.where(is_bad, torch.nan, of_batch))
    total = sum(part.sum(dtype=torch.float64) for part in losses)
    return replace(told, losses=tuple(losses), total=total)

Forward.evaluate = evaluate
"""

# From one step on a rank's storage is gone.
GONE = """
def gone(self, index):
    if os.environ.get("RANK") == "1" and os.path.exists({mark!r}):
        raise OSError(errno.EIO, "Input/output error")
    return READ(self, index)
SyntheticLanguage.__getitem__ = gone
"""


def program(folder: Path, broken: Mapping[int, str], more: str = "") -> Path:
    path = folder / "program.py"
    path.write_text(PROGRAM.format(broken=dict(broken), more=more))
    return path


def index_of(position: int) -> int:
    return int(STREAM.indices(np.array([position]))[0])


# On both ranks; two of one batch, one that fills its gap, one far on.
BROKEN = {330: "gone", 341: "id", 352: "refused", 353: "gone", 1200: "refused"}
TOLD = "data.skip=[" + ",".join(f"[{p},{p + 1}]" for p in BROKEN) + "]"
QUICK = ("steps=45", "data.retry_seconds=0.1")


Told = Callable[[int], Result]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Runs that were told never to read them, by ranks; each is made once."""
    folder = tmp_path_factory.mktemp("told")
    return functools.cache(lambda ranks: finish(folder / str(ranks), *QUICK, TOLD, ranks=ranks))


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return finish(tmp_path_factory.mktemp("evaluated") / "run", *EVALUATED)


CASES = [
    pytest.param(2, ("data.workers=1", "guard.sync=false"), id="two ranks, loaders, late"),
    full(0, (), id="one process"),
    full(2, (), id="two ranks"),
    full(0, ("data.workers=2",), id="one process, loaders"),
]


@pytest.mark.parametrize(("ranks", "how"), CASES)
def test_they_are_passed_over_as_if_told_so(
    tmp_path: Path, told: Told, ranks: int, how: tuple[str, ...]
) -> None:
    broken = {index_of(position): kind for position, kind in BROKEN.items()}
    run = finish(tmp_path / "run", *QUICK, *how, ranks=ranks, program=program(tmp_path, broken))
    assert_same_run(run, told(ranks))
    lines = run.journal("unreadable")
    found = [p for line in lines for p in line["detail"]["positions"]]
    assert sorted(found) == sorted(BROKEN)
    for line in lines:
        detail = line["detail"]
        assert detail["indices"] == [index_of(p) for p in detail["positions"]]
        assert len(line["sample_ids"]) == len(detail["errors"]) == len(detail["positions"])
        for position, words in zip(detail["positions"], detail["errors"], strict=True):
            kind = {"gone": "shorter", "id": "has id", "refused": "Input/output error"}
            assert kind[BROKEN[position]] in words
        assert line["ranks"] and all(
            f"position {p}" in line["reason"] for p in detail["positions"][:3]
        )
    assert run.summary["restarts"] == 0 and not run.journal("discard")
    assert "unreadable" in run.text and "position 330" in run.text


def test_past_the_budget_it_ends_in_words_and_goes_on_with_more(tmp_path: Path, told: Told) -> None:
    broken = {index_of(position): kind for position, kind in BROKEN.items()}
    made = program(tmp_path, broken)
    ended = train(tmp_path / "run", *QUICK, "data.max_unreadable=4", program=made)
    assert ended.code != 0, ended.tail  # torchrun's own code
    assert "data.max_unreadable=4" in ended.text and "position 1200" in ended.text, ended.tail
    assert ended.summary["exit_code"] == 2 and ended.summary["status"] == "failed"
    assert "5 different samples cannot be read" in ended.summary["reason"]
    run = finish(tmp_path / "run", *QUICK, "data.max_unreadable=5", program=made)
    # From the checkpoint before, over what was passed over already.
    assert run.digest == told(2).digest and run.counted() == told(2).counted()
    assert run.summary["skipped"] == told(2).summary["skipped"]


@pytest.mark.full
def test_a_storage_that_stutters_leaves_no_trace(tmp_path: Path, evaluated: Result) -> None:
    stutters = {index_of(position): "stutter" for position in (3, 70, 71, 600)}
    run = finish(tmp_path / "run", *EVALUATED, program=program(tmp_path, stutters))
    assert_same_run(run, evaluated)
    assert not run.journal("unreadable") and not run.summary["skipped"]


@pytest.mark.twin
def test_a_storage_that_is_gone_costs_no_sample(tmp_path: Path, evaluated: Result) -> None:
    mark = tmp_path / "gone"
    made = program(tmp_path, {}, GONE.format(mark=str(mark)))
    out, how = tmp_path / "run", (*EVALUATED, "data.retry_seconds=0.1")
    train(out, *how, "faults=[kill@step=15,rank=0]", program=made)
    mark.touch()
    ended = train(out, *how, program=made)
    assert ended.code != 0 and "rank 1 could not read one sample of its share" in ended.text
    assert ended.summary["exit_code"] == 1, ended.tail  # start me again
    assert not ended.journal("unreadable")
    mark.unlink()
    run = finish(out, *how, program=made)
    assert run.digest == evaluated.digest and not run.summary["skipped"]


# Evaluation


def held_out() -> list[int]:
    return STREAM.held_out_indices(10).tolist()


def losses(run: Result) -> dict[int, tuple[float | None, bool]]:
    """Step to held-out loss, and whether it is flagged."""
    lines = [json.loads(text) for text in (run.out / "metrics.jsonl").read_text().splitlines()]
    return {
        line["step"]: (line["eval_loss"], "eval_loss" in line.get("nonfinite", {}))
        for line in lines
        if line["step"] % 10 == 0
    }


@pytest.mark.parametrize("kind", [full("gone"), "id"])
@pytest.mark.parametrize("place", [3, full(4)])
def test_a_held_out_sample_that_one_rank_cannot_read(
    tmp_path: Path, evaluated: Result, kind: str, place: int
) -> None:
    index = held_out()[place]
    run = finish(tmp_path / "run", *EVALUATED, program=program(tmp_path, {index: kind}))
    assert run.digest == evaluated.digest, run.tail
    (line,) = run.journal("evaluation")
    assert line["step"] == 10 and line["ranks"] == [place % 2] and line["decision"] == "go on"
    assert line["detail"]["indices"] == [index] and line["detail"]["places"] == [place]
    assert "1 of 10 held-out samples cannot be read" in line["reason"]
    for step, (loss, flagged) in losses(run).items():
        other, _ = losses(evaluated)[step]
        assert loss is not None and other is not None and not flagged
        assert loss != other and abs(loss - other) < 0.5  # over the nine others
    assert not run.summary["skipped"]


@pytest.mark.parametrize("ranks", [2, full(0)])
def test_a_held_out_loss_that_is_no_number(tmp_path: Path, evaluated: Result, ranks: int) -> None:
    index = held_out()[7]
    more = NAN_LOSS.format(samples=SAMPLES, seq_len=32, index=index)
    made = program(tmp_path, {}, more)
    run = finish(tmp_path / "run", *EVALUATED, ranks=ranks, program=made)
    if ranks == 2:
        assert run.digest == evaluated.digest, run.tail
    assert losses(run) == {10: (None, True), 20: (None, True)}
    (line,) = run.journal("evaluation")
    assert line["ranks"] == [7 % 2 if ranks == 2 else 0]
    assert line["detail"]["indices"] == [index] and line["detail"]["errors"] == ["loss nan"]
    assert run.summary["eval_loss"] is None
    assert run.summary["nonfinite"] == {"eval_loss": "nan"}
    # A restart finds nothing in the files that it cannot read.
    again = finish(tmp_path / "run", *EVALUATED, ranks=ranks, program=made)
    assert again.digest == run.digest and again.summary["nonfinite"] == {"eval_loss": "nan"}


def test_a_held_out_set_without_a_counted_token(tmp_path: Path, evaluated: Result) -> None:
    masked = {index: "masked" for index in held_out()}
    run = finish(tmp_path / "run", *EVALUATED, program=program(tmp_path, masked))
    assert run.digest == evaluated.digest, run.tail
    assert losses(run) == {10: (None, False), 20: (None, False)}
    (line,) = run.journal("evaluation")
    assert "no token of 10 held-out samples counts" in line["reason"]


# Without a guard


@pytest.mark.parametrize("fault", ["nan_loss@step=20,rank=1", full("poison@samples=300-331")])
def test_without_a_guard_a_nan_is_the_end_state(tmp_path: Path, fault: str) -> None:
    how = ("guard=off", "steps=20", "eval.every=10", f"faults=[{fault}]")
    run = finish(tmp_path / "run", *how)
    assert run.summary["final_loss"] is None and run.summary["status"] == "done"
    assert run.summary["nonfinite"]["final_loss"] == "nan"
    again = finish(tmp_path / "run", *how)
    assert again.digest == run.digest and again.summary["nonfinite"]["final_loss"] == "nan"
