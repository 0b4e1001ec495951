"""Scripts and tests import only names that exist: the type checker reads ``runner/`` alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
OURS = ("runner", "scripts", "tests")


def source(module: str) -> Path | None:
    """The file of a module of ours."""
    path = ROOT.joinpath(*module.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)


@cache
def names(file: Path) -> frozenset[str]:
    """What a module binds anywhere outside of its functions and classes."""
    bound: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(file.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        nodes += ast.iter_child_nodes(node)
    return frozenset(bound)


def imports(file: Path) -> Iterator[tuple[int, str, str]]:
    """Line, module and name of what a file imports from ours, functions included."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, ""
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield node.lineno, node.module, alias.name


def test_scripts_and_tests_import_what_exists() -> None:
    missing, num_seen = [], 0
    for room in ("scripts", "tests"):
        for file in sorted((ROOT / room).rglob("*.py")):
            for line, module, name in imports(file):
                if module.partition(".")[0] not in OURS:
                    continue
                num_seen += 1
                at = f"{file.relative_to(ROOT)}:{line}: {module} {name}"
                if source(f"{module}.{name}") is None:
                    where = source(module)
                    lazy = where is not None and "__getattr__" in names(where)
                    if where is None or (name and not lazy and name not in names(where)):
                        missing.append(at)
    assert missing == []
    assert num_seen > 1000
