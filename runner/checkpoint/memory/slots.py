"""Which snapshot is in which slot, and what pins it there; the same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from runner.checkpoint.protocol import CheckpointMetadata


class PinReason(Enum):
    """Why a slot must not be reused."""

    kept = "kept"  # it counts as a copy of its checkpoint
    seal = "seal"  # it is being filled, and digested
    write = "write"  # it is being written to disk
    prove = "prove"  # it is being verified
    replica = "replica"  # it is being sent to a peer


@dataclass(slots=True, kw_only=True)
class SlotEntry:
    """A snapshot in a slot, with the state that is not in the engine's tensors."""

    slot: int
    metadata: CheckpointMetadata
    counts: Mapping[str, int]
    pins: set[PinReason] = field(default_factory=set)


class SlotAllocator:
    """Assigns slots to snapshots (``entries``, by serial); a slot without a pin is free."""

    def __init__(self) -> None:
        self.entries: dict[int, SlotEntry] = {}
        self._ready: list[int] = []

    def add(self, slot: int) -> None:
        """Add a slot that can be filled from now on."""
        if slot not in self._ready:
            self._ready.append(slot)

    def free(self) -> int | None:
        used = {entry.slot for entry in self.entries.values()}
        return next((slot for slot in self._ready if slot not in used), None)

    def busy(self) -> set[int]:
        """Serials whose slot a job uses."""
        return {serial for serial, entry in self.entries.items() if entry.pins - {PinReason.kept}}

    def pin(self, serial: int, why: PinReason) -> None:
        self.entries[serial].pins.add(why)

    def unpin(self, serial: int, why: PinReason) -> None:
        """Remove one pin; the last one frees the slot."""
        entry = self.entries.get(serial)
        if entry is not None:
            entry.pins.discard(why)
            if not entry.pins:
                del self.entries[serial]
