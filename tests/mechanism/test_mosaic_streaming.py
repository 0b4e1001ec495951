"""MosaicML Streaming under Guard: poisoned, killed and resumed is told to skip, bit for bit.

Not among the test packages: it brings clients of five object stores. Tried by hand with 0.13.0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.mechanism.test_guard_loop import NAN, batches, finish, journal, same

pytestmark = pytest.mark.usefixtures("node_memory")
SIZE, NUM = 8, 60


def shards(folder: Path, bad: set[int]) -> str:
    """Rows of 60 batches, with NaN in those that are numbered."""
    streaming = pytest.importorskip("streaming")
    with streaming.MDSWriter(out=str(folder), columns={"x": "ndarray:float32:6"}) as writer:
        for number, row in enumerate(torch.cat(batches(num=NUM)).numpy()):
            values = np.array(row)
            if number in bad:
                values[0] = NAN
            writer.write({"x": values})
    return str(folder)


def loader(folder: str) -> Any:
    streaming = pytest.importorskip("streaming")
    streaming.base.util.clean_stale_shared_memory()
    data = streaming.StreamingDataset(
        local=folder, batch_size=SIZE, shuffle=True, shuffle_seed=3, num_canonical_nodes=1
    )
    return streaming.StreamingDataLoader(
        data,
        batch_size=SIZE,
        collate_fn=lambda rows: torch.from_numpy(np.stack([r["x"] for r in rows])),
    )


def test_poisoned_killed_and_resumed_is_told_to_skip(tmp_path: Path) -> None:
    clean = shards(tmp_path / "clean", set())
    order = [row.tolist() for batch in loader(clean) for row in batch]
    rows = [row.tolist() for row in torch.cat(batches(num=NUM))]
    bad = {rows.index(order[number * SIZE]) for number in (5, 30, 31, 32)}
    poisoned = shards(tmp_path / "poisoned", bad)
    end, skipped = finish(tmp_path / "a", lambda: loader(poisoned), [13, 2, 20])
    assert len(journal(tmp_path / "a", "rollback")) == 1
    assert skipped in ([(5, 6), (29, 33)], [(5, 6), (30, 33)])
    same(end, finish(tmp_path / "b", lambda: loader(clean), skip=skipped)[0])
