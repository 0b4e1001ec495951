"""A run directory that a release wrote goes on; docs/stability.md promises it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from runner.system.version import __version__
from tests.releases.__main__ import ALL, FOLDER, SETTINGS, STEPS
from tests.run import finish

RELEASES = sorted(path.name for path in FOLDER.iterdir() if (path / "ring").is_dir())


def test_this_release_is_kept() -> None:
    assert __version__ in RELEASES


@pytest.mark.parametrize("version", RELEASES)
def test_a_run_of_a_release_goes_on(version: str, tmp_path: Path) -> None:
    shutil.copytree(FOLDER / version, tmp_path / "run")
    run = finish(tmp_path / "run", *SETTINGS, f"steps={ALL}", ranks=0)
    assert [line["step"] for line in run.metrics()] == [*range(1, ALL + 1)]
    assert f"resuming at step {STEPS} of {ALL}" in run.text
    whole = json.loads((FOLDER / version / "losses.json").read_text())
    # Of a run that was never stopped; another machine rounds otherwise.
    assert [line["loss"] for line in run.metrics()] == pytest.approx(whole, abs=1e-4)
