"""Which snapshot lies in which slot, and what pins it there. Alike on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from runner.checkpoint.protocol import CheckpointMetadata


class PinReason(Enum):
    """Why a slot must not be filled anew."""

    kept = "kept"  # it counts as a copy of its checkpoint
    seal = "seal"  # it is being filled, and digested
    write = "write"  # it is being written to disk
    prove = "prove"  # it is being verified
    replica = "replica"  # it is being sent to a peer


@dataclass(slots=True, kw_only=True)
class SlotEntry:
    """A snapshot in a slot, with what the engine's tensors do not tell."""

    slot: int
    metadata: CheckpointMetadata
    counts: Mapping[str, int]
    pins: set[PinReason] = field(default_factory=set)


class SlotAllocator:
    """``entries`` by serial; a slot is free when nothing pins its snapshot any more."""

    def __init__(self) -> None:
        self.entries: dict[int, SlotEntry] = {}
        self._ready: list[int] = []

    def add(self, slot: int) -> None:
        """A slot that can be filled from now on."""
        if slot not in self._ready:
            self._ready.append(slot)

    def free(self) -> int | None:
        taken = {entry.slot for entry in self.entries.values()}
        return next((slot for slot in self._ready if slot not in taken), None)

    def busy(self) -> set[int]:
        """Serials of which the slot is being worked on."""
        return {serial for serial, entry in self.entries.items() if entry.pins - {PinReason.kept}}

    def pin(self, serial: int, why: PinReason) -> None:
        self.entries[serial].pins.add(why)

    def unpin(self, serial: int, why: PinReason) -> None:
        """One reason less; the last one frees the slot."""
        entry = self.entries.get(serial)
        if entry is not None:
            entry.pins.discard(why)
            if not entry.pins:
                del self.entries[serial]
