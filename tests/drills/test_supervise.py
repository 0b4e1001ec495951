"""A supervised run of real ranks: whatever is killed, the same end, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from runner.launch.process_tree import is_there
from runner.system.json_lines import read_lines
from runner.system.process import exit_status, parent
from tests import warm
from tests.drills.compare import assert_every_sample_once, assert_same_run
from tests.rows import full
from tests.run import (
    TINY,
    Result,
    Started,
    environment_of,
    journalled,
    metrics_step,
    tiny,
    unbroken,
)
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("leaves_nothing")
# Long enough to be hit in the middle.
SLOW = "faults=[slow@step=30-52,seconds=0.25]"


def launch(out: Path, *overrides: str, options: tuple[str, ...] = ()) -> Started:
    """``python -m runner launch``, two ranks, in a session of its own."""
    words = ["launch", "--nproc", "2", "--pause", "0.1", *options]
    return begun(out, [*words, f"out={out}", *tiny(overrides), *overrides])


def begun(out: Path, words: Sequence[str], *, cold: bool = False) -> Started:
    """``python -m runner WORDS`` in a session of its own.

    ``cold``: with new interpreters, for what they read when they begin.
    """
    told = [sys.executable, "-m", "runner", *unbroken(words)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    begin = warm.WarmPopen if not cold and warm.suits(told, env) else subprocess.Popen
    process = begin(
        told, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env,
        start_new_session=True,
    )  # fmt: skip
    return Started(out=out, process=process)


def ranks(started: Started) -> list[int]:
    """The workers, lowest process id first."""
    return sorted(pid for pid in started.pids() if "RANK" in environment_of(pid))


def agent(started: Started) -> int:
    """The torchrun process."""
    (found,) = running(started, "runner.launch.agent")
    return found


def running(started: Started, module: str) -> list[int]:
    """Processes of ``python -m MODULE`` among the launcher's own, lowest process id first."""
    found = []
    for entry in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            is_it = f"\0{module}\0".encode() in Path(f"/proc/{entry}/cmdline").read_bytes()
            above = parent(entry)
            while is_it and above and above != started.process.pid:
                above = parent(above)
            found += [entry] if is_it and above else []
    return sorted(found)


def assert_healed(started: Started, clean: Result, codes: list[int]) -> Result:
    run = started.wait()
    assert run.code == 0, run.tail
    attempts, _ = read_lines(run.out / "attempts.jsonl")
    assert [attempt["code"] for attempt in attempts] == codes, run.tail
    assert_same_run(run, clean)
    assert_every_sample_once(run)
    assert started.pids() == [], "a process was left behind"
    return run


@pytest.mark.twin
@pytest.mark.parametrize("number", [signal.SIGUSR1, full(signal.SIGTERM)])
def test_asked_to_stop_and_started_again_a_rank_and_torchrun_are_killed(
    tmp_path: Path, clean: Result, number: int
) -> None:
    """One run in a row: saved and not restarted when it is asked to stop; then what is killed."""
    started = launch(tmp_path / "run", SLOW)
    started.until(lambda out: metrics_step(out) >= 33)
    started.process.send_signal(number)
    stopped = started.wait()
    assert stopped.code == 75 and stopped.summary["status"] == "preempted", stopped.tail
    assert stopped.summary["steps"] >= 33 and started.pids() == []
    started = launch(tmp_path / "run", SLOW)
    started.until(lambda out: metrics_step(out) >= 38)
    os.kill(ranks(started)[-1], signal.SIGKILL)
    started.until(lambda out: journalled(out, "start") >= 3 and metrics_step(out) >= 44)
    # Torchrun's workers have sessions of their own and would go on training.
    orphans = ranks(started)
    os.kill(agent(started), signal.SIGKILL)
    until(lambda: not set(orphans) & set(started.pids()), "the orphans' end")
    run = assert_healed(started, clean, [75, 1, 137, 0])
    assert run.summary["restarts"] == 3


@pytest.mark.twin
def test_ranks_that_are_not_forked(tmp_path: Path, clean: Result) -> None:
    """Torchrun alone is; the ranks of each attempt import everything themselves."""
    out = tmp_path / "run"
    words = ["launch", "--nproc", "2", "--pause", "0.1", f"out={out}", *TINY, SLOW]
    started = begun(out, [*words, "launch.warm=false"], cold=True)
    started.until(lambda out: metrics_step(out) >= 33)
    # With forked ranks, torchrun has a second one.
    assert len(running(started, "runner.launch.fork_server")) == 1
    os.kill(ranks(started)[-1], signal.SIGKILL)
    assert_healed(started, clean, [1, 0])


