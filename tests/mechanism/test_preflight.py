"""``preflight``: models and data with one thing wrong are found and named; sound ones pass."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from runner.__main__ import main
from runner.command.preflight import TRIALS
from runner.startup.checks import Check
from runner.startup.preflight.corpus_trials import _longest_repeat, _numbers
from runner.startup.preflight.hardware import all_reduce_speed, judged
from runner.startup.preflight.learning import _error, by_heart, rate_range
from runner.startup.preflight.subject import Subject, Trial
from runner.system.error import EXIT_CONFIG, EXIT_DONE
from tests.preflight_cases import DATA, MODELS, SOUND, WRONG
from tests.rows import full_but


def _results(
    capsys: pytest.CaptureFixture[str], *settings: str
) -> tuple[int, dict[str, str], dict[str, str]]:
    """The exit code, and by check the result and what was seen."""
    code = main(["preflight", "--json", *DATA, *settings])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    # What raises is "not tried" for a user; here it would hide a mistake of ours.
    assert not [line for line in lines if "Error: " in line["found"]]
    return code, {n["check"]: n["result"] for n in lines}, {n["check"]: n["found"] for n in lines}


FEW_WRONG = ("sees the next", "no positions", "wrong backward")


@pytest.mark.parametrize("name", full_but(FEW_WRONG, WRONG))
def test_what_is_wrong_is_named(capsys: pytest.CaptureFixture[str], name: str) -> None:
    (model, *settings), check = WRONG[name]
    code, results, _ = _results(capsys, f"model._target_={MODELS}.{model}", *settings)
    assert results[check] == "FAILS", results
    assert code == EXIT_CONFIG


@pytest.mark.parametrize("name", full_but(["decoder by documents"], SOUND))
def test_a_sound_model_passes(capsys: pytest.CaptureFixture[str], name: str) -> None:
    code, results, found = _results(capsys, *SOUND[name])
    assert set(results.values()) <= {"ok", "-"}, {n: found[n] for n in results}
    assert code == EXIT_DONE


def test_a_router_that_takes_the_best_two_has_no_wrong_gradient(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its choice changes within the differences by which gradients are tested."""
    _, results, found = _results(capsys, "model._target_=tests.uncommon_guests.TopTwo")
    name = "gradients are those of the loss"
    assert results[name] == "warns" and "at router.weight the loss jumps" in found[name], found


@pytest.mark.full
def test_samples_without_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    code, results, found = _results(
        capsys, "model._target_=tests.guests.Seeing", f"data._target_={MODELS}.Pictures"
    )
    assert code == EXIT_DONE, found
    assert results["no look at later tokens"] == "-"
    assert results["each trained parameter gets a gradient"] == "ok"


def test_no_trial_changes_a_mode(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[list[bool]] = []

    def note(subject: Subject) -> Check:
        modes.append([module.training for module in subject.network.modules()])
        return Check(name="modes", holds=True, found="")

    quick = [one for one in TRIALS if one.try_it not in (by_heart, rate_range)]
    noted = Trial(name="modes", try_it=note)
    monkeypatch.setattr("runner.command.preflight.TRIALS", [noted, *quick, noted])
    _results(capsys, "model._target_=tests.guests.PartlyFrozen")
    assert modes[0] == modes[1] and not all(modes[0]) and any(modes[0])


def test_the_table_and_a_mistake(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.command.preflight.TRIALS", TRIALS[:1])
    assert main(["preflight", "model=tiny", *DATA]) == EXIT_DONE
    out = capsys.readouterr().out
    assert "no look at later tokens" in out
    assert "held-out text is not trained on" in out
    assert main(["preflight", "model=huge", *DATA]) == EXIT_CONFIG


def test_equal_pieces_have_equal_numbers() -> None:
    random = np.random.default_rng(1)
    text = random.integers(0, 1000, 400)
    other = random.integers(0, 1000, 400)
    other[137:187] = text[20:70]
    same = np.flatnonzero(np.isin(_numbers(other, 50), _numbers(text, 50)))
    assert same.tolist() == [137]


def test_repeats_are_counted() -> None:
    assert _longest_repeat(np.arange(50)) == 1
    assert _longest_repeat(np.array([7] * 40 + [1, 2])) == 40
    assert _longest_repeat(np.array([1, 2, 3] * 12 + [5, 4])) == 12


@pytest.mark.full
def test_several_processes_sum_a_buffer() -> None:
    speed = all_reduce_speed("gloo", 2, 1 << 20)
    assert speed is not None and speed > 0


def test_the_bandwidth_is_held_against_the_device() -> None:
    slow, right, unknown, hung = (
        judged(speed, 8, name)
        for speed, name in (
            (300.0, "NVIDIA H100 80GB HBM3"),
            (450.0, "NVIDIA H100 80GB HBM3"),
            (20.0, "NVIDIA L4"),
            (None, "NVIDIA L4"),
        )
    )
    assert slow.holds is False and slow.is_warning and "reach about 460" in slow.found
    assert right.holds is True and unknown.holds is True
    assert hung.holds is False and not hung.is_warning


@pytest.mark.parametrize(
    ("jump", "factor", "is_off", "is_jump"),
    [(0.0, 1.0, False, False), (0.0, 0.6, True, False), (0.5, 1.0, True, True)],
    ids=["sound", "wrong gradient", "a choice"],
)
def test_a_loss_that_jumps_is_no_wrong_gradient(
    jump: float, factor: float, is_off: bool, is_jump: bool
) -> None:
    """As top-2 routing whose choice changes within the smallest difference."""
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
    before = float(weight.detach().sum())

    def loss() -> torch.Tensor:
        return weight.square().sum() + jump * (float(weight.detach().sum()) > before)

    loss().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    weight.grad *= factor
    error, jumps = _error(loss, weight)
    assert (error > 0.02, jumps) == (is_off, is_jump)
    assert weight.tolist() == [1.0, 2.0]
