"""``check-model``: the table of a model that holds, and of one that does not."""

from __future__ import annotations

import pytest

from runner.__main__ import main
from runner.command.check_samples import sample_checks
from runner.data.user_dataset import adapt
from tests.guests import Hashed, Images

DATA = ("data=synthetic", "data.vocab_size=16", "data.seq_len=8", "compute.precision=fp32")
TRIALS = [
    "same seed, same weights",
    "builds without memory",
    "same step twice, bit for bit",
    "buffers belong to the state",
    "samples are independent",
    "no other random source",
    "the loss is a sum per sample",
    "padding adds nothing",
    "each trained parameter gets a gradient",
    "the next step after a reload is equal",
    "memory of one rank",
    "a sample is the same when it is read again",
    "a sample is the same in another process",
]


def rows(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What was tried, and how it ended."""
    lines = [line.split("│") for line in capsys.readouterr().out.splitlines()]
    cells = [[cell.strip() for cell in line[1:3]] for line in lines if len(line) > 3]
    return {name: mark for name, mark in cells if name}


def test_a_sound_model_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-model", "--quick", "model._target_=tests.guests.Convolved", *DATA]) == 0
    assert rows(capsys) == dict.fromkeys(TRIALS, "ok")


def test_one_that_draws_from_numpy_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-model", "--quick", "model._target_=tests.guests.Drawing", *DATA]) == 2
    failed = {name for name, mark in rows(capsys).items() if mark == "FAILS"}
    assert {"same step twice, bit for bit", "no other random source"} <= failed


def test_a_sample_that_depends_on_the_process_does_not_hold() -> None:
    settings = ["model._target_=tests.guests.Seeing", "data._target_=tests.guests.Hashed"]
    here, elsewhere = sample_checks(adapt(Hashed(), vocab_size=None, seq_len=1), settings, None)
    assert here.holds and here.found == "the first 8 samples are the same in this process"
    assert elsewhere.holds is False
    assert elsewhere.found == "sample 0 differs in another process (8 of 8 do)"
    assert "hash() of a string" in elsewhere.remedy


@pytest.mark.full
def test_a_data_set_that_opens_here_only_does_not_hold() -> None:
    settings = ["model._target_=tests.guests.Seeing", "data._target_=tests.guests.Lost"]
    *_, elsewhere = sample_checks(adapt(Images(), vocab_size=None, seq_len=1), settings, None)
    assert elsewhere.holds is False
    assert "tests.guests.Lost" in elsewhere.found and "exit code 1" in elsewhere.found
    assert "from its settings alone" in elsewhere.remedy


@pytest.mark.full
def test_with_real_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-model", "model._target_=tests.guests.Tied", *DATA]) == 0
    runs = ["engines over five steps", "poisoned against skipped", "killed against not killed"]
    assert rows(capsys) == dict.fromkeys([*TRIALS, *runs], "ok")
