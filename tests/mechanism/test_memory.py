"""Snapshots in shared memory: whole or not used, private, budgeted, and cleaned up."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from runner.checkpoint.disk.directory import CheckpointDirectory
from runner.checkpoint.disk.shards import RateLimit, Snapshot, write_rank_file
from runner.checkpoint.jobs import LockstepQueues
from runner.checkpoint.memory.node_dir import NodeDir, OwnerProcess
from runner.checkpoint.memory.peer_replica import ReplicaInventory, on_every_rank, peers
from runner.checkpoint.memory.snapshot import (
    Memory,
    SharedBuffer,
    SlotLayout,
    _CudaCopier,
    empty_header,
)
from runner.checkpoint.memory.tier import MemoryParts, MemoryTier
from runner.checkpoint.protocol import CheckpointMetadata, Identity
from runner.checkpoint.ring import CheckpointRing
from runner.config.schema import CheckpointConfig
from runner.distributed.env import RankEnv
from runner.engine.protocol import Shard
from runner.policy.decision.history import Incident
from runner.policy.retention.records import Record, State, Tier, rollback_targets
from runner.startup.shared_memory import MEMORY_DIR, node_needs, open_memory
from runner.system.error import ConfigError, CorruptCheckpoint
from tests.observed import OneRank

RUN = "ab" * 16
IDENTITY = Identity(config_digest="c", data_fingerprint="d")

HERE: dict[str, str | int] = {"host": "h", "boot": "b", "pid": 1, "started": "1"}


class Weights:
    """What an engine holds: two tensors, of which this rank has a part."""

    def __init__(self, fill: float = 0.0, size: int = 1000) -> None:
        self.device = torch.device("cpu")
        self.a = torch.arange(float(size)) + fill
        self.b = torch.full((5,), float(fill))
        self.count = int(fill)
        self.replica = (0, 1)

    def shards(self) -> list[Shard]:
        return [
            Shard(name="param/a", shape=(len(self.a),), start=0, local=self.a),
            Shard(name="param/b", shape=(5,), start=0, local=self.b),
        ]

    def update_counts(self) -> dict[str, int]:
        return {"a": self.count}

    def complete_copies(self) -> None:
        pass

    def finish_load(self, update_counts: Mapping[str, int]) -> None:
        self.count = update_counts["a"]

    def change(self) -> None:
        self.a += 1.0
        self.b += 1.0
        self.count += 1


def node(base: Path, run: str = RUN, out: Path | None = None, **process: str | int) -> NodeDir:
    out = base if out is None else out
    return NodeDir(base, run=run, out=out, process=HERE | process, is_alive=lives)


def lives(process: OwnerProcess) -> bool | None:
    """In these tests process 1 lives, and no other."""
    return process["pid"] == 1 if process["boot"] == "b" else None


def memory(base: Path, state: Weights, *, incarnation: int = 3, **mark: Any) -> Memory:
    """One rank's slots, its folder made."""
    folder = node(base)
    folder.open()
    layout = SlotLayout(state.shards())
    empty = empty_header(layout, incarnation=incarnation, rank=0, world_size=1, identity=IDENTITY)
    made = Memory(
        folder, layout, mark=replace(empty, **mark), num_slots=3, device=state.device, threads=2
    )
    made.open()
    return made


def moment(step: int) -> CheckpointMetadata:
    return CheckpointMetadata(
        step=step,
        cursor=step * 8,
        train_state={"updates": step, "loss": 1.5},
        metrics_bytes=step * 100,
        journal_lines=step * 2,
    )


def taken(base: Path, *, incarnation: int = 3, serial: int = 7, step: int = 20) -> Memory:
    """With one sealed snapshot in slot 0."""
    state = Weights(step)
    made = memory(base, state, incarnation=incarnation)
    made.prepare(0)
    made.fill(0, state.shards())
    made.seal(0, serial, moment(step), state.update_counts())
    return made


def later(base: Path, incarnation: int = 4, **mark: Any) -> Memory:
    return memory(base, Weights(), incarnation=incarnation, **mark)


def slot_file(base: Path, suffix: str = "bin", incarnation: int = 3) -> Path:
    return node(base).of_rank(incarnation, 0) / f"slot-0.{suffix}"


def flip(path: Path, at: int = 1234) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0x10]))


# One slot


def test_what_was_copied_comes_back(tmp_path: Path) -> None:
    state = Weights(5)
    slots = memory(tmp_path, state)
    slots.prepare(1)
    slots.fill(1, state.shards())
    kept = state.a.clone()
    state.change()
    slots.seal(1, 7, moment(20), {"a": 5})
    slots.check(1, finite=True)
    slots.check(1, quick=True)
    slots.copy_out(1, state.shards())
    assert torch.equal(state.a, kept) and torch.equal(state.b, torch.full((5,), 5.0))


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    slots = taken(tmp_path)
    size = slot_file(tmp_path).stat().st_size
    last = slots.layout.num_bytes - 1
    assert size >= last
    for at in (0, 1234, last):
        flip(slot_file(tmp_path), at)
        with pytest.raises(CorruptCheckpoint, match="damaged in memory"):
            slots.check(0)
        flip(slot_file(tmp_path), at)
    slots.check(0)


