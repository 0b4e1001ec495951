"""The state that is never rolled back: the run's incidents and their consequences.

:class:`History` is a fold over the journal's entries: the skip ledger, the rollbacks, the rate
cuts, the number of attempts. Every rank has the same one; rank 0's copy is on disk.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from typing import Any

from runner.policy.decision.signals import Limits, StepSignals, json_float, limits_of
from runner.policy.decision.skip_ledger import Ledger
from runner.policy.retention.records import Record
from runner.policy.schedule import RateCut

OBSERVER = "observer"
EXPLAIN = "explain"  # the observer
ENDED_STARTS = "ended_starts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One journal line.

    ``samples`` is the half-open span of affected stream positions, ``sample_ids`` has the data
    set's names of the suspects, ``detail`` has what a replay of this kind needs.
    """

    kind: str
    step: int
    decision: str
    reason: str
    ranks: tuple[int, ...] = ()
    samples: tuple[int, int] | None = None
    sample_ids: tuple[str, ...] = ()
    cost_steps: int = 0
    cost_seconds: float = 0.0
    detail: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Incident:
        """Inverse of :meth:`to_json`; ignores other keys (time, seq, attempt).

        Raises:
            KeyError, TypeError: the line is not an incident.
        """
        samples = line["samples"]
        return cls(
            kind=str(line["kind"]),
            step=int(line["step"]),
            decision=str(line["decision"]),
            reason=str(line["reason"]),
            ranks=tuple(int(rank) for rank in line["ranks"]),
            samples=None if samples is None else (int(samples[0]), int(samples[1])),
            sample_ids=tuple(str(name) for name in line["sample_ids"]),
            cost_steps=int(line["cost_steps"]),
            cost_seconds=float(line["cost_seconds"]),
            detail=dict(line["detail"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackRecord:
    """A completed rollback: where trouble began, and the checkpoint the run went back to.

    ``cursor`` is the checkpoint's: everything read after it was undone.
    """

    onset_step: int
    to_step: int
    cursor: int
    serial: int
    next_serial: int
    skip: tuple[int, int]
    repeat: int
    metrics_bytes: int
    seq: int


class History:
    """The state that follows from the journal; ``add`` incidents in order."""

    def __init__(self, told_to_skip: Iterable[tuple[int, int]] = ()) -> None:
        self.ledger = Ledger(told_to_skip)
        self.rollbacks: list[RollbackRecord] = []
        self.cuts: list[RateCut] = []
        self.incidents: list[Incident] = []
        self.mismatches: list[tuple[int, int]] = []  # (next serial, last good step)
        self.num_starts = 0
        self.num_restarts = 0  # starts after one that did not end as done
        self.num_discarded = 0
        self.num_redone = 0
        self.widened: set[int] = set()  # cursors of steps computed in a wider precision
        self.wide_ranges: list[tuple[int, int]] = []  # of positions, likewise
        self.num_probes = 0  # replays of steps so far
        self.unreadable: set[int] = set()  # indices in the data set
        self.mixtures: list[tuple[int, dict[str, float]]] = []  # (position, weights from there on)
        self.held = Limits()  # of the guard, from before the newest rollback
        self.known_stop = 0  # one past the last position that the journal skips

    def add(self, incident: Incident) -> None:
        """Fold one incident in."""
        seq = len(self.incidents)
        self.incidents.append(incident)
        self.num_probes += probes_of(incident)
        if incident.kind == "start":
            self.num_restarts += bool(self.num_starts) and not incident.detail.get("idle_seconds")
            self.num_starts += 1
        elif incident.kind == "discard" and incident.samples is not None:
            self.num_discarded += 1
            self._skip(*incident.samples)
        elif incident.kind == "redo":
            self._add_redo(incident)
        elif incident.kind in ("unreadable", "out_of_memory"):
            self.unreadable.update(incident.detail.get("indices", ()))
            for position in incident.detail.get("positions", ()):
                self._skip(position, position + 1)
        elif incident.kind == "mixture":
            self.mixtures.append((incident.detail["start"], dict(incident.detail["weights"])))
        elif incident.kind == "rollback" and incident.samples is not None:
            self._add_rollback(incident, incident.samples, seq)
        elif incident.kind == "rebaseline":
            self.held = Limits()
        elif incident.kind == "replica_mismatch" and "good_step" in incident.detail:
            self.mismatches.append((incident.detail["next_serial"], incident.detail["good_step"]))

    def _add_redo(self, incident: Incident) -> None:
        self.num_redone += 1
        if incident.samples is not None and incident.detail.get("widened") is True:
            self.widened.add(incident.samples[0])
            if "wide_until" in incident.detail:
                self.wide_ranges.append((incident.samples[0], incident.detail["wide_until"]))
        for position in incident.detail["skipped"]:
            self._skip(position, position + 1)

    def is_wide(self, position: int) -> bool:
        """Whether the step from this position on is computed in a wider precision."""
        return position in self.widened or any(a <= position < b for a, b in self.wide_ranges)

    def _skip(self, start: int, stop: int) -> None:
        self.ledger.add(start, stop)
        self.known_stop = max(self.known_stop, stop)

    def _add_rollback(self, incident: Incident, skip: tuple[int, int], seq: int) -> None:
        detail = incident.detail
        if not detail.get("read_again", False):
            self._skip(*skip)
        if "held_limits" in detail:
            self.held = limits_of(detail["held_limits"])
        self.rollbacks.append(
            RollbackRecord(
                onset_step=detail["onset_step"],
                to_step=detail["to_step"],
                cursor=detail["cursor"],
                serial=detail["serial"],
                next_serial=detail["next_serial"],
                skip=skip,
                repeat=detail["repeat"],
                metrics_bytes=detail["metrics_bytes"],
                seq=seq,
            )
        )
        if detail["cut_steps"]:
            # From the onset, not from the checkpoint: which one was proven in time depends on the
            # disk, and the run must not. If the rate is the cause, from the checkpoint.
            start = detail.get("cut_start", detail["onset_step"] - 1)
            stop = start + detail["cut_steps"]
            self.cuts.append(RateCut(start=start, stop=stop, factor=detail["cut_factor"]))

    def abandoned_serials(self) -> set[int]:
        """Serials of checkpoints abandoned by a rollback; they must not be used again."""
        return {
            serial
            for rollback in self.rollbacks
            for serial in range(rollback.serial + 1, rollback.next_serial)
        }

    def refuses(self, record: Record) -> bool:
        """Whether a rollback has left a checkpoint behind, or a mismatch distrusts it."""
        return record.serial in self.abandoned_serials() or self.distrusts(record)

    def distrusts(self, record: Record) -> bool:
        """Whether a checkpoint was saved between the last good replica check and a mismatch.

        The ring taints it too, but a crash may come between the journal line and the mark.
        """
        return any(
            record.serial < next_serial and record.step > good_step
            for next_serial, good_step in self.mismatches
        )

    def last_rollback_to(self, serial: int) -> RollbackRecord | None:
        """The newest rollback that went back to this checkpoint."""
        return next((r for r in reversed(self.rollbacks) if r.serial == serial), None)

    def redone_at(self, step: int) -> list[Incident]:
        """The redos of this step since the last rollback, newest first."""
        return [incident for incident in self._since_rollback("redo") if incident.step == step]

    def has_ended_starts(self, step: int) -> bool:
        """Whether the probes of this step have ended starts, so that it has none any more."""
        return any(
            one.kind == OBSERVER
            and one.step == step
            and one.detail["observer"] == EXPLAIN
            and ENDED_STARTS in one.detail
            for one in self.incidents
        )

    def newest_discard(self) -> Incident | None:
        """The newest discard since the last rollback; lines of a single rank do not count."""
        return next(self._since_rollback("discard"), None)

    def warnings_before(self, step: int) -> list[str]:
        """Warnings in the 500 steps before this one, oldest first."""
        return [
            f"step {one.step}: {one.reason}"
            for one in self.incidents
            if one.kind == WARNING and step - _QUOTED_STEPS <= one.step < step
        ][-_MOST_QUOTED:]

    def kept_serials(self) -> set[int]:
        """Serials of checkpoints to keep, from before the newest two warnings that name one."""
        named = [one.detail.get("keeps") for one in self.incidents if one.kind == WARNING]
        serials = [serial for serial in named if type(serial) is int]
        return set(list(dict.fromkeys(reversed(serials)))[:_KEPT_FOR_WARNINGS])

    def newest_redo(self) -> Incident | None:
        """The newest redone step since the last rollback."""
        return next(self._since_rollback("redo"), None)

    def newest_cause(self, position: int) -> Mapping[str, Any]:
        """The last cause found by replays of samples up to ``position``; empty without."""
        found = (
            incident.detail["cause"]
            for incident in reversed(self.incidents)
            if incident.samples is not None
            and incident.samples[0] <= position
            and isinstance(incident.detail.get("cause"), Mapping)
        )
        return next(found, {})

    def _since_rollback(self, kind: str) -> Iterator[Incident]:
        """Incidents since the last rollback, newest first."""
        since = takewhile(lambda one: one.kind != "rollback", reversed(self.incidents))
        return (incident for incident in since if incident.kind == kind)

    def num_transient_on(self, rank: int) -> int:
        """Number of steps redone because of a fault on this rank."""
        return sum(i.kind == "redo" and i.ranks == (rank,) for i in self.incidents)

    def discards_from(self, cursor: int) -> list[Incident]:
        """Discards at sample position ``cursor`` or later that no rollback undid, in order.

        Their order in the journal does not matter: a restarted run may reach a discard long after
        it was journalled.
        """
        return [
            incident
            for seq, incident in enumerate(self.incidents)
            if incident.kind == "discard"
            and incident.samples is not None
            and incident.samples[0] >= cursor
            and not any(b.seq > seq and b.cursor <= incident.samples[0] for b in self.rollbacks)
        ]


WARNING = "warning"  # kind of lines that warn of a possible divergence
_QUOTED_STEPS, _MOST_QUOTED = 500, 4
_KEPT_FOR_WARNINGS = 2
STICKY = "hardware, sticky"  # a device that computes wrongly each time: no sample is skipped
STATE = "state corrupted"
RATE = "rate"
NUMERICS = "numerics"  # after this cause the next bad step is computed in FP32 at once
GO_BACK = "go back"  # remedy if the weights are the cause, not a sample
MIX = "data mix"  # after this cause a level may settle without a rollback


def may_be_data(cause: Mapping[str, Any]) -> bool:
    """Whether samples may be at fault, as far as replays have shown; True without a cause."""
    return (
        cause.get("cause") not in (STICKY, STATE, RATE, NUMERICS) and cause.get("remedy") != GO_BACK
    )


def cause_of(incident: Incident) -> str | None:
    """The name of the cause found by replays; None without replays."""
    cause = incident.detail.get("cause")
    return str(cause["cause"]) if isinstance(cause, Mapping) else None


def verdict_within(
    incidents: Sequence[Incident], span: tuple[int, int], names_nothing: Collection[str]
) -> Mapping[str, Any] | None:
    """The newest cause found by replays of samples in ``span``, preferring one that names a
    culprit."""
    verdicts = [
        incident.detail["cause"]
        for incident in reversed(incidents)
        if cause_of(incident) is not None
        and incident.samples is not None
        and span[0] <= incident.samples[0] < span[1]
    ]
    named = (cause for cause in verdicts if cause["cause"] not in names_nothing)
    return next(named, verdicts[0] if verdicts else None)


def probes_of(incident: Incident) -> int:
    """The number of replays made to explain an incident."""
    cause = incident.detail.get("cause")
    return int(cause["steps"]) if isinstance(cause, Mapping) else 0


def discard_incident(signals: StepSignals, *, verdict: str, reason: str) -> Incident:
    """The journal line of a discard, with everything that a restart needs to repeat the
    judgement."""
    return Incident(
        kind="discard",
        step=signals.step,
        decision="discard",
        reason=reason,
        samples=(signals.start, signals.stop),
        detail={
            "verdict": verdict,
            "loss": json_float(signals.loss),
            "grad_norm": json_float(signals.grad_norm),
            "tokens": signals.tokens,
            "nonfinite_ranks": signals.nonfinite_ranks,
            "withheld": signals.withheld,
        },
    )


def discarded_signals(incident: Incident) -> StepSignals:
    """The signals of a journalled discard: the inverse of :func:`discard_incident`."""
    assert incident.samples is not None
    detail = incident.detail
    return StepSignals(
        step=incident.step,
        start=incident.samples[0],
        stop=incident.samples[1],
        loss=float(detail["loss"]),
        grad_norm=float(detail["grad_norm"]),
        tokens=int(detail["tokens"]),
        nonfinite_ranks=int(detail["nonfinite_ranks"]),
        gated=True,
        withheld=detail.get("withheld"),
    )
