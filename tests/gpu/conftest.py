"""Everything here needs a CUDA device, and says so where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device: nothing about CUDA is shown on this machine")
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(skip)
