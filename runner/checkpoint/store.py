"""The ring's directory: how a checkpoint is named, committed, marked and removed.

    ring/000007-step-00000350/   rank-00000.bin ...  manifest.json  COMMITTED  [CLEAN|TAINTED]
    ring/writing-000008-000003/  by incarnation 3, not committed: removed at the next start

Marker last when saving, first when deleting; only committed entries count. ``COMMITTED``
holds the manifest's digest, so that a damaged manifest is noticed too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from runner.checkpoint.manifest import Manifest, read_manifest
from runner.error import CorruptCheckpoint
from runner.files import (
    file_digest,
    remove_folder,
    sync_directory,
    write_durably,
    write_json,
)
from runner.policy.ring import Record, State

MANIFEST = "manifest.json"
COMMITTED = "COMMITTED"
_MARKS = {State.clean: "CLEAN", State.tainted: "TAINTED"}
_SWEPT = "swept-"
_NAME = re.compile(r"(\d{6,})-step-(\d{8,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A committed checkpoint: its place in the ring and its manifest."""

    record: Record
    folder: Path
    manifest: Manifest

    @property
    def num_bytes(self) -> int:
        return sum(facts.num_bytes for facts in self.manifest.files.values())


class RingStore:
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
        self._check = check

    def writing_folder(self, serial: int) -> Path:
        """Where the ranks put their files of a checkpoint that is being made."""
        return self.folder / f"writing-{serial:06d}-{self._owner:06d}"

    def folder_of(self, record: Record) -> Path:
        return self.folder / f"{record.serial:06d}-step-{record.step:08d}"

    def commit(self, manifest: Manifest) -> None:
        """Publish a checkpoint whose rank files are all written and synced.

        Raises:
            OSError: nothing is published then.
        """
        writing = self.writing_folder(manifest.serial)
        write_json(writing / MANIFEST, manifest.to_json())
        record = Record(
            serial=manifest.serial,
            step=manifest.step,
            cursor=manifest.cursor,
            state=State.committed,
        )
        final = self.folder_of(record)
        # A newer incarnation moves ``writing`` away before it reads the ring: from here on
        # either this rename comes first, and it sees the checkpoint, or this one fails.
        self._check()
        writing.rename(final)
        sync_directory(self.folder)
        write_durably(final / COMMITTED, file_digest(final / MANIFEST).encode() + b"\n")

    def mark(self, record: Record, state: State) -> None:
        """Make a checkpoint's new state durable."""
        self._check()
        write_durably(self.folder_of(record) / _MARKS[state], b"")

    def remove(self, record: Record) -> None:
        """Delete a checkpoint, its marker first."""
        self._check()
        folder = self.folder_of(record)
        if folder.exists():
            (folder / COMMITTED).unlink(missing_ok=True)
            sync_directory(folder)
            remove_folder(folder)

    def sweep(self) -> list[str]:
        """Remove what never committed; returns the names. Only at start-up, on one rank."""
        self.folder.mkdir(parents=True, exist_ok=True)
        torn = [
            folder
            for folder in sorted(self.folder.iterdir())
            if folder.is_dir()
            and not (folder / COMMITTED).exists()
            and (folder.name.startswith(("writing-", _SWEPT)) or _NAME.fullmatch(folder.name))
        ]
        for folder in torn:
            # In one step, so that nobody commits a folder that is half gone.
            swept = self.folder / f"{_SWEPT}{self._owner:06d}-{folder.name.removeprefix(_SWEPT)}"
            folder.rename(swept)
            remove_folder(swept)
        return [folder.name for folder in torn if not folder.name.startswith(_SWEPT)]

    def entries(self) -> tuple[list[Entry], list[str]]:
        """Committed checkpoints by serial, and a sentence for each that cannot be read."""
        found: list[Entry] = []
        damaged: list[str] = []
        for folder in sorted(self.folder.iterdir()) if self.folder.is_dir() else []:
            if _NAME.fullmatch(folder.name) and (folder / COMMITTED).exists():
                try:
                    found.append(self.read(folder))
                except CorruptCheckpoint as error:
                    damaged.append(str(error))
        return sorted(found, key=lambda entry: entry.record.serial), damaged

    def read(self, folder: Path) -> Entry:
        """One committed checkpoint.

        Raises:
            CorruptCheckpoint: the manifest is damaged, or is another's.
        """
        manifest = read_manifest(folder / MANIFEST)
        try:
            promised = (folder / COMMITTED).read_text().strip()
            actual = file_digest(folder / MANIFEST)
        except (OSError, UnicodeDecodeError) as error:
            raise CorruptCheckpoint(f"{folder}: {error}") from None
        if promised != actual:
            raise CorruptCheckpoint(f"{folder / MANIFEST}: digest differs from {COMMITTED}")
        name = _NAME.fullmatch(folder.name)
        if name is None or (int(name[1]), int(name[2])) != (manifest.serial, manifest.step):
            raise CorruptCheckpoint(f"{folder}: holds serial {manifest.serial}: moved or renamed")
        return Entry(record=_record(folder, manifest), folder=folder, manifest=manifest)


def _record(folder: Path, manifest: Manifest) -> Record:
    state = State.committed
    for marked, name in _MARKS.items():
        if (folder / name).exists():
            state = marked
    return Record(serial=manifest.serial, step=manifest.step, cursor=manifest.cursor, state=state)


def read_rank_facts(path: Path) -> dict[str, object]:
    """What one rank says about the file it wrote.

    Raises:
        CorruptCheckpoint: it is not there or not JSON.
    """
    try:
        facts = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CorruptCheckpoint(f"{path}: {error}") from None
    assert isinstance(facts, dict)
    return facts
