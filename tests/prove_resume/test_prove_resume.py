"""Real scripts, killed and resumed: what is named first, and that nothing of the user's changes."""

from __future__ import annotations

import json
import os
import signal
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner import prove_resume
from runner.prove.drive import Plan, prove
from runner.prove.verdict import Verdict
from runner.system.error import ConfigError
from tests.programs import ROOT, python
from tests.prove_resume.cases import PLANTED, SCRIPTS, SOUND_CASES, Case
from tests.prove_resume.table import forked, named, verdict_of
from tests.rows import full

# Always; the others with --full.
FEW = {"plain-1-moments", "ddp-2-sampler_restarted"}


@pytest.fixture(autouse=True)
def starts_are_forked() -> Iterator[None]:
    """Those that this process begins."""
    with forked():
        yield


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=[] if str(case) in FEW else [pytest.mark.full])
        for case in (*PLANTED, *SOUND_CASES)
    ],
)
def test_what_is_named_first(case: Case, tmp_path: Path) -> None:
    verdict = verdict_of(case, tmp_path)
    assert named(verdict) in case.named, verdict.text()


def everything(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Time of change, inode and bytes of all that is below a folder."""
    paths = {path: path.stat(follow_symlinks=False) for path in sorted(folder.rglob("*"))}
    return {
        str(path): (about.st_mtime_ns, about.st_ino, path.read_bytes() if path.is_file() else b"")
        for path, about in paths.items()
    }


def with_results(home: Path) -> dict[str, tuple[int, int, bytes]]:
    """Give it checkpoints that a script would go on from, or overwrite; returns what is there."""
    for folder in ("out", "checkpoints"):
        (home / folder).mkdir()
        (home / folder / "last.pt").write_bytes(b"precious")
    return everything(home)


def python_of(*words: str, ranks: int = 1) -> tuple[str, ...]:
    """The command of a script, and of a launcher where there are several ranks."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    return (sys.executable, *(launcher if ranks > 1 else ()), *words)


def command_of(kind: str) -> tuple[str, ...]:
    words = (kind, "--out", "out", "--steps", "30", "--save-every", "5")
    return python_of(str(SCRIPTS / "odd.py"), *words)


def odd(kind: str, home: Path, **settings: Any) -> Verdict:
    plan = Plan(
        command=command_of(kind),
        **{"steps": 20, "out_argument": "out", "limit_seconds": 60, **settings},
    )
    return prove(plan, environment=os.environ, home=home)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("asks", "asks for a terminal"),
        ("busy_gpu", "cannot have the GPU"),
        ("fails", "failed at once, with 1.\n"),
        ("fails_again", "When it was started again: The command failed at once, with 1.\n"),
        ("hangs", "has done no step for 2 s (--timeout)"),
        ("never_saves", "No file was written before step 20"),
        ("no_optimizer", "without an optimizer step"),
    ],
)
def test_what_cannot_be_judged_gets_its_sentence(kind: str, words: str, tmp_path: Path) -> None:
    before = with_results(tmp_path)
    verdict = odd(kind, tmp_path, limit_seconds=2 if kind == "hangs" else 60)
    assert verdict.code == 2 and words in verdict.text(), verdict.text()
    assert everything(tmp_path) == before


def test_the_users_own_output_is_never_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a script without an end, asked to end; and by one that chooses its output itself."""
    before = with_results(tmp_path)
    asked = odd("never_ends", tmp_path, number=signal.SIGTERM)
    assert asked.text().startswith("Equal bit for bit: 20 steps, 2 kills"), asked.text()
    monkeypatch.chdir(tmp_path)
    verdict = prove_resume(command_of("relative"), steps=20, out="checkpoints")
    assert verdict.is_equal and len(verdict.kills) == 2, verdict.text()
    assert everything(tmp_path) == before


def test_the_fixture_in_a_projects_own_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It passes where the resume is equal; else the test fails, with what the verdict says."""
    (tmp_path / "test_ours.py").write_text(
        "def test_equal(prove_resume):\n"
        f"    verdict = prove_resume({command_of('relative')}, steps=20, out='checkpoints')\n"
        "    assert len(verdict.kills) == 2\n"
        "def test_not_judged(prove_resume):\n"
        "    prove_resume('true', out='checkpoints')\n"
    )
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as own:
        own.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        own.setenv("PYTEST_CURRENT_TEST", os.environ["PYTEST_CURRENT_TEST"])  # put back after it
        pytest.main(["-q", "-p", entries["pytest11"]["holdfast"], str(tmp_path)])
    told = capsys.readouterr().out
    assert "1 failed, 1 passed" in told, told
    assert "Could not be judged. The command ended without an optimizer step" in told


def test_a_script_that_reaches_for_it_is_refused(tmp_path: Path) -> None:
    """By an absolute path of its own, which no copy of the working directory changes."""
    own = tmp_path / "results"
    own.mkdir()
    (own / "last.pt").write_bytes(b"precious")
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in range(30):\n"
        "    model(torch.ones(2, 2)).sum().backward()\n"
        "    optimizer.step()\n"
        f"    torch.save(model.state_dict(), {str(own / 'last.pt')!r})\n"
    )
    before = everything(tmp_path)
    plan = Plan(command=python_of("train.py"), steps=20, out="results")
    verdict = prove(plan, environment=os.environ, home=tmp_path)
    assert verdict.code == 2 and f"touches {own}" in verdict.reason, verdict.text()
    assert everything(tmp_path) == before