def test_nan_is_no_proof(tmp_path: Path) -> None:
    state = Weights()
    state.a[500] = torch.nan
    slots = memory(tmp_path, state)
    slots.prepare(0)
    slots.fill(0, state.shards())
    slots.seal(0, 7, moment(20), {})
    slots.check(0)
    with pytest.raises(CorruptCheckpoint, match="NaN or Inf"):
        slots.check(0, finite=True)


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    taken(tmp_path)
    for path in (tmp_path / f"holdfast-{os.geteuid()}").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_no_room_is_an_error_and_no_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"No space left on device \(8,192 bytes\)"):
        SharedBuffer.make(tmp_path / "slot", 8192)
    assert not (tmp_path / "slot").exists()


def test_a_region_is_there_page_by_page(tmp_path: Path) -> None:
    made = SharedBuffer.make(tmp_path / "slot", 1 << 22)
    assert (tmp_path / "slot").stat().st_blocks * 512 >= 1 << 22
    resident = next(
        int(line.split()[1])
        for line in Path("/proc/self/smaps")
        .read_text()
        .split(str(tmp_path / "slot"))[1]
        .split("\n")
        if line.startswith("Rss:")
    )
    assert resident >= 4096, "the first copy must not pay for the pages"
    assert len(made.values) == 1 << 20


# What an earlier process left


def test_a_later_process_takes_it_over(tmp_path: Path) -> None:
    taken(tmp_path)
    next_one, state = later(tmp_path), Weights()
    headers, refused = next_one.left_by(3)
    assert refused == [] and [(n.serial, n.step) for n in headers.values()] == [(7, 20)]
    assert headers[7].train_state == {"updates": 20, "loss": 1.5}
    next_one.adopt(3, 7, 0)
    next_one.copy_out(0, state.shards())
    assert torch.equal(state.a, Weights(20).a)
    next_one.forget_earlier()
    assert not slot_file(tmp_path).exists()
    # And the one after that finds what was taken over.
    again = memory(tmp_path, Weights(), incarnation=5)
    assert list(again.left_by(4)[0]) == [7] and again.left_by(3) == ({}, [])


def test_one_that_still_lives_scribbles_on_nothing_of_ours(tmp_path: Path) -> None:
    """P9: the older process has the old slots mapped, whatever they are called."""
    old = taken(tmp_path)
    next_one = later(tmp_path)
    next_one.adopt(3, 7, 0)
    next_one.forget_earlier()
    state = Weights(-1)
    old.fill(0, state.shards())
    with pytest.raises(FileNotFoundError):
        old.seal(0, 8, moment(30), {})
    next_one.check(0)
    assert [header.serial for header in later(tmp_path, 5).left_by(4)[0].values()] == [7]


def left_alone(base: Path, **owner: str | int) -> None:
    """Let the folder of incarnation 3 be of a process that is dead, or else as told."""
    path = slot_file(base).with_name("owner.json")
    named = json.loads(path.read_text())
    named["process"]["pid"] = 2
    path.write_text(json.dumps(named | owner))


@pytest.mark.parametrize("owner", ["dead", "alive", "in another namespace", "without links"])
def test_the_memory_of_a_dead_process_is_taken_without_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: str
) -> None:
    taken(tmp_path)
    before = slot_file(tmp_path)
    if owner != "alive":
        left_alone(tmp_path, **({"pids": "pid:[7]"} if owner == "in another namespace" else {}))
    if owner == "without links":
        monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EPERM, "not permitted")))
    next_one, state = later(tmp_path), Weights()
    used = node(tmp_path).num_bytes()
    next_one.adopt(3, 7, 0)
    is_same = before.samefile(next_one.path_of(0))
    assert is_same == (owner == "dead")
    assert node(tmp_path).num_bytes() == (used if is_same else 2 * used)
    # Should this process die now as well, the next one still finds it.
    assert list(later(tmp_path, 5).left_by(3)[0]) == [7]
    next_one.forget_earlier()
    next_one.copy_out(0, state.shards())
    assert torch.equal(state.a, Weights(20).a)
    # It is a slot like any other.
    next_one.fill(0, Weights(30).shards())
    next_one.seal(0, 8, moment(30), {})
    next_one.check(0)
    assert list(later(tmp_path, 5).left_by(4)[0]) == [8]


