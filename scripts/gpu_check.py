"""Checks each claim that needs GPUs; prints pass, fail or skip for each, and writes a JSON file.

Runs of two ranks or more over NCCL, small and each in a folder of its own. What is measured beside
a claim (seconds) goes into the JSON; a claim itself is never a bare figure of time. What kernels
happen to do (whether they repeat bits) is a fact of the machine, and no claim.

This process starts no CUDA: its memory on a GPU would be missing from the runs, and where a GPU
serves one process at a time they could not start. What one process can show is in tests/gpu.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from runner.distributed.device import code_digest, cuda_problem, driver_version
from runner.distributed.env import is_nccl
from runner.startup.preflight import hardware
from scripts.bench.provenance import commit

ROOT = Path(__file__).parents[1]
MOST_MINUTES = 14.0
_RUN_SECONDS = 240.0
_TAIL = 2000
TINY = (
    *("model=tiny", "data=synthetic", "data.workers=0", "eval.every=0", "steps=40"),
    *("schedule.warmup=5", "checkpoint.every=10", "checkpoint.clean_after=5"),
    *("checkpoint.memory_every=0", "guard.min_history=10", "track.every=1000"),
    *("watchdog.floor_seconds=5", "parallel.timeout_seconds=120"),
)
LAYOUTS = ("fsdp", "ddp", "hsdp")
_VERSIONS = ("holdfast-train", "torch", "triton", "deepspeed", "numpy")
_NO_TIME = "no time left for it"


class Failed(Exception):
    """The claim does not hold here."""


class Skipped(Exception):
    """The claim cannot be checked here; the message says why."""


def require(holds: object, words: str) -> None:
    """
    Raises:
        Failed: it does not hold.
    """
    if not holds:
        raise Failed(words)


@dataclass(frozen=True, kw_only=True)
class Line:
    """The result for one claim."""

    name: str
    claim: str
    result: str  # pass (in a rehearsal: rehearsed), fact, fail or skip
    words: str
    seconds: float
    measured: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The result of one training command."""

    out: Path
    code: int
    seconds: float
    text: str

    @property
    def summary(self) -> dict[str, Any]:
        try:
            summary: dict[str, Any] = json.loads((self.out / "summary.json").read_text())
        except OSError:
            raise Failed(f"no summary (exit {self.code}): {self.text[-_TAIL:]}") from None
        return summary

    @property
    def digest(self) -> str:
        return str(self.summary["state_digest"])

    def journal(self, kind: str) -> list[dict[str, Any]]:
        path = self.out / "journal.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in map(json.loads, lines) if line["kind"] == kind]


class Machine:
    """Runs the checks: knows device, ranks and folder, and collects measurements."""

    def __init__(self, *, device: str, ranks: int, folder: Path, until: float) -> None:
        self.device = device
        self.ranks = ranks
        self.measured: dict[str, Any] = {}
        self._folder = folder
        self._until = until
        self._clean: dict[str, Ended] = {}
        self._repeats_bits: bool | None = None

    @property
    def is_rehearsal(self) -> bool:
        return self.device != "cuda"

    def left(self) -> float:
        return max(0.0, self._until - time.monotonic())

    def needs(self, ranks: int) -> None:
        if self.ranks < ranks:
            raise Skipped(f"needs {ranks} GPUs, there are {self.ranks}")

    def train(self, name: str, *overrides: str, ranks: int = 0, restarts: int = 0) -> Ended:
        """Start or resume the run ``name``."""
        out = self._folder / name
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={ranks or self.ranks}", f"--max-restarts={restarts}"]
        command += ["-m", "runner", f"out={out}", *TINY, f"parallel.device={self.device}"]
        code, text, seconds = self.call([*command, *overrides])
        return Ended(out=out, code=code, seconds=seconds, text=text)

    def done(self, name: str, *overrides: str, restarts: int = 0) -> Ended:
        """:meth:`train`, which must succeed."""
        ended = self.train(name, *overrides, restarts=restarts)
        require(ended.code == 0, f"exit {ended.code}: {ended.text[-_TAIL:]}")
        return ended

    def clean(self, layout: str = "fsdp") -> Ended:
        """The undisturbed run."""
        if layout not in self._clean:
            self._clean[layout] = self.done(f"clean-{layout}", *_layout(self, layout))
        return self._clean[layout]

    def repeats_bits(self) -> bool:
        """Whether two runs with the same settings end alike."""
        if self._repeats_bits is None:
            again = self.done("again-fsdp", *_layout(self, "fsdp"))
            self._repeats_bits = again.digest == self.clean().digest
        return self._repeats_bits

    def call(self, command: Sequence[str]) -> tuple[int, str, float]:
        """Exit code, output and seconds."""
        began = time.monotonic()
        limit = min(_RUN_SECONDS, self.left())
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            text, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            # Its workers end by themselves when their launcher is gone.
            process.kill()
            text, _ = process.communicate()
            raise Failed(f"still running after {limit:.0f} s: {text[-_TAIL:]}") from None
        return process.returncode, text, time.monotonic() - began


