"""Checks each claim that needs GPUs; prints pass, fail or skip for each, and writes a JSON file.

Runs of two ranks or more over NCCL, small and each in a folder of its own. What is measured beside
a claim (seconds, bytes) goes into the JSON; a claim itself is never a bare figure of time. What
kernels happen to do (whether they repeat bits) is a fact of the machine, and no claim.

This process starts no CUDA: its memory on a GPU would be missing from the runs, and where a GPU
serves one process at a time they could not start. Such checks run in a process of their own.
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

from runner.distributed.debug import is_nccl
from runner.distributed.device import cuda_problem, driver_version
from runner.run_dir.build_info import code_digest
from runner.train.agreed_step import HostNumbers
from scripts.bench.provenance import commit

ROOT = Path(__file__).parents[1]
MOST_MINUTES = 14.0
_RUN_SECONDS = 240.0
_TAIL = 2000
TINY = (
    *("model=tiny", "data=synthetic", "data.workers=0", "eval.every=0", "steps=40"),
    *("schedule.warmup=5", "checkpoint.every=10", "checkpoint.clean_after=5"),
    *("checkpoint.memory_every=0", "guard.min_history=10", "track.every=1000"),
    *("watchdog.floor_seconds=5", "watchdog.settle_seconds=2", "parallel.timeout_seconds=120"),
)
LAYOUTS = ("fsdp", "ddp", "hsdp")
_VERSIONS = ("holdfast-train", "torch", "triton", "deepspeed", "numpy")


class Failed(Exception):
    """The claim does not hold here."""


class Skipped(Exception):
    """The claim cannot be checked here; the message says why."""


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

    def train(self, name: str, *overrides: str, restarts: int = 0) -> Ended:
        """Start or resume the run ``name``."""
        out = self.folder(name)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={self.ranks}", f"--max-restarts={restarts}"]
        command += ["-m", "runner", f"out={out}", *TINY, f"parallel.device={self.device}"]
        code, text, seconds = self.call([*command, *overrides])
        return Ended(out=out, code=code, seconds=seconds, text=text)

    def done(self, name: str, *overrides: str, restarts: int = 0) -> Ended:
        """:meth:`train`, which must succeed."""
        ended = self.train(name, *overrides, restarts=restarts)
        if ended.code:
            raise Failed(f"exit {ended.code}: {ended.text[-_TAIL:]}")
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

    def apart(self, part: str) -> dict[str, Any]:
        """What a function of :data:`PARTS` returns in a process of its own."""
        command = [sys.executable, "-m", "scripts.gpu_check", "--part", part]
        code, text, _ = self.call([*command, "--device", self.device])
        answer = text.strip().rpartition("\n")[2]
        if code or not answer.startswith("{"):
            raise Failed(text[-_TAIL:])
        returned: dict[str, Any] = json.loads(answer)
        return returned

    def folder(self, name: str) -> Path:
        """Where the run ``name`` is."""
        return self._folder / name

    def call(self, command: Sequence[str]) -> tuple[int, str, float]:
        """Exit code, output and seconds."""
        began = time.monotonic()
        limit = min(_RUN_SECONDS, self.left())
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
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
    if one.digest != other.digest:
        raise Failed(f"state digests differ: {one.digest[:16]} and {other.digest[:16]}")


def _require_compiler() -> None:
    """Triton compiles a stub in C; images without the tools for it are common."""
    compilers = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not any(shutil.which(name) for name in compilers if name) or not header.exists():
        raise Skipped(f"Triton needs a C compiler and {header} (python3-dev), and one is missing")


# The claims -------------------------------------------------------------------------------------


def cuda_starts(machine: Machine) -> str:
    facts = machine.apart("facts")
    if problem := facts.pop("problem"):
        raise Failed(problem)
    machine.measured |= facts
    return ", ".join(map(str, facts.get("devices", ()))) or "none is needed on a CPU"


def in_one_process(machine: Machine) -> str:
    """tests/gpu: no launched step waits, late is the same run, checksums are the CPU's."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    try:
        _require_compiler()
    except Skipped as error:
        command += ["--ignore=tests/gpu/test_documents.py"]
        machine.measured["left_out"] = f"attention within documents: {error}"
    code, text, _ = machine.call(command)
    last = text.strip().splitlines()[-1] if text.strip() else ""
    if re.search(r"\d+ passed", last) is None and code == 0:
        raise Skipped(f"tests/gpu: {last}")
    if code:
        raise Failed(text[-_TAIL:])
    return last


