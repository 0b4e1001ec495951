"""The start is watched: by each rank, and by the supervisor of its node."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from runner.distributed.env import tell_begun
from runner.health import rank_monitor as module
from runner.health.rank_report import CAUSE, Report, read_reports, write_report
from runner.health.root_cause import find_root_cause
from runner.launch import attempt as begun_module
from runner.launch.attempt import Ended, Job, Stop, run_once
from runner.launch.process_tree import Preparation
from runner.system.process import host_name
from tests.mechanism.test_witness import endings, take_run, watched
from tests.waiting import until

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def test_a_stage_of_the_start_that_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes, said = endings(monkeypatch)
    one = watched(tmp_path, has_agent=False)
    one.expect("meeting the other ranks", 1000)
    one.start()
    one.expect("connecting to the other ranks", 0.1)
    until(lambda: bool(codes))
    one.end()
    assert codes == [1]
    assert said == [
        f"rank 0 on {host_name()}: connecting to the other ranks did not end within 0.1 s"
    ]


def test_a_rank_that_has_begun_is_not_ended_by_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "runner.health.cause_reporter.leave", lambda code: pytest.fail(f"left with {code}")
    )
    monkeypatch.setattr(module, "_TICK_SECONDS", 0.02)
    one = watched(tmp_path, has_agent=False)
    ticks: list[int] = []
    one.expect("connecting to the other ranks", 0.1)
    take_run(tmp_path, one)
    one._watchdog.add([lambda: ticks.append(1)])
    one.start()
    limit = time.monotonic() + 0.2
    until(lambda: len(ticks) > 3 and time.monotonic() > limit)
    one.end()


LOCKED = """
import ctypes, sys
from pathlib import Path
from runner.health import rank_monitor as module
from tests.mechanism.test_witness import watched
from tests.waiting import until
module.TELL_SECONDS = 0.5
one = watched(Path(sys.argv[1]), has_agent=False)
one.expect("connecting", 0.5)
one.start()
import time; time.sleep(0.6)  # until the watchdog has armed what needs no interpreter
ctypes.PyDLL(None).sleep(1000)  # as NCCL's initialisation, were it to keep the lock
"""


def test_a_start_that_keeps_the_interpreters_lock(tmp_path: Path) -> None:
    words = [sys.executable, "-c", LOCKED, str(tmp_path)]
    ended = subprocess.run(words, timeout=100, env=os.environ, check=False)
    assert ended.returncode == 1


# The supervisor's side

RANK = """
import json, os, sys, time
sys.path.insert(0, os.getcwd())
from runner.distributed.env import tell_begun, tell_exit
from runner.system.process import own_process
told = {"process": own_process(), "world_size": int(sys.argv[2]), "local_world_size": 1,
        "incident": sys.argv[1]}