def _layout(machine: Machine, layout: str) -> tuple[str, ...]:
    if layout != "hsdp":
        return (f"parallel={layout}",)
    divisors = [size for size in range(1, machine.ranks) if machine.ranks % size == 0]
    return ("parallel=hsdp", f"parallel.shard_size={max(divisors, default=1)}")


def _same(one: Ended, other: Ended) -> None:
    digests = f"{one.digest[:16]} and {other.digest[:16]}"
    require(one.digest == other.digest, f"state digests differ: {digests}")


def _require_compiler() -> None:
    """Triton compiles a stub in C; images without the tools for it are common."""
    compilers = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not any(shutil.which(name) for name in compilers if name) or not header.exists():
        raise Skipped(f"Triton needs a C compiler and {header} (python3-dev), and one is missing")


# The claims -------------------------------------------------------------------------------------

Check = Callable[[Machine], str]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """``seconds`` is what it usually takes; it is not begun with less than that left.

    ``is_fact``: whatever it says is no failure.
    """

    name: str
    words: str
    check: Check
    seconds: float
    is_fact: bool = False


CLAIMS: list[Claim] = []


def claim(name: str, words: str, *, seconds: float, is_fact: bool = False) -> Callable[..., Check]:
    """Try the function as a claim, in the order of this file."""

    def add(check: Check) -> Check:
        CLAIMS.append(Claim(name=name, words=words, check=check, seconds=seconds, is_fact=is_fact))
        return check

    return add


@claim("start", "CUDA starts", seconds=10)
def cuda_starts(machine: Machine) -> str:
    if machine.is_rehearsal:
        return "none is needed on a CPU"
    code, text, _ = machine.call([sys.executable, "-m", "scripts.gpu_check", "--facts"])
    answer = text.strip().rpartition("\n")[2]
    require(code == 0 and answer.startswith("{"), text[-_TAIL:])
    facts = json.loads(answer)
    problem = facts.pop("problem")
    require(not problem, problem)
    machine.measured |= facts
    return ", ".join(map(str, facts.get("devices", ())))


@claim("train", "fsdp, ddp and hsdp train over NCCL", seconds=60)
def trains_over_nccl(machine: Machine) -> str:
    machine.needs(2)
    for layout in LAYOUTS:
        ended = machine.clean(layout)
        require(ended.summary["status"] == "done", f"{layout}: {ended.summary['status']}")
        machine.measured[f"seconds_{layout}"] = round(ended.seconds, 1)
    [start] = machine.clean().journal("start")
    device = start["detail"]["device"]
    require(device == machine.device, f"trained on {device}")
    return f"{', '.join(LAYOUTS)}: {machine.ranks} ranks, 40 steps each"


def _ended_by(machine: Machine, name: str, fault: str) -> tuple[Ended, dict[str, Any]]:
    """A run that rank 1 ends is taken up again; its journal's line of the crash."""
    machine.needs(2)
    ended = machine.train(name, f"faults=[{fault}]")
    machine.measured["seconds_to_the_end"] = round(ended.seconds, 1)
    require(ended.code, "the run did not end")
    again = machine.done(name)
    crashes = again.journal("crash")
    blamed = [line["ranks"] for line in crashes]
    require(crashes and 1 in blamed[0], f"the journal blames {blamed}, not rank 1")
    return again, crashes[0]


