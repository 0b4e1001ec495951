"""Option parsing whose errors look like those of any wrong setting: one line, exit code 2."""

from __future__ import annotations

import argparse
from typing import NoReturn

from runner.system.error import ConfigError


class Parser(argparse.ArgumentParser):
    """Raises :class:`ConfigError` where argparse would print its usage and leave."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")
