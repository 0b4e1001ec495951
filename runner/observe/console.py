"""The console: one live line on a terminal, plain lines elsewhere, a table at the end.

Lines that stay are log records (:mod:`runner.system.log`); for a log pipeline (``track.log=json``)
the live line and the table are records as well.
"""

from __future__ import annotations

import importlib
import logging
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from runner.policy.alert import level_of
from runner.policy.decision.history import Incident
from runner.system.units import duration, name_ranks

if TYPE_CHECKING:  # imported by what prints first, after the first step, and on rank 0 alone
    from rich.console import Console as RichConsole
    from rich.live import Live

_log = logging.getLogger(__name__)
# By level, as numbers of ECMA-48: red, yellow.
_COLOURS = {logging.ERROR: "31", logging.WARNING: "33"}
_WARNING = "warning: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The live line's numbers. Losses are nats per token, if there are tokens.

    ``total`` is 0 if unknown, ``speed`` if nothing is counted: of what ``counted`` says, a second.
    ``goodput`` is the share of wall time, down time included, that counts in the result.
    ``eval_loss`` is the newest held-out loss, ``is_evaluated`` whether it is of this step;
    ``judged`` has name and value of another held-out number that decides which step is the best.
    """

    step: int
    total: int
    loss: float
    grad_norm: float
    lr: float
    speed: float
    mfu: float | None
    eta_seconds: float
    num_clean: int
    num_discarded: int
    num_rollbacks: int
    goodput: float
    eval_loss: float | None
    is_evaluated: bool
    counted: str = "tok"
    judged: tuple[str, float] | None = None

    def text(self, most: int | None = None) -> str:
        """The numbers that are not 0.

        Args:
            most: characters; what a person misses least is left out first.
        """
        parts = {
            "step": f"step {self.step}/{self.total}" if self.total else f"step {self.step}",
            "loss": f"loss {self.loss:.4f}",
            "grad": f"grad {self.grad_norm:.3f}",
            "lr": f"lr {self.lr:.2e}",
            "speed": f"{self.speed:,.0f} {self.counted}/s" if self.speed else "",
            "mfu": f"MFU {self.mfu:.1%}" if self.mfu is not None else "",
            "eta": f"ETA {duration(self.eta_seconds)}" if self.total else "",
            "clean": f"clean {self.num_clean}" if self.num_clean else "",
            "discarded": f"discarded {self.num_discarded}" if self.num_discarded else "",
            "rollbacks": f"rollbacks {self.num_rollbacks}" if self.num_rollbacks else "",
            "goodput": f"goodput {self.goodput:.0%}",
            "held-out": f"held-out {self.eval_loss:.4f}" if self.eval_loss is not None else "",
            "judged": f"{self.judged[0]} {self.judged[1]:.5g}" if self.judged else "",
        }
        shown = [name for name, text in parts.items() if text]
        for name in ("clean", "lr", "mfu", "grad", "speed", "goodput", "eta"):
            if most is not None and len("  ".join(parts[one] for one in shown)) > most:
                shown = [one for one in shown if one != name]
        return "  ".join(parts[name] for name in shown)


_BAR = 24
_PLAIN_SECONDS = 30.0
_QUIET_SECONDS, _LIVE_SECONDS = 2.0, 0.1


class Working:
    """Formats the progress of some work: how much, how fast, how long.

    Args:
        unit: what is counted, in the plural; empty for bytes.
        first: what was already done at the beginning.
    """

    def __init__(
        self,
        what: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        unit: str = "",
        first: int = 0,
    ) -> None:
        self.what = what
        self._unit = unit
        self._clock = clock
        self._began = clock()
        self._due = {True: self._began + _QUIET_SECONDS, False: self._began + _PLAIN_SECONDS}
        self._first = first

    def is_due(self, *, live: bool) -> bool:
        """Whether to show it now: in the live line not for work of two seconds, nor all the time;
        in plain lines not for work of seconds, and seldom for work of hours."""
        now = self._clock()
        if now < self._due[live]:
            return False
        self._due[live] = now + (_LIVE_SECONDS if live else _PLAIN_SECONDS)
        return True

    def text(self, done: int, total: int) -> str:
        """``tokenising [####----] 50%  1.2 of 2.4 GiB  40 MiB/s  ETA 4m10s``."""
        seconds = self._clock() - self._began
        rate = (done - self._first) / seconds if seconds > 1.0 else 0.0
        share = min(1.0, done / total)
        filled = int(_BAR * share)
        parts = [
            f"{self.what} [{'#' * filled}{'-' * (_BAR - filled)}] {share:.0%}",
            f"{done:,} of {total:,} {self._unit}"
            if self._unit
            else f"{done / 2**30:.2f} of {total / 2**30:.2f} GiB",
        ]
        if rate > 0:
            amount, unit = (rate, self._unit) if self._unit else (rate / 2**20, "MiB")
            pace = f"{amount:,.0f}" if amount >= 10 else f"{amount:.2g}"
            parts += [f"{pace} {unit}/s", f"ETA {duration((total - done) / rate)}"]
        return "  ".join(parts)


@cache
def _import_rich() -> None:
    """Import it late, and without a trace: it draws from Python's generator, which may be the
    user's, as it is imported."""
    state = random.getstate()
    importlib.import_module("rich.live")
    importlib.import_module("rich.table")
    random.setstate(state)


def _span(span: tuple[int, int], *, is_batches: bool) -> str:
    one, many = ("batch", "batches") if is_batches else ("sample", "samples")
    first, last = span[0], span[1] - 1
    return f"{one} {first}" if first == last else f"{many} {first}-{last}"


def show_line(text: str, live: Live | None, console: RichConsole) -> Live:
    """Show text in a live line, which is begun if there is none."""
    from rich.console import Group
    from rich.control import Control
    from rich.live import Live
    from rich.segment import ControlType
    from rich.text import Text

    if live is None:
        live = Live(console=console, auto_refresh=False, transient=True)
        live.start()
        console.show_cursor(True)  # a process that is killed could not
    # Whoever writes after that begins where the line does.
    line = Group(Text(text, end=""), Control(ControlType.CARRIAGE_RETURN))
    live.update(line, refresh=True)
    return live


class Console:
    """Rank 0's output; silent on the others.

    Args:
        every: steps between plain lines when the output is no terminal.
        as_json: nothing but log records, for a pipeline.
    """

    def __init__(self, *, silent: bool, every: int, as_json: bool = False) -> None:
        self._silent = silent
        self._every = every
        self._as_json = as_json
        self._live: Live | None = None
        self._working: Working | None = None
        self._work_done = 0

    @cached_property
    def _rich(self) -> RichConsole:
        _import_rich()
        from rich.console import Console as RichConsole

        return RichConsole(file=sys.stdout, highlight=False, soft_wrap=True)

    @property
    def _has_live(self) -> bool:
        return self._rich.is_terminal and not self._as_json

    def say(self, text: str) -> None:
        """Print one line that stays; a warning if it begins with ``warning: ``."""
        if not self._silent:
            level = logging.WARNING if text.startswith(_WARNING) else logging.INFO
            _log.log(level, "%s", text.removeprefix(_WARNING))

    def incident(self, incident: Incident) -> None:
        """Print an incident in one line that stays."""
        if self._silent:
            return
        span, ids = incident.samples, incident.sample_ids
        is_batches = bool(ids) and all(one.startswith("batch ") for one in ids)  # of a user's loop
        parts = [
            f"! step {incident.step} {incident.kind}",
            *([name_ranks(incident.ranks)] if incident.ranks else []),
            *([_span(span, is_batches=is_batches)] if span else []),
            *([f"({'; '.join(ids[:2])})"] if ids and not is_batches else []),
        ]
        message = f"{' '.join(parts)}: {incident.reason} -> {incident.decision}"
        level = level_of({"kind": incident.kind, "detail": incident.detail})
        names = ("step", "ranks", "samples", "reason", "decision")
        fields = {name: getattr(incident, name) for name in names}
        extra = {"incident": incident.kind, "fields": fields}
        if self._has_live and not self._rich.no_color:
            extra["colour"] = _COLOURS.get(level, "")
        _log.log(level, "%s", message, extra=extra)

    def progress(self, progress: Progress) -> None:
        """Update the live line; without a terminal print a plain line when it is due."""
        if not self.shows(progress.step, progress.total, is_evaluated=progress.is_evaluated):
            return
        most = self._rich.width - 1 if self._has_live else None
        self._show(progress.text(most), asdict(progress))

    def _show(self, text: str, fields: dict[str, Any]) -> None:
        """Show text in the live line, or as a line of its own."""
        if self._as_json:
            _log.info("%s", text, extra={"fields": fields})
            return
        _import_rich()
        from rich.text import Text

        if self._has_live:
            self._live = show_line(text, self._live, self._rich)
        else:
            self._rich.print(Text(text))
            sys.stdout.flush()

    def shows(self, step: int, total: int, *, is_evaluated: bool) -> bool:
        """Whether :meth:`progress` would show this step."""
        if self._silent:
            return False
        is_due = step in (1, total) or step % self._every == 0 or is_evaluated
        return is_due or self._has_live

    def work(self, what: str, done: int, total: int) -> None:
        """Show the progress of long work, in bytes: a live line, or a plain one now and then."""
        if self._silent or not total:
            return
        if self._working is None or self._working.what != what or done < self._work_done:
            self._working = Working(what, first=done)
        self._work_done = done
        if self._working.is_due(live=self._has_live):
            text = self._working.text(done, total)
            self._show(text, {"bytes_done": done, "bytes_total": total})

    def table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Print a table of two columns."""
        self.close()
        if self._silent:
            return
        if self._as_json:
            _log.info("%s", title, extra={"fields": {"summary": dict(rows)}})
            return
        _import_rich()
        from rich.table import Table
        from rich.text import Text

        # Text, not str: "[...]" in a path or an error is not markup.
        table = Table(title=Text(title), show_header=False, title_justify="left")
        for name, value in rows:
            table.add_row(Text(name), Text(value, overflow="fold"))
        self._rich.print(table)

    def close(self) -> None:
        """Remove the live line."""
        if self._live is not None:
            self._live.stop()
            self._live = None
