"""What other programs are given: cheap to import, typed, with examples that run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import runner
from runner.startup.shared_memory import MEMORY_DIR
from tests.programs import python

NAMES = sorted(set(runner.__all__) - {"__version__"})
DOCS = Path(__file__).parents[2] / "docs"


def test_importing_the_package_imports_little() -> None:
    told = "import sys, runner; print([m for m in ('torch', 'numpy', 'hydra') if m in sys.modules])"
    done = python("-c", told, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", NAMES)
def test_its_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MEMORY_DIR, str(tmp_path))
    thing = getattr(runner, name)
    module = importlib.import_module(thing.__module__)
    examples = [
        test
        for test in doctest.DocTestFinder(recurse=False).find(thing, name, module=module)
        if test.examples
    ]
    assert examples, f"{name} has no example"
    for test in examples:
        results = doctest.DocTestRunner().run(test)
        assert not results.failed


def test_its_types_are_told_to_others() -> None:
    """By the marker of PEP 561, without which type checkers take everything for Any."""
    assert Path(runner.__file__).with_name("py.typed").exists()


@pytest.mark.parametrize("name", NAMES)
def test_every_public_method_has_types_and_words(name: str) -> None:
    thing = getattr(runner, name)
    members = [getattr(thing, key) for key in vars(thing) if not key.startswith("_")]
    calls = [one.fget if isinstance(one, property) else one for one in members]
    begin = thing.__init__ if isinstance(thing, type) else thing
    for call in [begin, *filter(callable, calls)]:
        told = inspect.signature(call)
        untyped = [p.name for p in told.parameters.values() if p.annotation is p.empty]
        assert untyped in ([], ["self"]), f"{call.__qualname__}: {untyped}"
        assert told.return_annotation is not told.empty, call.__qualname__
    assert all(call.__doc__ for call in [thing, *filter(callable, calls)])


PAGES = {"Guard": "loop.md", "Ring": "ring.md", "Sampler": "sampler.md"}
PAGES["prove_resume"] = "prove_resume.md"


@pytest.mark.parametrize("name", NAMES)
def test_it_has_a_page_of_its_own(name: str) -> None:
    text = (DOCS / PAGES[name]).read_text()
    assert f"from runner import {name}" in text
    assert f"({PAGES[name]})" in (DOCS / "index.md").read_text()


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="Gard"):
        _ = runner.Gard


def test_the_second_name_is_the_same_package_beside_a_file_that_hides_it(tmp_path: Path) -> None:
    (tmp_path / "runner.py").write_text("print('mine')\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import holdfast_train, holdfast_train.embed.ring as ring\n"
        "from holdfast_train import Guard\n"
        "import runner, runner.embed.ring\n"
        "assert holdfast_train is runner and Guard is runner.Guard and ring is runner.embed.ring\n"
        "assert ring.__spec__.name == ring.__name__ == 'runner.embed.ring'\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
