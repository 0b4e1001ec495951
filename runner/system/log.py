"""Sets up Python's ``logging`` for this process: text for a person, JSON for a pipeline.

All output but the live line and the table at the end is a record of a logger under ``runner``.
:func:`begin` gives that logger its one handler, which writes whole lines to ``sys.stdout`` and
``sys.stderr`` as they are at that moment; :func:`runner.system.output.install` sees to it that
those never block. A record may carry, as ``extra``:

    incident  the kind of a journal incident
    fields    a mapping of further values for a pipeline; a step in it overrides the present one
    colour    of the text on a terminal, as a number of ECMA-48

The loggers of libraries are left as they are.
"""

from __future__ import annotations

import logging
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from runner.system.environment import redacted, variables
from runner.system.parsing import json_text

_ROOT = "runner"
# Records for the person who watches go to standard output, all others to standard error.
_TO_STDOUT = "runner.observe.console"
# Control characters, which would move a terminal's cursor or change its colours.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_FIXED = frozenset({"time", "level", "rank", "message", "incident"})
_MARKED = {logging.WARNING: "warning: ", logging.ERROR: "error: "}

Step = Callable[[], int]


def begin(*, as_json: bool, rank: int | None = None, step: Step = lambda: 0) -> None:
    """Write all records of ours in one format from here on.

    Args:
        rank: of this process; None: it has none.
        step: the present step; 0 before the first.
    """
    logger = logging.getLogger(_ROOT)
    for handler in [other for other in logger.handlers if isinstance(other, _Lines)]:
        logger.removeHandler(handler)
    logger.addHandler(_Lines(JsonFormat(rank, step) if as_json else TextFormat(rank)))
    logger.setLevel(logging.INFO)
    logger.propagate = False  # a handler that a library adds to the root logger would repeat it


class _Lines(logging.Handler):
    """Writes records. Never raises: a message that cannot be written must not end the run."""

    def __init__(self, form: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(form)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            stream = sys.stdout if record.name == _TO_STDOUT else sys.stderr
            if stream is not None:
                text = self.format(record)
                if stream.isatty() and isinstance(self.formatter, TextFormat):
                    text = at_words(text, shutil.get_terminal_size().columns)
                    if colour := getattr(record, "colour", ""):
                        text = f"\x1b[{colour}m{text}\x1b[0m"
                    if variables().get("TERM") != "dumb":
                        text = f"\x1b[K{text}"  # of a live line whose process was killed
                stream.write(text + "\n")
                stream.flush()
        except Exception:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # logging's name
        """Ignore the error, which could not be written either."""


def at_words(text: str, width: int) -> str:
    """Lines broken at words, indented like their beginning; a long word stays whole."""
    broken = []
    for line in text.split("\n"):
        begin = " " * (len(line) - len(line.lstrip()) + 4)
        broken += textwrap.wrap(
            line, width, subsequent_indent=begin, break_long_words=False, break_on_hyphens=False
        ) or [""]
    return "\n".join(broken)


class TextFormat(logging.Formatter):
    """The message, marked if it is a warning or an error, with the rank unless it is 0.

    An exception shows only its traceback: the last line is the message.
    """

    def __init__(self, rank: int | None) -> None:
        super().__init__()
        self._head = f"[rank {rank}] " if rank else ""

    def format(self, record: logging.LogRecord) -> str:
        if record.exc_info:
            trace = self.formatException(record.exc_info)
        else:
            is_incident = getattr(record, "incident", None) is not None
            mark = "" if is_incident else _MARKED.get(record.levelno, "")
            trace = mark + record.getMessage()
        return self._head + _CONTROL.sub(_escaped, redacted(trace))


class JsonFormat(logging.Formatter):
    """One object a line: time, level, rank, step, message, and the record's extras."""

    def __init__(self, rank: int | None, step: Step) -> None:
        super().__init__()
        self._rank = rank
        self._step = step

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "rank": self._rank,
            "step": self._step(),
            "message": record.getMessage(),
        }
        if (kind := getattr(record, "incident", None)) is not None:
            line["incident"] = kind
        fields: Mapping[str, Any] = getattr(record, "fields", {})
        line |= {name: value for name, value in fields.items() if name not in _FIXED}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json_text(redacted(line))


def _escaped(match: re.Match[str]) -> str:
    return f"\\x{ord(match[0]):02x}"
