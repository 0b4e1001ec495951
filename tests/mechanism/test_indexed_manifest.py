"""Runs and indexes, which say where the pieces of a checkpoint lie."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.checkpoint.disk import directory
from runner.checkpoint.disk.directory import CheckpointDirectory, Entry
from runner.checkpoint.disk.shards import Snapshot, collect_indexes, files_needed, own_share, stamps
from runner.checkpoint.manifest import PieceRun, check_coverage, compress, data_name, index_name
from runner.system.error import CheckpointError, CorruptCheckpoint
from tests.mechanism import test_ring_on_disk as on_disk
from tests.mechanism.test_ring_on_disk import Tensors, only, rewrite, sound, whole
from tests.stored import read_range


def evenly(values: Tensors, shards: int, replicas: int) -> list[list[Snapshot]]:
    """As FSDP2 deals rows out, and replicas each write their part; by rank."""
    dealt = []
    for rank in range(shards * replicas):
        replica, shard = divmod(rank, shards)
        pieces = []
        for name, tensor in values.items():
            rows = -(-tensor.shape[0] // shards)
            part = tensor[shard * rows : (shard + 1) * rows].reshape(-1)
            row = math.prod(tensor.shape[1:])
            pieces.append((name, min(tensor.shape[0], shard * rows) * row, part))
        dealt.append(own_share(pieces, (replica, replicas)))
    return dealt


def write(ring: Path, values: Tensors, dealt: Sequence[Sequence[Snapshot]]) -> Entry:
    on_disk.write(ring, values, dealt=dealt)
    return only(ring)


@pytest.mark.parametrize(
    ("shards", "replicas"), [(1, 1), (1, 7), (7, 1), (4, 4), (3, 5), (64, 1), (8, 8)]
)
def test_even_shards_need_few_runs(tmp_path: Path, shards: int, replicas: int) -> None:
    values = {"param/a": torch.randn(50, 3), "param/b": torch.randn(101), "param/c": torch.ones(2)}
    entry = write(tmp_path / "ring", values, evenly(values, shards, replicas))
    sound(entry)
    for name, tensor in values.items():
        assert torch.equal(whole(entry, name), tensor)
        assert len(entry.manifest.runs[name]) <= 6
    layout, files = collect_indexes(entry.folder, list(values), shards * replicas)
    assert files == entry.manifest.files
    again, _ = collect_indexes(entry.folder, list(values), shards * replicas, known=layout)
    assert again is layout


def test_a_rank_reads_the_indexes_that_it_needs(tmp_path: Path) -> None:
    values = {"param/a": torch.randn(64, 3)}
    entry = write(tmp_path / "ring", values, evenly(values, 16, 1))
    wanted = [("param/a", 15 * 12 - 2, 5)]
    needed = files_needed(entry, wanted)
    assert needed == {name(rank) for rank in (14, 15) for name in (data_name, index_name)}
    seen = stamps(entry, needed)
    for path in entry.folder.glob("rank-*"):
        if path.name not in needed:
            path.unlink()
    read = read_range(entry, *wanted[0], seen=seen)
    assert torch.equal(read, values["param/a"].reshape(-1)[178:183])


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 40), st.integers(1, 3)),
        max_size=40,
    )
)
def test_runs_hold_the_same_pieces(found: list[tuple[int, int, int, int]]) -> None:
    by_file = sorted(set(found), key=lambda piece: (piece[1], piece[0], piece[2]))
    columns = np.array(by_file, dtype=np.int64).reshape(-1, 4).T
    tensor, file, start, count = columns
    runs = compress(tensor=tensor, start=start, count=count, file=file)
    again = sorted(
        (number, place, at, run.count)
        for number, several in runs.items()
        for run in several
        for at, place in zip(*(column.tolist() for column in run.pieces()), strict=True)
    )
    assert again == sorted(set(found))


def test_the_size_does_not_grow_with_ranks_but_for_the_files() -> None:
    """Counts, not seconds: 64 times the ranks, the same number of runs."""
    sizes = []
    for world in (256, 16_384):
        rows = [(tensor, rank, rank * 10, 10) for rank in range(world) for tensor in range(4)]
        tensor, file, start, count = np.array(rows, dtype=np.int64).T
        found = compress(tensor=tensor, start=start, count=count, file=file)
        sizes.append(sum(map(len, found.values())))
        for runs in found.values():
            check_coverage("x", world * 10, [span for run in runs for span in run.intervals()])
    assert sizes == [4, 4]


# What is not as it was written


def indexed(ring: Path) -> Entry:
    values = {"param/a": torch.randn(8, 2), "param/b": torch.randn(8)}
    return write(ring, values, evenly(values, 4, 1))


@pytest.mark.parametrize("at", range(0, 88, 5))
def test_a_flipped_bit_in_an_index_is_found(tmp_path: Path, at: int) -> None:
    entry = indexed(tmp_path / "ring")
    path = entry.folder / index_name(2)
    data = bytearray(path.read_bytes())
    assert len(data) == 96
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match=r"rank-00002\.idx"):
        sound(entry)
    with pytest.raises(CorruptCheckpoint, match=r"rank-00002\.idx"):
        whole(entry, "param/a")


def test_the_index_of_another_rank_is_found(tmp_path: Path) -> None:
    entry = indexed(tmp_path / "ring")
    (entry.folder / index_name(1)).write_bytes((entry.folder / index_name(2)).read_bytes())
    with pytest.raises(CorruptCheckpoint, match=r"rank-00001\.idx"):
        sound(entry)
    with pytest.raises(CorruptCheckpoint, match=r"rank-00001\.idx"):
        whole(entry, "param/b")


def change_run(place: int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(tree: dict[str, Any]) -> None:
        tree["tensors"]["param/a"]["runs"][0][place] = value

    return change


LIES: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("no runs", lambda tree: tree["tensors"]["param/a"].pop("runs"), "runs"),
    ("short run", lambda tree: tree["tensors"]["param/a"]["runs"][0].pop(), "8 numbers"),
    ("a file more", change_run(1, 5), "outside of the 4 files"),
    ("no file", change_run(1, 0), "outside of the 4 files"),
    ("a hole at the front", change_run(2, 1), "missing or doubled"),
    ("the same twice", change_run(3, 0), "missing or doubled"),
    ("negative", change_run(3, -4), "step is '-4'"),
    ("without end", change_run(4, 1 << 60), "count is"),
    ("repeated", change_run(5, 2), "more pieces than the 4 files"),
    ("a file less", lambda tree: tree["files"].pop("rank-00003.idx"), "each with an index"),
    (
        "fewer bytes",
        lambda tree: tree["files"]["rank-00003.bin"].update(bytes=0),
        "bytes for tensors of",
    ),
]


@pytest.mark.parametrize(
    ("change", "words"), [lie[1:] for lie in LIES], ids=[lie[0] for lie in LIES]
)
def test_a_manifest_that_lies_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], words: str
) -> None:
    folder = indexed(tmp_path / "ring").folder
    rewrite(folder, lambda tree: (change(tree), None)[1])
    entries, damaged = CheckpointDirectory(folder.parent).entries()
    assert entries == []
    assert words in damaged[0]


def test_runs_that_are_not_what_the_index_says(tmp_path: Path) -> None:
    """Two files swapped in the layout: each piece would be another's bytes."""
    entry = indexed(tmp_path / "ring")
    swapped = [
        PieceRun(1, 1, 0, 0, 4, 1, 0, 0),
        PieceRun(0, 1, 4, 0, 4, 1, 0, 0),
        PieceRun(2, 2, 8, 4, 4, 1, 0, 0),
    ]

    def change(tree: dict[str, Any]) -> None:
        tree["tensors"]["param/a"]["runs"] = [run.to_json() for run in swapped]

    rewrite(entry.folder, change)
    [entry], _ = CheckpointDirectory(entry.folder.parent).entries()
    with pytest.raises(CorruptCheckpoint, match=r"rank-0000[01]\.idx: has not the elements"):
        whole(entry, "param/a")


def test_a_manifest_that_is_too_large_is_refused_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was written, then called damaged, and with it every checkpoint of the run."""
    monkeypatch.setattr(directory, "MOST_BYTES", 200)
    with pytest.raises(CheckpointError, match="save from fewer ranks") as caught:
        indexed(tmp_path / "ring")
    assert not isinstance(caught.value, CorruptCheckpoint)
    assert [path.name[:8] for path in (tmp_path / "ring").iterdir()] == ["writing-"]
