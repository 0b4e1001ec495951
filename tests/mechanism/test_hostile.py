"""Bugs that fuzzing and reading with a hostile eye have found, one by one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from runner.config.schema import DataConfig, GuardConfig, RunConfig, TokenDtype
from runner.config.validate import check
from runner.data.tokens import open_tokens
from runner.distributed.env import JobEnv, launch_from, place_from, rendezvous_endpoint
from runner.fault.spec import parse_faults
from runner.health.cause_reporter import unexplained
from runner.health.rank_report import Report, read_fatal_log, read_reports
from runner.health.root_cause import find_root_cause
from runner.observe.journal import read_journal
from runner.policy.decision.history import Incident
from runner.run_dir.lease import RunLease, acquire, newest_number
from runner.run_dir.paths import RunDir
from runner.system.error import CheckpointError, ConfigError, DataError, Superseded
from runner.system.json_lines import read_lines, step_of
from runner.system.process import own_process, started_at
from runner.train.state import TrainState

SLURM = {
    "SLURM_JOB_ID": "4", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "2",
}  # fmt: skip


# The launcher's variables


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_TASKS_PER_NODE": "2(x999999999999)"},  # a list of 10^12
        {"SLURM_STEP_TASKS_PER_NODE": "9" * 5000},
        {"SLURM_NODEID": "7"},
        {"SLURM_NODEID": "-1"},
        {"SLURM_PROCID": "2"},
        {"SLURM_PROCID": "²"},  # isdigit() says yes, int() says no
        {"SLURM_LOCALID": "5"},
        {"RANK": "0", "WORLD_SIZE": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
    ],
)
def test_a_place_that_cannot_be(changes: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        place_from(SLURM | changes)


@pytest.mark.parametrize(
    "changes",
    [{"SLURM_JOB_ID": "x"}, {"MASTER_PORT": "0"}, {"MASTER_PORT": "70000"}, {"MASTER_PORT": "²"}],
)
def test_a_meeting_point_that_cannot_be(changes: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        rendezvous_endpoint(SLURM | changes)


def test_odd_digits_in_what_is_only_good_to_know() -> None:
    found = launch_from(SLURM | {"SLURM_RESTART_COUNT": "²", "SLURM_JOB_END_TIME": "²"})
    assert found.order == (0, 0) and found.end_time is None


def test_a_process_whose_name_is_no_text() -> None:
    program = r"""
import ctypes, sys, time
ctypes.CDLL(None).prctl(15, b"\xff\xfe) x", 0, 0, 0)
print("ready", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        started = started_at(child.pid)
        child.communicate(b"")
    assert started is not None and started.isdecimal()


# Claims


LAUNCH = JobEnv(job=None, order=(0, 0), step="", end_time=None, has_agent=False)


NO_JOB = json.dumps({"order": [0, 0], "step": "", "time": 1.0, **own_process()}).encode()


def taken(folder: Path, said: list[str]) -> RunLease:
    return acquire(folder, LAUNCH, stale_seconds=0.05, take_over=False, say=said.append)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1]",
        b"[" * 100_000,
        b'{"job": "x"}',
        b"\xff",
        b'{"order": [], "pid": "1"}',
        NO_JOB,
    ],
)
def test_a_damaged_claim_is_waited_for_and_then_passed(tmp_path: Path, content: bytes) -> None:
    """It used to end the start, or to count as nobody at once."""
    (tmp_path / "000001.json").write_bytes(content)
    said: list[str] = []
    assert taken(tmp_path, said).number == 2
    assert "a damaged claim" in said[0]
    with pytest.raises(Superseded):
        RunLease(tmp_path, 1).check()


def test_a_damaged_claim_of_a_living_run_is_respected(tmp_path: Path) -> None:
    first = taken(tmp_path, [])
    (tmp_path / "000001.json").write_bytes(b"{")
    beats = iter(range(10**6))

    class Beating(list[str]):
        """Beats while the other one waits."""

        def append(self, text: str) -> None:
            import threading

            threading.Timer(0.1, lambda: [first.beat() for _ in [next(beats)]]).start()

    with pytest.raises(ConfigError, match=r"in use by a living run \(a damaged claim\)"):
        acquire(tmp_path, LAUNCH, stale_seconds=5, take_over=False, say=Beating().append)


def test_names_that_are_no_numbers(tmp_path: Path) -> None:
    for name in ("0x.json", "1.json", "00000².json", "0" * 60 + ".json"):
        (tmp_path / name).write_text("{}")
    assert newest_number(tmp_path) == 0


def test_the_last_number_ends_in_words_and_not_in_a_loop(tmp_path: Path) -> None:
    (tmp_path / "9999999.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"9999999\.json"):
        taken(tmp_path, [])


def test_a_claim_that_is_a_pipe_blocks_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "000001.json")
    os.mkfifo(tmp_path / "beat")
    assert taken(tmp_path, []).number == 2


def test_a_heartbeat_that_is_no_text(tmp_path: Path) -> None:
    claim = {"job": None, "order": [0, 0], "step": "", "time": 1.0, **own_process()}
    (tmp_path / "000001.json").write_text(json.dumps(claim | {"host": "elsewhere"}))
    (tmp_path / "beat").write_bytes(b"\xff\xfe")
    assert taken(tmp_path, []).number == 2


