"""Whatever happens to the bytes of a ring: what is loaded is what was saved, or it is refused."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.checkpoint.disk.directory import CheckpointDirectory
from runner.checkpoint.disk.shards import files_needed, stamps, verify_files
from runner.system.error import ConfigError, CorruptCheckpoint
from tests.crash_world import World
from tests.mechanism.test_ring_on_disk import SHAPES, tensors, whole, write
from tests.stored import read_range
from tests.syscalls import Inline

SAVED = {serial: tensors(serial) for serial in (1, 2, 3)}


def make(ring: Path, *, ranks: int = 2) -> list[Path]:
    """Three checkpoints of different contents; their folders, oldest first."""
    for serial, values in SAVED.items():
        write(ring, values, serial=serial, step=10 * serial, ranks=ranks)
    return sorted(folder for folder in ring.iterdir())


def loadable(ring: Path) -> list[int]:
    """Serials that a restart would accept; each must hold what was saved under it."""
    entries, _ = CheckpointDirectory(ring).entries()
    found = []
    for entry in entries:
        try:
            names = sorted(entry.manifest.files)
            verify_files(entry, names, finite=True, seen=stamps(entry, names))
        except CorruptCheckpoint:
            continue
        for name in SHAPES:
            assert torch.equal(whole(entry, name), SAVED[entry.record.serial][name])
        found.append(entry.record.serial)
    return found


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ring = tmp_path_factory.mktemp("pristine") / "ring"
    make(ring)
    return ring


@pytest.fixture
def ring(pristine: Path, tmp_path: Path) -> Path:
    shutil.copytree(pristine, tmp_path / "ring")
    return tmp_path / "ring"


def newest(ring: Path) -> Path:
    return max(ring.iterdir())


@pytest.mark.parametrize("name", ["manifest.json", "COMMITTED", "rank-00000.bin", "rank-00001.bin"])
def test_every_byte_flipped(ring: Path, name: str) -> None:
    """One bit of each byte; all eight of them would be eight times the wait for the same."""
    path = newest(ring) / name
    data = path.read_bytes()
    for older in sorted(ring.iterdir())[:-1]:
        shutil.rmtree(older)
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << (at % 8)
        path.write_bytes(flipped)
        # White space round the marker's digest means nothing.
        if name == "COMMITTED" and bytes(flipped).strip() == data.strip():
            continue
        assert loadable(ring) == [], f"{name}: byte {at}"
    path.write_bytes(data)
    assert loadable(ring) == [3]


@settings(
    deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_zeroed_and_doubled_blocks(
    pristine: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """What disks and file systems do: a block of zeros, or another block in its place."""
    ring = tmp_path_factory.mktemp("blocks") / "ring"
    shutil.copytree(pristine, ring)
    path = newest(ring) / data.draw(st.sampled_from(["manifest.json", "rank-00000.bin"]))
    was = path.read_bytes()
    start = data.draw(st.integers(0, len(was) - 1))
    stop = data.draw(st.integers(start + 1, len(was)))
    source = data.draw(st.integers(0, len(was) - 1))
    block = (was * 2)[source : source + stop - start] if data.draw(st.booleans()) else b""
    now = was[:start] + block.ljust(stop - start, b"\0") + was[stop:]
    path.write_bytes(now)
    assert loadable(ring) == ([1, 2, 3] if now == was else [1, 2])


def swap(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def copy_over(one: Path, other: Path) -> None:
    shutil.rmtree(other)
    shutil.copytree(one, other)


MIX_UPS: dict[str, tuple[Callable[[list[Path]], object], list[int]]] = {
    "ranks' files swapped in one slot": (
        lambda f: swap(f[2] / "rank-00000.bin", f[2] / "rank-00001.bin"),
        [1, 2],
    ),
    "a rank's file swapped between slots": (
        lambda f: swap(f[1] / "rank-00000.bin", f[2] / "rank-00000.bin"),
        [1],
    ),
    "manifests swapped": (lambda f: swap(f[1] / "manifest.json", f[2] / "manifest.json"), [1]),
    "manifests and markers swapped": (
        lambda f: [swap(f[1] / n, f[2] / n) for n in ("manifest.json", "COMMITTED")],
        [1],
    ),
    "whole slots swapped": (lambda f: swap(f[1], f[2]), [1]),
    "an old slot under a new number": (
        lambda f: shutil.copytree(f[0], f[2].with_name("000009-step-00000090")),
        [1, 2, 3],
    ),
    "an old slot over the newest": (lambda f: copy_over(f[0], f[2]), [1, 2]),
    "a slot doubled under the same number": (
        lambda f: shutil.copytree(f[1], f[1].with_name("0" + f[1].name)),
        [1, 2, 3],
    ),
    "the same in other digits": (
        lambda f: shutil.copytree(f[1], f[1].with_name(f[1].name.replace("2", "\u0662"))),
        [1, 2, 3],
    ),
    "the clock set back": (
        lambda f: [os.utime(path, (0, 0)) for path in f[2].iterdir()],
        [1, 2, 3],
    ),
    "the clock set forward": (
        lambda f: [os.utime(path, (2**33, 2**33)) for path in f[0].iterdir()],
        [1, 2, 3],
    ),
}


@pytest.mark.parametrize("what", MIX_UPS)
def test_mixed_up(ring: Path, what: str) -> None:
    """A restart takes the last of the list: the order is that of the numbers, not the clock."""
    change, left = MIX_UPS[what]
    change(sorted(ring.iterdir()))
    assert loadable(ring) == left


# Links, pipes, and changes between the check and the use


@pytest.mark.parametrize("name", ["manifest.json", "COMMITTED", "rank-00000.bin"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "device"])
def test_only_plain_files_are_read(ring: Path, tmp_path: Path, name: str, kind: str) -> None:
    path = newest(ring) / name
    path.rename(tmp_path / "elsewhere")
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere")  # the very bytes, but from outside
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    assert loadable(ring) == [1, 2]


def test_a_checkpoint_that_is_a_link_is_refused(ring: Path, tmp_path: Path) -> None:
    victim = newest(ring)
    victim.rename(tmp_path / "elsewhere")
    victim.symlink_to(tmp_path / "elsewhere")
    assert loadable(ring) == [1, 2]
    _, [sentence] = CheckpointDirectory(ring).entries()
    assert str(victim) in sentence and "symbolic link" in sentence


def test_sweeping_removes_a_link_and_not_what_it_names(ring: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("keep me")
    (ring / "writing-000009-000001").symlink_to(precious)
    assert CheckpointDirectory(ring).sweep() == ["writing-000009-000001"]
    assert (precious / "file").read_text() == "keep me"
    assert not (ring / "writing-000009-000001").exists()


def replace_whole(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"\x7f" * path.stat().st_size)
    other.rename(path)


def rewrite_in_place(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\x7f" * 4)


def rewrite_and_set_the_time_back(path: Path) -> None:
    was = path.stat()
    rewrite_in_place(path)
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


@pytest.mark.parametrize("change", [replace_whole, rewrite_in_place, rewrite_and_set_the_time_back])
def test_a_change_between_check_and_use_is_noticed(
    ring: Path, change: Callable[[Path], None]
) -> None:
    entry = CheckpointDirectory(ring).read(newest(ring))
    names = sorted(files_needed(entry, [("param/a", 0, 15)]))
    seen = stamps(entry, names)
    verify_files(entry, names, finite=True, seen=seen)
    assert torch.equal(read_range(entry, "param/a", 0, 15, seen=seen), SAVED[3]["param/a"].ravel())
    change(entry.folder / names[0])
    with pytest.raises(CorruptCheckpoint, match="was changed while it was verified and read"):
        read_range(entry, "param/a", 0, 15, seen=seen)


def test_a_change_after_the_look_and_before_the_check_is_noticed(ring: Path) -> None:
    """Sound bytes laid over sound bytes: the digest alone would not tell."""
    entry = CheckpointDirectory(ring).read(newest(ring))
    seen = stamps(entry, ["rank-00000.bin"])
    data = (entry.folder / "rank-00000.bin").read_bytes()
    (entry.folder / "rank-00000.bin").write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match="was changed"):
        verify_files(entry, ["rank-00000.bin"], finite=True, seen=seen)


@pytest.mark.parametrize(("name", "start", "count"), [("param/x", 0, 1), ("param/a", 10, 6)])
def test_elements_that_are_not_there_are_never_made_up(
    ring: Path, name: str, start: int, count: int
) -> None:
    with pytest.raises(CorruptCheckpoint, match="has no elements"):
        read_range(CheckpointDirectory(ring).read(newest(ring)), name, start, count)


# The journal


def test_a_journal_shorter_than_a_checkpoint_knows_is_refused(tmp_path: Path) -> None:
    """Its last lines cut or damaged look like a crash's torn end; the manifest knows better."""
    world = World(tmp_path / "run", lambda kind, value: None)
    world.inline = Inline()
    world.open(1)
    world.discard()
    world.train(2)
    world.save()
    world.close()
    path = tmp_path / "run" / "journal.jsonl"
    whole_file = path.read_bytes()
    for damaged_file in (b"", whole_file[:-1], whole_file[:-2] + b"?\n"):
        path.write_bytes(damaged_file)
        again = World(tmp_path / "run", lambda kind, value: None)
        again.inline = Inline()
        with pytest.raises(ConfigError, match=r"journal.jsonl: has . whole lines, but had 2 when"):
            again.open(2)
    path.write_bytes(whole_file)
    again = World(tmp_path / "run", lambda kind, value: None)
    again.inline = Inline()
    again.open(3)
    assert list(again.journal.history.ledger) == [(0, 4)]


@pytest.mark.parametrize("how", ["rollback", "mismatch"])
def test_what_was_given_up_and_is_put_back_is_not_used(tmp_path: Path, how: str) -> None:
    """A copy from before it was marked: the folder says clean or committed, the journal knows."""
    world = World(tmp_path / "run", lambda kind, value: None)
    world.inline = Inline()
    world.open(1)
    world.train(2)
    world.save()
    world.train(2)
    world.save()
    victim = max((tmp_path / "run" / "ring").iterdir())
    shutil.copytree(victim, tmp_path / "copy")
    if how == "rollback":
        world.roll_back()
    else:
        world.distrust(2)
    world.close()
    shutil.rmtree(victim, ignore_errors=True)
    shutil.copytree(tmp_path / "copy", victim)
    again = World(tmp_path / "run", lambda kind, value: None)
    again.inline = Inline()
    _, resumed = again.open(2)
    assert victim.name.startswith("000003") and again.loaded[0] == 2 and resumed.step == 2
    assert not victim.exists(), "and it is removed"
