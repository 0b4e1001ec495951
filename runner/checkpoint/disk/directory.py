"""The ring's directory: how a checkpoint is named, committed, marked and removed.

    ring/000007-step-00000350/   rank-00000.bin ...  manifest.json  COMMITTED  [CLEAN|TAINTED]
    ring/writing-000008-000003/  by incarnation 3, not committed: removed at the next start

Marker last when saving, first when deleting; only committed entries count. ``COMMITTED``
holds the manifest's digest, so that a damaged manifest is noticed too.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from runner.checkpoint.manifest import MOST_BYTES, Manifest, parse_manifest
from runner.policy.retention.records import Record, State, folder_name, parse_name
from runner.system.error import (
    CheckpointError,
    CorruptCheckpoint,
    RetiredCheckpoint,
    UnreadableCheckpoint,
)
from runner.system.files import (
    file_digest,
    read_bounded,
    remove_folder,
    sync_directory,
    write_durably,
    write_json,
)

MANIFEST = "manifest.json"
COMMITTED = "COMMITTED"
CLEAN = "CLEAN"
_MARKS = {State.clean: CLEAN, State.tainted: "TAINTED"}
_SWEPT = "swept-"
_MARKER_BYTES = 4096
MOST_LISTINGS = 5  # of a ring from which a living run removes what is being read

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A committed checkpoint: its place in the ring and its manifest."""

    record: Record
    folder: Path
    manifest: Manifest

    @property
    def num_bytes(self) -> int:
        return sum(facts.num_bytes for facts in self.manifest.files.values())

    def is_committed(self) -> bool:
        """Whether it is still in the ring: its marker is removed before its files."""
        return (self.folder / COMMITTED).exists()


