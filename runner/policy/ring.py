"""Which checkpoints are proven, which may be used, which may go. No files here.

``committed``: whole on disk. ``clean``: verified and followed by enough clean steps.
``tainted``: trouble began before it was proven, or the run went back behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

# Unproven checkpoints serve a restart only; more than the two newest are of no use to it.
_UNPROVEN_KEPT = 2


class State(Enum):
    committed = "committed"
    clean = "clean"
    tainted = "tainted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One checkpoint. ``serial`` orders them: steps repeat after a rollback, clocks lie."""

    serial: int
    step: int
    cursor: int
    state: State


def due_for_proof(
    records: Iterable[Record], *, step: int, clean_streak: int, clean_after: int
) -> list[Record]:
    """Committed checkpoints followed by ``clean_after`` clean steps in a row.

    A discarded step begins the count anew. The initial state (step 0) needs no probation:
    no update came before it that could have poisoned it.
    """
    return [
        record
        for record in records
        if record.state is State.committed
        and (
            record.step == 0 or (step - record.step >= clean_after and clean_streak >= clean_after)
        )
    ]


def with_state(records: Iterable[Record], serial: int, state: State) -> list[Record]:
    """The records with one of them in another state."""
    return [replace(r, state=state) if r.serial == serial else r for r in records]


def rollback_targets(records: Iterable[Record], *, cursor: int, step: int) -> list[Record]:
    """Clean checkpoints that read nothing from ``cursor`` on and are at ``step`` or before.

    Newest first.
    """
    usable = [
        record
        for record in records
        if record.state is State.clean and record.cursor <= cursor and record.step <= step
    ]
    return sorted(usable, key=lambda record: record.serial, reverse=True)


def resume_order(records: Iterable[Record]) -> list[Record]:
    """Checkpoints a restart may load, best first: newest whole one that is not tainted."""
    usable = [record for record in records if record.state is not State.tainted]
    return sorted(usable, key=lambda record: record.serial, reverse=True)


def abandoned_by_rollback(records: Iterable[Record], target: int) -> list[Record]:
    """Checkpoints of the path the run left when it went back to serial ``target``."""
    return [record for record in records if record.serial > target]


def retire(records: Sequence[Record], *, keep: int, keep_every: int) -> list[Record]:
    """The checkpoints to delete now, oldest first; never the last clean one.

    Kept: the ``keep`` newest clean ones, clean ones at multiples of ``keep_every`` steps
    (0: none), and the newest unproven ones.
    """
    newest = sorted(records, key=lambda record: record.serial, reverse=True)
    clean = [record for record in newest if record.state is State.clean]
    unproven = [record for record in newest if record.state is State.committed]
    kept = {record.serial for record in clean[: max(1, keep)]}
    kept |= {record.serial for record in unproven[:_UNPROVEN_KEPT]}
    if keep_every > 0:
        kept |= {record.serial for record in clean if record.step % keep_every == 0}
    tainted_only = not clean and not unproven
    return [
        record
        for record in reversed(newest)
        # With nothing else left, a tainted checkpoint is better than none: a person may want it.
        if record.serial not in kept and not (tainted_only and record.serial == newest[0].serial)
    ]
