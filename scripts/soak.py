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
from collections.abc import Collection, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from runner.fault.spec import POINTS
from runner.system.json_lines import read_lines
from tests.run import Started, environment_of, metrics_step, naming, skip_override

# A tiny model's step takes 0.03 s; a start several seconds. No lower rate after a rollback: it is
# the one lawful difference from a run that was told what to skip.
SETTINGS = """
model=tiny data=synthetic data.workers=0 eval.every=20 eval.samples=8 schedule.warmup=5
checkpoint.every=10 checkpoint.clean_after=5 checkpoint.keep=9 guard.min_history=10
guard.cooldown_steps=0 guard.max_rollbacks=1000 track.every=1000
watchdog.floor_seconds=8 watchdog.slow_seconds=60 resume.stale_seconds=5
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


def plan(
    num: int, dice: random.Random, *, ranks: int, kinds: Collection[str]
) -> tuple[list[str], list[tuple[int, str]]]:
    """``num`` faults of these kinds, each at a step of its own.

    Returns:
        values of ``faults``, and what comes from outside as (step, kind), in order.
    """
    weights = {kind: weight for kind, weight in WEIGHTS.items() if kind in kinds}
    chosen = dice.choices(list(weights), list(weights.values()), k=num)
    drawn = list(zip(chosen, dice.sample(range(12, num * STEPS_A_FAULT - 5), num), strict=True))
    inner = [_inner(kind, step, dice, ranks) for kind, step in drawn if kind not in OUTER]
    return inner, sorted((step, kind) for kind, step in drawn if kind in OUTER)


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
        dice, began = random.Random(options.seed), time.monotonic()
        kinds = [kind for kind in options.only or WEIGHTS if can_fill or kind != "disk_full"]
        inner, outer = plan(options.faults, dice, ranks=options.ranks, kinds=kinds)
        code, launches, server = soak(out, inner, outer, options, folder / "soak.log")
        result = {
            "seed": options.seed,
            "ranks": options.ranks,
            "code": code,
            "seconds": round(time.monotonic() - began),
            "launches": launches,
            "fork_server_mb": server,
            "processes_left": len(naming(f"out={out}")),
            **_told(out, inner, outer),
        }
        if code == 0:
            result |= _compare(out, folder / "peace", options)
        print(json.dumps(result), flush=True)
        (folder / "result.json").write_text(json.dumps(result) + "\n")
    return 0 if result.get("same_digest") else 1


def soak(
    out: Path, inner: list[str], outer: list[tuple[int, str]], options: Any, log: Path
) -> tuple[int, int, list[float]]:
    """The run under fire; its supervisor restarts it, and we restart the supervisor.

    Returns:
        the exit code, how many supervisors were started, and the memory of the last one's fork
        server at its first step and at its end, in MB.
    """
    waiting, launches = list(outer), 0
    server: list[float] = []
    while True:
        launches += 1
        process = _begun(out, options, log, f"faults=[{','.join(inner)}]")
        started, is_ours = Started(out=out, process=process), False
        server = []
        while process.poll() is None:
            time.sleep(0.1)
            if (size := _server_mb(process.pid)) and metrics_step(out) > 0:
                server = [server[0] if server else size, size]
            if waiting and metrics_step(out) >= waiting[0][0]:
                kind = waiting.pop(0)[1]
                _strike(kind, started)
                is_ours = is_ours or kind == "kill_all"
        if not is_ours:
            return process.returncode, launches, server


def _server_mb(supervisor: int) -> float:
    """Resident memory of its fork server; 0 without one."""
    with contextlib.suppress(OSError, IndexError):
        for child in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split():
            if b"runner.launch.fork_server" in Path(f"/proc/{child}/cmdline").read_bytes():
                pages = int(Path(f"/proc/{child}/statm").read_text().split()[1])
                return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)
    return 0.0


def _strike(kind: str, started: Started) -> None:
    ranks = [pid for pid in started.workers() if "RANK" in environment_of(pid)]
    if kind == "kill_all":
        started.kill()
        started.process.wait()
    elif kind == "kill_torchrun":
        for pid in set(started.workers()) - set(ranks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    elif kind == "sigterm" and ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[0], signal.SIGTERM)
    elif kind == "disk_full":
        _fill(started.out)


def _told(out: Path, inner: list[str], outer: list[tuple[int, str]]) -> dict[str, Any]:
    """What was done and what it led to."""
    # One fault without a rank leaves a marker of each rank.
    markers = {path.name.rpartition("-")[0] for path in (out / "faults").glob("*-rank*")}
    tried = Counter(name.partition("-")[0] for name in markers)
    tried += Counter(kind for _, kind in outer)
    tried += Counter(
        fault.partition("@")[0] for fault in inner if fault.startswith(("poison", "spike", "slow"))
    )
    journal, _ = read_lines(out / "journal.jsonl")
    kinds = Counter(line["kind"] for line in journal)
    seconds = [
        after["time"] - before["time"]
        for before, after in pairwise(journal)
        if before["kind"] == "crash" and after["kind"] == "start"
    ] or [0.0]
    return {
        "faults": sum(tried.values()),
        "by_kind": dict(sorted(tried.items())),
        "starts": kinds["start"],
        "discards": kinds["discard"],
        "rollbacks": kinds["rollback"],
        "checkpoints_damaged": kinds["checkpoint_damaged"],
        "saves_failed": kinds["save_failed"],
        "recover_seconds": {
            "median": round(statistics.median(seconds), 1),
            "most": round(max(seconds), 1),
        },
    }


def _compare(out: Path, peace: Path, options: argparse.Namespace) -> dict[str, Any]:
    soaked = json.loads((out / "summary.json").read_text())
    log = peace.with_suffix(".log")
    code = _begun(peace, options, log, skip_override(soaked["skipped"])).wait()
    assert code == 0, f"the run in peace ended with {code}: {log}"
    summary = json.loads((peace / "summary.json").read_text())
    keys = ("state_digest", "steps", "cursor", "samples_used")
    return {
        "same_digest": all(soaked[key] == summary[key] for key in keys),
        "digest": soaked["state_digest"][:16],
        "peace_digest": summary["state_digest"][:16],
        "steps": soaked["steps"],
        "goodput": soaked["goodput"],
    }


def _begun(out: Path, options: Any, log: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "runner", "launch", "--nproc", str(options.ranks)]
    command += ["--restarts", "40", "--pause", "0.1", "--max-pause", "1", f"out={out}"]
    command += [*SETTINGS.split(), f"steps={options.faults * STEPS_A_FAULT}", *overrides]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("a") as file:
        return subprocess.Popen(
            command, stdout=file, stderr=file, text=True, env=env, start_new_session=True
        )


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
    with tempfile.TemporaryDirectory(prefix="holdfast-soak-") as temporary:
        folder = Path(keep or temporary).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


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
    words = "kinds of faults, with commas between; default all"
    parser.add_argument("--only", type=lambda text: text.split(","), metavar="KINDS", help=words)
    parser.add_argument("--keep", metavar="DIR", help="leave run and log there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
