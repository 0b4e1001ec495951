"""A rank dies in a guarded script: the restart goes on, and the journal says who died and how."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.rows import full
from tests.run import metrics_step, read_lines
from tests.script_run import ends_of
from tests.waiting import until

SCRIPT = "crashing_script.py"


LOOP = """\
import sys, time, torch
import torch.distributed as dist
from runner import Guard
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
guard = Guard(sys.argv[1], model=model, optimizer=optimizer, every=8, clean_after=3, min_history=8)
for count, batch in enumerate(guard.over([torch.ones(4, 2)] * 2000)):
    print("step", count, flush=True)
    loss = model(batch).square().mean()
    if sys.argv[2] == "poison" and count > 20:
        loss = loss * float("nan")
    loss.backward()
    if guard.ok(loss):
        optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
"""


@pytest.mark.parametrize("how", ["poison", "stop"])
@pytest.mark.parametrize("by", [full("supervise"), "run"])
def test_a_loop_that_ends_on_purpose_under_torchrun(tmp_path: Path, by: str, how: str) -> None:
    """torchrun ends with 1, whatever its ranks ended with."""
    out, script = tmp_path / "run", tmp_path / "loop.py"
    script.write_text(LOOP)
    words = [sys.executable, "-m", "runner", by, "--out", str(out), "--pause", "0", "--"]
    words += [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words += [str(script), str(out), how]
    with warm.WarmPopen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as supervisor:
        try:
            if how == "stop":
                until(lambda: metrics_step(out) >= 12 or supervisor.poll() is not None)
                supervisor.terminate()
            text, _ = supervisor.communicate(timeout=120)
        finally:
            supervisor.kill()
    code = 75 if how == "stop" else 3
    assert supervisor.returncode == code, text[-3000:].decode()
    assert [line["code"] for line in read_lines(out / "attempts.jsonl")] == [code]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("undisturbed")
    return ends_of(SCRIPT, out, str(out))


@pytest.mark.parametrize(
    ("rank", "how", "words"),
    [
        full("1", "kill", r"rank 1: killed by SIGKILL"),
        ("1", "raise", r"rank 1: ValueError: the tokens of this batch are out of range .*:\d+ die"),
        full("0", "kill", r"rank 0: killed by SIGKILL"),
        full("0", "raise", r"rank 0: ValueError: the tokens"),
    ],
)
def test_the_journal_says_who_died_and_how(
    tmp_path: Path, undisturbed: list[dict[str, Any]], rank: str, how: str, words: str
) -> None:
    assert ends_of(SCRIPT, tmp_path, str(tmp_path), rank, how, restarts=1) == undisturbed
    lines = read_lines(tmp_path / "run" / "journal.jsonl")
    [crash] = [line for line in lines if line["kind"] == "crash"]
    assert crash["ranks"] == [int(rank)], crash
    assert re.match(words, crash["reason"]), crash["reason"]
    assert crash["detail"]["incarnation"] == 1
    starts = [line for line in lines if line["kind"] == "start"]
    assert len(starts) == 2 and starts[1]["step"] > 0
