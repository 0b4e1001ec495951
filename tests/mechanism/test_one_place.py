"""What stands in one place only: who touches the environment, and the numbers a run ends with."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.command.help import help_text
from runner.distributed.env import own_local_rank, own_rank
from runner.policy import restart
from runner.system import error

ROOT = Path(__file__).parents[2]
# The one that touches it, and those that change it for a library or a child, with what they set.
ENVIRONMENT = "runner/system/environment.py"
CHANGE = {
    "runner/data/chat.py": "the same for transformers' tokenizers",
    "runner/data/tokenizer.py": "tokenizers warns in every loader process otherwise",
    "runner/distributed/rendezvous.py": "where srun's tasks meet, for torch",
    "runner/engine/zero.py": "deepspeed does not start without",
    "runner/session/group.py": "debug=nccl|collectives, for NCCL and torch",
}
TOUCHES = re.compile(r"\bos\.(environ|getenv|putenv|unsetenv)\b|from os import .*\benviron\b")
CODES = {
    "_DONE": error.EXIT_DONE,
    "_CRASH": error.EXIT_CRASH,
    "_HALTED": error.EXIT_HALTED,
    "_PREEMPTED": error.EXIT_PREEMPTED,
}


def modules() -> Iterator[tuple[str, str]]:
    """Paths and texts of the package."""
    for path in sorted((ROOT / "runner").rglob("*.py")):
        yield str(path.relative_to(ROOT)), path.read_text()


def test_one_module_touches_the_environment() -> None:
    assert [name for name, text in modules() if TOUCHES.search(text)] == [ENVIRONMENT]


def test_those_who_change_it_are_known() -> None:
    changing = {name for name, text in modules() if re.search(r"\bchangeable\(\)", text)}
    assert changing - {ENVIRONMENT} == set(CHANGE)


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


def test_the_policy_has_the_exit_codes_of_the_errors() -> None:
    """It imports nothing of ours, and so it has them a second time."""
    assert {name: getattr(restart, name) for name in CODES} == CODES
    final = {error.EXIT_CONFIG, error.EXIT_HALTED, error.EXIT_NO_CHECKPOINT}
    assert set(restart._FINAL) == final


def test_the_help_names_them() -> None:
    codes = help_text().split("exit codes: ")[1].split("\n\n")[0]
    assert [int(number) for number in re.findall(r"\b\d+\b", codes)] == [0, 2, 3, 4, 75]


def test_no_other_module_ends_with_a_bare_number() -> None:
    """``return 3``, ``sys.exit(4)``, ``leave(75)``: by name, where it is an exit code."""
    known = {error.EXIT_CONFIG, error.EXIT_HALTED, error.EXIT_NO_CHECKPOINT, error.EXIT_PREEMPTED}
    found = []
    for name, text in modules():
        if name in ("runner/system/error.py", "runner/policy/restart.py"):
            continue
        for node in ast.walk(ast.parse(text)):
            is_end = isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
                "exit",
                "_exit",
                "leave",
                "end_within",
            )
            numbers = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
            if is_end and known & {n for n in numbers if type(n) is int}:
                found.append(f"{name}:{node.lineno}")
            if isinstance(node, ast.Constant) and node.value == error.EXIT_PREEMPTED:
                found.append(f"{name}:{node.lineno}")
        if name.startswith("runner/command/") or name == "runner/__main__.py":
            found += [f"{name}: {line}" for line in re.findall(r"return [234]$", text, re.M)]
    assert found == []
