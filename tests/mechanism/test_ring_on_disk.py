"""Checkpoints on disk: any ranks write, any range is read back, every damage is found."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from runner.checkpoint.disk import directory as directory_module
from runner.checkpoint.disk import shards as shards_module
from runner.checkpoint.disk.directory import CheckpointDirectory, Entry
from runner.checkpoint.disk.shards import (
    RateLimit,
    ShardReader,
    Snapshot,
    collect_indexes,
    numbers,
    own_share,
    verify_files,
    write_rank_file,
)
from runner.checkpoint.disk.tier import DiskTier
from runner.checkpoint.jobs import LockstepQueue
from runner.checkpoint.manifest import data_name, is_index, parse_manifest
from runner.checkpoint.protocol import Identity
from runner.checkpoint.state_digest import state_digest
from runner.command import export as export_module
from runner.command.export import export_command
from runner.command.ring import ring_command
from runner.engine.protocol import Shard
from runner.policy.retention.records import Record, State
from runner.system.error import (
    CheckpointError,
    ConfigError,
    CorruptCheckpoint,
    RetiredCheckpoint,
    UnreadableCheckpoint,
)
from runner.system.files import file_digest, open_regular, write_durably, write_json
from tests.observed import OneRank
from tests.stored import manifest, read_range

Tensors = Mapping[str, torch.Tensor]

SHAPES: dict[str, tuple[int, ...]] = {
    "exp_avg/a": (5, 3),
    "param/a": (5, 3),
    "param/b.weight": (7,),
    "param/c": (1,),
}


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def partition(
    values: Tensors, cuts: Mapping[str, Sequence[int]], ranks: int
) -> list[list[Snapshot]]:
    """Each rank's snapshots when every tensor is cut at these elements and dealt round."""
    dealt: list[list[Snapshot]] = [[] for _ in range(ranks)]
    for name, tensor in values.items():
        flat = tensor.reshape(-1)
        bounds = [0, *sorted(set(cuts.get(name, ()))), len(flat)]
        for number, (low, high) in enumerate(pairwise(bounds)):
            if low < high:
                piece = Snapshot(name=name, start=low, values=flat[low:high])
                dealt[(number + len(name)) % ranks].append(piece)
    return dealt


def write(
    ring: Path,
    values: Tensors,
    *,
    serial: int = 1,
    step: int = 10,
    ranks: int = 2,
    cuts: Mapping[str, Sequence[int]] | None = None,
    dealt: Sequence[Sequence[Snapshot]] = (),
    dtypes: Mapping[str, str] | None = None,
) -> Record:
    """Write and commit one checkpoint, as ``ranks`` ranks would; ``dealt``: what each writes."""
    store = CheckpointDirectory(ring)
    folder = store.writing_folder(serial)
    dealt = dealt or partition(values, cuts or {}, ranks)
    ranks = len(dealt)
    for rank, snapshots in enumerate(dealt):
        write_rank_file(folder, rank, snapshots, numbers(list(values)))
    layout, files = collect_indexes(folder, list(values), ranks, dtypes=dtypes)
    told = {"serial": serial, "step": step, "cursor": step * 32, "world_size": ranks}
    state = {"updates": step, "history": [1.5, None]}
    counts = {"a": step, "b.weight": step}
    shapes = {name: tuple(tensor.shape) for name, tensor in values.items()}
    held = {"train_state": state, "update_counts": counts, "runs": layout.runs, "files": files}
    store.commit(manifest(**told, **held, shapes=shapes, dtypes=dtypes or {}))
    return Record(serial=serial, step=step, cursor=step * 32, state=State.committed)


def only(ring: Path) -> Entry:
    entries, damaged = CheckpointDirectory(ring).entries()
    assert damaged == []
    (entry,) = entries
    return entry


def whole(entry: Entry, name: str) -> torch.Tensor:
    shape = entry.manifest.shapes[name]
    return read_range(entry, name, 0, math.prod(shape)).view(shape)


def sound(entry: Entry) -> None:
    verify_files(entry, sorted(entry.manifest.files), finite=True)


@pytest.fixture
def ring(tmp_path: Path) -> Path:
    return tmp_path / "run" / "ring"


