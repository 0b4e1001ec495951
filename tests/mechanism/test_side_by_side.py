"""Sessions that share the test files, and what becomes of a drill that fails once."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import side_by_side
from tests.programs import python

ROOT = Path(__file__).parents[2]
# Other plugins take most of a small session's time.
PLAIN = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
# One drill that fails the first time, one test file more for each of three sessions.
DRILL = """
from pathlib import Path

def test_seldom(folder):
    first = not Path("tried").exists()
    Path("tried").touch()
    assert not first, "the words of the first failure"

def test_well():
    with Path("ran").open("a") as file:
        file.write("drill\\n")
"""
OTHER = """
from pathlib import Path

def test_it(folder):
    with Path("ran").open("a") as file:
        file.write("{name}\\n")
    assert {passes}
"""
SHARED = """
import pytest

@pytest.fixture(scope="session")
def folder():
    return "."
"""


def make_tests(folder: Path, *, passes: bool = True) -> None:
    """A drill and two files of other tests, all with a fixture of one conftest.py."""
    (folder / "tests" / "drills").mkdir(parents=True)
    (folder / "tests" / "drills" / "test_a.py").write_text(DRILL)
    (folder / "tests" / "conftest.py").write_text(SHARED)
    for name in "bc":
        text = OTHER.format(name=name, passes=passes or name != "c")
        (folder / "tests" / f"test_{name}.py").write_text(text)
    if not passes:
        (folder / "tests" / "drills" / "test_d.py").write_text("import nowhere")
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p tests.share -p no:cacheprovider")


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    words = command or (str(ROOT / "tests" / "side_by_side.py"), "-q")
    env = {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"} | PLAIN
    return python(*words, cwd=folder, env=env)


def test_each_file_is_run_once_and_a_drill_that_fails_once_is_told(tmp_path: Path) -> None:
    make_tests(tmp_path)
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted((tmp_path / "ran").read_text().split()) == ["b", "c", "drill"]
    name = "tests/drills/test_a.py::test_seldom"
    assert f"{name}: failed once, passed when run again: FLAKY, see above" in done.stdout
    first, _, again = done.stdout.partition(f"{name}: failed; run once more, alone")
    assert "the words of the first failure" in first
    assert "1 passed" in again, "no other test is repeated"


def test_one_session_finds_the_fixtures_of_all_its_files(tmp_path: Path) -> None:
    make_tests(tmp_path)
    (tmp_path / "tried").touch()
    (tmp_path / "share").mkdir()
    done = run(tmp_path, "-m", "pytest", "--share=share", "tests")
    assert "4 passed" in done.stdout, done.stdout + done.stderr


def test_one_session_begins_at_the_end(tmp_path: Path) -> None:
    """What drills wait for is time for the tests that compute."""
    make_tests(tmp_path)
    (tmp_path / "share").mkdir()
    (tmp_path / "tests" / "others").mkdir()
    for name in ("test_b.py", "test_c.py"):
        (tmp_path / "tests" / name).rename(tmp_path / "tests" / "others" / name)
    run(tmp_path, "-m", "pytest", "--share=share", "tests")
    assert (tmp_path / "ran").read_text().split() == ["b", "c", "drill"]
    for claim in (tmp_path / "share").glob("begun-*"):
        claim.unlink()
    run(tmp_path, "-m", "pytest", "--share=share", "tests")
    assert (tmp_path / "ran").read_text().split()[3:] == ["drill", "b", "c"]


HANGS = """
import faulthandler, signal, sys, threading
from tests import side_by_side
if len(sys.argv) == 1:
    side_by_side.LIMIT_SECONDS = 2.0
    side_by_side._pytest = lambda words: [sys.executable, __file__, "session"]
    sys.exit(side_by_side.main([]))
faulthandler.register(signal.SIGUSR2)
threading.Event().wait()
"""


def test_sessions_that_hang_are_ended_and_say_where(tmp_path: Path) -> None:
    program = tmp_path / "hangs.py"
    program.write_text(HANGS)
    done = python(str(program), env={"PYTHONPATH": str(ROOT)})
    assert done.returncode != 0
    assert done.stdout.count("error: a session did not end within 2 s") == side_by_side.SESSIONS
    assert 'hangs.py", line 9 in <module>' in done.stdout + done.stderr


def test_a_test_that_is_no_drill_is_not_repeated(tmp_path: Path) -> None:
    make_tests(tmp_path, passes=False)
    done = run(tmp_path)
    assert done.returncode == 1 and "again" not in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "ran").read_text().split().count("c") == 1
    assert "tests/test_c.py::test_it: failed" in done.stdout
    assert "tests/drills/test_d.py: failed" in done.stdout, "it cannot be imported"


@pytest.mark.parametrize(
    ("failed", "repeated"),
    [
        (["tests/drills/test_a.py::test_a"], True),
        (["tests/drills/test_a.py::test_a", "tests/drills/test_b.py::test_b[x-1]"], True),
        ([f"tests/drills/test_a.py::test_{n}" for n in range(3)], False),
        (["tests/drills/test_a.py::test_a", "tests/policy/test_b.py::test_b"], False),
        ([], False),  # a session failed, and no test of it
    ],
)
def test_few_and_only_drills_are_repeated(failed: list[str], repeated: bool) -> None:
    assert side_by_side.may_be_repeated(failed) is repeated
