"""Incidents in a person's words: what happened, who, what was done, and whether it is over."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.system.units import name_ranks
from runner.tools.report.follow import whole
from runner.tools.report.incident import (
    REMARK_KINDS,
    Line,
    group_incidents,
    ints,
    list_of,
    texts,
    verdicts,
)
from runner.tools.report.markup import took
from runner.tools.report.run_reader import RunReader

# By cause of a replay, else by the kind of the first line.
_CAUSES = {
    "data": "bad data",
    "hardware, transient": "a fault of the hardware that did not come again",
    "hardware, sticky": "a fault of the hardware",
    "read wrongly once": "samples that were read wrongly once",
}
_KINDS = {
    "discard": "a bad step",
    "redo": "a bad step",
    "rollback": "bad steps",
    "rebaseline": "a lasting change of the loss",
    "halt": "a halt",
    "crash": "a crash",
    "unreadable": "samples that cannot be read",
    "out_of_memory": "no memory left",
    "evaluation": "an evaluation that failed",
}
_DEEDS = {
    "discard": ("step discarded", "steps discarded"),
    "redo": ("step computed again", "steps computed again"),
    "rollback": ("rollback", "rollbacks"),
    "rebaseline": ("new baseline", "new baselines"),
    "halt": ("halted", "halted"),
    "crash": ("crash", "crashes"),
    "unreadable": ("unreadable sample skipped", "unreadable samples skipped"),
    "out_of_memory": ("out of memory", "times out of memory"),
    "evaluation": ("evaluation failed", "evaluations failed"),
}
# Their attempt is the first one after them; that of the others is the bad step itself.
_BETWEEN_STEPS = frozenset({"crash", "unreadable", "out_of_memory", "evaluation"})
_MOST_CHARACTERS = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One incident; incidents are numbered from 1, the oldest.

    ``attempts`` are its first and its last in the curves, None without curves. ``clean_step`` and
    ``clean_at`` are of the first applied step after it, None and 0 if there is none. ``again`` and
    ``down_seconds`` are what the restart after a crash cost: steps and time.
    """

    number: int
    group: Sequence[Line]
    attempts: tuple[int, int] | None
    clean_step: int | None
    clean_at: float
    again: int = 0
    down_seconds: float = 0.0

    def anchor(self, place: int) -> str:
        """Its name on a page on which the run has this place."""
        return f"incident-{self.number}{f'-{place}' if place else ''}"

    @property
    def lines(self) -> list[Line]:
        """The journal's lines but for remarks."""
        return [line for line in self.group if line.kind not in REMARK_KINDS]

    @property
    def kinds(self) -> list[str]:
        """The distinct kinds of its lines in their order."""
        return list(dict.fromkeys(line.kind for line in self.lines))

    @property
    def verdict(self) -> str:
        """The cause that replays found; empty if none did."""
        causes = verdicts(self.group)
        return str(causes[0]["cause"])[:60] if causes else ""

    @property
    def deeds(self) -> str:
        """What was done, counted: ``4 steps computed again, 2 steps discarded, rollback``."""
        kinds = [line.kind for line in self.lines]
        parts = []
        for kind in self.kinds:
            one, many = _DEEDS.get(kind, (kind.replace("_", " "), f"times {kind}"))
            count = kinds.count(kind)
            parts.append(one if count == 1 else f"{count} {many}")
        return ", ".join(parts)

    @property
    def recovered(self) -> str:
        """Since which step it is over, or that it is not."""
        return "not recovered" if self.clean_step is None else f"since step {self.clean_step:,}"

    def ranks(self) -> list[int]:
        """The ranks that a cause names, or else those of the journal lines."""
        named = {rank for cause in verdicts(self.group) for rank in ints(cause.get("ranks"))}
        return sorted(named or {rank for line in self.lines for rank in line.ranks})

    def who(self) -> str:
        """Ranks and hosts; empty if none is named."""
        ranks, causes = self.ranks(), verdicts(self.group)
        if not ranks:
            return ""
        hosts = list(dict.fromkeys(host for cause in causes for host in texts(cause.get("hosts"))))
        known = [str(line.detail["host"])[:100] for line in self.lines if line.detail.get("host")]
        hosts = hosts[:8] or known[:1]
        return name_ranks(ranks) + (f" on {', '.join(hosts)}" if hosts else "")

    def cost(self) -> str:
        """Steps and seconds; empty for nothing."""
        steps = self.again + sum(line.cost_steps for line in self.lines)
        seconds = self.down_seconds + sum(line.cost_seconds for line in self.lines)
        step_text = "1 step" if steps == 1 else f"{steps:,} steps" if steps else ""
        return ", ".join(filter(None, [step_text, took(seconds) if seconds else ""]))

    def sentence(self) -> str:
        """What, where, who, why, what was done, and since when it is over."""
        causes, lines = verdicts(self.group), self.lines
        what = _CAUSES.get(self.verdict) or self.verdict or _KINDS.get(lines[0].kind, "an incident")
        first, last = min(one.step for one in lines), max(one.step for one in lines)
        at = f"at step {first:,}" if first == last else f"at steps {first:,} to {last:,}"
        who = self.who()
        told = lines[-1 if lines[-1].kind == "halt" else 0]
        why = str(causes[0].get("why", "")) if causes else told.reason
        went = [whole(one.detail.get("to_step")) for one in lines if one.kind == "rollback"]
        back = f"; went back to step {went[-1]:,}" if went else ""
        over = "Not recovered yet."
        if self.clean_step is not None:
            clock = time.strftime(" (%H:%M:%S)", time.localtime(self.clean_at))
            over = f"Recovered: clean since step {self.clean_step:,}{clock * bool(self.clean_at)}."
        elif lines[-1].kind == "halt":
            over = "Not recovered: the run has ended."
        return (
            f"{what[:1].upper()}{what[1:]} {at}{f', {who}' if who else ''}: "
            f"{_cut(why)} Done: {self.deeds}{back}. {over}"
        )


