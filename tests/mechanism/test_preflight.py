"""``preflight``: models and data with one thing wrong are found and named; sound ones pass."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runner.__main__ import main
from runner.command.preflight import TRIALS
from runner.config.compose import compose
from runner.data.dataset import RecordDataset
from runner.data.user_dataset import adapt
from runner.engine.optimizer import OptimizerSettings
from runner.startup.checks import Check
from runner.startup.preflight.corpus_trials import _longest_repeat, _numbers
from runner.startup.preflight.hardware import all_reduce_speed, judged
from runner.startup.preflight.independence import labels_belong
from runner.startup.preflight.learning import _error, by_heart, first_loss, rate_range
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
    assert results["labels belong to their inputs"] == "ok"


def _records(random: np.random.Generator, num: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Inputs and labels of tasks that can be learned, none of them easily by a line."""
    kinds, rare = random.integers(0, 10, num), (random.random(num) < 0.03).astype(int)
    plane, noise = random.standard_normal((num, 2)), random.standard_normal
    turn, arm = random.uniform(0, 3, num), random.integers(0, 2, num)
    along = np.stack([turn * np.cos(6 * turn + np.pi * arm), turn * np.sin(6 * turn + np.pi * arm)])
    words = np.ones((2, 2000))
    words[1, :20] *= 6
    texts = [random.choice(2000, 80, p=words[one] / words[one].sum()) for one in arm]
    walk = np.cumsum(noise((num, 32)), axis=1)
    masks = noise((num, 1, 8, 8)) > 0
    return {
        "faint pictures": (0.15 * noise((10, 1, 16, 16))[kinds] + noise((num, 1, 16, 16)), kinds),
        "exclusive or": (plane, (plane[:, 0] > 0) ^ (plane[:, 1] > 0)),
        "spirals": (along.T + 0.05 * noise((num, 2)), arm),
        "regression": (plane, np.sin(2 * plane[:, 0]) * plane[:, 1] + 0.3 * noise(num)),
        "words": (np.stack(texts), arm),
        "forecast": (walk, walk[:, -4:].mean(axis=1, keepdims=True) + noise((num, 4))),
        "masks": (masks + 0.5 * noise((num, 1, 8, 8)), masks.astype(int)),
        "a rare kind": (noise((num, 20)) + 2 * rare[:, None], rare),
    }


@pytest.mark.parametrize("seed", full_but([0], range(12)))
def test_labels_that_were_shuffled_alone_are_told(seed: int) -> None:
    random = np.random.default_rng(seed)
    wrong: list[str] = []
    for name, (inputs, labels) in _records(random, 400).items():
        for own, is_shuffled in ((labels, False), (random.permutation(labels), True)):
            items = [{"x": x, "y": y} for x, y in zip(inputs, own, strict=True)]
            records = adapt(items, vocab_size=None, seq_len=0)
            assert isinstance(records, RecordDataset)
            check = labels_belong(records, range(400))
            wrong += [name] * (check.holds is is_shuffled)
    assert len(wrong) <= (1 if seed else 0), wrong


def test_labels_that_nothing_can_be_said_of() -> None:
    for items in ([{"a": n / 7, "b": n / 3} for n in range(200)], [{"x": 1.5, "y": 2}] * 200):
        records = adapt(items, vocab_size=None, seq_len=0)
        assert isinstance(records, RecordDataset)
        assert labels_belong(records, range(200)).holds is None


class _Table(torch.nn.Module):
    """Logits by the token itself."""

    def __init__(self, weights: torch.Tensor) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(weights)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.weights[input_ids]


@pytest.mark.parametrize("shift", [0, 1, -1])
def test_ids_that_are_one_off_are_told_by_a_model_that_knows_text(shift: int) -> None:
    config = compose(["model=tiny", *DATA])
    random = np.random.default_rng(5)
    follows = random.permutation(48)
    rows = [[int(random.integers(48))] for _ in range(8)]
    for row in rows:
        row.extend(int(follows[row[-1]]) for _ in range(20))
    ids = (torch.tensor(rows) + shift) % 48
    batch: Any = SimpleNamespace(inputs=lambda: {"input_ids": ids[:, :-1], "labels": ids[:, 1:]})
    blueprint: Any = None
    for knows in (True, False):
        subject = Subject(
            config=config, blueprint=blueprint, batches=[batch], device=torch.device("cpu"),
            vocab_size=48, optimizer=OptimizerSettings.of(config.optim),
        )  # fmt: skip
        weights = torch.eye(48)[torch.from_numpy(follows)] * 6 * knows
        subject.__dict__["network"] = _Table(weights)
        check = list(first_loss(subject))[1]
        assert check.holds is ((shift == 0) if knows else None), check
        assert shift == 0 or not knows or f"with all ids {-shift:+}" in check.found


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
