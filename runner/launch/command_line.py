"""Reads a command that trains: which overrides it gives, and so which run it is."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from runner.config.compose import compose
from runner.config.schema import RunConfig
from runner.system.error import ConfigError

_DIAGNOSE = "debug=collectives"


def overrides_of(command: Sequence[str]) -> list[str]:
    """The overrides of a command: what follows ``-m runner``.

    Raises:
        ConfigError: the command does not start the runner.
    """
    for place in range(len(command) - 1):
        if tuple(command[place : place + 2]) == ("-m", "runner"):
            return list(command[place + 2 :])
    raise ConfigError(
        f"{' '.join(command) or 'no command'}: no '-m runner' in it; name the run's directory "
        "with --out DIR"
    )


def settings(overrides: Sequence[str]) -> RunConfig:
    """The run's settings.

    Raises:
        ConfigError: they are wrong.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir")
    known, rest = parser.parse_known_args(list(overrides))
    return compose(rest, config_dir=known.config_dir)


def out_of(command: Sequence[str], given: str | None) -> Path:
    """The run's directory: the given one, or that of the command.

    Raises:
        ConfigError: neither names one.
    """
    return Path(given) if given else Path(settings(overrides_of(command)).out)


def diagnosing(overrides: Sequence[str]) -> list[str]:
    """Add the override that checks every collective."""
    return [*(word for word in overrides if not word.startswith("debug=")), _DIAGNOSE]
