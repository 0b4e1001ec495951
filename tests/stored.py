"""Reads what a run stores or prepares in one call, as only tests need it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from runner.checkpoint.disk.directory import Entry
from runner.checkpoint.disk.shards import ShardReader, Stamp
from runner.config.schema import DataConfig
from runner.data.dataset import Dataset
from runner.data.text import open_prepared, prepare_text


def read_range(
    entry: Entry, name: str, start: int, count: int, *, seen: Mapping[str, Stamp] | None = None
) -> torch.Tensor:
    """Elements ``[start, start + count)`` of a flattened tensor of a checkpoint."""
    with ShardReader(entry, seen=seen) as reader:
        return reader.read(name, start, count)


def open_text(data: DataConfig) -> Dataset:
    """Prepare and open a text corpus in this process; its cache is set."""
    place = prepare_text(data, Path(str(data.cache)), progress=lambda *_: None).place
    return open_prepared(place, data)
