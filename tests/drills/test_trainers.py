"""The guard under TRL's trainers, torchtitan's and FSDP2 of frameworks, on two ranks."""

from __future__ import annotations

from pathlib import Path

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
