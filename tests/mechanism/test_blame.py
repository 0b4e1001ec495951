"""From what ranks wrote, and from texts of torch, gloo and NCCL, to who was at fault."""

from __future__ import annotations

import datetime
import importlib
import json
import multiprocessing
import os
import signal
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runner.config.schema import WatchdogConfig
from runner.health.cause_reporter import unexplained
from runner.health.flight_recorder import first_divergence
from runner.health.flight_recorder import plain_entry as evidence_entry
from runner.health.heartbeat import Heartbeat, hang_limit, hang_message
from runner.health.rank_report import Report, own_line, read_fatal_log, read_reports, write_report
from runner.health.root_cause import (
    LOST_CONTACT,
    MEMORY,
    UNCLEAR,
    find_root_cause,
    message_of,
    whose_fault,
)
from runner.run_dir.paths import RunDir


def entry(
    seq: int, op: str = "all_reduce", size: int = 4, *, finished: bool = True
) -> dict[str, Any]:
    return {
        "group": "0",
        "seq": seq,
        "op": op,
        "sizes": [[size]],
        "dtypes": ["Float"],
        "state": "completed" if finished else "scheduled",
        "finished": finished,
        "line": f"train.py:{seq} step",
    }


def report(rank: int, kind: str, **changes: Any) -> Report:
    told: dict[str, Any] = {
        "rank": rank, "world_size": 3, "kind": kind, "step": 7, "phase": "agree", "message": "m",
    }  # fmt: skip
    return Report(**(told | changes))


@pytest.mark.parametrize(
    "message",
    [
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "DistBackendError: NCCL error: unhandled cuda error\nCuda failure 2 'out of memory'",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't "
        "allocate memory: you tried to allocate 100663296 bytes. Error code 12 (Cannot allocate)",
        "MemoryError: ",
        "_ArrayMemoryError: Unable to allocate 64.0 GiB for an array with shape (8,)",
        "OSError: [Errno 12] Cannot allocate memory",
    ],
)
def test_a_lack_of_memory_is_known_by_its_words(message: str) -> None:
    cause = find_root_cause([report(0, "exception", message=message)], 1)
    assert cause.kind == MEMORY, cause


PAST = [entry(seq) for seq in range(5)]


@pytest.mark.parametrize(
    ("recorded", "kind", "ranks", "words"),
    [
        # Rank 2 has not come to the collective that the others wait in.
        (
            [[*PAST, entry(5, finished=False)], [*PAST, entry(5, finished=False)], PAST],
            "absent", (2,), "all_reduce #5",
        ),
        # One entered another operation.
        (
            [
                [*PAST, entry(5, finished=False)],
                [*PAST, entry(5, "broadcast", finished=False)],
                [*PAST, entry(5, finished=False)],
            ],
            "operation", (1,), "rank 1 entered broadcast #5",
        ),
        # One left an all-reduce out, and is at the gather that comes after it.
        (
            [
                [*PAST, entry(5, "all_gather", finished=False)],
                [*PAST, entry(5, finished=False)],
                [*PAST, entry(5, finished=False)],
            ],
            "operation", (0,), "rank 0 entered all_gather #5 (float[4]) at train.py:5",
        ),
        # Another number of elements.
        (
            [
                [*PAST, entry(5, finished=False)],
                [*PAST, entry(5, finished=False)],
                [*PAST, entry(5, size=5, finished=False)],
            ],
            "shape", (2,), "float[5]",
        ),
    ],
)  # fmt: skip
def test_the_first_divergence(
    recorded: list[list[dict[str, Any]]], kind: str, ranks: tuple[int, ...], words: str
) -> None:
    found = first_divergence(dict(enumerate(recorded)))
    assert found is not None and (found.kind, found.ranks, found.seq) == (kind, ranks, 5)
    assert words in found.message


def test_two_ranks_have_no_majority() -> None:
    found = first_divergence({0: [*PAST, entry(5)], 1: [*PAST, entry(5, "broadcast")]})
    assert found is not None and found.ranks == (0, 1)


