"""What the docstring of a class explains is there; of functions ruff says it (DOC102)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
# "Args:" of Google's style: a name or several, then a colon.
ARGUMENT = re.compile(r"^ {4}(\*{0,2}\w+(?:, \*{0,2}\w+)*):", re.M)
SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Attributes):$", re.M)


def parameters(node: ast.ClassDef) -> set[str]:
    """Names that an ``Args:`` section may explain: fields, and parameters of __init__."""
    fields = {item.target for item in node.body if isinstance(item, ast.AnnAssign)}
    names = {field.id for field in fields if isinstance(field, ast.Name)}
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            names |= {arg.arg for arg in ast.walk(item.args) if isinstance(arg, ast.arg)}
    return names


def test_every_explained_parameter_of_a_class_exists() -> None:
    unknown = []
    for path in sorted((ROOT / "runner").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and "Args:\n" in (ast.get_docstring(node) or ""):
                section = SECTION.split((ast.get_docstring(node) or "").partition("Args:\n")[2])[0]
                rows = ", ".join(ARGUMENT.findall(section)).replace("*", "").split(", ")
                unknown += [f"{path}: {name}" for name in {*rows} - parameters(node) - {""}]
    assert unknown == []
