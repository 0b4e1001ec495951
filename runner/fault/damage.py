"""Damages files of checkpoints, like a disk or a memory that corrupts bytes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol


class CheckpointFiles(Protocol):
    """Where the files to damage are; a ring implements it."""

    def newest(self) -> Path | None:
        """Folder of the newest committed checkpoint."""

    def snapshot_files(self) -> list[Path]:
        """This rank's files of the snapshots in memory."""


def damage_checkpoint(folder: Path | None) -> None:
    """Flip a bit in the first shard file; does nothing without a checkpoint."""
    shards = sorted(folder.glob("*.bin")) if folder else []
    if shards:
        flip_bit(shards[0])


def flip_bit(path: Path) -> None:
    """Flip a bit in the middle of the file, and sync it."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0x10]))
        file.flush()
        os.fsync(file.fileno())
