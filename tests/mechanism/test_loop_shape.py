"""The loop stays a story: short, with few actors, and without the mechanisms below it."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

from runner.train import loop

SOURCE = Path(loop.__file__)
ROOT = Path(__file__).parents[2]
MOST_LINES, MOST_PARAMETERS, MOST_OF_A_FUNCTION = 150, 8, 70


def imported(path: Path) -> set[str]:
    """Modules of the runner that a file imports."""
    tree = ast.parse(path.read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {node.module for node in nodes if node.module and node.module.startswith("runner.")}


def test_it_is_short_and_has_few_actors() -> None:
    assert len(SOURCE.read_text().splitlines()) <= MOST_LINES
    parameters = list(inspect.signature(loop.Loop).parameters)
    assert len(parameters) <= MOST_PARAMETERS, parameters


def test_it_knows_its_own_room_and_the_verdict_only() -> None:
    rooms = {name.split(".")[1] for name in imported(SOURCE)}
    assert rooms == {"train", "policy"}, imported(SOURCE)
    assert "torch" not in SOURCE.read_text()


def test_the_hot_path_knows_nothing_of_faults() -> None:
    for folder in ("train", "engine", "distributed"):
        for path in (ROOT / "runner" / folder).glob("*.py"):
            assert not any(name.startswith("runner.fault") for name in imported(path)), path


def test_no_function_is_long() -> None:
    """The number of parameters and statements is ruff's to hold (PLR0913, PLR0915)."""
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in (ROOT / "runner").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > MOST_OF_A_FUNCTION
    ]
    assert long == []
