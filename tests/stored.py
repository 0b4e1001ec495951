"""Makes and reads what a run stores or prepares in one call, as only tests need it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from runner.checkpoint.disk.directory import Entry
from runner.checkpoint.disk.shards import ShardReader, Stamp
from runner.checkpoint.manifest import Manifest
from runner.checkpoint.protocol import CheckpointMetadata
from runner.config.schema import DataConfig
from runner.data.dataset import Dataset
from runner.data.text import open_prepared, prepare_text
from runner.observe.metrics import MetricsLine


def manifest(**given: Any) -> Manifest:
    """Of an empty checkpoint, but for what is given."""
    numbers = dict.fromkeys(("serial", "step", "cursor", "world_size"), 1)
    numbers |= {"metrics_bytes": 7, "journal_lines": 3}
    parts = {name: {} for name in ("train_state", "update_counts", "shapes", "runs", "files")}
    of = {"config_digest": "c", "data_fingerprint": "d"}
    return Manifest(**{**numbers, **parts, **of, **given})


def moment(step: int, **given: Any) -> CheckpointMetadata:
    """What is saved beside the state after a step, but for what is given."""
    usual = {"cursor": step, "train_state": {}, "metrics_bytes": 0, "journal_lines": 0}
    return CheckpointMetadata(step=step, **usual | given)


def metrics_line(step: int, **given: Any) -> MetricsLine:
    """Of a clean step, but for what is given."""
    numbers = {"loss": 1.0, "grad_norm": 2.0, "lr": 0.1, "tokens": 8, "tokens_per_second": 8.0}
    usual = {"cursor": step + 1, "samples": (step, step + 1), "seconds": 1.0, **numbers}
    usual |= {"data_wait_seconds": 0.0, "verdict": "clean", "action": "apply"}
    return MetricsLine(step=step, **usual | given)


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