@pytest.mark.parametrize("left", ["never sealed", "being filled anew", "given up"])
def test_a_torn_slot_is_never_trusted(tmp_path: Path, left: str) -> None:
    state = Weights(1)
    if left == "never sealed":
        slots = memory(tmp_path, state)
        slots.prepare(0)
        slots.fill(0, state.shards())
    else:
        slots = taken(tmp_path)
        if left == "given up":
            slots.invalidate(0)
        else:
            slots.fill(0, state.shards())
    assert later(tmp_path).left_by(3) == ({}, [])


@pytest.mark.parametrize("damage", ["flipped", "short", "lost", "a link", "a pipe"])
def test_damaged_data_is_not_taken_over(tmp_path: Path, damage: str) -> None:
    taken(tmp_path)
    left_alone(tmp_path)
    path = slot_file(tmp_path)
    if damage == "flipped":
        flip(path)
    elif damage == "short":
        os.truncate(path, 2048)
    else:
        moved = path.rename(path.with_name("elsewhere"))
        if damage == "a link":
            path.symlink_to(moved)
        elif damage == "a pipe":
            os.mkfifo(path)
    next_one = later(tmp_path)
    with pytest.raises(CorruptCheckpoint):
        next_one.adopt(3, 7, 0)
    assert later(tmp_path, 5).left_by(4)[0] == {}, "no header stands for it"


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        ({"world_size": 2}, "they are of 1 ranks, and there are 2 now"),
        ({"layout": "x"}, "of another model or engine"),
        ({"config_digest": "x"}, "with other settings"),
        ({"data_fingerprint": "x"}, "on other data"),
    ],
)
def test_another_runs_snapshot_is_passed_over_in_words(
    tmp_path: Path, mark: dict[str, Any], words: str
) -> None:
    taken(tmp_path)
    found, refused = later(tmp_path, **mark).left_by(3)
    assert not found and len(refused) == 1 and words in refused[0]


@pytest.mark.parametrize("owner", ["another boot", "unreadable", "none"])
def test_what_outlived_a_power_cut_is_not_used(tmp_path: Path, owner: str) -> None:
    taken(tmp_path)
    path = slot_file(tmp_path).with_name("owner.json")
    assert later(tmp_path).left_by(3)[0]
    if owner == "another boot":
        path.write_text(path.read_text().replace('"boot": "b"', '"boot": "x"'))
    elif owner == "unreadable":
        path.write_text("[")
    else:
        path.unlink()
    assert later(tmp_path).left_by(3) == ({}, [])


def test_another_layout_has_another_digest() -> None:
    digests = {SlotLayout(Weights(size=size).shards()).digest for size in (1000, 1001)}
    one = Weights()
    moved = [replace(one.shards()[0], start=1), one.shards()[1]]
    turned = [replace(one.shards()[0], shape=(10, 100)), one.shards()[1]]
    digests |= {SlotLayout(shards).digest for shards in (moved, turned, one.shards()[::-1])}
    assert len(digests) == 5


def hostile_headers() -> Iterator[tuple[str, Callable[[bytes], bytes]]]:
    def with_value(name: str, value: Any) -> Callable[[bytes], bytes]:
        def change(data: bytes) -> bytes:
            tree = json.loads(data.partition(b"\n")[2]) | {name: value}
            text = json.dumps(tree).replace('"1e999"', "1e999").encode()
            return hashlib.sha256(text).hexdigest().encode() + b"\n" + text

        return change

    yield "empty", lambda data: b""
    yield "cut", lambda data: data[:-3]
    yield "flipped", lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:]
    yield "no digest", lambda data: data.partition(b"\n")[2]
    yield "deep", lambda data: b"[" * 100_000
    for name, value in [
        ("serial", -1),
        ("serial", 1.5),
        ("step", "20"),
        ("cursor", 1 << 70),
        ("train_state", 3),
        ("update_counts", {"a": -1}),
        ("update_counts", []),
        ("format", "other"),
        ("version", 99),
        ("num_bytes", None),
        # Its digest is right: it was taken over, and then could not be written again.
        *(("train_state", {"loss": value}) for value in (math.nan, -math.inf, "1e999")),
    ]:
        yield f"{name}={value}", with_value(name, value)