def episodes(run: RunReader) -> list[Episode]:
    """All incidents of a run, oldest first."""
    attempts = run.fold.attempts
    # Without attempts there are no curves to show them in.
    marks = run.marks() if len(attempts) else []
    places = {id(mark.line): mark.attempt for mark in marks}
    down, found = dict(run.fold.down), []
    for number, group in enumerate(group_incidents(run.fold.lines), start=1):
        lines = [line for line in group if line.kind not in REMARK_KINDS]
        at = [places[id(line)] for line in lines if id(line) in places]
        clean = max(at, default=0) + (lines[-1].kind not in _BETWEEN_STEPS)
        is_over = bool(at) and clean <= run.fold.applied_attempt
        is_crash = lines[0].kind == "crash" and clean < len(attempts)
        found.append(
            Episode(
                number=number,
                group=group,
                attempts=(min(at), max(at)) if at else None,
                clean_step=attempts.step_of(clean) if is_over else None,
                clean_at=_known(attempts.time_of(clean)) if is_over else 0.0,
                again=max(0, lines[0].step - attempts.step_of(clean)) if is_crash else 0,
                down_seconds=down.pop(clean, 0.0) if is_crash else 0.0,
            )
        )
    return found


def command(run: RunReader) -> str:
    """The command that resumes the run; empty if its start did not note it."""
    start = run.last("start")
    detail: Mapping[str, Any] = start.detail if start else {}
    words = [str(word) for word in list_of(detail.get("command"))]
    hosts = detail.get("hosts")
    if not words or not isinstance(hosts, dict) or not hosts:
        return ""
    ranks = max(1, whole(detail.get("world_size")) // len(hosts))
    is_ours = words[0].endswith(("runner/__main__.py", "/holdfast"))
    begin = ["holdfast", "launch", "--nproc"] if is_ours else ["torchrun", "--nproc-per-node"]
    return shlex.join([*begin, str(ranks), *words[is_ours:]])


def rank_list(ranks: Sequence[int]) -> str:
    """The first ranks, with commas."""
    return ", ".join(map(str, ranks[:32]))


def _known(seconds: float) -> float:
    return seconds if seconds == seconds else 0.0


def _cut(reason: str) -> str:
    flat = " ".join(reason.split()) or "no reason is known"
    return f"{flat if len(flat) <= _MOST_CHARACTERS else f'{flat[:_MOST_CHARACTERS]}…'}."
