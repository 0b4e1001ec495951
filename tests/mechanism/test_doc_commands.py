"""Every command of ours on a page is understood: its options, and its settings, which compose."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from runner.__main__ import main
from runner.command.arguments import Parser
from runner.config.compose import compose
from tests.mechanism.test_docs import PAGES, ROOT

_BLOCK = re.compile(r"^```(?:bash|sh|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`(?:holdfast|python -m runner|torchrun [^`]*-m runner) [\w-]+ [^`\n]+`")
_PROGRAM = re.compile(r"(?:^|\s)!?(?:holdfast|-m runner)(?=\s)")
_ENDS = ("|", ">", ">>", "&&", "||", ";", "&", "2>&1", "2>")
# Files of the reader's, which are not here, and words that stand for others.
_FILE_OPTION = ("--config", "--config-dir")
_STANDS_FOR_MORE = ("...", "SETTINGS")


class Understood(Exception):
    """The settings of a command, in place of what it would do."""


def commands(text: str) -> Iterator[list[str]]:
    """The arguments of each call of ours in the code of a page."""
    lines = "".join(_BLOCK.findall(text)).replace("\\\n", " ").split("\n")
    lines += [span.strip("`") for span in _INLINE.findall(text)]
    for line in lines:
        found = _PROGRAM.search(line.partition(" # ")[0])
        if found is not None:
            call = re.split(r"\)(?=\s|$)", re.sub(r"\$\w+", "1", line[found.end() :]))[0]
            words = shlex.split(call, comments=True)
            end = min((words.index(one) for one in _ENDS if one in words), default=len(words))
            yield [word for word in words[:end] if word not in _STANDS_FOR_MORE]


CALLS = [
    pytest.param(words, id=f"{page.name} {number}")
    for page in PAGES
    if page.name != "CHANGELOG.md"
    for number, words in enumerate(commands(page.read_text()))
]


@pytest.mark.parametrize("words", CALLS)
def test_it_is_understood(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = argparse.ArgumentParser.parse_known_args

    def known(self: Parser, *given: Any) -> Any:
        raise Understood(parsed(self, *given)[1])

    def exact(self: Parser, *given: Any) -> Any:
        options, more = parsed(self, *given)
        if more:
            self.error(f"unrecognized arguments: {' '.join(more)}")
        raise Understood(getattr(options, "overrides", []))

    monkeypatch.setattr(Parser, "parse_known_args", known)
    monkeypatch.setattr(Parser, "parse_args", exact)
    monkeypatch.setattr(Parser, "parse_intermixed_args", exact)
    monkeypatch.chdir(ROOT)
    for option in _FILE_OPTION:
        if option in words:
            at = words.index(option)
            words = words[:at] + words[at + 2 :]
    with pytest.raises(Understood) as told:
        assert main(words) == 0, "refused: the log says why"
    compose([word for word in told.value.args[0] if "=" in word])


def test_commands_are_found() -> None:
    block = "A=1 torchrun -m runner a=1 \\\n  b=2 # c\nholdfast read x | less\n(holdfast top y)\n"
    text = f"```bash\n{block}```\n`holdfast` and `holdfast live z`"
    assert [*commands(text)] == [["a=1", "b=2"], ["read", "x"], ["live", "z"]]
    assert len(CALLS) > 70