# Reports and last words


def report(**changes: Any) -> dict[str, Any]:
    return asdict(Report(rank=0, world_size=2, kind="hang", step=1, phase="x")) | changes


ENTRY = {"state": "scheduled", 
    "group": "0", "seq": 1, "op": "a", "sizes": [[1]], "dtypes": ["f"], "finished": False,
    "line": "",
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"step": float("inf")},
        {"rank": -1},
        {"stacks": [{"frames": []}]},
        {"stacks": [{"thread": "MainThread", "frames": [{"file": 1}]}]},
        {"collectives": [{}]},
        {"collectives": [ENTRY | {"sizes": 3}]},
        {"rank": 1},  # another rank's, in this one's name
    ],
)
def test_a_report_that_makes_no_sense_is_left_out(tmp_path: Path, changes: dict[str, Any]) -> None:
    (tmp_path / "rank-00000.json").write_text(json.dumps(report(**changes)))
    assert read_reports(tmp_path) == []


def test_a_far_sequence_number_is_no_endless_loop(tmp_path: Path) -> None:
    far = [ENTRY, ENTRY | {"seq": 2**62}]
    for rank in (0, 1):
        text = json.dumps(report(rank=rank, collectives=far))
        (tmp_path / f"rank-{rank:05d}.json").write_text(text)
    assert find_root_cause(read_reports(tmp_path), 2).kind == "network"


def test_last_words_with_a_line_number_that_int_refuses(tmp_path: Path) -> None:
    path = tmp_path / "fatal.txt"
    path.write_text(f'Fatal\nThread 0x1 (most\n  File "a.py", line {"9" * 5000} in f\n')
    seen = Report(rank=0, world_size=1, kind="fatal", step=0, phase="x")
    found = read_fatal_log(path, seen)
    assert found is not None and found.where == ""


def test_last_words_under_a_name_that_is_none(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.create()
    for rank in ("x", "²", "99999"):
        (run_dir.debug / f"fatal-000001-rank-{rank}.txt").write_text("Fatal")
    [line] = unexplained(run_dir, [], 2)
    assert line.ranks == ()


# Files of a run


@pytest.mark.parametrize("step", [None, "x", float("inf"), -1, 2**70, True, [1]])
def test_a_metrics_line_without_a_step(step: Any) -> None:
    assert step_of({"step": step}) == 0


DISCARDED = {"loss": "nan", "grad_norm": 1.0, "tokens": 9, "nonfinite_ranks": 1}


@pytest.mark.parametrize(
    "change",
    [
        {"detail": []},
        {"samples": None},
        {"step": -1},
        {"samples": [5, 2]},
        {"detail": {"incarnation": [1]}},
        {"detail": {"world_size": 10**12}},
        {"time": "soon"},
        {"ranks": [-1]},
    ],
)
def test_a_journal_line_that_cannot_be(tmp_path: Path, change: dict[str, Any]) -> None:
    line = Incident(kind="start", step=0, decision="begin", reason="new", samples=(0, 4)).to_json()
    if "samples" in change:
        line |= {"kind": "discard", "detail": DISCARDED}
    path = tmp_path / "journal.jsonl"
    path.write_text(json.dumps(line) + "\n")
    assert len(read_journal(path)[0]) == 1
    path.write_text(json.dumps(line | change) + "\n")
    with pytest.raises(ConfigError, match=r"journal\.jsonl"):
        read_journal(path)


@pytest.mark.parametrize(
    "text", ["kill@" + "[" * 50_000, "x" * 50_000, "kill@step=" + "1" * 50_000]
)
def test_an_endless_fault_is_refused_in_few_words(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_faults([text])
    assert len(str(caught.value)) < 2000


def test_lines_are_not_read_from_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "journal.jsonl")
    with pytest.raises(ConfigError, match="is no plain file"):
        read_lines(tmp_path / "journal.jsonl")


@pytest.mark.parametrize(
    "change",
    [{"updates": -1}, {"cursor": "5"}, {"cursor": 2**63}, {"baseline": None}, {"last_loss": []}],
)
def test_a_train_state_that_cannot_be(change: dict[str, Any]) -> None:
    state = TrainState(GuardConfig())
    with pytest.raises(CheckpointError, match="train_state"):
        state.load_json(state.to_json() | change)


def test_numbers_in_a_train_state_that_are_none() -> None:
    state = TrainState(GuardConfig())
    tree = state.to_json()
    tree["baseline"]["loss"] = [json.loads("1e999")]
    with pytest.raises(CheckpointError, match="holds inf"):
        state.load_json(tree)


def test_a_range_past_what_64_bits_hold() -> None:
    config = RunConfig()
    config.data.skip = [[0, 10**30]]
    with pytest.raises(ConfigError, match=r"data\.skip"):
        check(config, world_size=1)


@pytest.mark.parametrize("name", ["corpus.npy", "corpus.idx", "corpus.bin"])
def test_a_token_file_that_is_a_pipe_blocks_nobody(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match="no plain file"):
        path = [str(tmp_path / name)]
        open_tokens(DataConfig(path=path, token_dtype=TokenDtype.uint16, vocab_size=9, seq_len=2))
