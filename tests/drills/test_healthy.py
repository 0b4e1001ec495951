"""Nobody is woken for a healthy run: counted over a hundred of them, at default settings."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.run import read_lines

# Defaults, but for a model and a language that one core trains in half a minute.
HEALTHY = (
    *("model=tiny", "compute.precision=fp32", "data=python", "data.seq_len=64", "data.workers=0"),
    *("steps=400", "track.report_minutes=null", "debug.preflight=false"),
)
A_ROW = 5


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, 100, A_ROW))
def test_no_alarm_in_a_hundred_runs_of_400_steps(tmp_path: Path, first: int) -> None:
    told = tmp_path / "told"
    alert = f"track.command={json.dumps(f'cat >> {shlex.quote(str(told))}')}"
    for seed in range(first, first + A_ROW):
        out = tmp_path / str(seed)
        own = (f"out={out}", f"seed={seed}", alert)
        command = [sys.executable, "-m", "runner", *HEALTHY, *own]
        ended = warm.finished(command, timeout=800)
        assert ended.returncode == 0, ended.stderr[-3000:]
        assert json.loads((out / "summary.json").read_text())["steps"] == 400
    assert (read_lines(told) if told.exists() else []) == []
