"""What a reader of the source relies on: whole sentences, and parameters that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.mutants import MUTANTS

ROOT = Path(__file__).parents[2]
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# "Args:" of Google's style: a name or several, then a colon.
ARGUMENT = re.compile(r"^ {4}(\*{0,2}\w+(?:, \*{0,2}\w+)*):", re.M)
SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Attributes):$", re.M)
# What ends a sentence; a colon or "::" where a list or a drawing follows.
END = re.compile(r"[.:?!]['\")`]*$")
# Names of locals and parameters that do not say what they hold: name the value instead (gathered,
# digests, message, remote_path).
VAGUE = frozenset({"told", "found", "made", "there", "lone", "way_back"})
# Rooms that still have such names; nothing new belongs here.
STILL_VAGUE: tuple[str, ...] = ()


def documented() -> Iterator[tuple[str, ast.AST, str]]:
    """Where it is, the node and its docstring, of all of the package."""
    for path in sorted((ROOT / "runner").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, DEFINITIONS) and (text := ast.get_docstring(node)):
                line = node.body[0].lineno
                yield f"{path.relative_to(ROOT)}:{line}", node, text


def parameters(node: ast.AST) -> set[str]:
    """Names that an ``Args:`` section may explain: parameters, fields, and those of __init__."""
    if isinstance(node, ast.ClassDef):
        fields = {
            item.target.id
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }
        init = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        return fields.union(*(parameters(item) for item in init))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        every += [one for one in (node.args.vararg, node.args.kwarg) if one]
        return {one.arg for one in every}
    return set()


def test_every_first_sentence_is_whole() -> None:
    cut = []
    for place, _, text in documented():
        first = SECTION.split(text)[0].strip().split("\n\n")[0]
        if first and not END.search(first):
            cut.append(f"{place}: {first.splitlines()[-1]!r}")
    assert cut == []


def test_every_explained_parameter_exists() -> None:
    unknown = []
    for place, node, text in documented():
        _, mark, rest = text.partition("Args:\n")
        if not mark:
            continue
        section = SECTION.split(rest)[0]
        names = {name.lstrip("*") for row in ARGUMENT.findall(section) for name in row.split(", ")}
        unknown += [f"{place}: {name}" for name in sorted(names - parameters(node))]
    assert unknown == []


def local_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of every parameter, and of every name that a function binds."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.arg):
                yield node.lineno, node.arg
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.lineno, node.id


def test_every_local_name_says_what_it_holds() -> None:
    vague = set()
    for room in ("runner", "scripts"):
        for path in (ROOT / room).rglob("*.py"):
            place = str(path.relative_to(ROOT))
            if not place.startswith(STILL_VAGUE):
                names = local_names(ast.parse(path.read_text()))
                vague |= {f"{place}:{line}: {name}" for line, name in names if name in VAGUE}
    assert sorted(vague) == []


def test_every_deliberate_fault_still_fits_the_source() -> None:
    """``tests/mutants.py`` replaces texts, which a later change may have taken away."""
    texts = {mutant.file: (ROOT / mutant.file).read_text() for mutant in MUTANTS}
    gone = [mutant.name for mutant in MUTANTS if texts[mutant.file].count(mutant.old) != 1]
    assert gone == []