@pytest.mark.twin
def test_a_device_that_computes_wrongly_is_found_before_a_step(tmp_path: Path) -> None:
    """Two of three agree, so the third is named, and its node is left out where there are more."""
    out = tmp_path / "run"
    words = ["launch", "--nproc", "3", "--pause", "0.1", f"out={out}", *TINY, "steps=20"]
    run = begun(out, [*words, "faults=[wrong_product@step=0,rank=1]"]).wait()
    assert run.code == 0, run.tail
    attempts, _ = read_lines(out / "attempts.jsonl")
    assert [(one["code"], one["cause"]) for one in attempts] == [(1, "hardware"), (0, None)]
    (crash,) = run.journal("crash")
    assert crash["ranks"] == [1] and crash["step"] == 0, "before any step"
    assert "other bits for one product of two matrices than its like" in crash["reason"]
    assert (out / "bad_nodes").read_text().count("hardware: rank 1 on ") == 1


@pytest.mark.twin
@pytest.mark.full
def test_a_rank_that_is_preempted_alone_is_restarted(tmp_path: Path, clean: Result) -> None:
    started = launch(tmp_path / "run", SLOW)
    started.until(lambda out: metrics_step(out) >= 33)
    os.kill(ranks(started)[0], signal.SIGUSR1)
    assert_healed(started, clean, [75, 0])


@pytest.mark.twin
@pytest.mark.full
def test_a_poisoned_state_is_no_endless_loop(tmp_path: Path) -> None:
    """Every attempt dies at the same step; the third in a row that does so alike is the last.

    One that is described in other words, as may be on a busy machine, begins the count anew.
    """
    kills = ",".join(f"kill@step=34-{34 + extra},rank=1" for extra in range(9))
    told = tmp_path / "told"
    faults, alert = f"faults=[{kills}]", f'track.command="cat >> {told}"'
    started = launch(tmp_path / "run", faults, alert, options=("--restarts", "8"))
    run = started.wait()
    assert run.code == 3, run.tail
    assert "deterministic: 3 attempts in a row failed at step 34" in run.text
    attempts, _ = read_lines(run.out / "attempts.jsonl")
    assert {attempt["step"] for attempt in attempts} == {34} and 3 <= len(attempts) < 9
    assert started.pids() == []
    ends = [line for line in read_lines(told)[0] if line["kind"] == "gave_up"]
    assert [(line["level"], line["step"]) for line in ends] == [("error", 34)]
    assert (
        "deterministic" in ends[0]["text"] and "not started again; exit code 3" in ends[0]["text"]
    )


@pytest.mark.twin
@pytest.mark.full
def test_a_crash_in_gloo_is_diagnosed_once(tmp_path: Path, clean: Result) -> None:
    """gloo aborts a rank in C++; the attempt with every collective checked says why."""
    # Two faults: the attempt that looks closely shall meet one as well.
    shapes = "other_shape@step=33,rank=1,other_shape@step=34,rank=1"
    started = launch(
        tmp_path / "run", f"faults=[{shapes}]", "debug.diagnose_on_crash=true", "debug=nccl"
    )
    run = assert_healed(started, clean, [1, 1, 0])
    attempts, _ = read_lines(run.out / "attempts.jsonl")
    assert [attempt["diagnosed"] for attempt in attempts] == [False, True, False], run.tail
    unexplained, explained = run.journal("crash")
    assert unexplained["detail"]["cause"] in ("fatal", "silence"), unexplained
    assert "Detected mismatch between collectives" in explained["reason"], explained
    assert "with collectives checked (debug.diagnose_on_crash)" in run.text, run.tail


# A library that gives up: no exception, no signal, no report.
LEAVES = """
import os, pathlib, threading, time
def leave():
    out, left = pathlib.Path(os.environ["LEAVES"]), pathlib.Path(os.environ["LEAVES"], "left")
    metrics = out / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_bytes().splitlines()) < 30:
        time.sleep(0.02)
    if not left.exists():
        left.touch()
        os._exit(9)
if os.environ.get("RANK") == "1":
    threading.Thread(target=leave, daemon=True).start()
"""


