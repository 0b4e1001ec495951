"""``holdfast docs [WORD]``: the pages of this version, for who has no checkout."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from runner.command.arguments import Parser
from runner.command.help import key_line
from runner.config.compose import suggestion
from runner.system.error import EXIT_DONE, ConfigError


def docs_command(arguments: Sequence[str]) -> int:
    """Print the pages' names, a page, or where a setting or a word is told of."""
    parser = Parser("docs", docs_command.__doc__)
    parser.add_argument("word", nargs="?", help="a page (loop), a setting (optim.lr), or any word")
    word = parser.parse_args(arguments).word
    pages = {path.stem: path.read_text() for path in sorted(_folder().glob("*.md"))}
    name = (word or "").removeprefix("docs/").removesuffix(".md")
    text = pages.get(name) or (_found(word, pages) if word else _list(pages))
    sys.stdout.write(text)
    return EXIT_DONE


def _folder() -> Path:
    """``docs/``: inside an installed wheel, or beside the checkout."""
    package = Path(__file__).parents[1]
    inside = package / "docs"
    return inside if inside.is_dir() else package.parent / "docs"


def _list(pages: dict[str, str]) -> str:
    lines = (f"  {name:<14} {_title(text)}" for name, text in pages.items())
    return "\n".join(["holdfast docs PAGE prints one of:", *lines, ""])


def _title(text: str) -> str:
    return text.partition("\n")[0].lstrip("# ")


def _found(word: str, pages: dict[str, str]) -> str:
    """What a setting does, and the lines that tell of a word."""
    lines = [line] if (line := key_line(word)) else []
    whole = re.compile(rf"(?<![\w.]){re.escape(word)}(?![\w])", re.IGNORECASE)
    for name, text in pages.items():
        told = [line.strip() for line in text.splitlines() if whole.search(line)]
        if told and name != "configuration":
            lines += [f"\nholdfast docs {name}   ({_title(text)})", *(f"  {t}" for t in told[:3])]
    if not lines:
        raise ConfigError(
            f"docs {word}: neither a page nor a setting, and no page tells of it"
            f"{suggestion(word, pages)}; `holdfast docs` lists the pages"
        )
    return "\n".join([*lines, ""])
