"""The tier in memory: which snapshots it holds, alike on every rank, and its jobs.

Knows its slots, what needs them, and their copies on other nodes; nothing of what becomes of a
checkpoint. ``then`` gets the sentences of the ranks that failed, at the same step on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from runner.checkpoint.memory import Memory
from runner.checkpoint.mirror import Found, Mirror, on_every_rank
from runner.checkpoint.protocol import Holder, Moment, Ranks, Restored, Save, Then, finish_load
from runner.checkpoint.shards import Snapshot, own_share
from runner.checkpoint.slots import Held, Need, SlotBook
from runner.checkpoint.work import AgreedWork
from runner.policy.ring import Record, State, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Inherited:
    """What an earlier incarnation left; ``refused`` says what is of no use, and why.

    ``highest`` is the highest serial of any, 0 without one.
    """

    records: list[Record]
    highest: int
    refused: list[str]


class MemoryTier:
    """
    Args:
        mirror: sends snapshots to other nodes; its own queue is ``abroad``.
        lane: the queue of all other jobs.
    """

    def __init__(
        self,
        memory: Memory,
        mirror: Mirror | None,
        *,
        holder: Holder,
        ranks: Ranks,
        lane: AgreedWork,
        abroad: AgreedWork | None,
    ) -> None:
        self._memory = memory
        self._mirror = mirror
        self._holder = holder
        self._ranks = ranks
        self._lane = lane
        self._abroad = abroad
        self._slots = SlotBook()
        self._earlier: dict[int, Found] = {}
        self._earlier_incarnation = 0

    @property
    def has_room(self) -> bool:
        """Whether a slot can be filled."""
        return self._slots.free() is not None

    def busy(self) -> set[int]:
        """Serials that are being worked on: their slots cannot be had."""
        return self._slots.busy()

    def has(self, serial: int) -> bool:
        """Whether a slot of this incarnation holds it."""
        return serial in self._slots.held

    def files(self) -> list[Path]:
        """This rank's, oldest first."""
        return [self._memory.path_of(held.slot) for _, held in sorted(self._slots.held.items())]

    def begin(self, report_short: Callable[[str, list[str]], None]) -> None:
        """What earlier incarnations left goes, and own slots are made in the background.

        Args:
            report_short: takes what the run has to do without, and why.
        """
        self._earlier = {}
        self._memory.forget_earlier()
        for slot in range(self._memory.num_slots):
            self._prepare(slot, report_short)
        if self._mirror is not None and self._abroad is not None:

            def prepared(failures: list[str]) -> None:
                if failures:
                    self._mirror = None
                    report_short("without copies on other nodes", failures)

            self._abroad.submit("prepare copies", self._mirror.prepare, prepared)

    def _prepare(self, slot: int, report_short: Callable[[str, list[str]], None]) -> None:
        def prepared(failures: list[str]) -> None:
            if failures:
                report_short(f"without slot {slot}", failures)
            else:
                self._slots.add(slot)

        self._lane.submit(f"prepare {slot}", lambda: self._memory.prepare(slot), prepared)

    # -- one snapshot ---------------------------------------------------------------------

    def before_update(self) -> None:
        """To be called before the optimizer changes the state; see :class:`Memory`."""
        self._memory.before_update()

    def take(self, save: Save, then: Then) -> None:
        """Copy the state into a free slot; digest it in the background."""
        slot = self._slots.free()
        assert slot is not None
        needs = {Need.seal, Need.kept} | ({Need.write} if save.disk else set())
        self._slots.held[save.serial] = Held(
            slot=slot, moment=save.moment, counts=save.counts, needs=needs
        )
        self._memory.fill(slot, self._holder.shards())

        def sealed(failures: list[str]) -> None:
            then(failures)
            self._slots.done(save.serial, Need.seal)

        self._lane.submit(
            f"seal {save.serial}",
            lambda: self._memory.seal(slot, save.serial, save.moment, save.counts),
            sealed,
        )

    def to_write(self, serial: int) -> tuple[list[Snapshot], Callable[[], None]]:
        """What of a slot goes to disk, as views, and what to call after it was written.

        After, and not before: a byte that changed in the slot before is still changed then, and
        what was written has a digest of its own that would hide it for good.
        """
        slot = self._slots.held[serial].slot
        pieces = ((place.name, place.start, v) for place, v in self._memory.pieces(slot))
        return own_share(pieces, self._holder.replica), lambda: self._memory.check(slot)

    def written(self, serial: int) -> None:
        """It is not read for the disk any more."""
        self._slots.done(serial, Need.write)

    def verify(self, serial: int, then: Then) -> None:
        """Compare every byte with what was sealed, and refuse NaN and Inf."""
        slot = self._slots.held[serial].slot
        self._slots.need(serial, Need.prove)

        def verified(failures: list[str]) -> None:
            self._slots.done(serial, Need.prove)
            then(failures)

        self._lane.submit(
            f"verify {serial} in memory", lambda: self._memory.check(slot, finite=True), verified
        )

    def send_abroad(self, serial: int) -> None:
        """To a peer on another node, unless the one before is still on its way."""
        mirror, abroad = self._mirror, self._abroad
        if mirror is None or abroad is None or len(abroad):
            return
        slot = self._slots.held[serial].slot
        self._slots.need(serial, Need.mirror)
        abroad.submit(
            f"mirror {serial}",
            lambda: mirror.exchange(slot, serial),
            lambda failures: self._slots.done(serial, Need.mirror),
        )

    def release(self, serial: int) -> None:
        """It does not count as a copy of its checkpoint; what is being written of it still is."""
        self._slots.done(serial, Need.kept)

    def drop(self, serial: int) -> None:
        """Give it up, for this process and for any later one on this node."""
        held = self._slots.held.get(serial)
        if held is not None:
            self._memory.invalidate(held.slot)
            self.release(serial)

    def taint(self, serial: int) -> None:
        """As :meth:`drop`, with the copies on other nodes."""
        self.drop(serial)
        if self._mirror is not None:
            self._mirror.forget(serial)

    # -- across a restart -----------------------------------------------------------------

    def inherit(
        self, incarnation: int, *, metrics_bytes: int, is_wanted: Callable[[Record], bool]
    ) -> Inherited:
        """Look for what ``incarnation`` left on every rank. Collective.

        Args:
            metrics_bytes: length of the metrics file; what was taken later is of no use.
        """
        notes, refused = self._memory.left_by(incarnation)
        rows = [[n.serial, n.step, n.cursor, n.metrics_bytes] for n in notes.values()]
        copies = self._mirror.left_by(incarnation, metrics_bytes) if self._mirror else []
        told = self._ranks.gather(
            {
                "layout": self._memory.layout.digest,
                "own": [row[:3] for row in rows if row[3] <= metrics_bytes],
                "copies": copies,
                "refused": refused,
            }
        )
        self._earlier_incarnation = incarnation
        records = []
        for found in on_every_rank(told):
            record = Record(
                serial=found.serial,
                step=found.step,
                cursor=found.cursor,
                state=State.committed,
                tier=Tier.memory,
            )
            if is_wanted(record):
                self._earlier[found.serial] = found
                records.append(record)
        serials = [row[0] for said in told for row in said["own"]]
        serials += [row[2] for said in told for row in said["copies"]]
        return Inherited(
            records=records,
            highest=max(serials, default=0),
            refused=list(dict.fromkeys(words for said in told for words in said["refused"])),
        )

    def load(self, serial: int) -> Restored:
        """Verify it, then copy it into the holder. Collective.

        Raises:
            CorruptCheckpoint: it is damaged or gone on some rank.
        """
        memory = self._memory
        if serial in self._earlier:
            self._take_over(self._earlier.pop(serial))
        else:
            slot = self._slots.held[serial].slot
            self._ranks.all_or_none("verifying a snapshot", lambda: memory.check(slot, quick=True))
        held = self._slots.held[serial]

        def copy_back() -> None:
            memory.before_update()
            memory.copy_out(held.slot, self._holder.shards())
            finish_load(self._holder, held.counts, memory.path_of(held.slot))

        self._ranks.all_or_none("loading a snapshot", copy_back)
        moment = held.moment
        return Restored(
            serial=serial,
            step=moment.step,
            cursor=moment.cursor,
            train_state=moment.train_state,
            metrics_bytes=moment.metrics_bytes,
            tier=Tier.memory,
        )

    def _take_over(self, found: Found) -> None:
        """Make an earlier incarnation's snapshot one of our own, in the first slot."""
        memory, mirror = self._memory, self._mirror
        rank, earlier = self._ranks.rank, self._earlier_incarnation

        def take() -> None:
            memory.room(0)
            if rank not in found.holders:
                memory.take_over(earlier, found.serial, 0)

        self._ranks.all_or_none("taking a snapshot over", take)
        if mirror is not None and found.holders:
            self._ranks.all_or_none(
                "fetching a snapshot from another node",
                lambda: mirror.give_back(found.holders, found.serial, earlier),
            )
        note = memory.note_of(0)
        # The lengths are those of the first rank's files.
        told = self._ranks.from_first(
            {
                "step": note.step,
                "cursor": note.cursor,
                "train_state": note.train_state,
                "metrics_bytes": note.metrics_bytes,
                "journal_lines": note.journal_lines,
            }
        )
        self._slots.add(0)
        self._slots.held[found.serial] = Held(
            slot=0, moment=Moment(**told), counts=note.update_counts, needs={Need.kept}
        )

    def close(self, *, forget: bool) -> None:
        """``forget``: nobody will come back for the snapshots."""
        if self._mirror is not None:
            self._mirror.close(forget=forget)
        self._memory.close(forget=forget)
