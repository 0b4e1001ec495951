"""An option parser whose errors look like those of wrong settings: one line, exit code 2."""

from __future__ import annotations

import argparse
from typing import NoReturn

from runner.system.error import ConfigError


class Parser(argparse.ArgumentParser):
    """Raises :class:`ConfigError` where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")
