"""What a person sees: one live line on a terminal, plain lines elsewhere, a table at the end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console as RichConsole
from rich.live import Live
from rich.table import Table
from rich.text import Text

from runner.policy.history import Incident
from runner.redact import redacted


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The live line's numbers. Losses are nats per token.

    ``goodput`` is the share of wall time, down time included, that counts in the result.
    ``eval_loss`` is the newest held-out loss, ``is_evaluated`` whether it is of this step.
    """

    step: int
    total: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_second: float
    mfu: float | None
    eta_seconds: float
    num_clean: int
    num_discarded: int
    num_rollbacks: int
    goodput: float
    eval_loss: float | None
    is_evaluated: bool

    def text(self) -> str:
        parts = [
            f"step {self.step}/{self.total}",
            f"loss {self.loss:.4f}",
            f"grad {self.grad_norm:.3f}",
            f"lr {self.lr:.2e}",
            f"{self.tokens_per_second:,.0f} tok/s",
            *([f"MFU {self.mfu:.1%}"] if self.mfu is not None else []),
            f"ETA {duration(self.eta_seconds)}",
            f"clean {self.num_clean}",
            f"discarded {self.num_discarded}",
            f"rollbacks {self.num_rollbacks}",
            f"goodput {self.goodput:.0%}",
            *([f"held-out {self.eval_loss:.4f}"] if self.eval_loss is not None else []),
        ]
        return "  ".join(parts)


def duration(seconds: float) -> str:
    """4s, 3m07s, 2h05m."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


class Console:
    """Rank 0's output; silent on the others.

    Args:
        every: steps between plain lines when the output is no terminal.
    """

    def __init__(self, *, silent: bool, every: int) -> None:
        self._silent = silent
        self._every = every
        self._rich = RichConsole(file=sys.stdout, highlight=False, soft_wrap=True)
        self._live: Live | None = None

    def say(self, text: str) -> None:
        """One line that stays."""
        if not self._silent:
            self._rich.print(Text(redacted(text)))

    def incident(self, incident: Incident) -> None:
        """An incident in one line that stays."""
        span = incident.samples
        parts = [
            f"! step {incident.step} {incident.kind}",
            *([f"rank {','.join(map(str, incident.ranks))}"] if incident.ranks else []),
            *([f"samples {span[0]}-{span[1] - 1}"] if span else []),
            *([f"({'; '.join(incident.sample_ids[:2])})"] if incident.sample_ids else []),
        ]
        self.say(f"{' '.join(parts)}: {incident.reason} -> {incident.decision}")

    def progress(self, progress: Progress) -> None:
        """Update the live line; where the output is no terminal, a plain line when it is due."""
        if not self.shows(progress.step, progress.total, is_evaluated=progress.is_evaluated):
            return
        if self._rich.is_terminal:
            self._update_live(Text(progress.text()))
        else:
            self._rich.print(Text(progress.text()))
            sys.stdout.flush()

    def shows(self, step: int, total: int, *, is_evaluated: bool) -> bool:
        """Whether :meth:`progress` would show this step."""
        if self._silent:
            return False
        is_due = step in (1, total) or step % self._every == 0 or is_evaluated
        return is_due or self._rich.is_terminal

    def _update_live(self, text: Text) -> None:
        if self._live is None:
            self._live = Live(console=self._rich, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(text, refresh=True)

    def table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Two columns, at the end."""
        self.close()
        if self._silent:
            return
        # Text, not str: "[...]" in a path or an error's words is no markup.
        table = Table(title=Text(title), show_header=False, title_justify="left")
        for name, value in rows:
            table.add_row(Text(name), Text(value, overflow="fold"))
        self._rich.print(table)

    def close(self) -> None:
        """Take the live line away."""
        if self._live is not None:
            self._live.stop()
            self._live = None
