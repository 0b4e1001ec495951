"""However a test session ends, nothing that it began goes on."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.reaper import MARK, end_marked, marked

ROOT = Path(__file__).parents[2]
# A fixture's process, a test's, and one that has left the test's session; none is waited for.
SESSION = """
import os, subprocess, time
from pathlib import Path
import pytest
from tests.reaper import MARK

SLEEP = ["sleep", "300"]
Path("mark").write_text(os.environ[MARK])  # here: a time-out counts from the fixture on

@pytest.fixture(scope="session")
def server():
    return subprocess.Popen(SLEEP)

def test_that_does_not_end(server):
    subprocess.Popen(SLEEP)
    subprocess.Popen(["sh", "-c", "sleep 300 & wait"], start_new_session=True)
    Path("ready").write_text(os.environ[MARK])
    time.sleep(300)
"""


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, None], ids=lambda value: str(value)
)
def test_a_session_that_is_broken_off_leaves_no_process(
    tmp_path: Path, number: signal.Signals | None
) -> None:
    """None: pytest-timeout ends it from a thread, by ``os._exit``."""
    (tmp_path / "test_it.py").write_text(SESSION)
    told = ["--timeout=5", "--timeout-method=thread"] if number is None else []
    session = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", *told, "test_it.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # A job in the background of a script has it ignored, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    # A SIGINT that comes in the midst of Popen may be lost.
    ready = tmp_path / ("mark" if number is None else "ready")
    limit = time.monotonic() + 120
    while not (ready.exists() and ready.read_text()):
        assert time.monotonic() < limit and session.poll() is None
        time.sleep(0.01)
    mark = ready.read_text()
    if number is not None:
        while len(marked(mark)) < 4:  # the shell may not have begun its own yet
            assert time.monotonic() < limit and session.poll() is None
            time.sleep(0.01)
        session.send_signal(number)
    assert session.wait(60) != 0
    while left := marked(mark):
        assert time.monotonic() < limit, f"left behind: {left}"
        time.sleep(0.01)


def test_only_what_has_the_mark_is_ended() -> None:
    mark = secrets.token_hex(8)
    own = subprocess.Popen(["sleep", "60"], env=os.environ | {MARK: mark})
    other = subprocess.Popen(["sleep", "60"], env=os.environ | {MARK: mark + "0"})
    spared = subprocess.Popen(["sleep", "60"], env=os.environ | {MARK: mark})
    assert end_marked(mark, spare=frozenset([spared.pid])) == {own.pid}
    assert own.wait(10) == -signal.SIGKILL and other.poll() is None and spared.poll() is None
    for process in (other, spared):
        process.kill()
        process.wait()
