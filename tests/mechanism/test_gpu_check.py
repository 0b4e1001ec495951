"""The script for machines with GPUs: what it says without one, and how a claim becomes a line."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.checkpoint.ring import CheckpointRing
from runner.config.compose import compose
from runner.config.validate import check
from runner.distributed.device import code_digest
from runner.distributed.env import place_from
from runner.distributed.rendezvous import end_group, start_group
from runner.engine.forward import Forward
from runner.startup.preflight import hardware
from scripts import gpu_check
from scripts.gpu_check import CLAIMS, Claim, Failed, Machine, Skipped, main, try_claim, verdict
from tests.gpu.test_late import open_loop


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


def test_an_error_is_a_line_that_fails_and_keeps_what_was_measured(tmp_path: Path) -> None:
    def check(where: Machine) -> str:
        where.measured["bytes"] = 3
        raise RuntimeError("CUDA error")

    line = try_claim(Claim(name="a", words="it holds", check=check, seconds=1), machine(tmp_path))
    assert (line.result, line.words) == ("fail", "RuntimeError: CUDA error")
    assert line.measured == {"bytes": 3}


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
    monkeypatch.setattr(gpu_check, "_RUN_SECONDS", 1.0)
    program = "print('it said this', flush=True); import time; time.sleep(600)"
    with pytest.raises(Failed, match=r"still running after 1 s: it said this"):
        machine(tmp_path).call([sys.executable, "-c", program])


def test_a_rehearsal_writes_what_is_to_be_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "runs" / "told.json"
    assert main(["--rehearse", "--only=start", "--only=devices", f"--out={out}"]) == 0
    told = json.loads(out.read_text())
    assert told["rehearsal"] and told["machine"]["ranks"] == 2
    assert [line["result"] for line in told["claims"]] == ["rehearsed", "skip"]
    output = capsys.readouterr().out
    assert output.startswith("a rehearsal on the CPU") and "pass" not in output
    about = told["machine"]
    assert told["verdict"] == "rehearsed" and about["code"] == code_digest()
    assert {"commit", "torch", "triton", "deepspeed", "driver"} <= about.keys()


class World:
    """Machine.call for a world in which every run does what its claim says of 3 GPUs."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.starts: list[list[str]] = []
        self.wrong: dict[str, Any] = {}  # by name of a run, or of a part
        self.seen: set[str] = set()

    def __call__(self, command: Sequence[str]) -> tuple[int, str, float]:
        if "pytest" in command:
            return self.wrong.get("pytest", (0, "== 9 passed in 3 s ==", 3.0))
        if "--facts" in command:
            return 0, "noise\n" + json.dumps(self.wrong.get("facts", {"problem": ""})), 1.0
        [out] = [Path(word.removeprefix("out=")) for word in command if word.startswith("out=")]
        self.starts.append(list(command))
        if out.name == "short":
            return self.wrong.get("short", (2, "4 ranks but 3 GPUs (parallel.device=auto)", 1.0))
        again = out.exists()
        self.leave(out)
        is_first = out.name in ("killed", "hung") and not again
        return self.wrong.get(f"{out.name} ends", 1 if is_first else 0), "said", 5.0

    def leave(self, out: Path) -> None:
        """The files of a run, with what is wrong in them."""
        (out / "incidents" / "000001").mkdir(parents=True, exist_ok=True)
        summary = {
            "status": "done", "state_digest": "ab" * 32, "skipped": [],
            "discarded_steps": int(out.name == "nan"),
            "restarts": int(out.name in ("offload", "compile")),
        }  # fmt: skip
        start = {"device": self.machine.device, "repeats_bits": True, "tier": "memory"}
        lines = [{"kind": "start", "detail": start}]
        causes = [{"cause": "hardware, transient", "ranks": [rank]} for rank in (0, 2)]
        lines += [{"kind": "redo", "detail": {"cause": cause}} for cause in causes]
        lines += [{"kind": "crash", "ranks": [1], "reason": "rank 1: it did it"}]
        changes = self.wrong.get(out.name, {})
        kinds = changes.get("without", ())
        summary |= changes.get("summary", {})
        start |= changes.get("start", {})
        journal = [json.dumps(line) for line in lines if line["kind"] not in kinds]
        (out / "journal.jsonl").write_text("\n".join(journal))
        (out / "summary.json").write_text(json.dumps(summary))
        (out / "metrics.jsonl").write_text(json.dumps({"stalls": {"checkpoint": 0.01}}))
        collectives = [{"group": changes.get("group", "0/nccl2")}]
        report = out / "incidents" / "000001" / "rank-00000.json"
        report.write_text(json.dumps({"collectives": collectives}))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    until = time.monotonic() + 10_000
    gpus = Machine(device="cuda", ranks=3, folder=tmp_path, until=until)
    made = World(gpus)
    monkeypatch.setattr(gpus, "call", made)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(gpu_check, "_require_compiler", lambda: None)
    monkeypatch.setattr(hardware, "all_reduce_speed", lambda *_: 123.4)
    monkeypatch.setattr(gpu_check, "version", lambda name: "1.0")
    return made


