"""Runs that several drills compare with, made once a session."""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.launch.node_memory import NodeFolder
from runner.policy.nodes import NodeEvent
from runner.system.process import started_at
from tests.conftest import MEMORY_DIR
from tests.reaper import marked
from tests.run import Result, finish, nothing_breaks
from tests.warm import DRILL

# Three steps' worth of positions and a bit: enough bad steps to force a rollback.
POISON = "faults=[poison@samples=700-790]"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Drills in which a rank dies or hangs, once more where no collective breaks: their twins."""
    mark = metafunc.definition.get_closest_marker("twin")
    if mark is not None:
        metafunc.fixturenames.append("_breaks")
        always = mark.kwargs.get("always", False)
        twin = pytest.param(False, marks=() if always else pytest.mark.full, id="nothing breaks")
        metafunc.parametrize("_breaks", [pytest.param(True, id="gloo"), twin], indirect=True)


@pytest.fixture
def _breaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """See :func:`tests.run.nothing_breaks`."""
    with contextlib.nullcontext() if request.param else nothing_breaks():
        yield


_SHARED = Path("/dev/shm")
# torch_PID_NUMBER_NUMBER. Names of multiprocessing (sem.mp-, psm_) are random: they may be those of
# another session.
_OF_PROCESS = re.compile(r"torch_([0-9]+)")


@pytest.fixture
def leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After the drill: no process of it, so no port of it either, no file in shared memory.

    Snapshots may stay in memory where the run itself did not come to its end: the next start
    goes on from them.
    """
    mark = secrets.token_hex(8)
    own = Path(
        tempfile.mkdtemp(prefix="holdfast-drill-", dir=_SHARED if _SHARED.is_dir() else None)
    )
    monkeypatch.setenv(DRILL, mark)
    monkeypatch.setenv(MEMORY_DIR, str(own))
    before = _files_of_the_dead()
    yield
    limit = time.monotonic() + 5
    while (left := marked(mark, DRILL)) and time.monotonic() < limit:
        time.sleep(0.05)
    files = _files_of_the_dead() - before
    snapshots = done_with_snapshots(own)
    shutil.rmtree(own)
    assert not left, f"processes left behind: {[*map(_command_line, left)]}"
    assert not files, f"left in shared memory: {sorted(files)}"
    assert not snapshots, f"snapshots left of runs that are done: {snapshots}"


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return f"{pid}, which has just ended"


def _files_of_the_dead() -> set[str]:
    """Files in shared memory whose names have the number of a process that is gone."""
    names = [path.name for path in _SHARED.glob("*")]
    makers = {name: match for name in names if (match := _OF_PROCESS.match(name))}
    return {name for name, match in makers.items() if started_at(int(match[1])) is None}


def done_with_snapshots(memory: Path) -> list[str]:
    """Runs that are over, and still have snapshots in this folder of shared memory."""
    owners = memory.glob("holdfast-*/*/*/owner.json")
    outs = {Path(json.loads(owner.read_text())["out"]) for owner in owners}
    return [str(out) for out in sorted(outs) if _is_over(out / "summary.json")]


def _is_over(summary: Path) -> bool:
    return summary.exists() and json.loads(summary.read_text())["status"] in ("done", "halted")


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all sessions that share the tests."""
    share: Path | None = request.config.getoption("--share")
    folder = tmp_path_factory.mktemp("runs") if share is None else share / "runs"
    folder.mkdir(exist_ok=True)
    return folder


def _once(out: Path, *overrides: str, ranks: int = 2) -> Result:
    """:func:`finish`, in the session that comes to it first; the others wait for it."""
    told = out.with_suffix(".json")
    with out.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not told.exists():
            made = finish(out, *overrides, ranks=ranks)
            told.write_text(json.dumps([made.code, made.text]))
    code, text = json.loads(told.read_text())
    return Result(out=out, code=code, text=text)


@pytest.fixture(scope="session")
def clean(runs: Path) -> Result:
    """60 steps on 2 ranks, nothing wrong."""
    return _once(runs / "clean")


@pytest.fixture(scope="session")
def clean_bf16(runs: Path) -> Result:
    """:func:`clean` in BF16, which is all that DeepSpeed's engines compute in."""
    return _once(runs / "clean-bf16", "compute.precision=bf16")


@pytest.fixture(scope="session")
def clean_alone(runs: Path) -> Result:
    """60 steps in one process without torchrun, nothing wrong."""
    return _once(runs / "clean-alone", ranks=0)


@pytest.fixture(scope="session")
def poisoned(runs: Path) -> Result:
    """60 steps on 2 ranks with a bad range, its checkpoints all kept."""
    return _once(runs / "poisoned", POISON, "checkpoint.keep=9")


def remembered(folder: Path, *hosts: str) -> str:
    """The setting of a folder in which these hosts have failed in another run, some minutes ago."""
    for host in hosts:
        event = NodeEvent(host=host, kind="hardware", time=time.time() - 300, reason="ECC", run="x")
        NodeFolder(folder).add(event)
    return f"cluster.nodes={folder}"
