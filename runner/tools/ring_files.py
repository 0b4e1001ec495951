"""The checkpoints that lie in a run's directory, from the names and sizes of their files alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runner.policy.retention.records import State, parse_name
from runner.run_dir.paths import RunDir


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """A checkpoint on disk; ``time`` is when it was committed, in seconds since the epoch."""

    serial: int
    step: int
    state: State
    num_bytes: int
    time: float


def checkpoints(run_dir: RunDir) -> list[StoredCheckpoint]:
    """The committed checkpoints on disk, in the order of their serials."""
    try:
        folders = list(run_dir.ring.iterdir())
    except OSError:
        return []
    named = [(name, folder) for folder in folders if (name := parse_name(folder.name))]
    stored = [_stored(folder, *name) for name, folder in sorted(named)]
    return [one for one in stored if one is not None]


def _stored(folder: Path, serial: int, step: int) -> StoredCheckpoint | None:
    try:
        files = {file.name: file.stat() for file in folder.iterdir()}
    except OSError:  # it was retired just now
        return None
    if "COMMITTED" not in files:
        return None
    state = State.committed
    if "TAINTED" in files:
        state = State.tainted
    elif "CLEAN" in files:
        state = State.clean
    data = [status.st_size for name, status in files.items() if name.endswith(".bin")]
    return StoredCheckpoint(
        serial=serial, step=step, state=state, num_bytes=sum(data), time=files["COMMITTED"].st_mtime
    )