def test_what_the_recorder_has_forgotten_is_not_compared() -> None:
    long = [entry(seq) for seq in range(100)]
    assert first_divergence({0: long[90:], 1: long[40:]}) is None
    assert first_divergence({0: long[90:], 1: long[40:99]}) is None, "finished, not waiting"
    assert first_divergence({}) is None and first_divergence({0: long}) is None


def test_groups_are_compared_each_for_itself() -> None:
    other = [entry(seq) | {"group": "7"} for seq in range(3)]
    waits = entry(3, finished=False) | {"group": "7"}
    found = first_divergence({0: [*PAST, *other, waits], 1: [*PAST, *other], 2: PAST})
    assert found is not None and (found.group, found.ranks) == ("7", (1,))


def dumped(rank: int, name: str, seq: int, state: str) -> dict[str, Any]:
    """An entry as torch's recorder hands it over; NCCL and gloo write the same fields."""
    frames = [{"filename": "/site-packages/torch/x.py", "line": 9, "name": "all_reduce"},
              {"filename": "runner/train/step.py", "line": 7, "name": "attempt"}]  # fmt: skip
    return {
        "frames": frames, "record_id": seq, "pg_id": 0, "process_group": ("0", "default_pg"),
        "collective_seq_id": seq, "p2p_seq_id": 0, "op_id": seq, "profiling_name": name,
        "input_sizes": [[4]], "input_dtypes": ["Float"], "output_sizes": [[4]],
        "output_dtypes": ["Float"], "state": state, "retired": state == "completed",
        "is_p2p": False, "timeout_ms": 600000, "time_created_ns": seq,
    }  # fmt: skip


def test_two_backends_of_one_group_count_apart() -> None:
    """On CUDA the default group has gloo beside NCCL, and both have a collective number 5."""
    nccl = [("nccl:all_reduce", seq, "completed") for seq in range(1, 6)]
    ahead = [*nccl, ("gloo:broadcast", 5, "started")]
    gloo = [("gloo:broadcast", seq, "completed") for seq in range(1, 5)]
    recorded = {
        rank: [evidence_entry(dumped(rank, *told)) for told in [*gloo, *entries]]
        for rank, entries in enumerate([ahead, ahead, nccl])
    }
    found = first_divergence(recorded)
    assert found is not None and (found.kind, found.ranks) == ("absent", (2,)), found
    assert "entered broadcast #5 (float[4]) at runner/train/step.py:7 attempt" in found.message


def test_a_rank_that_left_without_a_word_is_the_cause() -> None:
    told = [report(0, "lost_contact"), report(1, "exit", message="ended with exit code 9")]
    found = find_root_cause(told, 2)
    assert (found.kind, found.ranks) == ("exit", (1,)), found
    assert found.signature == "exit ended with exit code N", "a supervisor shows it in a sentence"
    assert "rank 1: ended with exit code 9" in found.reason


def test_an_exception_comes_before_those_who_lost_contact() -> None:
    cause = find_root_cause(
        [
            report(0, "lost_contact", time=1.0),
            report(1, "exception", time=2.0, message="ValueError: 3 is odd"),
            report(2, "signal", message="killed by SIGTERM"),
        ],
        3,
    )
    assert cause.ranks == (1,) and "ValueError: 3 is odd" in cause.reason
    again = find_root_cause([report(1, "exception", message="ValueError: 5 is odd", step=7)], 3)
    assert again.signature == cause.signature, "numbers do not make it another failure"
    other = find_root_cause([report(1, "exception", message="KeyError: 'a'", step=7)], 3)
    assert other.signature != cause.signature


def test_all_ranks_that_fail_alike_are_named() -> None:
    reports = [report(r, "exception", message=f"OSError: rank {r}", time=r) for r in range(3)]
    assert find_root_cause(reports, 3).ranks == (0, 1, 2)


def test_who_changed_the_shape_when_gloo_aborted_the_other() -> None:
    same_line = [entry(seq) | {"line": "step.py:9 f"} for seq in range(3)]
    odd = entry(3, size=5, finished=False) | {"line": "step.py:9 f"}
    reports = [
        report(0, "fatal", message="Fatal Python error: Aborted"),
        report(1, "lost_contact", collectives=[*same_line, odd]),
    ]
    cause = find_root_cause(reports, 2)
    assert "rank 1 handed over [[5]] in all_reduce #3 at step.py:9 f" in cause.reason
    assert "where it was [[4]] before" in cause.reason