def trains_over_nccl(machine: Machine) -> str:
    machine.needs(2)
    for layout in LAYOUTS:
        ended = machine.clean(layout)
        if ended.summary["status"] != "done":
            raise Failed(f"{layout}: {ended.summary['status']}")
        machine.measured[f"seconds_{layout}"] = round(ended.seconds, 1)
    [start] = machine.clean().journal("start")
    if start["detail"]["device"] != machine.device:
        raise Failed(f"trained on {start['detail']['device']}")
    return f"{', '.join(LAYOUTS)}: {machine.ranks} ranks, 40 steps each"


def repeats_bits(machine: Machine) -> str:
    machine.measured["repeats_bits"] = machine.repeats_bits()
    if not machine.repeats_bits():
        return "no: lines that compare bits compare nothing (compute.deterministic=true is below)"
    return "yes: two runs with the same settings end bit for bit alike"


def late_is_the_same(machine: Machine) -> str:
    if not machine.repeats_bits():
        raise Skipped("this machine does not repeat bits")
    _same(machine.done("at-once", "guard.sync=true"), machine.clean())
    return "guard.sync=true and false end bit for bit alike"


def nan_is_applied_nowhere(machine: Machine) -> str:
    machine.needs(2)
    fault = "faults=[nan_grad@step=20,rank=1]"
    overrides = (fault, "guard.remedy=discard", "debug.replica_check_every=5", "parallel=ddp")
    ended = machine.done("nan", *overrides)
    if ended.summary["discarded_steps"] != 1 or ended.journal("replica_mismatch"):
        raise Failed(f"discarded {ended.summary['discarded_steps']}; {ended.journal('replicas')}")
    return "one rank's NaN discarded one step, and the ranks' copies stayed alike"


def a_passing_fault_leaves_no_trace(machine: Machine) -> str:
    last = machine.ranks - 1
    faults = f"faults=[nan_grad@step=12,rank=0,flip_grad@step=25,rank={last}]"
    ended = machine.done("redo", faults)
    redone = [line["detail"]["cause"] for line in ended.journal("redo")]
    if [cause["cause"] for cause in redone] != ["hardware, transient"] * 2:
        raise Failed(f"redone for {redone}; {ended.text[-_TAIL:]}")
    if [cause["ranks"] for cause in redone] != [[0], [last]] or ended.summary["skipped"]:
        raise Failed(f"named {[cause['ranks'] for cause in redone]}, {ended.summary['skipped']}")
    if not machine.repeats_bits():
        return "a NaN and a flipped bit were redone (bits are not repeated here)"
    _same(ended, machine.clean())
    return "a NaN and a flipped bit were redone, to the same bits"


def a_death_is_noticed(machine: Machine) -> str:
    machine.needs(2)
    ended = machine.train("killed", "faults=[kill@step=25,rank=1]")
    machine.measured["seconds_to_the_end"] = round(ended.seconds, 1)
    if ended.code == 0:
        raise Failed("the run did not end")
    again = machine.done("killed")
    crashes = again.journal("crash")
    if not crashes or crashes[0]["ranks"] != [1]:
        raise Failed(f"the journal blames {[line['ranks'] for line in crashes]}, not rank 1")
    if machine.clean().digest == again.digest:
        return f"{crashes[0]['reason']}; resumed to the same bits"
    if machine.repeats_bits():
        raise Failed("resumed to other bits")
    return f"{crashes[0]['reason']}; resumed (bits are not repeated here)"


def a_hang_is_named(machine: Machine) -> str:
    machine.needs(2)
    ended = machine.train("hung", "faults=[hang@step=25,rank=1]")
    machine.measured["seconds_to_the_end"] = round(ended.seconds, 1)
    if ended.code == 0:
        raise Failed("the run did not end")
    crashes = machine.done("hung").journal("crash")
    if not crashes or 1 not in crashes[0]["ranks"]:
        raise Failed(f"not named: {crashes[0]['reason'] if crashes else ended.text[-_TAIL:]}")
    reports = list((ended.out / "incidents").glob("*/rank-*.json"))
    collectives = [json.loads(path.read_text()).get("collectives") or [] for path in reports]
    machine.measured["collectives_told"] = [len(one) for one in collectives]
    groups = {entry["group"] for entries in collectives for entry in entries}
    if not machine.is_rehearsal and not any(is_nccl(group.partition("/")[2]) for group in groups):
        raise Failed(f"no entry of NCCL's recorder among those of {sorted(groups)}")
    return str(crashes[0]["reason"])