@pytest.mark.parametrize(
    "change", [pytest.param(change, id=name) for name, change in hostile_headers()]
)
def test_a_header_that_is_none_of_ours_is_refused(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    taken(tmp_path)
    path = slot_file(tmp_path, "json")
    path.write_bytes(change(path.read_bytes()))
    found, refused = later(tmp_path).left_by(3)
    assert not found and len(refused) == 1 and str(path) in refused[0]


def test_a_header_elsewhere_is_not_followed(tmp_path: Path) -> None:
    taken(tmp_path)
    path = slot_file(tmp_path, "json")
    path.symlink_to(path.rename(tmp_path / "elsewhere.json"))
    found, refused = later(tmp_path).left_by(3)
    assert not found and "slot-0.json" in refused[0]


def test_memory_that_cannot_be_page_locked_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise RuntimeError("CUDA error: out of memory\nmore of it")

    forgotten: list[object] = []
    buffer = SimpleNamespace(
        pin=refuse, forget_refusal=forgotten.append, path="slot-0.bin", num_bytes=3 << 30
    )
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    copier = object.__new__(_CudaCopier)
    copier._device, copier._pinned = torch.device("cuda", 0), []
    copier.adopt(cast(Any, buffer))
    assert "slot-0.bin: 3 GiB cannot be page-locked (CUDA error: out of memory):" in caplog.text
    assert forgotten == [torch.device("cuda", 0)] and copier._pinned == []


# The node's folder


@pytest.mark.parametrize("kind", ["readable by others", "a link", "a file"])
def test_a_folder_that_is_not_ours_alone_is_not_used(tmp_path: Path, kind: str) -> None:
    root = tmp_path / f"holdfast-{os.geteuid()}"
    if kind == "readable by others":
        root.mkdir()
        root.chmod(0o755)
    elif kind == "a link":
        (tmp_path / "theirs").mkdir(mode=0o700)
        root.symlink_to(tmp_path / "theirs")
    else:
        root.touch(mode=0o600)
    with pytest.raises(OSError, match=str(root)):
        node(tmp_path).open()


@pytest.mark.parametrize(
    ("process", "out", "age", "why"),
    [
        ({"pid": 1}, "gone", 1e9, ""),  # it lives
        ({"pid": 2}, "there", 60, ""),  # it crashed, and may come back
        ({"pid": 2}, "gone", 60, "that directory is gone"),
        ({"pid": 2, "boot": "x"}, "there", 60, "from before the last boot"),
        ({"pid": 2}, "there", 90_000, "ended more than a day ago"),
    ],
)
def test_what_nobody_comes_back_for_is_swept(
    tmp_path: Path, process: dict[str, str | int], out: str, age: float, why: str
) -> None:
    (tmp_path / "there").mkdir()
    theirs = node(tmp_path, "cd" * 16, tmp_path / out, **process)
    theirs.open()
    folder = theirs.of_rank(2, 0)
    theirs.make(folder)
    (folder / "slot-0.bin").write_bytes(b"x" * 5000)
    for path in (*theirs.folder.rglob("*"), theirs.folder):
        os.utime(path, (time.time() - age,) * 2)
    ours = node(tmp_path)
    ours.open()
    swept = ours.sweep()
    assert [gone.rpartition(": ")[2].rstrip(")") for gone in swept] == ([why] if why else [])
    assert folder.exists() is not bool(why) and ours.folder.exists()
    assert all(str(tmp_path / out) in gone for gone in swept)
    assert ours.sweep() == []


def test_sweeping_follows_no_links(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    (precious / "000001-rank-00000").mkdir(parents=True)
    ours = node(tmp_path)
    ours.open()
    (ours.folder.parent / ("ef" * 16)).symlink_to(precious)
    old = time.time() - 1e6
    os.utime(precious, (old, old))
    assert ours.sweep() == [] and (precious / "000001-rank-00000").is_dir()


def test_a_proper_end_leaves_nothing(tmp_path: Path) -> None:
    slots = taken(tmp_path)
    slots.close(forget=False)
    assert slot_file(tmp_path, "json").exists(), "after a crash it is kept"
    slots.close(forget=True)
    assert not node(tmp_path).folder.exists()


# The budget


def look(name: str, size: int, free: int) -> dict[str, Any]:
    return {"host": name.split()[0], "memory": name, "bytes": size, "free": free}


def test_a_node_is_what_its_ranks_see() -> None:
    looks = [look("a 1", 100, 1000), look("a 1", 50, 990), look("b 1", 70, 500)]
    needs = {n.name: (n.slot_bytes, n.budget_bytes) for n in node_needs(looks, None)}
    assert needs == {"a": (150, 495), "b": (70, 250)}
    two = [look("a 1", 100, 1 << 40), look("a 2", 100, 1 << 40)]
    assert [n.budget_bytes for n in node_needs(two, 2.0)] == [2 << 30] * 2, "folders apart"


def test_a_limit_above_what_is_free_is_what_is_free() -> None:
    [need] = node_needs([look("a 1", 100, 1000)], 5.0)
    assert need.budget_bytes == 1000


def opened(tmp_path: Path, **settings: Any) -> tuple[Memory | None, list[str]]:
    said: list[str] = []
    place = RankEnv(rank=0, world_size=1, local_rank=0, local_world_size=1)
    group: Any = SimpleNamespace(
        ranks=OneRank(),
        place=place,
        run_dir=SimpleNamespace(identity=lambda: RUN, out=tmp_path / "out"),
        console=SimpleNamespace(say=said.append),
    )
    made = open_memory(
        CheckpointConfig(**settings),
        group,
        Weights(),
        incarnation=1,
        identity=IDENTITY,
        timeout_seconds=60.0,
    )
    assert made.replica is None
    return made.memory, said


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(MEMORY_DIR, str(tmp_path))
    return tmp_path


def test_what_is_needed_is_told(base: Path) -> None:
    made, said = opened(base)
    assert made is not None and made.num_slots == 3
    [line] = said
    assert "every 10 steps or more, by cost, 3 slots of 3.926 KiB for the rank" in line
    assert str(base) in line
    made, said = opened(base, memory_every=5, clean_after=10, memory_slots=4)
    assert made is not None and made.num_slots == 4 and "every 5 steps, 4 slots" in said[0]


def test_it_shrinks_to_the_budget_and_says_so(base: Path) -> None:
    made, said = opened(base, memory_every=2, clean_after=10, memory_limit_gib=5 * 4020 / 2**30)
    assert made is not None and made.num_slots == 5
    assert "5 slots (for 7 there is no room)" in said[0]


def test_what_was_asked_for_and_does_not_fit_is_refused(base: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        opened(base, memory_every=10, memory_limit_gib=1e-6)
    for words in ("checkpoint.memory_every=10", "7.852 KiB", "memory_limit_gib=1e-06", "1.048 KiB"):
        assert words in str(raised.value), raised.value


def test_the_default_does_without_and_warns(base: Path) -> None:
    made, said = opened(base, memory_limit_gib=1e-6)
    assert made is None and len(said) == 1
    assert said[0].startswith("warning: no snapshots in memory: ")
    assert opened(base, memory_every=0) == (None, [])


def test_a_run_that_wants_none_clears_what_it_left(base: Path) -> None:
    made, _ = opened(base)
    assert made is not None and list(base.rglob("*-rank-*"))
    opened(base, memory_every=0)
    assert not list(base.rglob("*-rank-*"))


def test_no_shared_memory_is_no_crash(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MEMORY_DIR, str(base / "nowhere"))
    made, said = opened(base)
    assert made is None and "nowhere" in said[0]
    with pytest.raises(ConfigError, match="nowhere"):
        opened(base, memory_every=10)


# Copies on other nodes


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([[0], [1]], {0: 1, 1: 0}),
        ([[0, 1], [2, 3], [4, 5]], {0: 2, 1: 3, 2: 4, 3: 5, 4: 0, 5: 1}),
        ([[0, 1, 2], [3]], {0: 3, 1: 3, 2: 3, 3: 0}),
    ],
)
def test_a_peer_is_on_another_node(nodes: list[list[int]], expected: dict[int, int]) -> None:
    assert peers(nodes) == expected


def test_what_all_have_or_can_get_back() -> None:
    """Rank 1's node was started anew; rank 0's holds copies of it."""
    row, older = [7, 35, 1120], [5, 25, 800]
    told: list[dict[str, Any]] = [
        {"layout": "a", "own": [row, older], "copies": [[1, "b", *row], [9, "b", *row]]},
        {"layout": "b", "own": [], "copies": []},
    ]
    [found] = on_every_rank(told)
    assert (found.record.serial, found.record.step, found.record.cursor) == (7, 35, 1120)
    assert found.holders == {1: 0}
    told[0]["copies"] = [[1, "another layout", *row]]
    assert on_every_rank(told) == []
    told[1]["own"] = [older]
    assert [(f.record.serial, f.holders) for f in on_every_rank(told)] == [(5, {})]


class Agreeing(OneRank):
    """Knows whether the ranks are just agreeing on how something went."""

    is_agreeing = False

    def all_or_none(self, what: str, work: Callable[[], Any]) -> Any:
        self.is_agreeing = True
        try:
            return work()
        finally:
            self.is_agreeing = False

    all_or_none_patiently = all_or_none


@dataclass
class Peer:
    """Has the one snapshot that this rank has lost."""

    header: bytes
    values: torch.Tensor
    layout: str
    ranks: Agreeing
    has_room: bool = True
    num_sent: int = 0
    into: torch.Tensor = field(init=False)

    def left_by(self, *told: int) -> list[list[Any]]:
        return [[0, self.layout, 7, 20, 160]]

    def open_copies(self, found: ReplicaInventory, incarnation: int) -> tuple[torch.Tensor]:
        if not self.has_room:
            raise OSError("No space left on device")
        return (self.values,)

    def bring_back(self, parts: torch.Tensor) -> list[bytes]:
        assert not self.ranks.is_agreeing, "whoever fails here alone leaves the others waiting"
        self.num_sent += 1
        self.into.copy_(parts)
        return [self.header]


@pytest.mark.parametrize("fault", ["", "no room", "damaged on its way"])
def test_ranks_agree_before_and_after_a_transfer_never_in_it(tmp_path: Path, fault: str) -> None:
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
    header, values = taken(tmp_path / "other").sealed(0)
    state, ranks = Weights(), Agreeing()
    own = later(tmp_path / "own")
    peer = Peer(header, values.clone(), own.layout.digest, ranks, has_room=fault != "no room")
    peer.into = own.room(0)
    queues = LockstepQueues(ranks, count=2)
    snapshots, peer_queue = queues.queues
    tier = MemoryTier(own, (peer, peer_queue), sharded=state, ranks=ranks, queue=snapshots)  # type: ignore[arg-type]
    found, *_ = tier.inherit(3, metrics_bytes=10**6, journal_lines=99, is_wanted=lambda r: True)
    assert [record.serial for record in found] == [7]
    if fault == "damaged on its way":
        peer.values[3] += 1.0
    if fault:
        with pytest.raises((OSError, CorruptCheckpoint)):
            tier.load(7)
    else:
        assert tier.load(7).step == 20 and state.count == 20
    assert peer.num_sent == (fault != "no room")
    close(queues)


# Background work


def close(*work: LockstepQueues) -> None:
    for queue in (queue for queues in work for queue in queues.queues):
        queue.close()


def test_queues_are_told_apart_in_the_sums() -> None:
    """Three ranks: a job is over when all have said so, each queue for itself."""
    ranks: Any = SimpleNamespace(gather=lambda text: [text] * 3, world_size=3)
    world = [LockstepQueues(ranks, count=3) for _ in range(3)]
    over: list[list[str]] = [[] for _ in world]
    for rank, queues in enumerate(world):
        for queue in queues.queues:
            queue.submit(lambda: None, over[rank].append)  # type: ignore[arg-type]
    for queues in world:
        for queue in queues.queues:
            queue.wait()
    told = [queues.progress() for queues in world]
    # The third rank is late in the queue in the middle.
    late = (*told[2].counts[:2], 0.0, 0.0, *told[2].counts[4:])
    for queues in world:
        counts = zip(told[0].counts, told[1].counts, late, strict=True)
        queues.apply_progress([sum(of_ranks) for of_ranks in counts], told[0].jobs)
    assert [queue.num_jobs for queue in world[0].queues] == [0, 1, 0]
    assert all(len(seen) == 2 for seen in over)
    close(*world)


def test_a_limited_writer_takes_its_time_unless_somebody_waits(tmp_path: Path) -> None:
    piece = Snapshot(name="param/a", start=0, values=torch.arange(float(3 << 20)))
    began = time.monotonic()
    write_rank_file(tmp_path / "slow", 0, [piece], {piece.name: 0}, RateLimit(24 << 20))
    slow = time.monotonic() - began
    assert slow >= 0.45, "12 MiB at 24 MiB/s"
    hurried = RateLimit(1 << 10)  # three hours, but for the next line
    threading.Timer(0.2, hurried.hurry.set).start()
    write_rank_file(tmp_path / "hurried", 0, [piece], {piece.name: 0}, hurried)
    files = [(tmp_path / name / "rank-00000.bin").read_bytes() for name in ("slow", "hurried")]
    assert files[0] == files[1] and len(files[0]) == 12 << 20


# The ring over both tiers


@dataclass
class Rig:
    """A ring of one rank, with and without its tier in memory."""

    folder: Path
    state: Weights = field(default_factory=Weights)
    incidents: list[Incident] = field(default_factory=list)
    write_gate: threading.Event = field(default_factory=threading.Event)
    step: int = 0

    def __post_init__(self) -> None:
        self.write_gate.set()

    def ring(self, *, incarnation: int = 1, with_memory: bool = True) -> CheckpointRing:
        slots = memory(self.folder, self.state, incarnation=incarnation) if with_memory else None
        made = CheckpointRing(
            CheckpointDirectory(self.folder / "ring"),
            sharded=self.state,
            ranks=OneRank(),
            settings=CheckpointConfig(clean_after=2, keep=2),
            identity=IDENTITY,
            report=self.incidents.append,
            before_write=lambda step: self.write_gate.wait(20) and None,
            memory=MemoryParts(memory=slots),
        )
        return made

    def begun(self, steps: int = 0, **options: Any) -> CheckpointRing:
        """A ring of so many steps."""
        ring = self.ring(**options)
        ring.begin()
        self.train(ring, steps)
        return ring

    def train(self, ring: CheckpointRing, steps: int) -> None:
        """Steps; a snapshot after each odd one, one to disk after each fourth."""
        for _ in range(steps):
            ring.before_update()
            self.state.change()
            self.step += 1
            self.settle(ring)
            ring.after_step(self.step, self.step)
            if self.step % 2 or self.step % 4 == 0:
                ring.save(moment(self.step), disk=self.step % 4 == 0)
            self.settle(ring)

    def settle(self, ring: CheckpointRing) -> None:
        """What a step's agreement does, given time for the quick work."""
        limit = time.monotonic() + 20
        snapshots = ring._snapshot_queue
        while snapshots.num_jobs and time.monotonic() < limit:
            snapshots.wait(1)
            ring.apply_progress(*ring.progress())
        ring.apply_progress(*ring.progress())


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def allowed(record: Record) -> bool:
    return False


def copies(ring: CheckpointRing) -> list[tuple[int, str, str]]:
    return sorted((r.step, r.tier.value, r.state.value) for r in ring.records)


def test_both_tiers_in_one_list(rig: Rig) -> None:
    ring = rig.begun(9)
    ring.drain()
    serials = {r.serial: r.step for r in ring.records}
    assert [serials[s] for s in sorted(serials)] == sorted(serials.values()), "one counter"
    assert (4, "disk", "clean") in copies(ring) and (8, "disk", "committed") in copies(ring)
    held = {step: state for step, tier, state in copies(ring) if tier == "memory"}
    assert len(held) == 3 and {7, 8} <= held.keys() and "clean" in held.values(), copies(ring)
    assert ring.saved_step == 8
    ring.close(forget=True)
    assert rig.incidents == []


def test_a_rollback_takes_the_newest_clean_copy(rig: Rig) -> None:
    ring = rig.begun(10)
    targets = rollback_targets(ring.records, cursor=10_000, step=100)
    assert targets[0].tier is Tier.memory and targets[0].step in (7, 8), copies(ring)
    expected = Weights()
    for _ in range(targets[0].step):
        expected.change()
    restored = ring.restore(targets)
    assert (restored.tier, restored.step) == (Tier.memory, targets[0].step)
    assert torch.equal(rig.state.a, expected.a) and rig.state.count == expected.count
    assert restored.train_state["updates"] == restored.step
    ring.abandon_after(restored.serial)
    ring.drain()
    assert all(r.serial <= restored.serial for r in ring.records), "and nothing newer is left"
    rig.step = restored.step
    rig.train(ring, 4)
    assert ring.records[-1].serial > restored.serial
    ring.close()


def test_a_damaged_copy_falls_to_the_next(rig: Rig) -> None:
    ring = rig.begun()
    for _ in range(7):
        rig.train(ring, 1)
        ring.drain()
    for path in ring.snapshot_files():
        flip(path)
    restored = ring.restore(rollback_targets(ring.records, cursor=10_000, step=100))
    assert (restored.tier, restored.step) == (Tier.disk, 4), copies(ring)
    assert rig.state.count == 4
    damaged = [i for i in rig.incidents if i.kind == "checkpoint_damaged"]
    assert damaged and all("in memory" in i.reason for i in damaged)
    assert all(i.detail["tier"] == "memory" for i in damaged)
    ring.close()


def test_a_damaged_copy_is_never_proven(rig: Rig) -> None:
    ring = rig.begun(1)
    [path] = ring.snapshot_files()
    flip(path)
    rig.train(ring, 3)
    [incident] = rig.incidents
    assert incident.kind == "checkpoint_damaged" and "of step 1 in memory" in incident.reason
    assert not any(r.step == 1 for r in ring.records)
    ring.close()


def test_a_slow_disk_holds_no_snapshot_up(rig: Rig) -> None:
    ring = rig.begun()
    rig.write_gate.clear()
    rig.train(ring, 7)
    assert ring.saved_step == -1, "4 is still being written"
    held = {step: state for step, tier, state in copies(ring) if tier == "memory"}
    assert held.get(4) == "clean", "proven in memory before it is whole on disk"
    assert max(held) == 7
    rig.write_gate.set()
    ring.drain()
    assert ring.saved_step == 4
    entry = CheckpointDirectory(rig.folder / "ring").entries()[0][0]
    assert entry.manifest.update_counts == {"a": 4}, "what was written is of step 4"
    shown: list[tuple[str, int, int]] = []
    ring.show_restoring(lambda *far: shown.append(far))
    restored = ring.restore([r for r in ring.records if r.tier is Tier.disk])
    assert (restored.step, rig.state.count) == (4, 4)
    assert shown[-1][0] == "restoring" and shown[-1][1] == shown[-1][2] > 0, "compared and copied"
    assert float(rig.state.a[0]) == 4.0
    ring.close()


def test_what_changed_in_the_slot_is_not_published(rig: Rig) -> None:
    """Else the disk would hold damage with a digest that fits."""
    ring = rig.begun()
    for _ in range(7):
        rig.train(ring, 1)
        ring.drain()
    rig.write_gate.clear()
    rig.train(ring, 1)
    for path in ring.snapshot_files():
        flip(path)
    rig.write_gate.set()
    ring.drain()
    failed = [i for i in rig.incidents if i.kind == "save_failed"]
    assert [i.step for i in failed] == [8] and "damaged in memory" in failed[0].reason
    assert ring.saved_step == 4 and failed[0].decision == "go on"
    assert not list((rig.folder / "ring").glob("*00000008")), "nor is anything left of it"
    ring.close()


def test_what_was_being_written_when_the_run_went_back_comes_to_nothing(rig: Rig) -> None:
    ring = rig.begun(7)
    ring.drain()
    rig.write_gate.clear()
    rig.train(ring, 1)  # 8 is being written
    targets = rollback_targets(ring.records, cursor=10_000, step=5)
    restored = ring.restore(targets)
    ring.abandon_after(restored.serial)
    rig.write_gate.set()
    ring.drain()
    assert not any(r.step == 8 for r in ring.records)
    folders = [path.name for path in (rig.folder / "ring").iterdir()]
    assert not any(name.endswith("00000008") or name.startswith("writing") for name in folders)
    assert rig.incidents == []
    rig.step = restored.step
    rig.train(ring, 4)
    ring.drain()
    assert ring.saved_step == 8, "and the next save is its own"
    ring.close()


def test_a_restart_goes_on_from_memory(rig: Rig) -> None:
    first = rig.begun(7)
    first.drain()
    first.close()
    on_disk = [r for r in first.records if r.tier is Tier.disk]
    rig.state.a.zero_()
    again = rig.ring(incarnation=2)
    again.adopt(on_disk, next_serial=first.next_serial - 2)
    assert again.inherit(1, is_refused=allowed, metrics_bytes=700, journal_lines=99) == []
    newest = max(again.records, key=lambda r: r.serial)
    assert (newest.step, newest.tier, newest.state) == (7, Tier.memory, State.committed)
    assert again.next_serial == first.next_serial, "no serial is given out twice"
    restored = again.restore([newest])
    again.begin()
    assert restored.step == 7 and rig.state.count == 7 and float(rig.state.a[0]) == 7.0
    rig.train(again, 5)
    again.drain()
    assert again.saved_step == 12
    again.close(forget=True)
    assert rig.incidents == []


@pytest.mark.parametrize(
    ("change", "left"),
    [
        ({}, [5, 7]),
        ({"metrics_bytes": 650}, [5]),  # the file is shorter than it was at step 7
        ({"journal_lines": 13}, [5]),
        ({"is_refused": lambda record: record.step > 5}, [5]),
        ({"incarnation": 0}, []),
    ],
)
def test_what_a_restart_leaves_alone(rig: Rig, change: dict[str, Any], left: list[int]) -> None:
    first = rig.begun()
    for _ in range(7):
        rig.train(first, 1)
        first.drain()  # which snapshots are kept must not be the disk's choice
    first.close()
    again = rig.ring(incarnation=2)
    again.adopt([r for r in first.records if r.tier is Tier.disk], next_serial=first.next_serial)
    again.inherit(
        change.get("incarnation", 1),
        is_refused=change.get("is_refused", allowed),
        metrics_bytes=change.get("metrics_bytes", 10_000),
        journal_lines=change.get("journal_lines", 99),
    )
    assert [r.step for r in again.records if r.tier is Tier.memory] == left
    again.close()


def test_distrust_reaches_memory(rig: Rig) -> None:
    """A copy of the state went wrong after step 5: a restart must not find what came after."""
    ring = rig.begun(7)
    ring.distrust_after(5)
    assert all(r.step <= 5 for r in ring.records if r.tier is Tier.memory)
    ring.close()
    again = rig.ring(incarnation=2)
    again.inherit(1, is_refused=allowed, metrics_bytes=10_000, journal_lines=99)
    assert all(r.step <= 5 for r in again.records) and again.records
    again.close()


def test_no_room_for_slots_is_an_incident(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = rig.ring()

    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    ring.begin()
    rig.train(ring, 8)
    ring.drain()
    assert [i.kind for i in rig.incidents] == ["memory_short"] * 3
    assert {r.tier for r in ring.records} == {Tier.disk} and ring.saved_step == 8
    ring.close()


def test_the_folder_may_be_lost_while_it_runs(rig: Rig) -> None:
    """Somebody cleans /dev/shm: told once a snapshot, and the disk still gets its own."""
    ring = rig.begun(3)
    shutil.rmtree(node(rig.folder).folder)
    rig.train(ring, 1)
    ring.drain()
    assert [i.kind for i in rig.incidents] == ["snapshot_failed"]
    assert ring.saved_step == 4
    ring.restore([r for r in ring.records if r.tier is Tier.disk])
    assert rig.state.count == 4
    ring.close()
