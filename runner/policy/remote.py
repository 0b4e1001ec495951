"""Which checkpoints an object store is to hold. No files and no network here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runner.policy.ring import Record, State, retire


def next_upload(
    records: Iterable[Record], stored: Iterable[Record], *, tried: int
) -> Record | None:
    """The newest clean checkpoint, unless it is stored, or was ``tried`` (a serial) in vain.

    Older ones are not sent after it: where the store is slower than the ring, the newest is
    what a restart wants.
    """
    clean = [record for record in records if record.state is State.clean]
    if not clean:
        return None
    newest = max(clean, key=lambda record: record.serial)
    done = max((record.serial for record in stored), default=0)
    return newest if newest.serial > max(done, tried) else None


def kept_there(stored: Sequence[Record], *, keep: int, keep_every: int) -> list[Record]:
    """What stays in the store: by the same rule as in the ring."""
    leaving = {record.serial for record in retire(stored, keep=keep, keep_every=keep_every)}
    return [record for record in stored if record.serial not in leaving]
