"""Whose fault an exception is, by texts that torch, gloo and NCCL really wrote."""

from __future__ import annotations

import datetime
import importlib
import json
import multiprocessing
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runner.health.rank_report import Report
from runner.health.root_cause import LOST_CONTACT, UNCLEAR, find_root_cause, message_of, whose_fault

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


def report(rank: int, kind: str, message: str = "", time: float = 0.0) -> Report:
    return Report(
        rank=rank, world_size=3, kind=kind, step=7, phase="agree", message=message, time=time
    )


def test_an_error_that_does_not_tell_is_the_cause_only_where_nothing_is_surer() -> None:
    lost, unclear = report(0, LOST_CONTACT), report(1, UNCLEAR, "NCCL error: internal error")
    alone = find_root_cause([lost, unclear, report(2, "called")], 3)
    assert (alone.kind, alone.ranks) == (UNCLEAR, (1,)) and "internal error" in alone.reason
    gone = find_root_cause([lost, unclear], 3)
    assert (gone.kind, gone.ranks) == ("silence", (2,)), "a rank that is gone is surer"
    killed = find_root_cause([lost, unclear, report(2, "signal", "killed by SIGKILL", time=9.0)], 3)
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
