"""Real scripts, killed and resumed: what is named first, and that nothing of the user's changes."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.prove.drive import Plan, prove
from runner.prove.verdict import Verdict
from runner.system.error import ConfigError
from tests.programs import ROOT, python
from tests.prove_resume.cases import PLANTED, SCRIPTS, SOUND_CASES, Case
from tests.prove_resume.table import forked, named, verdict_of, zygote

# Always; the others with --full.
FEW = {"plain-1-moments", "plain-1-rng", "ddp-2-sampler_restarted", "plain-1-workers-sound"}


@pytest.fixture(scope="module")
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of a process from which the scripts of this file are forked."""
    with zygote(frameworks=request.config.getoption("--full")) as found:
        yield found


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=[] if str(case) in FEW else [pytest.mark.full])
        for case in (*PLANTED, *SOUND_CASES)
    ],
)
def test_what_is_named_first(case: Case, tmp_path: Path, address: str) -> None:
    verdict = verdict_of(case, tmp_path, address)
    assert named(verdict) in case.named, verdict.text()


def odd(kind: str, home: Path, address: str, **settings: Any) -> Verdict:
    words = (str(SCRIPTS / "odd.py"), kind, "--out", "out", "--steps", "30", "--save-every", "5")
    plan = Plan(
        command=forked(address, 1, words),
        **{"steps": 20, "out_argument": "out", "limit_seconds": 60, **settings},
    )
    return prove(plan, environment=os.environ, home=home)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("asks", "asks for a terminal"),
        ("fails", "failed at once, with 1.\n"),
        ("fails_again", "When it was started again: The command failed at once, with 1.\n"),
        ("never_saves", "No file was written before step 20"),
        ("no_optimizer", "without an optimizer step"),
    ],
)
def test_what_cannot_be_judged_gets_its_sentence(
    kind: str, words: str, tmp_path: Path, address: str
) -> None:
    verdict = odd(kind, tmp_path, address)
    assert verdict.code == 2 and words in verdict.text(), verdict.text()


def test_a_script_without_an_end_is_ended(tmp_path: Path, address: str) -> None:
    verdict = odd("never_ends", tmp_path, address)
    assert verdict.text().startswith("Equal bit for bit: 20 steps, 2 kills")


def everything(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Time of change, inode and bytes of all that is below a folder."""
    paths = {path: path.stat(follow_symlinks=False) for path in sorted(folder.rglob("*"))}
    return {
        str(path): (about.st_mtime_ns, about.st_ino, path.read_bytes() if path.is_file() else b"")
        for path, about in paths.items()
    }


def test_the_users_own_output_is_never_touched(tmp_path: Path, address: str) -> None:
    """It exists, with checkpoints that the script would go on from, or overwrite."""
    for folder in ("out", "checkpoints"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "last.pt").write_bytes(b"precious")
    before = everything(tmp_path)
    by_argument = odd("never_ends", tmp_path, address)
    by_itself = odd("relative", tmp_path, address, out_argument="", out="checkpoints")
    assert by_argument.is_equal and by_itself.is_equal, by_itself.text()
    assert everything(tmp_path) == before


def test_a_script_that_reaches_for_it_is_refused(tmp_path: Path, address: str) -> None:
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
    plan = Plan(command=forked(address, 1, ("train.py",)), steps=20, out="results")
    verdict = prove(plan, environment=os.environ, home=tmp_path)
    assert verdict.code == 2 and f"touches {own}" in verdict.reason, verdict.text()
    assert everything(tmp_path) == before


RUNNER = (
    *("-m", "runner", "out=out", "model=tiny", "steps=60", "checkpoint.every=5", "seed=3"),
    *("batch.global_size=6", "batch.micro_size=1", "compute.precision=fp32", "data=synthetic"),
)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["guard", "ring", "runner"])
@pytest.mark.full
def test_our_own_parts_resume(kind: str, ranks: int, tmp_path: Path, address: str) -> None:
    own = (str(Path(__file__).with_name("own.py")), kind, "--out", "out")
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    words = RUNNER if kind == "runner" else own
    command = (sys.executable, *(launcher if ranks > 1 else ()), *words)
    if kind != "runner":
        command = forked(address, ranks, own)
    plan = Plan(command=command, steps=40, out_argument="out", limit_seconds=120)
    verdict = prove(plan, environment=os.environ, home=tmp_path)
    assert verdict.is_equal, verdict.text()
    assert verdict.ranks == ranks and len(verdict.kills) == 2


@pytest.mark.parametrize("kind", ["guard", "ring", "plain"])
@pytest.mark.full
def test_a_signal_that_asks(kind: str, tmp_path: Path, address: str) -> None:
    """The guard saves and leaves with 75; the others just end."""
    script = SCRIPTS / "plain.py" if kind == "plain" else Path(__file__).with_name("own.py")
    words = [str(script), *([] if kind == "plain" else [kind]), "--out", "out"]
    command = forked(address, 1, words)
    plan = Plan(command=command, steps=40, out_argument="out", number=signal.SIGTERM)
    verdict = prove(plan, environment=os.environ, home=tmp_path)
    assert verdict.is_equal, verdict.text()
    after = verdict.kills[0] // 5 * 5 if kind != "guard" else verdict.kills[0]
    assert verdict.resumes[0].start == after + 1


@pytest.mark.parametrize(
    ("words", "count", "said"),
    [
        ((str(Path(__file__).with_name("own.py")), "ring"), 3, "Equal"),
        ((str(Path(__file__).with_name("own.py")), "guard"), 1, "Equal"),
        ((str(SCRIPTS / "ddp.py"),), 1, "reads other samples than on 2"),
    ],
    ids=["ring", "guard", "ddp"],
)
@pytest.mark.full
def test_on_other_ranks(words: tuple[str, ...], count: int, said: str, tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    command = (sys.executable, *launcher, *words, "--out", "out", "--steps", "40")
    plan = Plan(command=command, steps=40, out_argument="out", other_ranks=count)
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
    with pytest.raises(ConfigError, match=None) as caught:
        prove(Plan(**{"command": PLAIN, **settings}), environment=os.environ, home=tmp_path)
    assert words in str(caught.value)


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