def test_silence() -> None:
    gone = find_root_cause([report(0, "lost_contact"), report(2, "lost_contact")], 3)
    assert gone.ranks == (1,) and "SIGKILL" in gone.reason
    frozen = find_root_cause([report(0, "hang", collectives=[*PAST, entry(5, finished=False)])], 2)
    assert frozen.ranks == (1,) and "does not answer" in frozen.reason
    assert "all_reduce #5 at train.py:5" in frozen.reason
    assert "without a report" in find_root_cause([], 3).reason


def test_a_rank_that_is_busy_while_the_others_wait() -> None:
    stack = {"thread": "MainThread", "frames": [{"file": "d.py", "line": 9, "function": "load"}]}
    waiting = [*PAST, entry(5, finished=False)]
    cause = find_root_cause(
        [
            report(0, "hang", collectives=waiting),
            report(1, "called", collectives=PAST, stacks=[stack], phase="fetch"),
        ],
        2,
    )
    assert cause.ranks == (1,) and cause.kind == "absent"
    assert "rank 1 is in fetch at d.py:9 load" in cause.reason


def test_reports_survive_the_disk_and_torn_ones_are_left_out(tmp_path: Path) -> None:
    whole = report(0, "hang", collectives=PAST)
    write_report(tmp_path, whole)
    (tmp_path / "rank-00001.json").write_text(json.dumps(asdict(whole))[:50])
    (tmp_path / "rank-00002.json").write_text("[]")
    assert read_reports(tmp_path) == [whole]


def test_last_words(tmp_path: Path) -> None:
    """As faulthandler writes them, the dying thread not being the training thread."""
    path = tmp_path / "fatal.txt"
    seen = report(1, "signal")
    assert read_fatal_log(path, seen) is None
    path.touch()
    assert read_fatal_log(path, seen) is None
    path.write_text(
        "Fatal Python error: Aborted\n\n"
        "Current thread 0x00007f (most recent call first):\n  <no Python frame>\n\n"
        "Thread 0x00007e (most recent call first):\n"
        '  File "/x/runner/train/step.py", line 196 in _all_reduce\n'
        '  File "/x/runner/__main__.py", line 90 in _run\n'
    )
    found = read_fatal_log(path, seen)
    assert found is not None and found.kind == "fatal" and "Aborted" in found.message
    assert found.where == "/x/runner/train/step.py:196 _all_reduce"


def test_own_lines_come_before_library_lines() -> None:
    frames = [
        {"file": "/home/me/train.py", "line": 3, "function": "main"},
        {"file": "/v/site-packages/torch/x.py", "line": 9, "function": "all_reduce"},
    ]
    assert own_line(frames) == "/home/me/train.py:3 main"
    frozen = {"file": "<frozen importlib._bootstrap>", "line": 241, "function": "_call"}
    assert own_line([*frames, frozen]) == own_line(frames), "within an import"
    assert own_line(frames[1:]).startswith("/v/site-packages") and own_line([]) == ""


def test_who_asked_for_a_collective_comes_before_who_handed_it_on() -> None:
    handed_on = [
        {"file": f"/w/runner/{file}", "line": 5, "function": "all_reduce"}
        for file in ("fault/wrap.py", "distributed/agreement.py")
    ]
    library = {"file": "/v/site-packages/torch/x.py", "line": 9, "function": "all_reduce"}
    step = {"file": "/w/runner/train/step.py", "line": 3, "function": "launch"}
    assert own_line([step, *handed_on, library]) == "/w/runner/train/step.py:3 launch"
    assert own_line([*handed_on, library]) == "/w/runner/distributed/agreement.py:5 all_reduce"