# Written by some ranks, read by others


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(ranks=st.integers(1, 5), data=st.data())
def test_any_range_of_any_partition_reads_back(
    tmp_path_factory: pytest.TempPathFactory, ranks: int, data: st.DataObject
) -> None:
    values = tensors()
    cuts = {
        name: data.draw(st.lists(st.integers(0, math.prod(shape)), max_size=4))
        for name, shape in SHAPES.items()
    }
    ring = tmp_path_factory.mktemp("ring")
    write(ring, values, ranks=ranks, cuts=cuts)
    entry = only(ring)
    sound(entry)
    for name, tensor in values.items():
        flat = tensor.reshape(-1)
        start = data.draw(st.integers(0, len(flat)))
        count = data.draw(st.integers(0, len(flat) - start))
        assert torch.equal(read_range(entry, name, start, count), flat[start : start + count])
        assert torch.equal(whole(entry, name), tensor)
    with pytest.raises(CorruptCheckpoint, match="has no elements"):
        read_range(entry, "param/a", 0, 16)


def test_all_bit_patterns_survive(ring: Path) -> None:
    patterns = torch.tensor([0, -(2**31), 1, 0x7F800000, 0x7FC00001, -1], dtype=torch.int32)
    write(ring, {"param/a": patterns.view(torch.float32)})
    assert torch.equal(read_range(only(ring), "param/a", 0, 6).view(torch.int32), patterns)


def test_the_manifest_comes_back_as_it_went(ring: Path) -> None:
    write(ring, tensors(), serial=4, step=17)
    manifest = only(ring).manifest
    assert (manifest.serial, manifest.step, manifest.cursor) == (4, 17, 17 * 32)
    assert (manifest.world_size, manifest.metrics_bytes, manifest.journal_lines) == (2, 7, 3)
    assert manifest.train_state == {"updates": 17, "history": [1.5, None]}
    assert manifest.update_counts == {"a": 17, "b.weight": 17}
    assert manifest.shapes == SHAPES
    data = sum(facts.num_bytes for name, facts in manifest.files.items() if not is_index(name))
    assert data == 4 * sum(map(math.prod, SHAPES.values()))


def test_a_rank_without_an_index_stops_the_commit(ring: Path) -> None:
    folder = CheckpointDirectory(ring).writing_folder(1)
    write_rank_file(folder, 0, partition(tensors(), {}, 1)[0], numbers(list(SHAPES)))
    with pytest.raises(CorruptCheckpoint, match=r"rank-00001\.idx"):
        collect_indexes(folder, list(SHAPES), 2)
    with pytest.raises(FileExistsError):  # a serial is never written twice
        write_rank_file(folder, 0, [], {})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["param/a", "exp_avg/a"])
def test_what_is_not_finite_is_never_proven(ring: Path, name: str, bad: float) -> None:
    values = tensors()
    values[name][4, 2] = bad
    write(ring, values, cuts={name: [7]})
    entry = only(ring)
    verify_files(entry, sorted(entry.manifest.files), finite=False)
    with pytest.raises(CorruptCheckpoint, match=r"rank-0000\d\.bin: holds NaN or Inf"):
        sound(entry)


def test_a_rank_verifies_only_the_files_it_is_given(ring: Path) -> None:
    write(ring, tensors(), ranks=2)
    entry = only(ring)
    flip(entry.folder / "rank-00001.bin", 0)
    verify_files(entry, ["rank-00000.bin"], finite=True)
    with pytest.raises(CorruptCheckpoint, match=r"rank-00001\.bin: digest differs"):
        verify_files(entry, ["rank-00001.bin"], finite=True)


# Damage


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def is_sound(ring: Path) -> bool:
    entries, damaged = CheckpointDirectory(ring).entries()
    if damaged:
        assert entries == []
        return False
    if not entries:
        return False
    try:
        sound(entries[0])
    except CorruptCheckpoint:
        return False
    return True


