"""The wheel, by way of the source distribution, where nothing is but what it declares."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from runner.system.error import PACKAGES

ROOT = Path(__file__).parents[2]


def declared() -> dict[str, importlib.metadata.Distribution]:
    """What the wheel needs without extras, and what these need in turn, as installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: dict[str, importlib.metadata.Distribution] = {}
    todo = [Requirement(text) for text in project["dependencies"]]
    while todo:
        requirement = todo.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = canonicalize_name(requirement.name)
        if name not in found:
            found[name] = importlib.metadata.distribution(name)
            todo += [Requirement(text) for text in found[name].requires or ()]
    return found


def of_extra(extra: str) -> str:
    """The packages that pyproject.toml has in an extra, as pip takes them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = map(Requirement, project["optional-dependencies"][extra])
    return "' '".join(f"{one.name}{one.specifier}" for one in needed)


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A command that finds no Python package but those of its own environment."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    return subprocess.run(
        words, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(scope="module")
def bin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``bin`` of a fresh environment with the wheel in it. The packages that it declares are
    links to those here, for torch is large."""
    place = tmp_path_factory.mktemp("wheel")
    build = (sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(place))
    source = run(*build, cwd=ROOT)
    assert source.returncode == 0, source.stderr
    [archive] = place.glob("holdfast_train-*.tar.gz")
    built = run(
        sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps",
        "--no-build-isolation", "--wheel-dir", "built", str(archive), cwd=place,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    [wheel] = (place / "built").glob("*.whl")
    assert wheel.name.startswith("holdfast_train-")
    made = run(sys.executable, "-m", "venv", "--without-pip", "venv", cwd=place)
    assert made.returncode == 0, made.stderr
    [site] = (place / "venv" / "lib").glob("python3.*/site-packages")
    for distribution in declared().values():
        for part in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / part).exists():
                (site / part).symlink_to(Path(str(distribution.locate_file(part))))
    python = place / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    done = run(*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel), cwd=place)
    assert done.returncode == 0, done.stderr
    consistent = run(*pip, "check", cwd=place)
    assert consistent.returncode == 0, consistent.stdout + consistent.stderr
    return python.parent


def test_the_environment_holds_no_extra_and_not_the_checkout(
    bin_folder: Path, tmp_path: Path
) -> None:
    code = (
        "import importlib.util, runner; print(runner.__file__); "
        f"print([p for p in {sorted(PACKAGES.values())} if importlib.util.find_spec(p)])"
    )
    done = run(str(bin_folder / "python"), "-c", code, cwd=tmp_path)
    place, extras = done.stdout.splitlines()
    assert Path(place).is_relative_to(bin_folder.parent), "the checkout was imported"
    assert extras == "[]", done.stdout + done.stderr
    (tmp_path / "runner.py").write_text("raise SystemExit('mine')")
    (tmp_path / "beside.py").write_text("from holdfast_train import Guard, Ring; print(Ring)")
    done = run(str(bin_folder / "python"), "beside.py", cwd=tmp_path)
    assert "runner.embed.ring.Ring" in done.stdout, done.stderr


def test_the_command_trains_without_extras_and_with_own_presets(
    bin_folder: Path, tmp_path: Path
) -> None:
    """Bytes of text in one process; packaged presets, and a user's own beside them."""
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("the cat sat on the mat\n" * 4000)
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "own.yaml").write_text("dim: 48\nlayers: 1\nheads: 2\n")
    (tmp_path / "runner.py").write_text("raise SystemExit('mine')")  # hides ours from children
    settings = (
        "--config-dir", "mine", "model=own", "data.path=corpus", "data.cache=cache",
        "data.seq_len=32", "compute.precision=fp32", "eval.every=0", "data.workers=0", "steps=4",
        "schedule.warmup=1", "out=run",
    )  # fmt: skip
    done = run(str(bin_folder / "holdfast"), *settings, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "done" and summary["steps"] == 4
    assert (tmp_path / "run" / "report.html").exists(), done.stderr  # a child has written it
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert "dim: 48" in config and config.startswith("# settings sha256 ")


def test_without_an_extra_the_error_names_it_and_the_command(
    bin_folder: Path, tmp_path: Path
) -> None:
    """Before anything is made or waited for, by the training command and the launcher alike."""
    settings = ("parallel=zero1", "track=tensorboard", "data.tokenizer=t.json", "out=run")
    for command in (["holdfast"], ["holdfast", "launch", "--nproc", "2"]):
        program = str(bin_folder / command[0])
        done = run(program, *command[1:], *settings, cwd=tmp_path)
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        for setting, package, extra in (
            ("parallel=zero1", "deepspeed", "zero"),
            ("track=tensorboard", "tensorboard", "tensorboard"),
            ("data.tokenizer=t.json", "tokenizers", "text"),
        ):
            assert (
                f"{setting}: needs the package {package}, which is not installed: "
                f"pip install '{of_extra(extra)}'"
            ) in done.stderr
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["backtest", "events.out.tfevents.1.host"], "tensorboard"),
        (["backtest", "a.csv", "--plot", "a.png"], "plot"),
    ],
)
def test_other_commands_name_the_extra_too(
    bin_folder: Path, tmp_path: Path, words: list[str], extra: str
) -> None:
    (tmp_path / "events.out.tfevents.1.host").write_bytes(b"")
    rows = "".join(f"{step},{2 - step / 100},1.0\n" for step in range(1, 60))
    (tmp_path / "a.csv").write_text("step,loss,grad_norm\n" + rows)
    done = run(str(bin_folder / "holdfast"), *words, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"pip install '{of_extra(extra)}'" in done.stderr


INTEGRATIONS = (
    "accelerate",
    "lightning",
    "torchtitan",
)  # whoever imports runner.integrations has them


# Where the distribution has another name than what is imported.
IMPORTED_AS = {"mlflow-skinny": "mlflow", "nvidia-ml-py": "pynvml"}


def test_every_extra_is_declared_with_its_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: texts for name, texts in project["optional-dependencies"].items()}
    del extras["dev"], extras["docs"]  # of the checkout, not of a setting
    # Of an extra with several packages the first is the one whose lack is told.
    names = {name: Requirement(texts[0]).name for name, texts in extras.items()}
    first = {name: IMPORTED_AS.get(package, package) for name, package in names.items()}
    assert first == PACKAGES | {name: name for name in INTEGRATIONS}
    base = {canonicalize_name(Requirement(text).name) for text in project["dependencies"]}
    assert not base & set(PACKAGES.values())
    assert project["name"] == "holdfast-train"


def test_the_wheel_holds_the_package_and_its_presets_only(bin_folder: Path) -> None:
    [wheel] = (bin_folder.parent.parent / "built").glob("*.whl")
    assert "runner/docs/loop.md" in zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "runner",
        "holdfast_train.py",
    }
