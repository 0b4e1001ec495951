"""Damages files of checkpoints, as a disk or a memory that gives back other bytes than it took."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol


class CheckpointFiles(Protocol):
    """Where the files lie that are damaged; a ring knows."""

    def newest(self) -> Path | None:
        """Folder of the newest committed checkpoint."""

    def snapshot_files(self) -> list[Path]:
        """This rank's files of the snapshots in memory."""


def damage_checkpoint(folder: Path | None) -> None:
    """Flip a bit in the first file of its shards; without a checkpoint nothing happens."""
    shards = sorted(folder.glob("*.bin")) if folder else []
    if shards:
        flip_bit(shards[0])


def flip_bit(path: Path) -> None:
    """In the middle of the file, and on disk when this returns."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0x10]))
        file.flush()
        os.fsync(file.fileno())
