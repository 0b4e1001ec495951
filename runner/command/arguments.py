"""An option parser whose errors look like those of wrong settings: one line, exit code 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from runner.system.error import ConfigError


def _started_as() -> str:
    return "holdfast" if Path(sys.argv[0]).name == "holdfast" else "python -m runner"


class Parser(argparse.ArgumentParser):
    """Raises :class:`ConfigError` where argparse would print its usage and exit.

    Args:
        command: its name; empty for training.
        description: the docstring of its function or module.
    """

    def __init__(self, command: str, description: str | None = None, **options: Any) -> None:
        prog = f"{_started_as()} {command}".strip()
        told = description and description.replace("python -m runner", _started_as())
        told = told and told.replace("``", "")
        super().__init__(prog=prog, description=told, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")

    def option(
        self, name: str, default: Any, words: str = "", *, metavar: str | None = None
    ) -> None:
        """An option that takes one value of the default's type, which its help names."""
        escaped = f"{default:g}" if isinstance(default, float) else str(default).replace("%", "%%")
        text = f"{words}; default {escaped}" if words else f"default {escaped}"
        self.add_argument(name, type=type(default), default=default, metavar=metavar, help=text)

    def flag(self, name: str, words: str | None = None) -> None:
        """An option without a value."""
        self.add_argument(name, action="store_true", help=words)

    def repeated(self, name: str, metavar: str, words: str) -> None:
        """An option that may be given several times."""
        self.add_argument(name, action="append", default=[], metavar=metavar, help=words)

    def add_settings(self) -> None:
        """The settings of a run as ``overrides``, and ``config_dir``."""
        self.add_argument("--config-dir", help="presets of your own")
        self.add_argument("overrides", nargs="*", help="settings of the run")

    def of_command(self, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """The options, and what follows after ``--``."""
        given = list(arguments)
        separator = given.index("--") if "--" in given else len(given)
        return self.parse_args(given[:separator]), given[separator + 1 :]


def at_least(least: float, **options: float) -> None:
    """
    Raises:
        ConfigError: an option is smaller, or not a number.
    """
    for name, value in options.items():
        if not value >= least:
            raise ConfigError(f"--{name.replace('_', '-')} {value:g}: at least {least:g}")


def pairs(option: str, texts: Sequence[str], *, flags: bool = False) -> dict[str, str]:
    """Values by name, as an option that may be repeated gives them: ``NAME=VALUE``.

    Args:
        flags: whether the value may be missing.

    Raises:
        ConfigError: one is written otherwise, or has spaces.
    """
    by_name = {}
    for text in texts:
        name, _, value = text.lstrip("-").partition("=")
        if not name or len(text.split()) > 1 or not (value or flags):
            raise ConfigError(f"{option} {text!r}: write NAME=VALUE, without spaces")
        by_name[name] = value
    return by_name