def deterministic_repeats_bits(machine: Machine) -> str:
    """What a machine must do that repeats no bits by itself."""
    runs = [machine.done(f"fixed-{n}", "compute.deterministic=true") for n in (1, 2)]
    _same(*runs)
    [start] = runs[0].journal("start")
    if start["detail"]["repeats_bits"] is not True:
        raise Failed(f"the start says repeats_bits={start['detail']['repeats_bits']}")
    return "two runs with compute.deterministic=true end bit for bit alike, and the start says so"


def more_ranks_than_gpus_are_refused(machine: Machine) -> str:
    if machine.is_rehearsal:
        raise Skipped("needs GPUs to be short of")
    gpus = torch.cuda.device_count()
    # A task that sees one GPU takes that one, as srun gives it one; so two find that they share it.
    words = f"{gpus + 1} ranks but {gpus} GPUs" if gpus > 1 else "ranks share a GPU"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={gpus + 1}", "-m", "runner", *TINY, "parallel.device=auto"]
    code, text, _ = machine.call([*command, f"out={machine.folder('short')}"])
    if code == 0 or words not in text:
        raise Failed(f"exit {code}: {text[-_TAIL:]}")
    return f"{gpus + 1} ranks on {gpus} GPUs end with an error, none goes to the CPU"


def waiting_sleeps(machine: Machine) -> str:
    """The core is left to the threads that hash snapshots."""
    if machine.is_rehearsal:
        raise Skipped("on a CPU nothing is waited for")
    machine.measured |= machine.apart("wait")
    waited, used = machine.measured["waited_seconds"], machine.measured["cpu_seconds"]
    if used > waited / 2:
        raise Failed(f"{used:.2f} s of a core in {waited:.2f} s of waiting")
    return f"{used:.3f} s of a core in {waited:.2f} s of waiting"


def wait(device: torch.device) -> dict[str, Any]:
    """Seconds, and processor seconds, of waiting for numbers of a step."""
    numbers = torch.ones(8, dtype=torch.float64, device="cuda")
    HostNumbers(numbers).read()
    torch.cuda._sleep(2_000_000_000)
    on_their_way = HostNumbers(numbers)
    began, cpu = time.monotonic(), time.thread_time()
    on_their_way.read()
    waited, used = time.monotonic() - began, time.thread_time() - cpu
    return {"waited_seconds": round(waited, 3), "cpu_seconds": round(used, 3)}


def snapshots_come_back(machine: Machine) -> str:
    """Also that memory was page-locked: it is said where it could not be."""
    machine.needs(2)
    overrides = ("checkpoint.memory_every=5", "checkpoint.every=20")
    ended = machine.done("memory", *overrides, "faults=[kill@step=28,rank=0]", restarts=1)
    tier = ended.journal("start")[-1]["detail"]["tier"]
    if tier != "memory":
        raise Failed(f"resumed from {tier}: {ended.text[-_TAIL:]}")
    if "cannot be page-locked" in ended.text:
        raise Failed("shared memory cannot be page-locked: snapshots make training wait")
    lines = map(json.loads, (ended.out / "metrics.jsonl").read_text().splitlines())
    stalls = [float(line.get("stalls", {}).get("checkpoint", 0.0)) for line in lines]
    machine.measured["longest_stall_seconds"] = round(max(stalls, default=0.0), 4)
    return "page-locked; after a kill the run went on from memory"


def large_heads(machine: Machine) -> str:
    machine.measured |= machine.apart("head")
    peak, whole = machine.measured["peak_bytes"], machine.measured["peak_bytes_at_once"]
    for error in machine.measured["gradient_errors"]:
        if not error < 0.02:
            raise Failed(f"gradients differ by {error:.3f} of their norm")
    if not machine.is_rehearsal and peak > 0.7 * whole:
        raise Failed(f"{peak / 1e9:.2f} GB at the peak, {whole / 1e9:.2f} GB at once")
    return f"the same losses; {peak / 1e9:.2f} GB at the peak, {whole / 1e9:.2f} GB at once"


