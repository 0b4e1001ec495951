"""Fixtures that many mechanisms need; a module asks for one by ``pytestmark``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from runner.distributed.env import place_from
from runner.distributed.rendezvous import end_group, start_group
from runner.startup.shared_memory import MEMORY_DIR


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A process group of this process."""
    start_group(place_from({}), torch.device("cpu"), timeout_seconds=60)
    yield
    end_group()


@pytest.fixture
def node_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots lie under the test's own folder."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv(MEMORY_DIR, str(folder))