class CheckpointDirectory:
    """File operations on one ring. Only one rank may call those that change names.

    Args:
        owner: the incarnation; unfinished checkpoints of two of them never mix.
        check: raises when a newer incarnation owns the run; called before each change.
    """

    def __init__(
        self, folder: Path, *, owner: int = 0, check: Callable[[], None] = lambda: None
    ) -> None:
        self.folder = folder
        self._owner = owner
        self.check = check

    def writing_folder(self, serial: int) -> Path:
        """The folder for the ranks' files of a checkpoint that is being made."""
        return self.folder / f"writing-{serial:06d}-{self._owner:06d}"

    def folder_of(self, record: Record) -> Path:
        return self.folder / folder_name(record)

    def commit(self, manifest: Manifest) -> None:
        """Publish a checkpoint whose rank files are all written and synced.

        Raises:
            OSError: nothing is published then.
            CheckpointError: no reader would accept a manifest of this size; nothing is published.
        """
        path = self.writing_folder(manifest.serial) / MANIFEST
        try:
            # json's fast encoder writes no line breaks; the manifest may name thousands of files.
            write_json(path, manifest.to_json(), most_bytes=MOST_BYTES, indent=None)
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            raise CheckpointError(
                f"the manifest of {len(manifest.shapes)} tensors on {manifest.world_size} ranks is "
                f"too large ({error}); save from fewer ranks"
            ) from None
        self._publish(manifest.record(manifest.serial))

    def take_back(self, manifest: Manifest, data: bytes, state: State = State.clean) -> Record:
        """Publish a checkpoint whose files were restored and verified.

        Args:
            data: the manifest as it was written.
            state: clean or committed.
        """
        record = manifest.record(manifest.serial)
        self.remove(record)  # a damaged one of this name
        writing = self.writing_folder(manifest.serial)
        write_durably(writing / MANIFEST, data)
        if state is State.clean:
            write_durably(writing / CLEAN, b"")
        self._publish(record)
        return replace(record, state=state)

    def _publish(self, record: Record) -> None:
        writing, final = self.writing_folder(record.serial), self.folder_of(record)
        # A newer incarnation moves ``writing`` away before it reads the ring: from here on
        # either this rename comes first, and it sees the checkpoint, or this one fails.
        self.check()
        writing.rename(final)
        try:
            sync_directory(self.folder)
            write_durably(final / COMMITTED, file_digest(final / MANIFEST).encode() + b"\n")
        except OSError:
            # It is unknown whether the disk has it: a restart must not find it complete.
            _take_back(final / COMMITTED)
            with contextlib.suppress(OSError):
                remove_folder(final)
            raise

    def mark(self, record: Record, state: State) -> None:
        """Make a checkpoint's new state durable.

        Raises:
            OSError: the mark could not be written. A clean mark then does not count; a taint may
                have been written in part.
        """
        self.check()
        path = self.folder_of(record) / _MARKS[state]
        try:
            write_durably(path, b"")
        except OSError:
            if state is State.clean:
                _take_back(path)
            raise

    def remove(self, record: Record) -> None:
        """Delete a checkpoint, its marker first."""
        self.check()
        folder = self.folder_of(record)
        if folder.exists():
            (folder / COMMITTED).unlink(missing_ok=True)
            sync_directory(folder)
            remove_folder(folder)

    def sweep(self) -> list[str]:
        """Remove what never committed; returns the names. Only at start-up, on one rank.

        Raises:
            Superseded: a newer incarnation owns the run.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        torn = [
            folder
            for folder in sorted(self.folder.iterdir())
            if folder.is_dir()
            and not (folder / COMMITTED).exists()
            and (folder.name.startswith(("writing-", _SWEPT)) or parse_name(folder.name))
        ]
        self.check()  # after the listing, which has none of a newer one's
        for folder in torn:
            # Renamed first, so that no process commits a folder that is half removed.
            if folder.is_symlink():  # only the link is ours to remove
                folder.unlink()
                continue
            swept = self.folder / f"{_SWEPT}{self._owner:06d}-{folder.name.removeprefix(_SWEPT)}"
            folder.rename(swept)
            remove_folder(swept)
        return [folder.name for folder in torn if not folder.name.startswith(_SWEPT)]

    def entries(self) -> tuple[list[Entry], list[str]]:
        """Committed checkpoints by serial, and a sentence for each that cannot be read.

        Those that a living run removes meanwhile are left out.
        """
        for _ in range(MOST_LISTINGS):
            entries, damaged, is_whole = self._list()
            if is_whole:
                break
        return entries, damaged

    def _list(self) -> tuple[list[Entry], list[str], bool]:
        """:meth:`entries`, and whether none was removed meanwhile."""
        by_serial: dict[int, Entry] = {}
        damaged: list[str] = []
        is_whole, has_unmarked = True, False
        for folder in sorted(self.folder.iterdir()) if self.folder.is_dir() else []:
            if not parse_name(folder.name):
                continue
            if not (folder / COMMITTED).exists():
                has_unmarked = True
                continue
            try:
                entry = self.read(folder)
                if entry.record.serial in by_serial:
                    raise CorruptCheckpoint(f"{folder}: its number exists twice")
                by_serial[entry.record.serial] = entry
            except RetiredCheckpoint:
                is_whole = False
            except CorruptCheckpoint as error:
                damaged.append(str(error))
        # The only one that was listed may be gone, and its successor was not there yet.
        is_whole = is_whole and (bool(by_serial) or not has_unmarked)
        return [by_serial[serial] for serial in sorted(by_serial)], damaged, is_whole

    def read(self, folder: Path) -> Entry:
        """One committed checkpoint.

        Raises:
            CorruptCheckpoint: the manifest is damaged, or belongs to another checkpoint.
        """
        path = folder / MANIFEST
        if folder.is_symlink():
            raise CorruptCheckpoint(f"{folder}: is a symbolic link; a checkpoint lies in the ring")
        try:
            promised = read_bounded(folder / COMMITTED, _MARKER_BYTES).strip()
            data = read_bounded(path, MOST_BYTES)
        except OSError as error:
            raise unreadable(path, error) from None
        manifest = checked_manifest(data, promised, str(folder))
        record = manifest.record(manifest.serial)
        for state, name in _MARKS.items():  # a taint counts more
            if (folder / name).exists():
                record = replace(record, state=state)
        entry = Entry(record=record, folder=folder, manifest=manifest)
        if not entry.is_committed():  # its marks may have been gone when they were looked for
            raise _retired(folder)
        return entry


def checked_manifest(data: bytes, promised: bytes, folder: str) -> Manifest:
    """Parse the manifest in a checkpoint's folder; ``promised`` is what its marker says.

    Raises:
        CorruptCheckpoint: it is damaged, or belongs to another checkpoint.
    """
    # Digest and parse the same bytes: a second read may return others.
    if promised != hashlib.sha256(data).hexdigest().encode():
        raise CorruptCheckpoint(f"{folder}/{MANIFEST}: digest differs from {COMMITTED}")
    manifest = parse_manifest(data, f"{folder}/{MANIFEST}")
    if folder.rpartition("/")[2] != folder_name(manifest.record(manifest.serial)):
        raise CorruptCheckpoint(f"{folder}: holds serial {manifest.serial}: moved or renamed")
    return manifest


# Errors of a file that is missing, cut or replaced. Others come from the disk or the network.
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.EFBIG)


def unreadable(path: Path, error: OSError) -> CorruptCheckpoint:
    """The error to raise for a file of a checkpoint that could not be read."""
    if error.errno == errno.ENOENT and not (path.parent / COMMITTED).exists():
        return _retired(path.parent)
    kind = CorruptCheckpoint if error.errno in _DAMAGE else UnreadableCheckpoint
    return kind(f"{path}: {error}")


def _retired(folder: Path) -> RetiredCheckpoint:
    return RetiredCheckpoint(f"{folder}: its run removed it while it was being read")


def again_while_retired(read: Callable[[], T]) -> T:
    """Call a function that lists the ring and reads it; again if the run removed what it read.

    Raises:
        RetiredCheckpoint: the run removes them faster than they can be read.
    """
    for _ in range(MOST_LISTINGS - 1):
        with contextlib.suppress(RetiredCheckpoint):
            return read()
    return read()  # raises, if that happens once more


def _take_back(marker: Path) -> None:
    with contextlib.suppress(OSError):
        marker.unlink(missing_ok=True)
        sync_directory(marker.parent)
