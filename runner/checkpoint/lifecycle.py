"""The life of one copy of a checkpoint, in memory or on disk: its states and transitions.

::

    saving ----> served             its probation is over before its bytes are safe
      |            |
      +-----+------+--------------> left_behind     the run goes back meanwhile
            |                            |
            v                            |
        committed -----------------+     |
          |   ^                    |     |
          v   | not noted          v     v
        proving ---> condemned --> tainted
          |   |                    ^     ^
          |   +----- damaged ------+     |
          v                              |
        clean ---------------------------+

Every state but ``condemned`` may also end in ``gone``. The table names every move that the ring
makes; :meth:`Copy.move` refuses any other. Rollbacks and retention see :attr:`Copy.record` alone.

==========================  ====================================================================
move                        when
==========================  ====================================================================
saving -> served            its probation is over before its bytes are safe
saving -> left_behind       the run goes back to an older checkpoint meanwhile
saving -> committed         every rank's bytes are safe, and it is published
saving -> gone              a rank could not seal, write or commit it
served -> left_behind       as from saving
served -> committed         as from saving; its proof begins at once
served -> gone              as from saving
left_behind -> tainted      it was published all the same: too late to cancel
left_behind -> gone         its bytes are dropped
committed -> proving        its probation is over: every byte is read back
committed -> tainted        trouble began before it, or it does not load
committed -> gone           retired, or its slot in memory is needed
proving -> clean            every byte is as it was written, and the mark is durable
proving -> committed        sound, but the mark is not durable: proven again later
proving -> tainted          damaged
proving -> condemned        the run goes back to an older checkpoint meanwhile (on disk)
proving -> gone             the same in memory, or damaged there
condemned -> tainted        its proof has ended, so that its files may go
clean -> tainted            trouble began before it, or it does not load
clean -> gone               retired, or its slot in memory is needed
tainted -> gone             retired
==========================  ====================================================================
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from runner.policy.retention.records import Record, State, Tier


class Life(Enum):
    """The states of a copy. See the module's docstring."""

    saving = "saving"
    served = "served"
    left_behind = "left behind"
    committed = "committed"
    proving = "proving"
    condemned = "condemned"
    clean = "clean"
    tainted = "tainted"
    gone = "gone"


MOVES = {
    Life.saving: {Life.served, Life.left_behind, Life.committed, Life.gone},
    Life.served: {Life.left_behind, Life.committed, Life.gone},
    Life.left_behind: {Life.tainted, Life.gone},
    Life.committed: {Life.proving, Life.tainted, Life.gone},
    Life.proving: {Life.clean, Life.committed, Life.tainted, Life.condemned, Life.gone},
    Life.condemned: {Life.tainted},
    Life.clean: {Life.tainted, Life.gone},
    Life.tainted: {Life.gone},
    Life.gone: set[Life](),
}

_BEING_SAVED = {Life.saving, Life.served, Life.left_behind}

# The record's state for each state; a copy in any other state has no record.
_RECORDED = {
    Life.committed: State.committed,
    Life.proving: State.committed,
    Life.condemned: State.tainted,
    Life.clean: State.clean,
    Life.tainted: State.tainted,
}


class Copy:
    """One copy of a checkpoint and its present state, equal on every rank.

    Args:
        record: as found at a start, or as it will be once committed.
    """

    def __init__(self, record: Record, life: Life) -> None:
        self._record = record
        self.life = life
        self.faults: list[str] = []  # found by its last proof

    @classmethod
    def found(cls, record: Record) -> Copy:
        """A copy that an earlier process left."""
        return cls(record, Life[record.state.name])

    @property
    def serial(self) -> int:
        return self._record.serial

    @property
    def tier(self) -> Tier:
        return self._record.tier

    @property
    def is_being_saved(self) -> bool:
        return self.life in _BEING_SAVED

    @property
    def is_left_behind(self) -> bool:
        """Whether the run went back to an older checkpoint while this one was being saved."""
        return self.life is Life.left_behind

    @property
    def is_being_proven(self) -> bool:
        """Whether its bytes are being read back: they must not go yet."""
        return self.life in (Life.proving, Life.condemned)

    @property
    def is_recorded(self) -> bool:
        """Whether it counts as a checkpoint: it is whole and not gone."""
        return self.life in _RECORDED

    @property
    def record(self) -> Record:
        """The record that others see; while it is being saved, the record to come."""
        return replace(self._record, state=_RECORDED.get(self.life, State.committed))

    def move(self, life: Life) -> None:
        """Move to another state."""
        assert life in MOVES[self.life], f"{self._record}: {self.life.value} -> {life.value}"
        self.life = life