@pytest.mark.parametrize("file", ["rank-00000.bin", "rank-00001.idx", "manifest.json", "COMMITTED"])
@pytest.mark.parametrize("harm", ["missing", "empty", "short", "long", "folder"])
def test_every_harm_to_every_file_is_found(ring: Path, file: str, harm: str) -> None:
    write(ring, tensors())
    path = only(ring).folder / file
    data = path.read_bytes()
    path.unlink()
    if harm == "folder":
        path.mkdir()
    elif harm != "missing":
        path.write_bytes({"empty": b"", "short": data[:-4], "long": data + b"more"}[harm])
    assert not is_sound(ring)


@pytest.mark.parametrize("size", [0, 8, 11])
def test_a_short_file_is_noticed_while_reading(ring: Path, size: int) -> None:
    write(ring, tensors(), ranks=1)
    entry = only(ring)
    os.truncate(entry.folder / "rank-00000.bin", size)
    with pytest.raises(CorruptCheckpoint, match=r"rank-00000\.bin"):
        whole(entry, "param/a")


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest and its digest alike: only its own checks can notice."""
    tree = json.loads((folder / "manifest.json").read_text())
    change(tree)
    write_json(folder / "manifest.json", tree)
    write_durably(folder / "COMMITTED", file_digest(folder / "manifest.json").encode())


def rename_file(name: str) -> Callable[[dict[str, Any]], None]:
    def change(tree: dict[str, Any]) -> None:
        tree["files"][name] = tree["files"].pop("rank-00000.bin")

    return change


LIES: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("other format", lambda tree: tree.update(format="zip"), "format zip"),
    ("older version", lambda tree: tree.update(version=1), "version 1"),
    ("newer version", lambda tree: tree.update(version=99), "version 99"),
    ("no step", lambda tree: tree.pop("step"), "step"),
    ("step without end", lambda tree: tree.update(step="1e999"), "1e999"),
    ("step is a word", lambda tree: tree.update(step="soon"), "soon"),
    ("tensors is a list", lambda tree: tree.update(tensors=[]), "Error"),
    ("other shape", lambda tree: tree["tensors"]["param/a"].update(shape=[5, 4]), "15 of 20"),
    ("negative shape", lambda tree: tree["tensors"]["param/a"].update(shape=[-5, -3]), "'-5'"),
    ("a number as text", lambda tree: tree.update(cursor="3"), "cursor is '3'"),
    ("a fraction", lambda tree: tree.update(cursor=3.5), "cursor is '3.5'"),
    ("true for one", lambda tree: tree.update(world_size=True), "world_size is 'True'"),
    ("half an element", lambda tree: tree["files"]["rank-00000.bin"].update(bytes=61), "61 bytes"),
    (
        "a product without end",
        lambda tree: tree["tensors"]["param/a"].update(shape=[2**62] * 100_000),
        "dimensions",
    ),
    ("path above", rename_file("../rank-00000.bin"), "../rank-00000.bin"),
    ("absolute path", rename_file("/etc/passwd"), "/etc/passwd"),
    ("path with a newline", rename_file("rank-00000.bin\n"), "file name"),
    ("manifest is no object", lambda tree: tree.clear(), "format"),
]


@pytest.mark.parametrize(
    ("change", "words"), [lie[1:] for lie in LIES], ids=[lie[0] for lie in LIES]
)
def test_a_manifest_that_lies_is_refused(
    ring: Path, change: Callable[[dict[str, Any]], Any], words: str
) -> None:
    write(ring, tensors(), cuts={"param/a": [4, 9]})
    folder = only(ring).folder
    rewrite(folder, lambda tree: None)
    assert is_sound(ring)  # the rewriting itself harms nothing
    rewrite(folder, lambda tree: (change(tree), None)[1])
    entries, damaged = CheckpointDirectory(ring).entries()
    assert entries == []
    assert str(folder / "manifest.json") in damaged[0]
    assert words in damaged[0]


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"null", b'"x"', b'{"format":', b"[" * 100_000, b"\xff\xfe"]
)
def test_a_manifest_that_is_no_object_is_refused(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"manifest\.json"):
        parse_manifest(text, tmp_path / "manifest.json")


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN"])
def test_a_number_that_is_none_is_refused(ring: Path, number: str) -> None:
    write(ring, tensors())
    folder = only(ring).folder
    text = (folder / "manifest.json").read_text()
    changed = text.replace('"step": 10', f'"step": {number}')
    with pytest.raises(CorruptCheckpoint, match=r"manifest\.json"):
        parse_manifest(changed.encode(), folder / "manifest.json")


# The folder


def test_order_is_by_serial(ring: Path) -> None:
    # After a rollback steps repeat; names of many digits sort wrongly; clocks lie.
    for serial, step in [(1_000_000, 5), (999_999, 90), (3, 40), (2, 50)]:
        write(ring, tensors(), serial=serial, step=step)
    entries, damaged = CheckpointDirectory(ring).entries()
    assert damaged == []
    assert [entry.record.serial for entry in entries] == [2, 3, 999_999, 1_000_000]


def test_sweep_removes_only_what_never_committed(ring: Path) -> None:
    store = CheckpointDirectory(ring)
    for serial in (1, 2):
        write(ring, tensors(), serial=serial, step=10 * serial)
    (ring / "000002-step-00000020" / "COMMITTED").unlink()
    write_rank_file(store.writing_folder(3), 0, [], {})
    (ring / "notes").mkdir()
    (ring / "writing-down.txt").touch()
    assert store.sweep() == ["000002-step-00000020", "writing-000003-000000"]
    left = ["000001-step-00000010", "notes", "writing-down.txt"]
    assert sorted(path.name for path in ring.iterdir()) == left
    assert store.sweep() == []


def test_marks_outlive_the_process_and_tainted_wins(ring: Path) -> None:
    record = write(ring, tensors())
    states = [only(ring).record.state]
    for state in (State.clean, State.tainted):
        CheckpointDirectory(ring).mark(record, state)
        states.append(only(ring).record.state)
    assert states == [State.committed, State.clean, State.tainted]
    assert only(ring).record == replace(record, state=State.tainted)
    sound(only(ring))


def test_remove_takes_one_and_twice_is_once(ring: Path) -> None:
    records = [write(ring, tensors(), serial=serial, step=serial) for serial in (1, 2)]
    for _ in range(2):
        CheckpointDirectory(ring).remove(records[0])
        assert only(ring).record == records[1]


@pytest.mark.parametrize("replicas", [1, 2, 3, 9])
def test_replicas_write_each_element_once(replicas: int) -> None:
    """Also where there are more of them than a tensor has elements."""
    whole = {"a": torch.arange(7.0), "b": torch.arange(1.0), "c": torch.empty(0)}
    pieces = [(name, 100, values) for name, values in whole.items()]
    for name, values in whole.items():
        parts = [p for r in range(replicas) for p in own_share(pieces, (r, replicas))]
        parts = [part for part in parts if part.name == name]
        assert all(len(part.values) for part in parts), "a file holds no empty piece"
        assert torch.equal(torch.cat([torch.empty(0), *(p.values for p in parts)]), values)
        ends = [100, *(part.start + len(part.values) for part in parts)]
        assert [part.start for part in parts] == ends[:-1]


class Copy:
    """Copy number ``index`` of ``count`` of a state, which is filled with NaN."""

    def __init__(self, index: int, count: int) -> None:
        self.replica = index, count
        self.parts = {name: torch.full(shape, math.nan) for name, shape in SHAPES.items()}
        self.called: list[str] = []

    def shards(self) -> list[Shard]:
        return [
            Shard(name=name, shape=tuple(part.shape), start=0, local=part.view(-1))
            for name, part in self.parts.items()
        ]

    def update_counts(self) -> dict[str, int]:
        return {"a": 0}

    def complete_copies(self) -> None:
        self.called.append("complete")

    def finish_load(self, counts: Mapping[str, int]) -> None:
        self.called.append("finish")


@pytest.mark.parametrize("count", [1, 3])
def test_copies_read_each_element_once(
    ring: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Of many copies each would read the whole state from a disk that all share."""
    pieces = [(name, 0, tensor.view(-1)) for name, tensor in tensors().items()]
    record = write(ring, tensors(), dealt=[own_share(pieces, (n, count)) for n in range(count)])
    opened: list[set[str]] = []

    def noted(path: Path) -> BinaryIO:
        opened[-1].add(path.name)
        return open_regular(path)

    monkeypatch.setattr(shards_module, "open_regular", noted)
    copies = [Copy(index, count) for index in range(count)]
    for one in copies:
        opened.append(set())
        ranks = OneRank()
        ranks.rank, ranks.world_size = one.replica
        tier = DiskTier(
            CheckpointDirectory(ring), one, ranks, Identity(config_digest="", data_fingerprint=""),
            LockstepQueue(ranks.gather), RateLimit(), before_write=lambda step: None,
        )  # fmt: skip
        tier.load(record, before_copy=lambda: None)
        assert one.called == ["complete", "finish"]
    for name, tensor in tensors().items():
        read = torch.stack([one.parts[name] for one in copies])
        assert (read.isfinite().sum(0) == 1).all() and torch.equal(read.nansum(0), tensor)
    assert [len(names & {data_name(n) for n in range(count)}) for names in opened] == [1] * count


