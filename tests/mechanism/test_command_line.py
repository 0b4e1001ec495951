"""The command line as a user meets it: help, settings, and mistakes told in a line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from runner.compose import compose, fields, flat, from_yaml, packaged_configs
from runner.config import RunConfig

ROOT = Path(__file__).parents[2]


@cache
def runner(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "runner", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_help_lists_every_key_with_type_default_and_meaning() -> None:
    done = runner("--help")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    for name, spec, _ in fields(RunConfig()):
        (line,) = [line for line in lines if line.strip().startswith(f"{name}=")]
        assert line.endswith(spec.metadata["help"])
        assert "(" in line
    assert runner("-h").stdout == done.stdout


def test_help_lists_every_preset_and_exit_code() -> None:
    lines = [line.replace(",", " ").split() for line in runner("--help").stdout.splitlines()]
    for path in packaged_configs().glob("*/*.yaml"):
        assert any(line[:1] == [path.parent.name] and path.stem in line for line in lines)
    words = runner("--help").stdout
    assert all(f"{code} " in words.split("exit codes:")[1] for code in (0, 2, 3, 4, 75))


def test_cfg_prints_what_was_composed() -> None:
    overrides = ("model=tiny", "optim.lr=1e-4", "data.skip=[[1,2]]", "faults=[kill@step=3,rank=0]")
    done = runner("--cfg", "job", *overrides)
    assert (done.returncode, done.stderr) == (0, "")
    assert from_yaml(done.stdout, source=ROOT) == flat(compose(overrides))


@pytest.mark.parametrize(
    ("key", "value"), [("out", "runs/x y"), ("model.dim", "32"), ("parallel.kind", "ddp")]
)
def test_get_prints_one_value(key: str, value: str) -> None:
    done = runner("out=runs/x y", "model=tiny", "parallel=ddp", "--get", key)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{value}\n", "")


def test_own_presets(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("dim: 48\n")
    done = runner("--config-dir", str(tmp_path), "model=mine", "--get", "model.dim")
    assert (done.returncode, done.stdout) == (0, "48\n")


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["--verbose"], ["--verbose", "--help"]),
        (["--cfg", "hydra"], ["hydra", "job"]),
        (["--cfg"], ["--cfg"]),
        (["--get", "optim.lrr"], ["optim.lrr", "Did you mean optim.lr"]),
        (["--get", "out", "steps=0"], ["steps=0"]),
        (["stepz=3"], ["'stepz'", "Did you mean steps"]),
        (["=3"], ["=3"]),
        (["--multirun", "seed=1,2"], ["--multirun"]),
        (["ring", "/nowhere/at/all"], ["/nowhere/at/all"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_two(
    arguments: Sequence[str], fragments: Sequence[str]
) -> None:
    done = runner(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: ")
    assert all(fragment in done.stderr for fragment in fragments)


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["ring"], "required: run"),
        (["ring", ".", "--serial", "x"], "--serial: invalid int value: 'x'"),
        (["ring", ".", "--purge"], "unrecognized arguments: --purge"),
    ],
)
def test_a_wrong_ring_command_shows_its_usage(arguments: Sequence[str], fragment: str) -> None:
    done = runner(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: python -m runner ring")
    assert fragment in done.stderr.splitlines()[-1]


def test_only_the_first_rank_speaks() -> None:
    others = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for arguments in (["steps=0"], ["--get", "out"], ["--help"]):
        done = runner(*arguments, **others)
        assert (done.stdout, done.stderr) == ("", "")
    assert runner("steps=0", **others).returncode == 2


def test_half_a_launcher_is_told() -> None:
    done = runner("--get", "out", RANK="0")
    assert done.returncode == 2
    assert done.stderr.startswith("error: the launcher's environment is incomplete")


def test_an_out_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = runner(f"out={tmp_path}/file/run", "model=tiny", "data=synthetic", "data.workers=0")
    assert done.returncode == 2
    assert f"out={tmp_path}/file/run: cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