"""
BEGINS = RANK + "tell_begun(os.environ, 1, told)\n"


def attempt(folder: Path, body: str, world_size: int = 2, **more: float) -> Ended:
    job = Job(
        command=[sys.executable, "-c", body, str(folder / "incident"), str(world_size)],
        environment=os.environ | {"RANK": "1"},
        **more,
    )
    return run_once(job, Stop())


def test_ranks_that_do_not_begin_are_ended(tmp_path: Path) -> None:
    ended = attempt(tmp_path, "import time; time.sleep(1000)", begin_seconds=0.5)
    assert ended.code not in (0, 75) and host_name() in ended.reason
    assert "none has begun" in ended.reason


def test_ranks_that_have_begun_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the time counts from the first process that is a rank: nodes may come late."""
    now, there = [0.0], list[int]()
    monkeypatch.setattr(begun_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(begun_module.process_tree, "ranks", lambda mark: there)
    late, well = (begun_module.BegunRanks(tmp_path, "mark", 10.0) for _ in range(2))
    now[0] = 1000.0
    assert not late.late() and not well.late(), "nobody is there"
    there.append(7)
    now[0] = 1002.0
    assert not late.late() and not well.late()
    now[0] = 1013.0
    assert "none has begun" in late.late()
    tell_begun({"HOLDFAST_EXIT_DIR": str(tmp_path)}, 1, {})
    assert not well.late()
    (tmp_path / ".begun-1").unlink()
    now[0] = 9000.0
    assert not well.late(), "once is enough"


KILLED = BEGINS + "import signal; os.kill(os.getpid(), signal.SIGKILL)"


def test_a_rank_that_was_alone_on_its_node_is_told_of(tmp_path: Path) -> None:
    """The other nodes have no process to look at, and no collective breaks."""
    attempt(tmp_path, KILLED)
    (told,) = read_reports(tmp_path / "incident")
    assert told.rank == 1 and told.kind in ("signal", "exit") and told.world_size == 2
    assert "supervisor" in told.message


def test_a_supervisor_outlives_storage_that_is_stale_when_its_rank_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could not start a rank again, and the other nodes would wait for its node."""
    stale = OSError(errno.ESTALE, "Stale file handle")
    monkeypatch.setattr(begun_module, "reported", Mock(side_effect=stale))
    assert attempt(tmp_path, KILLED).code != 0
    assert not read_reports(tmp_path / "incident")


ABORTED = (
    RANK + "told['fatal'] = sys.argv[1] + '.txt'\n"
    "import faulthandler; faulthandler.enable(open(told['fatal'], 'w'))\n"
    "tell_begun(os.environ, 1, told)\n"
    "os.abort()"
)


def test_its_last_words_are_told_as_well(tmp_path: Path) -> None:
    """As gloo and NCCL abort a rank in C++; of the step the supervisor knows nothing."""
    attempt(tmp_path, ABORTED)
    (seen,) = read_reports(tmp_path / "incident")
    assert (seen.rank, seen.kind) == (1, "fatal") and "Aborted" in seen.message, seen
    waits = Report(rank=0, world_size=2, kind="called", step=30, phase="agree", time=seen.time + 1)
    cause = find_root_cause([waits, seen], 2)
    assert (cause.ranks, cause.step) == ((1,), 30)
    assert "rank 1: Fatal Python error: Aborted in some phase of step 30" in cause.reason


def test_a_rank_that_is_dead_while_its_launcher_lives_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.launch.attempt._NEIGHBOURS_SECONDS", 0.2)
    launcher = (
        f"import subprocess, sys, time\nsubprocess.run([sys.executable, '-c', {KILLED!r}, "
        "*sys.argv[1:]])\ntime.sleep(1000)"
    )
    stop = Stop()
    job = Job(
        command=[sys.executable, "-c", launcher, str(tmp_path / "incident"), "2"],
        environment=dict(os.environ),
    )
    running = threading.Thread(target=run_once, args=(job, stop))
    running.start()
    until(lambda: bool(read_reports(tmp_path / "incident")))
    stop.ask(signal.SIGTERM)
    time.sleep(1.1)
    stop.ask(signal.SIGTERM)
    running.join(30)
    assert not running.is_alive()


def test_nothing_but_c_runs_between_fork_and_exec() -> None:
    """A lock that another thread held at the fork stays locked, and Popen waits for ever."""
    program = (
        "import os, sys\n"
        "from runner.launch.attempt import Job, Stop, run_once\n"
        "os.register_at_fork(after_in_child=lambda: __import__('time').sleep(1000))\n"
        "job = Job(command=[sys.executable, '-c', ''], environment=dict(os.environ))\n"
        "sys.exit(run_once(job, Stop()).code)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=100, check=False).returncode == 0


def test_a_signal_that_comes_too_early_is_ignored_by_what_is_shielded() -> None:
    prepared = Preparation(parent=os.getpid(), shielded=True, is_torchrun=False)
    with prepared.beginning():
        child = subprocess.Popen(prepared.command([sys.executable, "-c", "print('well')"]))
    child.send_signal(signal.SIGTERM)
    assert child.wait(100) == 0
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_command_that_is_not_there(capfd: pytest.CaptureFixture[str]) -> None:
    job = Job(command=["/no/such/command"], environment=dict(os.environ))
    assert run_once(job, Stop()).code not in (0, 75)
    assert "error: /no/such/command: No such file" in capfd.readouterr().err


SEEN: dict[str, Any] = {"world_size": 2, "kind": "called", "step": 7, "phase": "agree"}


@pytest.mark.parametrize(
    "case", ["alone in the world", "in order", "told by another", "the cause is told"]
)
def test_who_needs_no_supervisor_to_tell(case: str, tmp_path: Path) -> None:
    folder = tmp_path / "incident"
    body, world_size = KILLED, 2
    if case == "alone in the world":  # the next start tells
        world_size = 1
    elif case == "in order":
        body = BEGINS + "tell_exit(os.environ, 'rank-1', 75)"
    elif case == "told by another":
        write_report(folder, Report(rank=1, **SEEN), for_other=True)
    else:
        write_report(folder, Report(rank=0, **SEEN))
        (folder / CAUSE).write_text("{}")
    attempt(tmp_path, body, world_size)
    expected = {"told by another": [1], "the cause is told": [0]}.get(case, [])
    assert [told.rank for told in read_reports(folder)] == expected


def test_what_another_rank_says_of_itself_is_not_enough(tmp_path: Path) -> None:
    """It has lost contact, and waits for a report of who is gone."""
    folder = tmp_path / "incident"
    write_report(folder, Report(rank=0, **SEEN | {"kind": "lost_contact"}))
    attempt(tmp_path, ABORTED)
    assert [told.rank for told in read_reports(folder)] == [0, 1]


def test_a_torn_mark_is_no_rank(tmp_path: Path) -> None:
    body = (
        "import os, pathlib\n"
        "folder = pathlib.Path(os.environ['HOLDFAST_EXIT_DIR'])\n"
        f"(folder / '.begun-1').write_text({json.dumps({'rank': 1})[:5]!r})\n"
    )
    assert attempt(tmp_path, body).code == 0