def test_the_patience_with_a_phase() -> None:
    now = [0.0]
    heart = Heartbeat(lambda: now[0])
    patience = WatchdogConfig(floor_seconds=2.0, slow_seconds=60.0)
    assert hang_limit(heart, patience) == 60.0, "starting"
    for step in (1, 2, 3):
        now[0] += 0.25
        heart.begin_step(step)
    assert hang_limit(heart, patience) == 5.0
    now[0] += 3.0
    assert heart.seconds == 3.0 and (heart.step, heart.phase) == (3, "fetch")
    assert hang_message(heart, patience) is None
    now[0] += 3.0
    assert hang_message(heart, patience) == "no progress for 6.0 s (limit 5.0 s)"
    heart.enter("save")
    assert heart.seconds == 0.0 and hang_limit(heart, patience) == 60.0
    fast = WatchdogConfig(floor_seconds=30.0, slow_seconds=10.0)
    assert hang_limit(heart, fast) == 30.0


def test_the_next_start_journals_each_incarnation_without_a_line_once(tmp_path: Path) -> None:
    """Whatever ranks have reports: their numbers are no numbers of incarnations."""
    run_dir = RunDir(tmp_path)
    run_dir.create()
    for number in (1, 3):
        for rank in (0, 1):
            told = report(rank, "exception", step=number * 10, message=f"ValueError: {number}")
            write_report(run_dir.incident(number), told)
    starts = [
        {"kind": "start", "detail": {"incarnation": number, "world_size": 2}}
        for number in range(1, 6)
    ]
    run_dir.incarnation.mkdir()
    (run_dir.incarnation / "000005.ended").touch()
    found = unexplained(run_dir, [*starts, {"kind": "crash", "detail": {"incarnation": 4}}], 6)
    assert [(line.detail["incarnation"], line.step) for line in found] == [(1, 10), (2, 1), (3, 30)]
    assert "without a report" in found[1].reason


# Whose fault an exception is


# Where the text is from: seen here with torch 2.13, or a project's issue thread.
ROWS = json.loads((Path(__file__).parents[1] / "data" / "lost_contact.json").read_text())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['expected']}: {row['from']}")
def test_whose_fault_it_is(row: dict[str, str]) -> None:
    module, _, name = row["error"].rpartition(".")
    error = getattr(importlib.import_module(module), name)
    assert whose_fault(error(row["text"])) == row["expected"]


def test_nccls_last_error_is_told() -> None:
    (text,) = (row["text"] for row in ROWS if row["text"].endswith("999 'unknown error'"))
    words = message_of(dist.DistBackendError(f"{text}\nException raised from here\nframe #3: x\n"))
    assert words.startswith("NCCL error in: ") and words.endswith(
        "Cuda failure 999 'unknown error'"
    )
    assert "\n" not in words and "frame" not in words
    assert message_of(ValueError("one\ntwo")) == "one" and message_of(KeyError()) == "KeyError"


def test_an_error_that_does_not_tell_is_the_cause_only_where_nothing_is_surer() -> None:
    lost = report(0, LOST_CONTACT)
    unclear = report(1, UNCLEAR, message="NCCL error: internal error")
    alone = find_root_cause([lost, unclear, report(2, "called")], 3)
    assert (alone.kind, alone.ranks) == (UNCLEAR, (1,)) and "internal error" in alone.reason
    gone = find_root_cause([lost, unclear], 3)
    assert (gone.kind, gone.ranks) == ("silence", (2,)), "a rank that is gone is surer"
    ended = report(2, "signal", message="killed by SIGKILL", time=9.0)
    killed = find_root_cause([lost, unclear, ended], 3)
    assert killed.ranks == (2,), "and so is one that was killed"


def _rank(rank: int, port: int, how: str, told: Any) -> None:
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    limit = datetime.timedelta(seconds=2 if how == "hangs" else 60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
    try:
        dist.all_reduce(torch.ones(1000))
    except Exception as error:
        told.put((whose_fault(error), str(error)))
        return
    told.put(("went through", ""))


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_what_gloo_says_when_a_peer(how: str) -> None:
    """The texts above change with torch: this one is asked of the torch that is installed."""
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [context.Process(target=_rank, args=(rank, port, how, told)) for rank in range(2)]
    try:
        for rank in ranks:
            rank.start()
        assert told.get(timeout=60)[0] == LOST_CONTACT
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
