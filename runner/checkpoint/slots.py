"""Which snapshot lies in which slot, and what needs it there. Alike on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from runner.checkpoint.protocol import Moment


class Need(Enum):
    """Why a slot must not be filled anew."""

    kept = "kept"  # it counts as a copy of its checkpoint
    seal = "seal"  # it is being filled, and digested
    write = "write"  # it is being written to disk
    prove = "prove"  # it is being verified
    mirror = "mirror"  # it is being sent to a peer


@dataclass(slots=True, kw_only=True)
class Held:
    """A snapshot in a slot, with what the engine's tensors do not tell."""

    slot: int
    moment: Moment
    counts: Mapping[str, int]
    needs: set[Need] = field(default_factory=set)


class SlotBook:
    """``held`` by serial; a slot is free when nothing needs its snapshot any more."""

    def __init__(self) -> None:
        self.held: dict[int, Held] = {}
        self._ready: list[int] = []

    def add(self, slot: int) -> None:
        """A slot that can be filled from now on."""
        if slot not in self._ready:
            self._ready.append(slot)

    def free(self) -> int | None:
        taken = {held.slot for held in self.held.values()}
        return next((slot for slot in self._ready if slot not in taken), None)

    def busy(self) -> set[int]:
        """Serials of which the slot is being worked on."""
        return {serial for serial, held in self.held.items() if held.needs - {Need.kept}}

    def need(self, serial: int, why: Need) -> None:
        self.held[serial].needs.add(why)

    def done(self, serial: int, why: Need) -> None:
        """One reason less; the last one frees the slot."""
        held = self.held.get(serial)
        if held is not None:
            held.needs.discard(why)
            if not held.needs:
                del self.held[serial]
