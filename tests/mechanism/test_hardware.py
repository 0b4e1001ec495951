"""A device that has failed is told as that: its node is listed, and it is never deterministic."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runner.health.cause_reporter import crash_incident
from runner.health.rank_report import Report
from runner.health.root_cause import HARDWARE, find_root_cause, is_hardware
from runner.launch import process_tree
from runner.launch import supervisor as supervisor_module
from runner.launch.attempt import EXIT_CODES, Ended, Job
from runner.launch.crash_evidence import BadNodes
from runner.launch.supervisor import JobSupervisor
from runner.policy import restart
from runner.policy.nodes import choose
from runner.policy.outlier_ranks import RankPace, Stragglers
from runner.policy.restart import End, RestartRules

ECC = "AcceleratorError: CUDA error: uncorrectable ECC error encountered"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ECC, True),
        ("CUDA error: uncorrectable NVLink error detected during the execution", True),
        ("Unable to determine the device handle: GPU has fallen off the bus", True),
        ("NVML: GPU is lost", True),
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.", True),
        ("NVRM: Xid (PCI:0000:3b:00): 94, Contained ECC error", True),
        ("NVRM: Xid (PCI:0000:3b:00): 31, MMU Fault: a program's own", False),
        ("CUDA error: hardware stack error", True),
        ("CUDA error: all CUDA-capable device(s) is/are busy or unavailable", True),
        (
            "NCCL error: unhandled cuda error: Cuda failure 'uncorrectable ECC error encountered'",
            True,
        ),
        ("CUDA error: an illegal memory access was encountered", False),
        ("CUDA error: device-side assert triggered", False),
        ("CUDA error: unspecified launch failure", False),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("ValueError: the record at 79 is odd", False),
    ],
)
def test_which_texts_say_so(text: str, expected: bool) -> None:
    assert is_hardware(text) is expected


def report(rank: int, message: str, **more: Any) -> Report:
    told: dict[str, Any] = {"kind": "exception", "step": 7, "phase": "read", "time": float(rank)}
    return Report(rank=rank, world_size=4, message=message, host=f"gpu{rank:02d}", **(told | more))


def test_the_device_that_failed_comes_before_what_followed_from_it() -> None:
    reports = [
        report(0, "AcceleratorError: CUDA error: unspecified launch failure"),
        report(1, "m", kind="lost_contact"),
        report(2, ECC),
        report(3, "killed by SIGTERM", kind="signal"),
    ]
    cause = find_root_cause(reports, 4)
    assert (cause.kind, cause.ranks) == (HARDWARE, (2,)) and "ECC" in cause.reason
    line = crash_incident(cause, 1)
    assert line.detail["cause"] == HARDWARE == restart.HARDWARE
    assert line.detail["host"] == "gpu02"


def journal(out: Path, *lines: dict[str, Any]) -> None:
    with (out / "journal.jsonl").open("a") as file:
        file.writelines(json.dumps({"ranks": [], "reason": "", **line}) + "\n" for line in lines)


class Attempts:
    """In the place of what starts processes."""

    def __init__(self, out: Path, *ended: Ended, cause: str = "exception") -> None:
        self.out, self.ended, self.cause = out, list(ended), cause

    def __call__(self, job: Job, stop: Any) -> Ended:
        ended = self.ended.pop(0)
        if ended.code:
            detail = {"cause": self.cause, "signature": "s", "host": "gpu02.cluster.example"}
            crash = {"kind": "crash", "step": 12, "ranks": [2], "reason": ECC, "detail": detail}
            journal(self.out, {"kind": "start", "step": 10, "detail": {}}, crash)
        return ended


def supervised(out: Path, attempts: Attempts, monkeypatch: pytest.MonkeyPatch) -> tuple[End, str]:
    said: list[str] = []
    monkeypatch.setattr(supervisor_module, "run_once", attempts)
    monkeypatch.setattr(supervisor_module.Stop, "listen", lambda self: None)
    made = JobSupervisor(
        out=out,
        launch_id="l",
        rules=RestartRules(codes=EXIT_CODES, pause_seconds=0.0),
        make_job=lambda number, diagnose: Job(command=[], environment={}),
        say=said.append,
    )
    return made.run(), "\n".join(said)


def ended(code: int, **more: Any) -> Ended:
    return Ended(code=code, missing=frozenset(), **more)


def test_its_node_is_listed_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = Attempts(tmp_path, ended(1), ended(0), cause=HARDWARE)
    end, said = supervised(tmp_path, attempts, monkeypatch)
    assert end.code == 0
    bad = BadNodes(tmp_path).read()
    assert list(bad) == ["gpu02"] and "uncorrectable ECC" in bad["gpu02"] and "gpu02" in said
    nodes = ["gpu01", "gpu02", "gpu03"]
    assert choose(nodes, count=2, bad=bad, lost=()) == ["gpu01", "gpu03"]


def test_no_other_crash_lists_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supervised(tmp_path, Attempts(tmp_path, ended(1), ended(0)), monkeypatch)
    assert not BadNodes(tmp_path).read()


def test_processes_that_do_not_end_keep_the_next_attempt_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would start beside them, and die for want of the GPU's memory that they hold."""
    attempts = Attempts(tmp_path, ended(1, stuck=(77,)), ended(0))
    end, said = supervised(tmp_path, attempts, monkeypatch)
    assert end.code == 1 and "state D" in end.reason and len(attempts.ended) == 1
    assert list(BadNodes(tmp_path).read()) == [os.uname().nodename.partition(".")[0]]
    assert "77" in said


@pytest.mark.parametrize(("in_kernel", "seconds"), [(True, 60.0), (False, 5.0)])
def test_how_long_is_waited_for_those_who_sleep_in_the_kernel(
    in_kernel: bool, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, sent = [0.0], list[int]()
    monkeypatch.setattr(process_tree, "marked", lambda mark: [77])
    monkeypatch.setattr(process_tree, "is_in_kernel", lambda pid: in_kernel)
    monkeypatch.setattr(process_tree, "send", lambda pid, number: sent.append(pid))
    monkeypatch.setattr(process_tree.time, "monotonic", lambda: now[0])

    def sleep(_: float) -> None:
        now[0] += 1.0

    monkeypatch.setattr(process_tree.time, "sleep", sleep)
    process_tree.end_all("m", timeout_seconds=5.0, stuck_seconds=60.0)
    assert now[0] == seconds + 1.0 and set(sent) == {77}


@pytest.mark.parametrize(("device_factor", "found"), [(1.2, [2]), (None, [])])
def test_a_throttled_gpu_is_slow_by_less_than_a_busy_host(
    device_factor: float | None, found: list[int]
) -> None:
    paces = [
        RankPace(host=0.01, device=0.010 if rank != 2 else 0.013, step=0.5) for rank in range(8)
    ]
    stragglers = Stragglers(factor=2.0, checks=1, device_factor=device_factor)
    assert [one.rank for one in stragglers.note(paces)] == found
    busy = [replace(pace, host=0.015 if rank == 3 else 0.01) for rank, pace in enumerate(paces)]
    assert 3 not in [one.rank for one in stragglers.note(busy)]
