"""A checkpoint holds elements of any type, on disk and in memory."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import runner.system.files
from runner.checkpoint.disk.directory import Entry
from runner.checkpoint.disk.shards import ShardReader, verify_files
from runner.checkpoint.elements import dtype_of, is_finite
from runner.checkpoint.manifest import ITEM_SIZES
from runner.checkpoint.memory.snapshot import SlotLayout
from runner.engine.protocol import Shard
from runner.system.error import CorruptCheckpoint
from tests.mechanism import test_ring_on_disk as on_disk
from tests.mechanism.test_ring_on_disk import Tensors, only, partition

TYPES = {name: dtype_of(name) for name in ITEM_SIZES}
FLOATS = [name for name, dtype in TYPES.items() if dtype.is_floating_point]
CUTS = {f"{name}/a": [1, 3, 4, 9] for name in TYPES}
RANKS = 3


def tensors() -> Tensors:
    """Of every type, of odd lengths, so that elements are not aligned."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for at, (name, dtype) in enumerate(TYPES.items()):
        drawn = torch.randint(0, 100, (5 + at % 3, 3), generator=generator)
        made[f"{name}/a"] = drawn.to(dtype) if dtype is not torch.bool else drawn > 50
    return made | {"float64/scalar": torch.tensor(math.pi, dtype=torch.float64)}


def write(ring: Path, values: Tensors) -> Entry:
    dtypes = {name: name.partition("/")[0] for name in values if "float32/" not in name}
    on_disk.write(ring, values, dealt=partition(values, CUTS, RANKS), dtypes=dtypes)
    return only(ring)


def assert_reads_back(entry: Entry, values: Tensors) -> None:
    with ShardReader(entry) as reader:
        for name, tensor in values.items():
            flat = tensor.reshape(-1)
            for start in range(len(flat)):
                read = reader.read(name, start, len(flat) - start)
                assert read.dtype == tensor.dtype, name
                assert torch.equal(read.view(torch.uint8), flat[start:].clone().view(torch.uint8))


def test_every_type_reads_back_bit_for_bit(tmp_path: Path) -> None:
    assert_reads_back(write(tmp_path / "ring", tensors()), tensors())


@pytest.mark.parametrize("block_bytes", [1, 7, 64, 1 << 20])
def test_nan_is_found_in_every_type_of_float(
    tmp_path: Path, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner.system.files, "_BLOCK_BYTES", block_bytes)
    values = tensors()
    entry = write(tmp_path / "sound", values)
    # Bytes of whole numbers that would be NaN as FP32 are none.
    verify_files(entry, sorted(entry.manifest.files), finite=True)
    for at, name in enumerate(FLOATS):
        spoilt = {n: tensor.clone() for n, tensor in values.items()}
        spoilt[f"{name}/a"].view(-1)[at] = math.nan
        entry = write(tmp_path / name, spoilt)
        verify_files(entry, sorted(entry.manifest.files), finite=False)
        with pytest.raises(CorruptCheckpoint, match="holds NaN or Inf"):
            verify_files(entry, sorted(entry.manifest.files), finite=True)


def test_whole_numbers_with_the_bits_of_nan_are_sound(tmp_path: Path) -> None:
    values = tensors()
    values["int32/a"].fill_(0x7FC00000)
    values["uint8/a"].fill_(255)
    entry = write(tmp_path / "ring", values)
    verify_files(entry, sorted(entry.manifest.files), finite=True)


def test_a_slot_in_memory_holds_every_type() -> None:
    values = tensors()
    shards = [
        Shard(name=name, shape=tuple(tensor.shape), start=0, local=tensor.view(-1))
        for name, tensor in values.items()
    ]
    layout = SlotLayout(shards)
    assert not layout.is_fp32 and layout.num_bytes % 4 == 0
    slot = torch.zeros(layout.num_bytes // 4)
    for view, shard in zip(layout.views(slot), shards, strict=True):
        view.copy_(shard.local)
    for view, shard in zip(layout.views(slot), shards, strict=True):
        assert view.dtype == shard.local.dtype and is_finite(view)
        assert torch.equal(view.view(torch.uint8), shard.local.view(torch.uint8)), shard.name
    others = [*shards[1:], Shard(name=shards[0].name, shape=(5, 3), start=0, local=torch.zeros(15))]
    assert SlotLayout(others).digest != layout.digest


def test_another_type_is_named(tmp_path: Path) -> None:
    entry = write(tmp_path / "ring", tensors())
    tree = entry.manifest.to_json()
    assert tree["tensors"]["uint8/a"]["dtype"] == "uint8"
    assert "dtype" not in tree["tensors"]["float32/a"]
