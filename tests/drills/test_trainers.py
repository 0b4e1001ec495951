"""The guard under TRL's trainers, torchtitan's and FSDP2 of frameworks, on two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.mechanism.test_integrations import NEEDS
from tests.run import read_lines
from tests.script_run import ends_of

TRL, FSDP2 = "trl_trainers.py", "sharded_trainers.py"
TITAN = "torchtitan_trainers.py"


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "name", "kill_at", "reward"),
    [
        *((TRL, name, "20", "") for name in ("dpo", "reward", "kto")),
        *((TRL, "grpo", "9", how) for how in ("nan", "none", "raise")),
        *((FSDP2, f"{name}_fsdp", "47", "") for name in ("lightning", "fabric", "accelerate")),
        *((FSDP2, f"{name}_fsdp", "20", "") for name in ("hf", "sft")),
        *((TITAN, name, "24", "") for name in ("torchtitan", "torchtitan_tp")),
    ],
)
def test_poisoned_killed_and_resumed_is_told_to_skip(
    tmp_path: Path, script: str, name: str, kill_at: str, reward: str
) -> None:
    """Of GRPO the rewards are poisoned: NaN, none from any function, or an exception.

    torchtitan is asked to stop in a validation as well.
    """
    package = NEEDS["sft" if script == TRL else name.partition("_")[0]]
    pytest.importorskip(package, reason=f"{package} is not installed")
    words = (name, str(tmp_path), "poison", "told")
    restarts = 2 if script == TITAN else 1
    ends = ends_of(script, tmp_path, *words, restarts=restarts, KILL_AT=kill_at, REWARD=reward)
    for end in ends:
        assert end["poison"] == end["told"] == ends[0]["poison"]
        assert end["poison"]["skipped"]
    lines = read_lines(tmp_path / f"{name}-poison" / "journal.jsonl")
    kinds = [line["kind"] for line in lines]
    assert kinds.count("start") == 1 + restarts and "discard" in kinds
    stops = [line["step"] for line in lines if line["kind"] == "preempted"]
    assert stops == [27] * (script == TITAN)
    told = read_lines(tmp_path / f"{name}-told" / "journal.jsonl")
    assert not [line for line in told if line["kind"] in ("discard", "rollback")]
    if name == "grpo":
        steps = read_lines(tmp_path / "grpo-poison" / "metrics.jsonl")
        assert all(line["rewards/distinct"] >= 0 for line in steps if line["action"] == "apply")


BY_STEPS = {"save_strategy": "steps", "save_steps": 9, "load_best_model_at_end": True}
THREE = {"accumulate_grad_batches": 3, "gradient_clip_algorithm": "value"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "patience", "more"),
    [
        ("hf", 9, BY_STEPS),
        ("hf", 0, {"gradient_accumulation_steps": 1, "max_steps": 50, "neftune_noise_alpha": 5.0}),
        ("sft", 0, {"gradient_accumulation_steps": 4, "gradient_checkpointing": True}),
        ("lightning", 9, {"stops_by": "train_loss_epoch", "val_check_interval": 1.0, **THREE}),
    ],
)
def test_settings_on_shards(tmp_path: Path, name: str, patience: int, more: dict[str, Any]) -> None:
    """Killed twice or not, the end is one: of early stopping, the best evaluation, accumulation."""
    pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
    words = (f"{name}_fsdp", str(tmp_path), "poison", "calm")
    # A rollback goes where it goes without the kills.
    rules = json.dumps({"memory_every": 0, "background": False})
    env = {"MORE": json.dumps(more), "PATIENCE": str(patience), "RULES": rules}
    ends = ends_of(FSDP2, tmp_path, *words, restarts=2, KILL_AT="11,25", **env)
    for end in ends:
        assert end["poison"] == end["calm"] == ends[0]["calm"] and end["calm"]["skipped"]
    lines = read_lines(tmp_path / f"{name}_fsdp-poison" / "journal.jsonl")
    assert sum(line["kind"] == "start" for line in lines) == 3


@pytest.mark.full
def test_rewards_that_are_all_the_same_are_no_incident(tmp_path: Path) -> None:
    """No completion has an advantage: every gradient is zero, and the trainer applies it."""
    pytest.importorskip(NEEDS["sft"])
    words = ("grpo", str(tmp_path), "poison", "bare")
    ends = ends_of(TRL, tmp_path, *words, restarts=1, KILL_AT="9", REWARD="constant")
    for end in ends:
        assert end["poison"] == end["bare"] == {**ends[0]["bare"], "skipped": []}
    lines = read_lines(tmp_path / "grpo-poison" / "journal.jsonl")
    assert {line["kind"] for line in lines} == {"start", "crash"}
    steps = read_lines(tmp_path / "grpo-poison" / "metrics.jsonl")
    assert {line["grad_norm"] for line in steps} == {0.0}