def test_every_line_passes_where_all_is_well(world: World) -> None:
    lines = [try_claim(claim, world.machine) for claim in CLAIMS]
    results = {line.name: (line.result, line.words) for line in lines}
    assert {result for result, _ in results.values()} == {"pass", "fact"}, results
    assert [name for name, (result, _) in results.items() if result == "fact"] == ["bits"]
    assert verdict(lines) == "pass"
    # Every command line is one that the runner takes.
    starts = (words[words.index("runner") + 1 :] for words in world.starts)
    for told in {tuple(word for word in words if not word.startswith("out=")) for words in starts}:
        check(compose(told), world_size=3)


DIFFERENT = {"summary": {"state_digest": "cd" * 32}}


@pytest.mark.parametrize(
    ("name", "where", "wrong", "words"),
    [
        ("start", "facts", {"problem": "CUDA does not start: torch 2.13"}, "does not start"),
        ("train", "clean-hsdp", {"summary": {"status": "halted"}}, "hsdp: halted"),
        ("train", "clean-fsdp", {"start": {"device": "cpu"}}, "trained on cpu"),
        ("train", "clean-ddp ends", 1, "exit 1: said"),
        ("death", "killed ends", 0, "did not end"),
        ("death", "killed", {"without": ("crash",)}, "not rank 1"),
        ("death", "killed", DIFFERENT, "other bits"),
        ("hang", "hung ends", 0, "did not end"),
        ("hang", "hung", {"without": ("crash",)}, "not rank 1"),
        ("hang", "hung", {"group": "0/gloo"}, "no entry of NCCL's recorder"),
        ("nan", "nan", {"summary": {"discarded_steps": 0}}, "discarded 0"),
        ("redo", "redo", {"without": ("redo",)}, "redone for"),
        ("redo", "redo", {"summary": {"skipped": [[1, 2]]}}, "named"),
        ("redo", "redo", DIFFERENT, "digests differ"),
        ("memory", "memory", {"start": {"tier": "disk"}}, "resumed from disk"),
        ("fixed", "fixed", {"start": {"repeats_bits": False}}, "says repeats_bits=False"),
        ("devices", "short", (0, "", 1.0), "exit 0"),
        ("late", "at-once", DIFFERENT, "digests differ"),
        ("waits", "pytest", (1, "1 failed", 1.0), "1 failed"),
        ("offload", "offload", {"summary": {"restarts": 0}}, "parallel.offload=cpu"),
        ("compile", "compile", {"summary": {"status": "failed"}}, "failed"),
        ("zero", "zero3 ends", 1, "exit 1"),
    ],
)  # fmt: skip
def test_every_line_sees_what_is_wrong(
    world: World, name: str, where: str, wrong: Any, words: str
) -> None:
    world.wrong[where] = wrong
    world.wrong |= {"fixed-1": wrong, "fixed-2": wrong} if where == "fixed" else {}
    [claim] = [claim for claim in CLAIMS if claim.name == name]
    line = try_claim(claim, world.machine)
    assert line.result == "fail" and words in line.words, line
    assert verdict([line]) == "fail"


def test_bits_that_are_not_repeated_fail_nothing(world: World) -> None:
    """No claim of this project is about a kernel's bits; runs that compare them compare nothing."""
    for name in ("again-fsdp", "killed", "redo"):
        world.wrong[name] = DIFFERENT
    by_name = {claim.name: try_claim(claim, world.machine) for claim in CLAIMS}
    assert by_name["bits"].result == "fact" and by_name["bits"].words.startswith("no")
    assert by_name["bits"].measured == {"repeats_bits": False}
    assert by_name["late"].result == "skip"
    assert {line.result for line in by_name.values()} == {"pass", "fact", "skip"}


