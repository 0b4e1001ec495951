"""One long run, hundreds of random faults, one supervisor; then the same run in peace.

Half of the faults end or freeze processes, from within (``faults=[...]``) or from outside (the
launcher killed, everything killed, a signal to stop, a full disk where a small one can be
mounted); the rest are NaNs, spikes, bad samples and damaged checkpoints. The peaceful run has no
faults and is told to skip what the soaked one skipped: both must end with one digest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from runner.fault.spec import POINTS
from runner.system.json_lines import read_lines

# A tiny model's step takes 0.03 s; a start several seconds. Neighbouring troubles are no repeat:
# the ladder's lower rate is the one lawful difference from a run that was told what to skip.
SETTINGS = """
model=tiny data=synthetic data.workers=0 eval.every=20 eval.samples=8 schedule.warmup=5
checkpoint.every=10 checkpoint.clean_after=5 checkpoint.keep=9 guard.min_history=10
guard.cooldown=1 guard.repeat_window=1 guard.max_rollbacks=1000 track.every=1000
watchdog.floor_seconds=8 watchdog.slow_seconds=60 watchdog.settle_seconds=2 resume.stale_seconds=5
"""
BATCH = 32
STEPS_A_FAULT = 5
WEIGHTS = {
    "kill": 30, "abort": 8, "raise": 8, "hang": 2, "stop": 2, "mismatch": 2, "other_collective": 2,
    "nan_grad": 14, "nan_loss": 8, "poison": 4, "spike": 3, "corrupt_checkpoint": 6, "slow": 1,
    "kill_all": 3, "kill_torchrun": 2, "sigterm": 3, "disk_full": 2,
}  # fmt: skip
OUTER = ("kill_all", "kill_torchrun", "sigterm", "disk_full")
DISK_BYTES = 64 << 20
FULL_SECONDS = 2.0


@dataclass(frozen=True)
class Plan:
    """``inner`` are values of ``faults``; ``outer`` pairs of (step, kind), in order."""

    inner: list[str]
    outer: list[tuple[int, str]]


def plan(num: int, dice: random.Random, *, ranks: int, can_fill: bool) -> Plan:
    """``num`` faults, each at a step of its own."""
    weights = {kind: w for kind, w in WEIGHTS.items() if can_fill or kind != "disk_full"}
    kinds = dice.choices(list(weights), list(weights.values()), k=num)
    steps = dice.sample(range(12, num * STEPS_A_FAULT - 5), num)
    inner, outer = [], []
    for kind, step in zip(kinds, steps, strict=True):
        if kind in OUTER:
            outer.append((step, kind))
        else:
            inner.append(_inner(kind, step, dice, ranks))
    return Plan(inner=inner, outer=sorted(outer))


def _inner(kind: str, step: int, dice: random.Random, ranks: int) -> str:
    first = step * BATCH + dice.randrange(BATCH)
    if kind == "poison":
        return f"poison@samples={first}-{first + dice.choice((3, 40, 90))}"
    if kind == "spike":
        return f"spike@samples={first}-{first + dice.choice((3, 31))},scale=50"
    if kind == "corrupt_checkpoint":
        return f"{kind}@step={step}"
    rank = dice.randrange(ranks)
    if kind == "slow":
        return f"slow@step={step}-{step + 2},rank={rank},seconds=0.2"
    if kind in ("kill", "abort", "raise", "hang", "stop"):
        point = dice.choice([p for p in POINTS if p != "rollback"])
        step = step // 10 * 10 or 10 if point == "save" else step
        return f"{kind}@step={step},rank={rank},at={point}"
    return f"{kind}@step={step},rank={rank}"


def main() -> int:
    """Soak, compare, print one line; 1 when the ends differ."""
    options = _options()
    with _folder(options.keep) as folder, _disk(folder) as (out, can_fill):
        schedule = plan(
            options.faults, random.Random(options.seed), ranks=options.ranks, can_fill=can_fill
        )
        began = time.monotonic()
        soak = Soak(out, schedule, options, folder / "soak.log")
        code = soak.run()
        seconds = time.monotonic() - began
        result = {
            "seed": options.seed,
            "ranks": options.ranks,
            "code": code,
            "seconds": round(seconds),
            **soak.result(),
        }
        if code == 0:
            result |= _compare(out, folder / "peace", options)
        print(json.dumps(result), flush=True)
        (folder / "result.json").write_text(json.dumps(result) + "\n")
    return 0 if result.get("same_digest") else 1


class Soak:
    """The run under fire; the supervisor restarts it, and we restart the supervisor."""

    def __init__(self, out: Path, plan: Plan, options: argparse.Namespace, log: Path) -> None:
        self.out = out
        self._plan = plan
        self._waiting = list(plan.outer)
        self._options = options
        self._log = log
        self._done: Counter[str] = Counter()
        self._num_launches = 0

    def run(self) -> int:
        while True:
            self._num_launches += 1
            code, children = self._launch()
            if not children:
                return code

    def _launch(self) -> tuple[int, bool]:
        """One supervisor to its end; whether it was we who ended it."""
        faults = ",".join(self._plan.inner)
        command = _command(self.out, self._options, f"faults=[{faults}]")
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=_environment(), start_new_session=True
            )
            while process.poll() is None:
                time.sleep(0.1)
                if self._waiting and self._step() >= self._waiting[0][0]:
                    _, kind = self._waiting.pop(0)
                    self._done[kind] += 1
                    self._strike(kind, process.pid)
                    if kind == "kill_all":
                        return process.wait(), True
        return process.returncode, False

    def _step(self) -> int:
        try:
            with (self.out / "metrics.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
                lines = file.read().splitlines()[:-1]
            return int(json.loads(lines[-1])["step"])
        except (OSError, ValueError, IndexError, KeyError):
            return 0

    def _strike(self, kind: str, supervisor: int) -> None:
        if kind == "kill_all":
            while pids := _naming(self.out):
                for pid in pids:
                    _signal(pid, signal.SIGKILL)
                time.sleep(0.05)
        elif kind == "kill_torchrun":
            for pid in _naming(self.out):
                if pid != supervisor and "RANK" not in _variables(pid):
                    _signal(pid, signal.SIGKILL)
        elif kind == "sigterm":
            ranks = [pid for pid in _naming(self.out) if "RANK" in _variables(pid)]
            for pid in ranks[:1]:
                _signal(pid, signal.SIGTERM)
        elif kind == "disk_full":
            _fill(self.out)

    def result(self) -> dict[str, Any]:
        """What was done and what it led to."""
        # One fault without a rank leaves a marker of each rank.
        markers = {path.name.rpartition("-")[0] for path in (self.out / "faults").glob("*-rank*")}
        fired = Counter(name.partition("-")[0] for name in markers)
        journal, _ = read_lines(self.out / "journal.jsonl")
        kinds = Counter(line["kind"] for line in journal)
        ranges = Counter(
            fault.partition("@")[0]
            for fault in self._plan.inner
            if fault.startswith(("poison", "spike", "slow"))
        )
        tried = fired + ranges + self._done
        return {
            "faults": sum(tried.values()),
            "by_kind": dict(sorted(tried.items())),
            "starts": kinds["start"],
            "launches": self._num_launches,
            "discards": kinds["discard"],
            "rollbacks": kinds["rollback"],
            "checkpoints_damaged": kinds["checkpoint_damaged"],
            "saves_failed": kinds["save_failed"],
            "recover_seconds": _recoveries(journal),
        }


def _recoveries(journal: list[dict[str, Any]]) -> dict[str, float]:
    """From the last line of an incarnation that crashed to the next start, where both are told."""
    seconds = [
        after["time"] - before["time"]
        for before, after in pairwise(journal)
        if before["kind"] == "crash" and after["kind"] == "start"
    ]
    if not seconds:
        return {}
    return {
        "num": len(seconds),
        "median": round(statistics.median(seconds), 1),
        "least": round(min(seconds), 1),
        "most": round(max(seconds), 1),
    }


def _compare(out: Path, peace: Path, options: argparse.Namespace) -> dict[str, Any]:
    soaked = json.loads((out / "summary.json").read_text())
    skip = json.dumps(soaked["skipped"]).replace(" ", "")
    with peace.with_suffix(".log").open("wb") as log:
        subprocess.run(
            _command(peace, options, f"data.skip={skip}"),
            stdout=log,
            stderr=log,
            env=_environment(),
            check=True,
        )
    summary = json.loads((peace / "summary.json").read_text())
    keys = ("state_digest", "steps", "cursor", "samples_used")
    return {
        "same_digest": all(soaked[key] == summary[key] for key in keys),
        "digest": soaked["state_digest"][:16],
        "peace_digest": summary["state_digest"][:16],
        "steps": soaked["steps"],
        "goodput": soaked["goodput"],
    }


def _command(out: Path, options: argparse.Namespace, *overrides: str) -> list[str]:
    command = ["launch", "--nproc", str(options.ranks), "--restarts", "40"]
    command += ["--pause", "0.1", "--max-pause", "1"]
    steps = f"steps={options.faults * STEPS_A_FAULT}"
    return [
        *(sys.executable, "-m", "runner", *command),
        *(f"out={out}", *SETTINGS.split(), steps, *overrides),
    ]


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def _naming(out: Path) -> list[int]:
    """Processes whose command line has ``out=...``."""
    named = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if f"out={out}".encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                    named.append(int(folder.name))
    return sorted(named)


def _variables(pid: int) -> set[str]:
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return set()
    return {part.partition("=")[0] for part in raw.split("\0")}


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _fill(out: Path) -> None:
    """Leave no byte free on the small disk for a while."""
    filler = out.parent / "filler"
    limit = time.monotonic() + FULL_SECONDS
    with filler.open("wb", buffering=0) as file:
        while time.monotonic() < limit:
            try:
                file.write(bytes(1 << 16))
            except OSError:
                time.sleep(0.02)
    filler.unlink()


@contextlib.contextmanager
def _folder(keep: str | None) -> Iterator[Path]:
    if keep is not None:
        folder = Path(keep).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="holdfast-soak-") as temporary:
        yield Path(temporary)


@contextlib.contextmanager
def _disk(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Where the run goes: a small disk of its own, if one can be mounted."""
    disk = folder / "disk"
    disk.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "soak", str(disk)]
    can_fill = os.geteuid() == 0 and shutil.which("mount") is not None
    can_fill = can_fill and subprocess.run(command, capture_output=True).returncode == 0
    if not can_fill:
        print("no small disk could be mounted (needs root): no full disk is tried", flush=True)
    try:
        yield disk / "run", can_fill
    finally:
        if can_fill:
            shutil.copytree(disk, folder / "left", dirs_exist_ok=True)
            subprocess.run(["umount", str(disk)], check=False)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=100, metavar="N", help="default 100")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="default 1")
    parser.add_argument("--ranks", type=int, default=2, metavar="R", help="default 2")
    parser.add_argument("--keep", metavar="DIR", help="leave run and log there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
