"""The script for machines with GPUs: what it says without one, and how a claim becomes a line."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch

from scripts import gpu_check
from scripts.gpu_check import CLAIMS, Claim, Failed, Machine, Skipped, main, try_claim


def machine(folder: Path, *, ranks: int = 2, seconds: float = 60.0) -> Machine:
    until = time.monotonic() + seconds
    return Machine(device="cpu", ranks=ranks, folder=folder, until=until)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the script would use it")
def test_without_a_gpu_it_says_so_and_claims_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path / "told.json")]) == 2
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("no CUDA device on this machine")
    assert [line[:4] for line in told[1:-1]] == ["skip"] * len(CLAIMS)
    assert not (tmp_path / "told.json").exists()


@pytest.mark.parametrize(
    ("error", "result", "words"),
    [
        (None, "pass", "as it should"),
        (Failed("it differs"), "fail", "it differs"),
        (Skipped("no deepspeed"), "skip", "no deepspeed"),
        (RuntimeError("CUDA error"), "fail", "RuntimeError: CUDA error"),
    ],
)
def test_a_claim_becomes_a_line(
    tmp_path: Path, error: Exception | None, result: str, words: str
) -> None:
    def check(where: Machine) -> str:
        where.measured["bytes"] = 3
        if error is not None:
            raise error
        return "as it should"

    line = try_claim(Claim(name="a", words="it holds", check=check, seconds=1), machine(tmp_path))
    assert (line.result, line.words, line.measured) == (result, words, {"bytes": 3})


def test_what_no_time_is_left_for_is_not_begun(tmp_path: Path) -> None:
    def check(where: Machine) -> str:
        raise AssertionError("begun")

    claim = Claim(name="a", words="it holds", check=check, seconds=90)
    assert try_claim(claim, machine(tmp_path)).words.startswith("no time left")


def test_one_gpu_skips_what_needs_two_ranks(tmp_path: Path) -> None:
    [death] = [claim for claim in CLAIMS if claim.name == "death"]
    line = try_claim(death, machine(tmp_path, ranks=1, seconds=600))
    assert (line.result, line.words) == ("skip", "needs 2 GPUs, there are 1")


def test_a_command_that_does_not_end_fails_with_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "_RUN_SECONDS", 3.0)
    program = "print('it said this', flush=True); import time; time.sleep(600)"
    with pytest.raises(Failed, match=r"still running after 3 s: it said this"):
        machine(tmp_path).call([sys.executable, "-c", program])


def test_a_rehearsal_writes_what_is_to_be_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "runs" / "told.json"
    assert main(["--rehearse", "--only=head", "--only=digest", f"--out={out}"]) == 0
    told = json.loads(out.read_text())
    assert told["rehearsal"] and told["machine"]["ranks"] == 2
    assert [line["result"] for line in told["claims"]] == ["pass", "pass"]
    assert capsys.readouterr().out.startswith("a rehearsal on the CPU")