@claim("death", "a killed rank is noticed and named, and the run resumes", seconds=60)
def a_death_is_noticed(machine: Machine) -> str:
    again, crash = _ended_by(machine, "killed", "kill@step=25,rank=1")
    require(crash["ranks"] == [1], f"the journal blames {crash['ranks']}, not rank 1")
    if machine.clean().digest == again.digest:
        return f"{crash['reason']}; resumed to the same bits"
    require(not machine.repeats_bits(), "resumed to other bits")
    return f"{crash['reason']}; resumed (bits are not repeated here)"


@claim("hang", "a hanging rank is named by NCCL's recorder", seconds=90)
def a_hang_is_named(machine: Machine) -> str:
    again, crash = _ended_by(machine, "hung", "hang@step=25,rank=1")
    reports = list((again.out / "incidents").glob("*/rank-*.json"))
    collectives = [json.loads(path.read_text()).get("collectives") or [] for path in reports]
    machine.measured["collectives_told"] = [len(entries) for entries in collectives]
    groups = {entry["group"] for entries in collectives for entry in entries}
    has_nccl = any(is_nccl(group.partition("/")[2]) for group in groups)
    words = f"no entry of NCCL's recorder among those of {sorted(groups)}"
    require(machine.is_rehearsal or has_nccl, words)
    return str(crash["reason"])


@claim("nan", "a NaN on one rank is applied on no rank", seconds=30)
def nan_is_applied_nowhere(machine: Machine) -> str:
    machine.needs(2)
    fault = "faults=[nan_grad@step=20,rank=1]"
    overrides = (fault, "guard.remedy=discard", "debug.replica_check_every=5", "parallel=ddp")
    ended = machine.done("nan", *overrides)
    discarded, differing = ended.summary["discarded_steps"], ended.journal("replica_mismatch")
    require(discarded == 1 and not differing, f"discarded {discarded}; {differing}")
    return "one rank's NaN discarded one step, and the ranks' copies stayed alike"


@claim("redo", "a fault that passes is redone and leaves no trace", seconds=30)
def a_passing_fault_leaves_no_trace(machine: Machine) -> str:
    last = machine.ranks - 1
    faults = f"faults=[nan_grad@step=12,rank=0,flip_grad@step=25,rank={last}]"
    ended = machine.done("redo", faults)
    causes = [line["detail"]["cause"] for line in ended.journal("redo")]
    is_right = [cause["cause"] for cause in causes] == ["hardware, transient"] * 2
    require(is_right, f"redone for {causes}; {ended.text[-_TAIL:]}")
    named, skipped = [cause["ranks"] for cause in causes], ended.summary["skipped"]
    require(named == [[0], [last]] and not skipped, f"named {named}, skipped {skipped}")
    if not machine.repeats_bits():
        return "a NaN and a flipped bit were redone (bits are not repeated here)"
    _same(ended, machine.clean())
    return "a NaN and a flipped bit were redone, to the same bits"


@claim("memory", "snapshots in memory are page-locked and come back", seconds=60)
def snapshots_come_back(machine: Machine) -> str:
    """Also that memory was page-locked: it is said where it could not be."""
    machine.needs(2)
    overrides = ("checkpoint.memory_every=5", "checkpoint.every=20")
    ended = machine.done("memory", *overrides, "faults=[kill@step=28,rank=0]", restarts=1)
    tier = ended.journal("start")[-1]["detail"]["tier"]
    require(tier == "memory", f"resumed from {tier}: {ended.text[-_TAIL:]}")
    is_locked = "cannot be page-locked" not in ended.text
    require(is_locked, "shared memory cannot be page-locked: snapshots make training wait")
    lines = map(json.loads, (ended.out / "metrics.jsonl").read_text().splitlines())
    stalls = [float(line.get("stalls", {}).get("checkpoint", 0.0)) for line in lines]
    machine.measured["longest_stall_seconds"] = round(max(stalls, default=0.0), 4)
    return "page-locked; after a kill the run went on from memory"


@claim("bits", "whether this machine repeats bits", seconds=30, is_fact=True)
def repeats_bits(machine: Machine) -> str:
    machine.measured["repeats_bits"] = machine.repeats_bits()
    if not machine.repeats_bits():
        return "no: lines that compare bits compare nothing (compute.deterministic=true is below)"
    return "yes: two runs with the same settings end bit for bit alike"


@claim("zero", "DeepSpeed ZeRO trains", seconds=120)
def deepspeed_zero(machine: Machine) -> str:
    machine.needs(2)
    if _version("deepspeed") is None:
        raise Skipped("deepspeed is not installed")
    for stage in ("zero1", "zero3"):
        machine.done(stage, f"parallel={stage}", "compute.precision=bf16", "steps=20")
    return "stages 1 and 3: 20 steps each"


