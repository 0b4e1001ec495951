"""A line file whose disk takes nothing for a while: kept, in order, and whole lines only."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest

from runner.system import json_lines as lines_module
from runner.system.error import Superseded
from runner.system.json_lines import Backlog, LineFile, read_lines


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Disk:
    """What stands in for the system: a number of bytes that are free, and whether fsync works."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free: float = float("inf")
        self.syncs = True
        self.cuts = True
        disk, fsync = self, os.fsync
        opened = Path.open

        def limited(path: Path, mode: str = "r", *rest: Any, **named: Any) -> Any:
            file = opened(path, mode, *rest, **named)
            return _Limited(file, disk) if mode == "ab" else file

        def checked(descriptor: int) -> None:
            if not disk.syncs:
                raise full()
            fsync(descriptor)

        monkeypatch.setattr(Path, "open", limited)
        monkeypatch.setattr(os, "fsync", checked)


class _Limited:
    def __init__(self, file: Any, disk: Disk) -> None:
        self._file, self._disk = file, disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: Any) -> int:
        if self._disk.free <= 0:
            raise full()
        part = bytes(data)[: int(min(len(data), self._disk.free))]
        self._disk.free -= len(part)
        return int(self._file.write(part))

    def truncate(self, size: int) -> int:
        if not self._disk.cuts:
            raise OSError(errno.EIO, "Input/output error")
        return int(self._file.truncate(size))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def numbers(path: Path) -> list[int]:
    return [line["n"] for line in read_lines(path)[0]]


@pytest.mark.parametrize("free", [0, 1, 5, 8])
@pytest.mark.parametrize("durably", [True, False])
def test_lines_are_kept_and_written_in_order(
    tmp_path: Path, disk: Disk, free: int, durably: bool
) -> None:
    path, clock = tmp_path / "m", Clock()
    file = LineFile(path, length=0, clock=clock)
    file.append({"n": 0}, durably=durably)
    assert file.kept is None
    disk.free = free
    for number in range(1, 6):
        file.append({"n": number}, durably=durably)
        clock.now += 0.4
        kept = file.kept
        assert kept is not None and (kept.num_lines, kept.num_bytes) == (
            number,
            9 * number + 9 * (not durably),
        )
        assert kept.seconds == pytest.approx(0.4 * number) and "No space left" in kept.error
        assert str(path) in kept.error
        # Whole lines, whatever a part of one left; and where the file will end is known.
        assert path.read_bytes() == b'{"n": 0}\n' and file.num_bytes() == 9 * (number + 1)
    disk.free = float("inf")
    file.append({"n": 6}, durably=durably)  # too soon after the last try, or not
    clock.now += 1.0
    file.retry()
    assert file.kept is None and numbers(path) == list(range(7))
    assert file.sync() == path.stat().st_size == 63
    file.close()


@pytest.mark.parametrize("syncs", [True, False])
def test_what_no_fsync_vouches_for_is_written_anew(tmp_path: Path, disk: Disk, syncs: bool) -> None:
    """On a network the disk is found full only then, and the kernel drops what it had."""
    path, clock = tmp_path / "m", Clock()
    checks = 0

    def check() -> None:
        nonlocal checks
        checks += 1

    file = LineFile(path, length=0, check=check, clock=clock)
    file.append({"n": 0}, durably=True)
    file.append({"n": 1}, durably=False)
    disk.syncs = False
    assert file.sync() == 18
    path.write_bytes(b'{"n": 0}\n' + b"\0" * 9)  # the page was lost
    kept = file.kept
    assert kept is not None and kept.num_lines == 1
    inode, before = path.stat().st_ino, checks
    clock.now += 1.0
    file.append({"n": 2}, durably=False)
    assert (file.kept is None) is False and file.num_bytes() == 27
    disk.syncs = True
    clock.now += 1.0
    file.retry()
    assert file.kept is None and numbers(path) == [0, 1, 2]
    assert path.stat().st_ino != inode and checks > before


class Stale:
    """A file on NFS whose server was replaced: nothing can be done with it any more."""

    closed = False

    def __getattr__(self, name: str) -> Any:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


