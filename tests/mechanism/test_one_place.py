"""What stands in one place only: who touches the environment, and the numbers a run ends with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.distributed.env import own_local_rank, own_rank
from runner.launch.attempt import FINAL
from runner.system import error as codes

ROOT = Path(__file__).parents[2]
# The one that touches it, and those that change it for a library or a child, with what they set.
ENVIRONMENT = "runner/system/environment.py"
# These run in the process of somebody else's script.
IN_A_STRANGER = {"runner/prove/inside/hooks.py", "runner/prove/on_path/sitecustomize.py"}
CODES = "runner/system/error.py"
CHANGE = {
    "runner/__main__.py": "a file of the user's named runner is not taken for ours by a child",
    "runner/command/profile.py": "torch's own lines about it are left out",
    "runner/data/rows.py": "the same for transformers' tokenizers",
    "runner/data/tokenizer.py": "tokenizers warns in every loader process otherwise",
    "runner/distributed/rendezvous.py": "where srun's tasks meet, for torch",
    "runner/engine/zero.py": "deepspeed does not start without",
    "runner/launch/fork_server.py": "a forked process has its own",
    "runner/launch/slurm.py": "variables of an attempt",
    "runner/session/group.py": "debug=nccl|collectives, for NCCL and torch",
}
TOUCHES = re.compile(r"\bos\.(environ|getenv|putenv|unsetenv)\b|from os import .*\benviron\b")


def modules() -> Iterator[tuple[str, str]]:
    """Paths and texts of the package."""
    for path in sorted((ROOT / "runner").rglob("*.py")):
        yield str(path.relative_to(ROOT)), path.read_text()


def test_one_module_touches_the_environment() -> None:
    touching = {name for name, text in modules() if TOUCHES.search(text)}
    assert touching - IN_A_STRANGER == {ENVIRONMENT}


def test_those_who_change_it_are_known() -> None:
    changing = {name for name, text in modules() if re.search(r"\bchangeable\(\)", text)}
    assert changing - {ENVIRONMENT} == set(CHANGE)


# Besides the one that keeps the modes of a network's modules: those of optimizers, and of a network
# that is being built.
MODES = "runner/engine/modes.py"
OTHER_MODES = {"runner/engine/user_optimizer.py", "runner/model/pretrained.py"}


def test_one_module_sets_the_modes_of_modules() -> None:
    setting = {name for name, text in modules() if re.search(r"\.(eval\(\)|train\()", text)}
    own_words = {f"runner/integrations/{name}.py" for name in ("hf", "torchtitan")}  # of an example
    assert setting - OTHER_MODES - own_words == {MODES}


@pytest.mark.parametrize(
    ("given", "ranks"),
    [
        ({}, (0, 0)),
        ({"RANK": "12", "LOCAL_RANK": "4"}, (12, 4)),
        ({"RANK": "first", "LOCAL_RANK": ""}, (0, 0)),
    ],
)
def test_a_rank_is_known_before_anything_else(
    given: dict[str, str], ranks: tuple[int, int]
) -> None:
    assert (own_rank(given), own_local_rank(given)) == ranks


def test_one_module_defines_the_exit_codes() -> None:
    defines = re.compile(r"^EXIT_\w+ *= *\d", re.M)
    assert [name for name, text in modules() if defines.search(text)] == [CODES]
    assert set(FINAL) == {codes.EXIT_CONFIG, codes.EXIT_HALTED, codes.EXIT_NO_CHECKPOINT}