@claim("fixed", "with compute.deterministic=true it repeats bits, and says so", seconds=60)
def deterministic_repeats_bits(machine: Machine) -> str:
    """What a machine must do that repeats no bits by itself."""
    runs = [machine.done(f"fixed-{n}", "compute.deterministic=true") for n in (1, 2)]
    _same(*runs)
    [start] = runs[0].journal("start")
    said = start["detail"]["repeats_bits"]
    require(said is True, f"the start says repeats_bits={said}")
    return "two runs with compute.deterministic=true end bit for bit alike, and the start says so"


@claim("devices", "where GPUs are missing no rank goes to the CPU", seconds=30)
def more_ranks_than_gpus_are_refused(machine: Machine) -> str:
    if machine.is_rehearsal:
        raise Skipped("needs GPUs to be short of")
    gpus = torch.cuda.device_count()
    # A task that sees one GPU takes that one, as srun gives it one; so two find that they share it.
    words = f"{gpus + 1} ranks but {gpus} GPUs" if gpus > 1 else "ranks share a GPU"
    ended = machine.train("short", "parallel.device=auto", ranks=gpus + 1)
    is_refused = ended.code and words in ended.text
    require(is_refused, f"exit {ended.code}: {ended.text[-_TAIL:]}")
    return f"{gpus + 1} ranks on {gpus} GPUs end with an error, none goes to the CPU"


@claim("late", "reading numbers one step late changes no bit", seconds=60)
def late_is_the_same(machine: Machine) -> str:
    if not machine.repeats_bits():
        raise Skipped("this machine does not repeat bits")
    _same(machine.done("at-once", "guard.sync=true"), machine.clean())
    return "guard.sync=true and false end bit for bit alike"


