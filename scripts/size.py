"""Counts the project: ``python -m scripts.size [--write | --check]``.

Code lines are lines that hold a token, without blank lines, comments and docstrings.
``docs/records/size.json`` keeps the figures; ``--write`` makes it anew. ``--check`` fails where
``runner/`` has grown by more than :data:`ALLOWED_GROWTH` code lines over the record: who adds
that much removes something, or changes the record in the same commit and says why.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "docs" / "records" / "size.json"
ALLOWED_GROWTH = 300

# What a training process and a user's loop begin with; what these import, also in a function, is
# the trusted core. The command line imports a command only when it is asked for, by its name.
# tests/mechanism/test_core.py compares it with what real processes have imported.
CORE = (
    "runner.__main__",
    "runner.embed.loop.guard",
    "runner.embed.ring",
    "runner.embed.data.sampler",
)
CORE_PACKAGES = ("runner.integrations",)

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(text: str) -> int:
    """How many lines hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - set(_docstring_lines(ast.parse(text))))


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, owners) and node.body and ast.get_docstring(node, clean=False):
            first = node.body[0]
            yield from range(first.lineno, (first.end_lineno or first.lineno) + 1)


def module_name(path: Path) -> str:
    """``runner/embed/__init__.py`` as ``runner.embed``."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(name: str, tree: ast.Module, modules: Iterable[str]) -> set[str]:
    """Modules of ours that a module imports anywhere, but for type checkers only."""
    modules, targets = set(modules), set()
    skipped = {id(node) for block in _for_types_only(tree) for node in ast.walk(block)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            targets |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    packages = {".".join(target.split(".")[:n]) for target in targets for n in range(1, 9)}
    return ((targets | packages) & modules) - {name}


def _for_types_only(tree: ast.Module) -> Iterator[ast.If]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield node


def modules() -> dict[str, str]:
    """The text of each of our modules, by name."""
    return {module_name(path): path.read_text() for path in _files("runner")}


def measure() -> dict[str, int]:
    """All figures, by name."""
    sources = modules()
    trees = {name: ast.parse(text) for name, text in sources.items()}
    code = {name: code_lines(text) for name, text in sources.items()}
    classes = Counter(
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    )
    stems = Counter(path.stem for path in _files("runner") if path.stem != "__init__")
    return {
        "code_lines": sum(code.values()),
        "trusted_core_code_lines": sum(code[name] for name in core(trees)),
        "files": len(sources),
        "files_in_session": len(list(_files("runner/session"))),
        "files_in_train": len(list(_files("runner/train"))),
        "class_names_used_twice": sum(uses > 1 for uses in classes.values()),
        "module_names_used_twice": sum(uses > 1 for uses in stems.values()),
        "test_lines": _lines("tests"),
        "script_lines": _lines("scripts"),
        "page_words": sum(len(page.read_text().split()) for page in (ROOT / "docs").glob("*.md")),
    }


def core(trees: Mapping[str, ast.Module]) -> set[str]:
    """The modules of the trusted core, of all modules."""
    waiting = [name for name in trees if name in CORE or name.startswith(CORE_PACKAGES)]
    reached: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += imported(name, trees[name], trees)
    return reached


def _files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def _lines(folder: str) -> int:
    return sum(len(path.read_text().splitlines()) for path in _files(folder))


def main() -> int:
    """Print the figures beside the record."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m scripts.size")
    parser.add_argument("--write", action="store_true", help="keep the figures as the record")
    parser.add_argument("--check", action="store_true", help="only the total; fail if it has grown")
    arguments = parser.parse_args()
    figures = measure()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    grown = figures["code_lines"] - record.get("code_lines", 0)
    if arguments.write:
        RECORD.write_text(json.dumps(figures, indent=1) + "\n")
    elif arguments.check:
        print(f"size: {figures['code_lines']:,} code lines in runner/, {grown:+,} to the record")
        if grown > ALLOWED_GROWTH:
            print(
                f"error: runner/ grew by more than {ALLOWED_GROWTH} code lines: remove something, "
                "or run python -m scripts.size --write and say in the commit what pays for it",
                file=sys.stderr,
            )
            return 1
        return 0
    for name, value in figures.items():
        print(f"{name.replace('_', ' '):28}{value:>10,}{record.get(name, 0):>10,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