@contextlib.contextmanager
def a_failing_sync(monkeypatch: pytest.MonkeyPatch, number: int) -> Iterator[threading.Event]:
    """The fsync with this number, from 0, fails with EIO; the event says that it has."""
    failed, real, numbers = threading.Event(), os.fsync, count()

    def fsync(descriptor: int) -> None:
        if next(numbers) == number:
            failed.set()
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield failed


@pytest.mark.parametrize("number", range(8))
def test_a_sync_that_fails_leaves_nothing_to_trust(
    ring: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Whichever it is of a commit's and a mark's; the next save is not in its way."""
    write(ring, tensors(), serial=1, step=10)
    with a_failing_sync(monkeypatch, number) as failed:
        try:
            write(ring, tensors(), serial=2, step=20, ranks=1)
            CheckpointDirectory(ring).mark(
                CheckpointDirectory(ring).entries()[0][1].record, State.clean
            )
        except OSError as error:
            assert str(ring) in str(error), "names no file"
    CheckpointDirectory(ring).sweep()
    entries, damaged = CheckpointDirectory(ring).entries()
    assert damaged == [] and failed.is_set()
    assert [entry.record.serial for entry in entries] == [1]
    write(ring, tensors(), serial=3, step=20)
    assert [entry.record.serial for entry in CheckpointDirectory(ring).entries()[0]] == [1, 3]


@pytest.mark.parametrize("number", range(2))
def test_a_mark_that_fails_is_no_mark(
    ring: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    record = write(ring, tensors())
    with a_failing_sync(monkeypatch, number), pytest.raises(OSError, match=r"CLEAN|000001-step"):
        CheckpointDirectory(ring).mark(record, State.clean)
    assert only(ring).record.state is State.committed


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.EIO, UnreadableCheckpoint), (errno.ESTALE, UnreadableCheckpoint),
     (errno.ENOENT, CorruptCheckpoint), (errno.ELOOP, CorruptCheckpoint)],
)  # fmt: skip
def test_what_the_disk_refuses_is_not_called_damaged(
    ring: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[CorruptCheckpoint]
) -> None:
    write(ring, tensors())
    entry = only(ring)

    def refuse(*arguments: Any, **named: Any) -> None:
        raise OSError(number, os.strerror(number), "a file")

    monkeypatch.setattr("runner.checkpoint.disk.directory.read_bounded", refuse)
    monkeypatch.setattr("runner.checkpoint.disk.shards.open_regular", refuse)
    for work in (lambda: CheckpointDirectory(ring).read(entry.folder), lambda: sound(entry)):
        with pytest.raises(CorruptCheckpoint) as caught:
            work()
        assert type(caught.value) is kind


# The command


def columns(text: str) -> list[list[str]]:
    """Cells of the table's rows that begin with a number."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    return [row for row in rows if row and row[0].isdigit()]


def test_the_command_lists(ring: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(ring, tensors(), serial=1, step=10)
    CheckpointDirectory(ring).mark(write(ring, tensors(), serial=2, step=20, ranks=3), State.clean)
    for path in (ring, ring.parent):
        assert ring_command([str(path)]) == 0
        assert columns(capsys.readouterr().out) == [
            ["1", "10", "320", "committed", "2", "344 B", "not now"],
            ["2", "20", "640", "clean", "3", "400 B", "not now"],
        ]


def test_the_command_verifies(ring: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for serial in (1, 2):
        write(ring, tensors(), serial=serial, step=10 * serial)
    assert ring_command([str(ring), "--verify"]) == 0
    assert [row[-1] for row in columns(capsys.readouterr().out)] == ["every byte"] * 2
    flip(ring / "000001-step-00000010" / "rank-00000.bin", 3)
    assert ring_command([str(ring)]) == 0
    capsys.readouterr()
    assert ring_command([str(ring), "--verify"]) == 4
    told = capsys.readouterr().out
    assert [row[-1] for row in columns(told)] == ["damaged", "every byte"]
    path = ring / "000001-step-00000010" / "rank-00000.bin"
    assert f"damaged: {path}: digest differs" in told


def test_the_command_tells_of_a_damaged_manifest(
    ring: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for serial in (1, 2):
        write(ring, tensors(), serial=serial, step=10 * serial)
    flip(ring / "000001-step-00000010" / "manifest.json", 3)
    assert ring_command([str(ring)]) == 4
    told = capsys.readouterr().out
    assert "damaged: " in told and "000001-step-00000010" in told
    assert [row[0] for row in columns(told)] == ["2"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_exported_weights_are_the_values(ring: Path, tmp_path: Path, ranks: int) -> None:
    values = tensors()
    record = write(ring, values, ranks=ranks, cuts={"param/a": [2, 7], "param/b.weight": [3]})
    CheckpointDirectory(ring).mark(record, State.clean)
    assert ring_command([str(ring), "--export", str(tmp_path / "out")]) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert sorted(found) == ["a", "b.weight", "c"]
    for name, tensor in found.items():
        assert torch.equal(tensor, values[f"param/{name}"])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model.safetensors"]


@pytest.mark.parametrize(
    ("options", "serial"), [([], 2), (["--serial", "1"], 1), (["--serial", "3"], 3)]
)
def test_the_newest_clean_one_is_exported(
    ring: Path, tmp_path: Path, options: list[str], serial: int
) -> None:
    for number, state in [(1, State.clean), (2, State.clean), (3, None), (4, State.tainted)]:
        record = write(ring, tensors(number), serial=number, step=number)
        if state is not None:
            CheckpointDirectory(ring).mark(record, state)
    assert ring_command([str(ring), "--export", str(tmp_path / "out"), *options]) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["a"], tensors(serial)["param/a"])


@pytest.mark.parametrize("option", [["--serial", "9"], []])
def test_nothing_to_export_is_told(ring: Path, tmp_path: Path, option: list[str]) -> None:
    CheckpointDirectory(ring).mark(write(ring, tensors()), State.tainted)
    with pytest.raises(CheckpointError, match=r"to export; there are: 1 \(step 10, tainted\)"):
        ring_command([str(ring), "--export", str(tmp_path / "out"), *option])


@pytest.fixture
def mixed(ring: Path) -> Path:
    """Step 10 and 20 clean, 30 not proven, 40 tainted, of 50; the run's directory."""
    told = [State.clean, State.clean, None, State.tainted]
    for number, state in enumerate(told, start=1):
        record = write(ring, tensors(number), serial=number, step=10 * number)
        if state is not None:
            CheckpointDirectory(ring).mark(record, state)
    (ring.parent / "config.yaml").write_text("steps: 50\n")
    return ring.parent


def exported(folder: Path) -> tuple[torch.Tensor, dict[str, str]]:
    """One tensor and the metadata."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        return file.get_tensor("a"), file.metadata()


def test_the_newest_proven_one_is_exported_and_why_no_newer_one(
    mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export_command([str(mixed), str(tmp_path / "out")]) == 0
    first, *more = capsys.readouterr().out.splitlines()
    assert first == f"exported step 20 of 50 (clean) to {tmp_path / 'out'}"
    assert more == [
        "step 40 is not exported: tainted: the run rolled back past it, or it was found damaged",
        "step 30 is not exported: not proven: too few clean steps have followed it yet",
        "the run has not reached step 50: its newest checkpoint is of 40",
    ]
    tensor, told = exported(tmp_path / "out")
    assert torch.equal(tensor, tensors(2)["param/a"])
    counts = {"a": 20, "b.weight": 20}
    whole_state = state_digest(sorted(tensors(2).items()), counts)
    assert told == {"format": "pt", "step": "20", "state": "clean", "digest": whole_state}


def test_what_the_journal_says_of_the_last_one_is_said(
    mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = {"kind": "unproven", "step": 30, "reason": "held-out loss 9.000 > limit 2.000"}
    (mixed / "journal.jsonl").write_text(json.dumps(line) + "\n")
    assert export_command([str(mixed / "ring"), str(tmp_path / "out")]) == 0
    assert "step 30 is not exported: held-out loss 9.000 > limit" in capsys.readouterr().out


def test_a_damaged_one_is_passed_over(
    mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(mixed / "ring" / "000002-step-00000020" / "rank-00001.bin", 3)
    assert export_command([str(mixed), str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    assert told.startswith("exported step 10 of 50 (clean)")
    assert "step 20 is not exported: damaged: " in told and "digest differs" in told
    assert torch.equal(exported(tmp_path / "out")[0], tensors(1)["param/a"])


def test_an_unproven_one_is_exported_by_name_and_says_so(
    mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export_command([str(mixed), str(tmp_path / "out"), "--step", "30"]) == 0
    assert capsys.readouterr().out.startswith("exported step 30 of 50 (committed, not proven) to")
    tensor, told = exported(tmp_path / "out")
    assert torch.equal(tensor, tensors(3)["param/a"]) and told["state"] == "committed"


@pytest.mark.parametrize(
    ("step", "words"), [("40", "tainted: .*--serial 4"), ("35", "no checkpoint of step 35")]
)
def test_a_tainted_or_absent_step_is_refused(
    mixed: Path, tmp_path: Path, step: str, words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        export_command([str(mixed), str(tmp_path / "out"), "--step", step])
    assert not (tmp_path / "out").exists()


# Beside a run that goes on


def clean(ring: Path, serial: int) -> Record:
    """Each is better than the one before."""
    line = {"step": 10 * serial, "action": "apply", "eval_loss": 1 / serial}
    ring.parent.mkdir(exist_ok=True)
    with (ring.parent / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps(line) + "\n")
    record = write(ring, tensors(serial), serial=serial, step=10 * serial)
    CheckpointDirectory(ring).mark(record, State.clean)
    return record


LOOKS = {
    "verify": lambda ring, folder: ring_command([str(ring), "--verify"]),
    "list": lambda ring, folder: ring_command([str(ring)]),
    "export": lambda ring, folder: export_command([str(ring), str(folder)]),
    "best": lambda ring, folder: export_command([str(ring), str(folder), "--step", "best"]),
}


@pytest.mark.parametrize(
    ("look", "file"),
    [
        *(("verify", file) for file in ("COMMITTED", "manifest.json", "rank-00000.bin")),
        *(("export", file) for file in ("COMMITTED", "manifest.json", "rank-00001.bin")),
        ("best", "rank-00001.bin"),
        *(("list", file) for file in ("COMMITTED", "manifest.json")),
    ],
)
def test_a_checkpoint_that_is_retired_while_it_is_read_is_not_called_damaged(
    ring: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    look: str,
    file: str,
) -> None:
    first = clean(ring, 1)

    def retiring(read: Callable[..., Any]) -> Callable[..., Any]:
        def reads(path: Path, *arguments: Any, **options: Any) -> Any:
            if path.name == file and path.parent.name.startswith("000001"):
                clean(ring, 2)
                CheckpointDirectory(ring).remove(first)
            return read(path, *arguments, **options)

        return reads

    monkeypatch.setattr(directory_module, "read_bounded", retiring(directory_module.read_bounded))
    monkeypatch.setattr(shards_module, "open_regular", retiring(shards_module.open_regular))
    assert LOOKS[look](ring, tmp_path / "out") == 0
    output = capsys.readouterr().out
    assert "damaged" not in output, output
    if look in ("export", "best"):
        assert torch.equal(exported(tmp_path / "out")[0], tensors(2)["param/a"])
    else:
        assert [row[0] for row in columns(output)] == ["2"]


def test_the_only_checkpoint_is_replaced_behind_the_listing(
    ring: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = clean(ring, 1)
    listings = iter([True])
    listed = Path.iterdir

    def listing(folder: Path) -> Iterator[Path]:
        names = list(listed(folder))
        if folder == ring and next(listings, False):
            clean(ring, 2)
            CheckpointDirectory(ring).remove(former)
        return iter(names)

    monkeypatch.setattr(Path, "iterdir", listing)
    assert [entry.record.serial for entry in CheckpointDirectory(ring).entries()[0]] == [2]


def _run_on(ring: Path) -> None:
    """A run that keeps one checkpoint, for ever."""
    former = clean(ring, 1)
    for serial in count(2):
        record = clean(ring, serial)
        CheckpointDirectory(ring).remove(former)
        former = record


def test_looks_at_a_run_that_goes_on_find_no_damage(
    ring: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = multiprocessing.get_context("fork").Process(target=_run_on, args=(ring,))
    run.start()
    try:
        while not CheckpointDirectory(ring).entries()[0]:
            assert run.is_alive()
        for number in range(60):
            for look in LOOKS.values():
                try:
                    code = look(ring, tmp_path / str(number))
                except RetiredCheckpoint:  # five in a row
                    code = 0
                output = capsys.readouterr().out
                assert code == 0 and "damaged" not in output, output
    finally:
        run.kill()
        run.join()


def test_an_export_that_cannot_be_written_names_the_folder(mixed: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(ConfigError, match="out: cannot be written"):
        export_command([str(mixed), str(tmp_path / "out")])
    with pytest.raises(ConfigError, match="local checkpoints"):
        export_command(["s3://bucket/run", str(tmp_path / "out")])


def test_many_files_have_an_index_and_the_same_metadata(
    mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_module, "_SHARD_BYTES", 1)
    assert export_command([str(mixed), str(tmp_path / "out")]) == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert sorted(index["weight_map"]) == ["a", "b.weight", "c"] and len(files) == 3
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        *files,
        "model.safetensors.index.json",
    ]
    total = 4 * sum(tensor.numel() for name, tensor in tensors(2).items() if name[:6] == "param/")
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "out" / file, "pt") as one:
            assert torch.equal(one.get_tensor(name), tensors(2)[f"param/{name}"])
            assert {**one.metadata(), "total_size": total} == {"format": "pt", **index["metadata"]}
    assert index["metadata"]["step"] == "20"


def test_a_file_is_opened_once_for_all_that_is_read_of_it(
    ring: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(ring, tensors())
    entry = only(ring)
    opened: list[str] = []

    def counted(path: Path) -> BinaryIO:
        opened.append(path.name)
        return open_regular(path)

    monkeypatch.setattr(shards_module, "open_regular", counted)
    with ShardReader(entry) as reader:
        for name, whole in tensors().items():
            assert torch.equal(reader.read(name, 0, whole.numel()), whole.view(-1))
            assert torch.equal(reader.read(name, 1, whole.numel() - 1), whole.view(-1)[1:])
    data = sorted(name for name in entry.manifest.files if not is_index(name))
    assert sorted(opened) == data
    monkeypatch.setattr(shards_module, "_MOST_OPEN", 1)
    with ShardReader(entry) as reader:
        for name, whole in tensors().items():
            assert torch.equal(reader.read(name, 0, whole.numel()), whole.view(-1))
        assert len(reader._files) == 1
    assert len(opened) > 2 * len(data)


# The state's own digest


def test_the_digest_is_of_names_shapes_bytes_and_counts() -> None:
    value = torch.arange(6.0)
    told = [
        state_digest([("a", value)], {"a": 1}),
        state_digest([("b", value)], {"a": 1}),
        state_digest([("a", value.view(2, 3))], {"a": 1}),
        state_digest([("a", value + 1)], {"a": 1}),
        state_digest([("a", value)], {"a": 2}),
        state_digest([("a", torch.tensor([-0.0, 1, 2, 3, 4, 5]))], {"a": 1}),
    ]
    assert len(set(told)) == len(told)
    turned = value.view(2, 3).T.contiguous().T
    assert state_digest([("a", turned)], {"a": 1}) == told[2]