OWN = str(Path(__file__).with_name("own.py"))
RUNNER = (
    *("-m", "runner", "out=out", "model=tiny", "steps=60", "checkpoint.every=5", "seed=3"),
    *("batch.global_size=6", "batch.micro_size=1", "compute.precision=fp32", "data=synthetic"),
    *("checkpoint.clean_after=3", "debug.preflight=false", "model.layers=1", "data.workers=0"),
)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["guard", "ring", "runner"])
@pytest.mark.full
def test_our_own_parts_resume(kind: str, ranks: int, tmp_path: Path) -> None:
    words = RUNNER if kind == "runner" else (OWN, kind, "--out", "out")
    command = python_of(*words, ranks=ranks)
    plan = Plan(command=command, steps=40, out_argument="out", limit_seconds=120)
    verdict = prove(plan, environment=os.environ, home=tmp_path)
    assert verdict.is_equal, verdict.text()
    assert verdict.ranks == ranks and len(verdict.kills) == 2


@pytest.mark.parametrize("kind", ["guard", "ring", "plain"])
@pytest.mark.full
def test_a_signal_that_asks(kind: str, tmp_path: Path) -> None:
    """The guard ends the step, or one more, saves and leaves with 75; the others just end."""
    words = (str(SCRIPTS / "plain.py"),) if kind == "plain" else (OWN, kind)
    command = python_of(*words, "--out", "out")
    plan = Plan(command=command, steps=40, out_argument="out", number=signal.SIGTERM)
    verdict = prove(plan, environment=os.environ, home=tmp_path)
    assert verdict.is_equal, verdict.text()
    kill, start = verdict.kills[0], verdict.resumes[0].start
    assert start == kill // 5 * 5 + 1 if kind != "guard" else kill < start <= kill + 2


@pytest.mark.parametrize(
    ("words", "count", "said"),
    [
        pytest.param((OWN, "ring"), 1, "Equal", id="ring"),
        full((OWN, "ring"), 3, "Equal", id="ring on more"),
        full((OWN, "guard"), 1, "Equal", id="guard"),
        full((str(SCRIPTS / "ddp.py"),), 1, "reads other samples than on 2", id="ddp"),
    ],
)  # fmt: skip
def test_on_other_ranks(words: tuple[str, ...], count: int, said: str, tmp_path: Path) -> None:
    command = python_of(*words, "--out", "out", "--steps", "40", ranks=2)
    plan = Plan(command=command, steps=20, out_argument="out", other_ranks=count)
    verdict = prove(plan, environment=os.environ, home=tmp_path)
    assert said in verdict.text(), verdict.text()


PLAIN = (sys.executable, "train.py", "--out", "out")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"command": ()}, "no command"),
        ({"steps": 2}, "--steps 2: at least 3"),
        ({"kills": (30, 20)}, "--kill 30,20: rising steps from 1 to 59"),
        ({"kills": (60,)}, "--kill 60: rising steps"),
        ({"out_argument": "output"}, "has no arguments of this name"),
        ({"out_argument": "out", "out": "out"}, "one of them says"),
        ({"out": ".."}, "is not below the working directory"),
        ({"other_ranks": 3}, "no --nproc-per-node"),
        ({"scratch": Path("/proc/self")}, "cannot be written"),
    ],
)
def test_bad_settings_start_nothing(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    before = with_results(tmp_path)
    with pytest.raises(ConfigError, match=None) as caught:
        prove(Plan(**{"command": PLAIN, **settings}), environment=os.environ, home=tmp_path)
    assert words in str(caught.value)
    assert everything(tmp_path) == before


def test_a_folder_that_cannot_be_copied_needs_a_word(tmp_path: Path) -> None:
    with (tmp_path / "corpus.bin").open("wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(ConfigError) as caught:
        prove(Plan(command=PLAIN), environment=os.environ, home=tmp_path)
    assert "It is not certain where the script writes, and corpus.bin" in str(caught.value)


def test_the_command_line(tmp_path: Path) -> None:
    """Every process begins as a user's does; the script hides a ``sitecustomize`` of its own."""
    hidden, home = tmp_path / "path", tmp_path / "home"
    hidden.mkdir()
    home.mkdir()
    (hidden / "sitecustomize.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    environment = os.environ | {"DEFECT": "lr_reset"}
    environment["PYTHONPATH"] = f"{ROOT}:{hidden}"
    done = python(
        *("-m", "runner", "prove-resume", "--steps", "20", "--out-arg", "--out"),
        *("--json", "v.json", "--resume-with", "--steps=41"),
        *("--", sys.executable, str(SCRIPTS / "plain.py"), "--out", "runs", "--save-every", "4"),
        cwd=home, env=environment,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    told = json.loads((home / "v.json").read_text())
    assert told["verdict"] == "differs" and told["first"]["kind"] == "learning_rate"
    assert done.stdout.startswith("Learning rate ") and "To mend it" in done.stdout
    assert (tmp_path / "ran").exists() and not (home / "runs").exists()
