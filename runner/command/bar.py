"""Shows a command's progress on standard error, if it takes more than two seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from runner.observe.console import Working, show_line


class Bar:
    """A live line on a terminal, and a plain line every half minute elsewhere.

    Args:
        what: name of the work: "verifying".
        total: number of bytes, or of ``unit``.
        unit: in the plural; empty for bytes.
        console: where it is shown; standard error, so that the output can be piped.
    """

    def __init__(
        self,
        what: str,
        total: int,
        *,
        unit: str = "",
        console: RichConsole | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._done = 0
        self._working = Working(what, clock, unit=unit)
        self._console = console or RichConsole(file=sys.stderr, highlight=False, soft_wrap=True)
        self._live: Live | None = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def add(self, count: int) -> None:
        """Add to what is done."""
        self.at(self._done + count)

    def at(self, done: int, total: int | None = None) -> None:
        """Set what is done, and a total that may have grown."""
        self._done = done
        self._total = self._total if total is None else total
        is_live = self._console.is_terminal
        if self._total <= 0 or not self._working.is_due(live=is_live):
            return
        text = self._working.text(done, self._total)
        if is_live:
            self._live = show_line(text, self._live, self._console)
        else:
            self._console.print(Text(text))