@pytest.mark.parametrize(
    ("gpus", "expected"), [(1, "ranks share a GPU"), (2, "3 ranks but 2 GPUs")]
)
def test_a_rank_too_many_is_refused_in_other_words_on_one_gpu(
    world: World, monkeypatch: pytest.MonkeyPatch, gpus: int, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    world.wrong["short"] = (1, f"gpu07: {expected} (...)", 1.0)
    [claim] = [claim for claim in CLAIMS if claim.name == "devices"]
    assert try_claim(claim, world.machine).result == "pass"


def test_without_a_compiler_only_what_needs_one_is_left_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise Skipped("Triton needs a C compiler")

    monkeypatch.setattr(gpu_check, "_require_compiler", refuse)
    results = {claim.name: try_claim(claim, world.machine) for claim in CLAIMS}
    assert [name for name, line in results.items() if line.result == "skip"] == ["compile"]
    assert "Triton" in results["waits"].measured["left_out"]


@pytest.mark.parametrize("compilers", [[], ["gcc"]])
def test_a_compiler_is_looked_for(compilers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check.shutil, "which", lambda name: name if name in compilers else None)
    monkeypatch.setattr(gpu_check.sysconfig, "get_paths", lambda: {"include": "/nowhere"})
    with pytest.raises(Skipped, match=r"Python\.h"):
        gpu_check._require_compiler()


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("layout", gpu_check.LAYOUTS)
def test_every_number_of_gpus_has_a_layout(tmp_path: Path, ranks: int, layout: str) -> None:
    """Five and seven GPUs cannot be halved."""
    words = gpu_check._layout(machine(tmp_path, ranks=ranks), layout)
    check(compose([*gpu_check.TINY, *words, f"out={tmp_path}"]), world_size=ranks)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA starts here")
def test_where_cuda_does_not_start_there_is_a_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs that NVIDIA's library counts, and a driver that is too old."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    out = tmp_path / "gpu.json"
    assert main([f"--out={out}"]) == 1
    written = json.loads(out.read_text())
    [line] = written["claims"]
    assert (written["verdict"], line["name"], line["result"]) == ("fail", "start", "fail")
    output = capsys.readouterr().out
    assert "CUDA does not start: torch" in output and "Traceback" not in output
    assert output.splitlines()[-1].startswith("fail: written to ")


def test_a_lack_of_time_is_no_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "gpu.json"
    assert main(["--rehearse", "--minutes=0", "--only=train", f"--out={out}"]) == 0
    assert json.loads(out.read_text())["verdict"] == "incomplete"


@pytest.mark.full
def test_the_whole_is_rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With real runs on this CPU."""
    out = tmp_path / "gpu.json"
    assert main(["--rehearse", "--minutes=60", f"--out={out}"]) == 0
    by_name = {line["name"]: line for line in json.loads(out.read_text())["claims"]}
    assert list(by_name) == [claim.name for claim in CLAIMS]
    skipped = [name for name, line in by_name.items() if line["result"] == "skip"]
    assert skipped == ["devices", "waits"], by_name


@pytest.mark.parametrize(
    "engine", ["fsdp", *(pytest.param(one, marks=pytest.mark.full) for one in ("single", "ddp"))]
)
def test_the_steps_of_tests_gpu_are_nothing_but_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """An evaluation or a snapshot among them makes the host wait: the claim would always fail."""
    start_group(place_from({}), torch.device("cpu"), timeout_seconds=60)
    try:
        loop = open_loop(
            tmp_path / "run", torch.device("cpu"), f"parallel={engine}", "guard.sync=false",
            "parallel.device=cpu", "compute.precision=fp32", "data.workers=0",
        )  # fmt: skip
        for _ in range(40):
            loop.step()
        others = []
        monkeypatch.setattr(Forward, "evaluate", lambda *_: others.append("evaluation"))
        monkeypatch.setattr(CheckpointRing, "save", lambda *_, **__: others.append("save"))
        assert loop.steps._ahead is not None, "no step is launched ahead after 40"
        for _ in range(50):
            loop.step()
        assert others == []
    finally:
        end_group()