@pytest.mark.twin
@pytest.mark.full
def test_a_rank_that_leaves_without_a_word_is_diagnosed(
    tmp_path: Path, clean: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun as a person types it."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(LEAVES)
    path = [str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    monkeypatch.setenv("LEAVES", str(tmp_path / "run"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    overrides = [f"out={tmp_path / 'run'}", *TINY, SLOW, "debug.diagnose_on_crash=true"]
    overrides += ["launch.warm=false"]  # forked ranks import no sitecustomize
    started = begun(
        tmp_path / "run",
        ["supervise", "--pause", "0.1", "--", *torchrun, "-m", "runner", *overrides],
        cold=True,
    )
    run = assert_healed(started, clean, [1, 0])
    attempts, _ = read_lines(run.out / "attempts.jsonl")
    assert [attempt["diagnosed"] for attempt in attempts] == [False, True], run.tail
    (crash,) = run.journal("crash")
    assert crash["ranks"] == [1], crash
    assert "rank 1: ended with exit code 9 and without a report" in crash["reason"], crash


@pytest.mark.parametrize("stopped", [False, full(True)])
def test_launch_that_is_killed_leaves_no_process(tmp_path: Path, stopped: bool) -> None:
    """Also where all that it has started is stopped (SIGSTOP)."""
    started = launch(tmp_path / "run", SLOW)
    started.until(lambda out: metrics_step(out) >= 31)
    alive = {*started.pids(), *running(started, "runner.launch.fork_server")}
    assert len(alive) == 7
    for pid in alive if stopped else ():
        os.kill(pid, signal.SIGSTOP)
    started.process.kill()
    started.wait()
    until(lambda: not any(parent(pid) is not None for pid in alive), "the end of all")


@pytest.mark.twin
@pytest.mark.parametrize("stopped", ["launch", full("runner.launch.fork_server")])
def test_what_is_stopped_while_a_rank_dies_holds_nothing_up(
    tmp_path: Path, clean: Result, stopped: str
) -> None:
    """SIGSTOP, as of a debugger or a frozen machine. The launcher goes on when it is continued;
    fork servers, of launcher and torchrun, never are: new ones take their place."""
    is_launcher = stopped == "launch"
    out = tmp_path / "run"
    words = ["launch", "--nproc", "2", "--pause", "0.1", f"out={out}", *TINY, SLOW]
    started = begun(out, words, cold=not is_launcher)  # forked by the tests' own server else
    started.until(lambda out: metrics_step(out) >= 33)
    pids = [started.process.pid] if is_launcher else running(started, stopped)
    assert len(pids) == (1 if is_launcher else 2)
    torchrun, dying = agent(started), ranks(started)[-1]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    os.kill(dying, signal.SIGKILL)
    if is_launcher:
        until(lambda: exit_status(torchrun) is not None, "torchrun's end")
        os.kill(started.process.pid, signal.SIGCONT)
    run = assert_healed(started, clean, [1, 0])
    assert ("fork server: it does not answer" in run.text) is not is_launcher, run.tail
    assert not any(is_there(pid) for pid in pids)


@pytest.mark.parametrize(
    ("hosts", "length", "longer"),
    [("yes", "epochs=1e-3", "epochs=2e-3"), full("no", "steps=3", "steps=4")],
)
def test_a_node_alone_ends_where_the_run_is_done_and_waits_where_it_is_not(
    tmp_path: Path, hosts: str, length: str, longer: str
) -> None:
    """Nobody else comes: no rank begins, and torchrun would wait for ten minutes."""
    out = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as free:
        head = f"127.0.0.1:{free.getsockname()[1]}"
    node = ("--nodes", "2", "--nproc", "1", "--head", head, "--hosts", hosts)
    assert launch(out, length).wait().code == 0
    done = launch(out, length, options=node).wait()
    assert done.code == 0 and "is done; no other node is waited for" in done.text, done.tail
    started = launch(out, longer, options=node)
    started.until(lambda _: running(started, "runner.launch.agent"))
    os.kill(started.process.pid, signal.SIGTERM)
    assert started.wait().code == 75
    assert started.pids() == []


@pytest.mark.twin
@pytest.mark.full
def test_a_launch_on_nodes_has_a_budget_of_its_own(tmp_path: Path) -> None:
    """An earlier launch of the same run, which met under the same name, has used none of it up."""
    out = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as free:
        head = f"127.0.0.1:{free.getsockname()[1]}"
    node = ("--nodes", "1:2", "--nproc", "1", "--head", head)
    for steps, restarts, code in (((3,), "0", 1), ((4,), "0", 1), ((5, 6, 7), "1", 0)):
        faults = ",".join(f"kill@step={step},rank=0" for step in steps)
        options = (*node, "--restarts", restarts, "--torchrun-restarts", restarts)
        run = launch(out, "steps=8", f"faults=[{faults}]", options=options).wait()
        assert run.code == code, run.tail
    attempts, _ = read_lines(out / "attempts.jsonl")
    assert [attempt["code"] for attempt in attempts] == [1, 1, 1, 0]
    # What the supervisor measures is of the attempt's first start, and not of torchrun's restart.
    starts = [line["detail"]["start_seconds"] for line in run.journal("start")]
    assert ["evidence" in seconds for seconds in starts] == [False] * 4 + [True, False]


@pytest.mark.full
def test_a_wrong_setting_is_not_restarted(tmp_path: Path) -> None:
    """Found by the ranks only, when they open what is there."""
    out = tmp_path / "run"
    assert launch(out, "steps=5").wait().code == 0
    refused = launch(out, "steps=5", "seed=1").wait()
    assert refused.code == 2 and "seed: was 0, now 1" in refused.text, refused.tail
    attempts, _ = read_lines(out / "attempts.jsonl")
    assert [attempt["code"] for attempt in attempts] == [0, 2]