def head(device: torch.device) -> dict[str, Any]:
    """Losses, gradients and bytes of a head in parts, against all at once."""
    from runner.model.loss import HeadLosses, sequence_losses

    on_gpu = device.type == "cuda"
    size = (1, 4096, 1024, 64_000) if on_gpu else (1, 64, 32, 500)
    rows, length, dim, vocabulary = size
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, length, dim, generator=generator).to(device, torch.bfloat16)
    weight = (torch.randn(vocabulary, dim, generator=generator) * 0.02).to(device, torch.bfloat16)
    targets = torch.randint(vocabulary, (rows, length), generator=generator).to(device)
    results = []
    for most_bytes in (0, rows * length * vocabulary // 4):
        losses_of = HeadLosses(fp32=True, z_loss=0.0, most_bytes=most_bytes)
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        is_wanted = losses_of.is_wanted(x, w)
        logits = losses_of(x, w, targets) if is_wanted else torch.nn.functional.linear(x, w)
        losses, _ = sequence_losses(logits, targets, fp32=True, z_loss=0.0)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None and w.grad is not None
        peak = torch.cuda.max_memory_allocated() if on_gpu else 0
        results.append((losses.detach(), x.grad, w.grad, peak))
        del logits, losses, x, w
    (loss, *grads, whole), (parts, *part_grads, peak) = results
    torch.testing.assert_close(parts, loss, rtol=1e-4, atol=0.0)
    errors = [
        float((one.float() - other.float()).norm() / other.float().norm())
        for one, other in zip(part_grads, grads, strict=True)
    ]
    return {"peak_bytes": peak, "peak_bytes_at_once": whole, "gradient_errors": errors}


def sums_of_large_states(machine: Machine) -> str:
    """The state digest of large states is the CPU's."""
    machine.measured |= machine.apart("digest")
    if not machine.measured.pop("is_equal"):
        raise Failed("the GPU's digest differs from the CPU's")
    return "the GPU sums as the CPU does"


def digest(device: torch.device) -> dict[str, Any]:
    """Whether 20 MB have the digest that they have on the CPU, and the seconds of it."""
    from runner.checkpoint.state_digest import Summing

    values = torch.randn(5_000_011, generator=torch.Generator().manual_seed(0))
    on_device = values.to(device)
    Summing().of("warm", 0, on_device)
    began = time.monotonic()
    summed = Summing().of("param/a", 77, on_device)
    seconds = round(time.monotonic() - began, 4)
    is_equal = summed == Summing().of("param/a", 77, values)
    return {"seconds_of_20_MB": seconds, "is_equal": is_equal}


def _killed_once(machine: Machine, setting: str) -> str:
    """What is page-locked or compiled must come back as well."""
    machine.needs(2)
    name = setting.partition("=")[0].partition(".")[2]
    ended = machine.done(name, setting, "faults=[kill@step=25,rank=0]", restarts=1)
    if ended.summary["status"] != "done" or ended.summary["restarts"] != 1:
        raise Failed(f"{setting}: {ended.summary['status']}, {ended.text[-_TAIL:]}")
    machine.measured["seconds"] = round(ended.seconds, 1)
    return f"{setting}: killed once, 40 steps"


def offloads(machine: Machine) -> str:
    return _killed_once(machine, "parallel.offload=cpu")


def compiles(machine: Machine) -> str:
    if not machine.is_rehearsal:
        _require_compiler()
    return _killed_once(machine, "compute.compile=true")


def bandwidth_is_measured(machine: Machine) -> str:
    from runner.startup.preflight.hardware import all_reduce_speed

    machine.needs(2)
    backend = "gloo" if machine.is_rehearsal else "nccl"
    measured = all_reduce_speed(backend, machine.ranks, 1 << 24)
    if measured is None:
        raise Failed("its processes failed, or took longer than a minute")
    machine.measured["gb_per_second"] = round(measured, 2)
    return f"{measured:.1f} GB/s"


def deepspeed_zero(machine: Machine) -> str:
    machine.needs(2)
    try:
        version("deepspeed")
    except PackageNotFoundError:
        raise Skipped("deepspeed is not installed") from None
    for stage in ("zero1", "zero3"):
        machine.done(stage, f"parallel={stage}", "compute.precision=bf16", "steps=20")
    return "stages 1 and 3: 20 steps each"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """``seconds`` is what it usually takes; it is not begun with less than that left.

    ``is_fact``: whatever it says is no failure.
    """

    name: str
    words: str
    check: Callable[[Machine], str]
    seconds: float
    is_fact: bool = False


CLAIMS = (
    Claim(name="start", words="CUDA starts", check=cuda_starts, seconds=10),
    Claim(
        name="head",
        words="a large head in parts gives the same losses in less memory",
        check=large_heads,
        seconds=10,
    ),
    Claim(
        name="digest",
        words="the state digest does not depend on the device",
        check=sums_of_large_states,
        seconds=10,
    ),
    Claim(
        name="train",
        words="fsdp, ddp and hsdp train over NCCL",
        check=trains_over_nccl,
        seconds=60,
    ),
    Claim(
        name="death",
        words="a killed rank is noticed and named, and the run resumes",
        check=a_death_is_noticed,
        seconds=60,
    ),
    Claim(
        name="hang",
        words="a hanging rank is named by NCCL's recorder",
        check=a_hang_is_named,
        seconds=90,
    ),
    Claim(
        name="nan",
        words="a NaN on one rank is applied on no rank",
        check=nan_is_applied_nowhere,
        seconds=30,
    ),
    Claim(
        name="redo",
        words="a fault that passes is redone and leaves no trace",
        check=a_passing_fault_leaves_no_trace,
        seconds=30,
    ),
    Claim(
        name="memory",
        words="snapshots in memory are page-locked and come back",
        check=snapshots_come_back,
        seconds=60,
    ),
    Claim(
        name="bits",
        words="whether this machine repeats bits",
        check=repeats_bits,
        seconds=30,
        is_fact=True,
    ),
    Claim(name="zero", words="DeepSpeed ZeRO trains", check=deepspeed_zero, seconds=120),
    Claim(
        name="fixed",
        words="with compute.deterministic=true it repeats bits, and says so",
        check=deterministic_repeats_bits,
        seconds=60,
    ),
    Claim(
        name="devices",
        words="where GPUs are missing no rank goes to the CPU",
        check=more_ranks_than_gpus_are_refused,
        seconds=30,
    ),
    Claim(
        name="sleep",
        words="waiting for the device keeps no core busy",
        check=waiting_sleeps,
        seconds=10,
    ),
    Claim(
        name="late",
        words="reading numbers one step late changes no bit",
        check=late_is_the_same,
        seconds=60,
    ),
    Claim(
        name="waits",
        words="no step makes the host wait for the device",
        check=in_one_process,
        seconds=120,
    ),
    Claim(name="offload", words="offloaded runs train and resume", check=offloads, seconds=30),
    Claim(name="compile", words="compiled runs train and resume", check=compiles, seconds=60),
    Claim(
        name="links",
        words="preflight measures an all-reduce between the GPUs",
        check=bandwidth_is_measured,
        seconds=20,
    ),
)
_NO_TIME = "no time left for it"


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


def facts(device: torch.device) -> dict[str, Any]:
    """What only CUDA can say; ``problem``: why it does not start."""
    problem = cuda_problem() if device.type == "cuda" else ""
    if problem or device.type != "cuda":
        return {"problem": problem}
    count = range(torch.cuda.device_count())
    return {
        "problem": "",
        "devices": [torch.cuda.get_device_name(n) for n in count],
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
    }


# Run in a process of their own, see Machine.apart.
PARTS: dict[str, Callable[[torch.device], dict[str, Any]]] = {
    "facts": facts,
    "head": head,
    "digest": digest,
    "wait": wait,
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
    if options.part:
        print(json.dumps(PARTS[options.part](torch.device(options.device))))
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
    chosen = [claim for claim in CLAIMS if not options.only or claim.name in options.only]
    for claim in chosen:
        line = try_claim(claim, machine)
        lines.append(line)
        print(f"{line.result}  {line.claim} ({line.words.strip().splitlines()[-1][:400]})")
        if claim.is_fact or claim.name == "start":
            about |= line.measured
        _write(options.out, lines, about, is_rehearsal=machine.is_rehearsal)
        if claim.name == "start" and line.result == "fail":
            break
    return lines


def _write(out: Path, lines: list[Line], about: dict[str, Any], *, is_rehearsal: bool) -> None:
    """Called after each claim, so that an abort loses nothing."""
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "rehearsal": is_rehearsal,
        "verdict": verdict(lines),
        "machine": about,
        "claims": [asdict(line) for line in lines],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")


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
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cpu", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
