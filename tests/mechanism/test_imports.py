"""What scripts ask of the runner is there: their settings here, all names by mypy over them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from runner.config.compose import compose
from scripts import gpu_check, screenshot, soak


@pytest.mark.parametrize(
    "settings",
    [soak.SETTINGS.split(), screenshot.SETTINGS.split(), gpu_check.TINY],
    ids=["soak", "screenshot", "gpu_check"],
)
def test_the_settings_of_a_script_are_settings(settings: Sequence[str]) -> None:
    compose([*settings, "out=unused"])