@pytest.mark.parametrize("durably", [True, False])
def test_a_stale_descriptor_is_given_up(tmp_path: Path, disk: Disk, durably: bool) -> None:
    path, clock = tmp_path / "m", Clock()
    file = LineFile(path, length=0, clock=clock)
    for number in range(2):
        file.append({"n": number}, durably=durably)
    file._file = Stale()  # type: ignore[assignment]
    file.append({"n": 2}, durably=durably)
    kept = file.kept
    assert kept is not None and str(path) in kept.error and "tale" in kept.error
    clock.now += 1.0
    file.retry()
    assert file.kept is None and numbers(path) == [0, 1, 2]


def test_a_new_owner_is_not_written_over(tmp_path: Path, disk: Disk) -> None:
    """The file that was to be made anew belongs to another by now."""
    path, clock = tmp_path / "m", Clock()
    owner = True

    def check() -> None:
        if not owner:
            raise Superseded("another one")

    file = LineFile(path, length=0, check=check, clock=clock)
    disk.syncs = False
    file.append({"n": 0}, durably=True)
    disk.syncs, owner = True, False
    LineFile(path, length=0).append({"n": 7}, durably=True)
    clock.now += 1.0
    with pytest.raises(Superseded):
        file.append({"n": 1}, durably=True)
    assert numbers(path) == [7]


def test_lines_without_fsync_are_not_held_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines_module, "_UNSYNCED_BYTES", 40)
    file = LineFile(tmp_path / "m", length=0)
    for number in range(100):
        file.append({"n": number}, durably=False)
        assert file._unsynced_bytes <= 50
    file.close()
    assert numbers(tmp_path / "m") == list(range(100))


@pytest.mark.parametrize("seed", range(20))
def test_no_line_is_lost_or_doubled(tmp_path: Path, disk: Disk, seed: int) -> None:
    """Whatever fails when: in the end each line is there once, and at any time a prefix."""
    dice, clock, path = random.Random(seed), Clock(), tmp_path / "m"
    file = LineFile(path, length=0, clock=clock)
    for number in range(120):
        disk.free = dice.choice([0, 3, 10, 25, float("inf")])
        disk.syncs, disk.cuts = dice.random() < 0.7, dice.random() < 0.7
        file.append({"n": number}, durably=dice.random() < 0.3)
        clock.now += dice.choice([0.1, 1.5])
        there = numbers(path)
        assert there == list(range(len(there)))
        if file.kept is None:
            assert len(there) == number + 1
    disk.free, disk.syncs, disk.cuts = float("inf"), True, True
    file.close()
    assert numbers(path) == list(range(120)) and file.kept is None
    assert path.read_bytes().endswith(b"\n")


def test_a_backlog_asks_once_when_it_has_lasted(tmp_path: Path, disk: Disk) -> None:
    clock, asked, said = Clock(), list[str](), list[str]()
    backlog = Backlog(
        patience_seconds=5.0, ask_to_stop=asked.append, from_first=str, say=said.append
    )
    backlog.add(None)
    file = LineFile(tmp_path / "metrics.jsonl", length=0, clock=clock)
    backlog.add(file)
    assert not backlog.look()
    backlog.require_written()
    disk.free = 0
    file.append({"n": 0}, durably=False)
    for _ in range(8):
        assert backlog.look() and backlog.standing() == backlog.message() != ""
        assert bool(asked) is (clock.now > 5.0)
        clock.now += 1.0
    assert len(asked) == 1 and "[Errno 28] No space left on device: " in asked[0]
    assert "track.unwritten_seconds=5" in asked[0]
    with pytest.raises(OSError, match=r"1 lines of .*metrics\.jsonl are kept in memory only"):
        backlog.require_written()
    disk.free = 100
    clock.now += 1.0
    assert not backlog.look() and backlog.standing() == ""
    backlog.require_written()
    disk.free = 0
    file.append({"n": 1}, durably=False)
    backlog.finish()
    file.close()
    backlog.finish()  # a closed one is left alone
    assert len(said) == 2 and "1 lines of" in said[0] and numbers(tmp_path / "metrics.jsonl") == [0]


def test_a_backlog_in_memory_is_bounded(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.system.json_lines._MOST_BYTES", 90)
    asked = list[str]()
    backlog = Backlog(patience_seconds=1e9, ask_to_stop=asked.append, from_first=str, say=str)
    file = LineFile(tmp_path / "m", length=0)
    backlog.add(file)
    disk.free = 0
    for number in range(12):
        file.append({"n": number}, durably=False)
        assert backlog.look() and bool(asked) is (number > 9)