@claim("waits", "no step makes the host wait; sums, heads and attention are right", seconds=120)
def in_one_process(machine: Machine) -> str:
    """The tests of tests/gpu."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    try:
        _require_compiler()
    except Skipped as error:
        command += ["--ignore=tests/gpu/test_documents.py"]
        machine.measured["left_out"] = f"attention within documents: {error}"
    code, text, _ = machine.call(command)
    last = text.strip().splitlines()[-1] if text.strip() else ""
    require(code == 0, text[-_TAIL:])
    if re.search(r"\d+ passed", last) is None:
        raise Skipped(f"tests/gpu: {last}")
    return last


def _killed_once(machine: Machine, setting: str) -> str:
    """What is page-locked or compiled must come back as well."""
    machine.needs(2)
    name = setting.partition("=")[0].partition(".")[2]
    ended = machine.done(name, setting, "faults=[kill@step=25,rank=0]", restarts=1)
    status, restarts = ended.summary["status"], ended.summary["restarts"]
    has_come_back = status == "done" and restarts == 1
    require(has_come_back, f"{setting}: {status}, {restarts} restarts, {ended.text[-_TAIL:]}")
    machine.measured["seconds"] = round(ended.seconds, 1)
    return f"{setting}: killed once, 40 steps"


@claim("offload", "offloaded runs train and resume", seconds=30)
def offloads(machine: Machine) -> str:
    return _killed_once(machine, "parallel.offload=cpu")


@claim("compile", "compiled runs train and resume", seconds=60)
def compiles(machine: Machine) -> str:
    if not machine.is_rehearsal:
        _require_compiler()
    return _killed_once(machine, "compute.compile=true")


@claim("links", "preflight measures an all-reduce between the GPUs", seconds=20)
def bandwidth_is_measured(machine: Machine) -> str:
    machine.needs(2)
    backend = "gloo" if machine.is_rehearsal else "nccl"
    measured = hardware.all_reduce_speed(backend, machine.ranks, 1 << 24)
    if measured is None:
        raise Failed("its processes failed, or took longer than a minute")
    machine.measured["gb_per_second"] = round(measured, 2)
    return f"{measured:.1f} GB/s"


# The record --------------------------------------------------------------------------------------


def try_claim(claim: Claim, machine: Machine) -> Line:
    """Check a claim; an exception is reported as a failure."""
    machine.measured = {}
    began = time.monotonic()
    try:
        if machine.left() < claim.seconds:
            raise Skipped(f"{_NO_TIME} (usually {claim.seconds:.0f} s)")
        result, message = "rehearsed" if machine.is_rehearsal else "pass", claim.check(machine)
        result = "fact" if claim.is_fact else result
    except Skipped as error:
        result, message = "skip", str(error)
    except Failed as error:
        result, message = "fail", str(error)
    except Exception as error:  # go on with the next claim
        result, message = "fail", f"{type(error).__name__}: {error}"
    return Line(
        name=claim.name,
        claim=claim.words,
        result=result,
        words=message,
        seconds=round(time.monotonic() - began, 1),
        measured=machine.measured,
    )


def facts() -> dict[str, Any]:
    """What only CUDA can say; ``problem``: why it does not start."""
    if problem := cuda_problem():
        return {"problem": problem}
    count = range(torch.cuda.device_count())
    return {
        "problem": "",
        "devices": [torch.cuda.get_device_name(n) for n in count],
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
    }


def describe(ranks: int) -> dict[str, Any]:
    """The facts about code and machine that matter; nothing in it identifies the machine."""
    return {
        "commit": commit(),
        "code": code_digest(),
        **{name: _version(name) for name in _VERSIONS},
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "driver": driver_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "ranks": ranks,
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def verdict(lines: Sequence[Line]) -> str:
    """Of all lines: fail, incomplete (time was too short for some), or pass (or rehearsed)."""
    if any(line.result == "fail" for line in lines):
        return "fail"
    if any(line.result == "skip" and line.words.startswith(_NO_TIME) for line in lines):
        return "incomplete"
    return "rehearsed" if any(line.result == "rehearsed" for line in lines) else "pass"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if nothing failed, 1 if a claim failed, 2 without a GPU."""
    options = _options(arguments)
    if options.facts:
        print(json.dumps(facts()))
        return 0
    num_gpus = torch.cuda.device_count()
    if not num_gpus and not options.rehearse:
        print("no CUDA device on this machine: none of these claims was tried")
        for claim in CLAIMS:
            print(f"skip  {claim.words} (no CUDA device)")
        print("run this where GPUs are, or with --rehearse to try the script itself on the CPU")
        return 2
    if options.rehearse:
        print("a rehearsal on the CPU: nothing here says anything about GPUs")
    ranks = options.ranks or (2 if options.rehearse else num_gpus)
    if ranks < 2:
        print("one GPU: what needs two ranks is skipped")
    with tempfile.TemporaryDirectory(prefix="holdfast-gpu-check-") as folder:
        machine = Machine(
            device="cpu" if options.rehearse else "cuda",
            ranks=ranks,
            folder=Path(folder),
            until=time.monotonic() + 60 * options.minutes,
        )
        lines = _try_all(machine, options)
    print(f"{verdict(lines)}: written to {options.out}: please send it back")
    return int(verdict(lines) == "fail")


def _try_all(machine: Machine, options: argparse.Namespace) -> list[Line]:
    """Print a line a claim. Where CUDA does not start, nothing else is tried."""
    lines: list[Line] = []
    about = describe(machine.ranks)
    for claim in CLAIMS:
        if options.only and claim.name not in options.only:
            continue
        line = try_claim(claim, machine)
        lines.append(line)
        print(f"{line.result}  {line.claim} ({line.words.strip().splitlines()[-1][:400]})")
        if claim.is_fact or claim.name == "start":
            about |= line.measured
        record = {  # after each claim, so that an abort loses nothing
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "rehearsal": machine.is_rehearsal,
            "verdict": verdict(lines),
            "machine": about,
            "claims": [asdict(line) for line in lines],
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n")
        if claim.name == "start" and line.result == "fail":
            break
    return lines


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    claims_text = "\n".join(f"  {claim.name:<8}{claim.words}" for claim in CLAIMS)
    parser = argparse.ArgumentParser(
        prog="bash scripts/gpu_check.sh",
        description="Tries every claim that only GPUs can show; writes a JSON to send back.",
        epilog=f"claims:\n{claims_text}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu-check.json")
    parser.add_argument("--ranks", type=int, help="default: every GPU")
    names = [claim.name for claim in CLAIMS]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, to try the script")
    parser.add_argument("--minutes", type=float, default=MOST_MINUTES, help="default: 14")
    parser.add_argument("--facts", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
