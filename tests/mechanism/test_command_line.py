"""The command line as a user meets it: help, settings, and mistakes told in a line."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from runner.__main__ import main
from runner.command import COMMANDS
from runner.config.compose import compose, documented, fields, flat, from_yaml, packaged_configs
from runner.config.schema import RunConfig
from tests import golden, warm
from tests.programs import python

ROOT = Path(__file__).parents[2]
OTHER_RANK = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


Command = Callable[..., Said]


def process(*arguments: str, **environment: str) -> Said:
    """``python -m runner`` as a process of its own."""
    told = [sys.executable, "-m", "runner", *arguments]
    done = warm.finished(told, env=environment, timeout=120)
    return Said(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def runner(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """The same in this process, for what ends before training."""

    def run(*arguments: str, **environment: str) -> Said:
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            try:
                code = main(arguments)
            except SystemExit as left:
                code = int(left.code or 0)
        told = capsys.readouterr()
        return Said(code, told.out, told.err)

    return run


def test_help_is_one_screen_and_names_every_group_and_command(runner: Command) -> None:
    done = runner("--help")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert len(lines) <= 50 and max(map(len, lines)) <= 110
    groups = {name.partition(".")[0] for name, _, _ in fields(RunConfig()) if "." in name}
    assert groups <= {line.split()[0] for line in lines if line.strip()}
    assert COMMANDS.keys() - {"slurm-job", "slurm-node"} <= set(re.findall(r"[a-z0-9-]+", done.out))
    assert runner("-h") == done == runner("--help", "steps=3")


def test_help_of_a_group_lists_its_keys_and_presets(runner: Command) -> None:
    done = runner("--help", "guard")
    keys = re.findall(r"(?m)^  ([\w.]+)=", done.out)
    assert keys == [name for name, _, _ in fields(RunConfig()) if name.startswith("guard.")]
    assert "presets: default, off, palm" in done.out
    assert runner("--help", "guard.persist") == done
    refused = runner("--help", "gard")
    assert refused.code == 2 and "did you mean guard?" in refused.err


def test_help_lists_every_key_with_type_default_and_meaning(runner: Command) -> None:
    done = runner("--help", "all")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    for name, spec, _ in documented(RunConfig()):
        (line,) = [line for line in lines if line.strip().startswith(f"{name}=")]
        assert line.endswith(spec.metadata["help"])
        assert "(" in line


def test_help_lists_every_preset_and_exit_code(runner: Command) -> None:
    text = runner("--help").out
    lines = [re.findall(r"[\w-]+", line) for line in text.splitlines()]
    for path in packaged_configs().glob("*/*.yaml"):
        assert any(line[:1] == [path.parent.name] and path.stem in line for line in lines)
    assert all(f"{code} " in text.split("exit codes:")[1] for code in (0, 2, 3, 4, 75))


def test_cfg_prints_what_was_composed() -> None:
    overrides = ("model=tiny", "optim.lr=1e-4", "data.skip=[[1,2]]", "faults=[kill@step=3,rank=0]")
    done = process("--cfg", "job", *overrides)
    assert (done.code, done.err) == (0, "")
    assert from_yaml(done.out, source=ROOT) == flat(compose(overrides))


@pytest.mark.parametrize(
    ("key", "value"), [("out", "runs/x y"), ("model.dim", "32"), ("parallel.kind", "ddp")]
)
def test_get_prints_one_value(runner: Command, key: str, value: str) -> None:
    done = runner("out=runs/x y", "model=tiny", "parallel=ddp", "--get", key)
    assert done == Said(0, f"{value}\n", "")


def test_own_presets(runner: Command, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("dim: 48\n")
    done = runner("--config-dir", str(tmp_path), "model=mine", "--get", "model.dim")
    assert done == Said(0, "48\n", "")


@pytest.mark.parametrize(
    "arguments",
    [
        "--verbose", "--cfg hydra", "--cfg", "--get optim.lrr", "--get out steps=0", "stepz=3",
        "--get out faults=[melt@step=1]", "--multirun seed=1,2", "=3", "ring /nowhere/at/all",
        "replay /nowhere/at/all", "reprot runs/a", "trian steps=3", "ring", "ring . --serial x",
        "ring . --purge", "backtest", "backtest x.csv", "backtest x.csv steps=3",
        "backtest x.csv guard.windw=3", "backtest x.csv guard.min_history=90",
        "backtest x.csv --nonsense", "slurm", "slurm --nodes 0", "slurm --nodes 2 modell=tiny",
        "slurm --nodes 2 --sbatch 'exclusive x'", "slurm-job", "k8s", "k8s --image i --nproc 0",
        "k8s --image i --name No_Name", "k8s --image i --resource cpu",
        "k8s --image i parallel=single --nodes 2",
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_two(
    runner: Command, arguments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    done = runner(*shlex.split(arguments))
    assert (done.code, done.out) == (2, "")
    assert len(done.err.splitlines()) == 1 and done.err.startswith("error: ")
    golden.same(done.err if arguments != "=3" else done.err.partition(": ")[0])


ENDING = """
import atexit, ctypes, sys, tempfile, threading, time
from runner.__main__ import run
# As extensions complain while the interpreter is finalized: this one would abort.
ctypes.pythonapi.Py_AtExit(ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p))
folder = tempfile.TemporaryDirectory()
atexit.register(lambda: print("registered", file=sys.stderr))
threading.Thread(target=lambda: (time.sleep(0.5), print("joined", file=sys.stderr))).start()
print(folder.name, flush=True)
sys.argv = ["holdfast", "ring", "/nowhere/at/all"]
run()
"""


def test_a_command_ends_with_what_is_registered_and_no_more() -> None:
    """torch 2.15's Triton writes 30 lines of leaks while the interpreter is finalized."""
    done = python("-c", ENDING)
    assert done.returncode == 2, done
    *before, last = done.stderr.splitlines()
    assert sorted(before) == ["error: /nowhere/at/all: no such run directory", "joined"]
    assert last == "registered"
    assert not Path(done.stdout.strip()).exists()


@pytest.mark.parametrize("arguments", [["--verbose"], ["ring", "/nowhere/at/all"]])
def test_a_process_ends_the_same_way(runner: Command, arguments: Sequence[str]) -> None:
    assert process(*arguments) == runner(*arguments)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["steps=0", "--get", "out"], 2), (["--get", "out"], 0), (["--help"], 0)],
)
def test_only_the_first_rank_speaks(runner: Command, arguments: Sequence[str], code: int) -> None:
    assert runner(*arguments, **OTHER_RANK) == Said(code, "", "")


def test_half_a_launcher_is_told(runner: Command) -> None:
    done = runner("--get", "out", RANK="0")
    assert done.code == 2
    assert done.err.startswith("error: the launcher's environment is incomplete")


def test_an_out_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = process(f"out={tmp_path}/file/run", "model=tiny", "data=synthetic", "data.workers=0")
    assert done.code == 2
    assert f"out={tmp_path}/file/run: cannot be written" in done.err
    assert "Traceback" not in done.err
