"""One long run, hundreds of random faults, one supervisor; then the same run undisturbed.

The run has everything on: evaluations, a mixture, an average, audits, a tracker, snapshots in
memory, copies in an object store. Half of the faults end or freeze processes, from within
(``faults=[...]``) or from outside (everything killed, a signal, a notice, a full disk where a small
one can be mounted, a store that is gone for a while); the rest are NaNs, spikes, bad samples,
flipped bits and damaged checkpoints. Where the run recovers from one fault, another strikes now
and then. The undisturbed run is told to skip what the soaked one skipped: both must end with one
digest. No guard sees a wrong number that stays below its limits: where the two first
differ at the step of such a fault, that run is made anew with that one fault.

With ``--record FILE`` it goes on from that record with the next seed until ``--minutes`` are over,
so that a record may be of any number of sittings; one that is broken off is played anew.
``--trace FILE`` plays a trace of failures on nodes instead (:mod:`scripts.soak_trace`).
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
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from runner.fault.spec import ENDINGS, POINTS, parse_faults
from runner.system.error import EXIT_PREEMPTED
from runner.system.json_lines import read_lines
from scripts import soak_trace
from scripts.bench.provenance import head
from tests.run import (
    Result,
    Started,
    environment_of,
    kill_naming,
    metrics_step,
    naming,
    skip_override,
)
from tests.store import BUCKET, Store

# A tiny model's step takes 0.03 s; a start several seconds. No lower rate after a rollback: it is
# the one lawful difference from a run that was told what to skip.
SETTINGS = """
model=tiny compute.precision=fp32 data=synthetic data.workers=0 schedule.warmup=5
data.sources=[{name:code,weight:1,samples:3000,seed:1},{name:web,weight:3,samples:9000,seed:2}]
eval.every=20 eval.samples=8 optim.ema=0.9 checkpoint.keep_best=true
checkpoint.every=10 checkpoint.clean_after=5 checkpoint.keep=9 checkpoint.memory_every=4
guard.min_history=10 guard.cooldown_steps=0 guard.max_rollbacks=1000
debug.audit_every=10 debug.replica_check_every=10 watchdog.straggler_every=7
track.tensorboard=true track.every=5 track.layers_every=5
watchdog.floor_seconds=8 watchdog.slow_seconds=60 resume.stale_seconds=5
parallel.start_seconds=60 parallel.timeout_seconds=60
"""
BATCH = 32
STEPS_A_FAULT = 5
# Not: what lasts on one rank (sticky, wrong, wrong_grad), for it takes another node, and what ends
# as the run without it but for rounding (oom, overflow). tests/drills are of both.
WEIGHTS = {
    "kill": 30, "abort": 8, "raise": 8, "hang": 2, "stop": 2, "mismatch": 2, "other_collective": 2,
    "skip_collective": 2, "other_shape": 2, "wrong_product": 2, "observer": 6,
    "nan_grad": 12, "nan_loss": 8, "flip_grad": 6, "misread": 4, "spoil_state": 2, "flip_bit": 2,
    "poison": 4, "spike": 3, "corrupt_checkpoint": 6, "corrupt_snapshots": 3, "slow": 1,
    "kill_all": 3, "kill_torchrun": 2, "kill_rank": 4, "freeze_rank": 1, "sigterm": 3, "notice": 2,
    "disk_full": 2, "store_gone": 3,
}  # fmt: skip
# From outside, by the harness. The first few also strike where the run recovers from another fault.
OF_RANK = ("kill_rank", "sigterm", "freeze_rank")
OUTER = (*OF_RANK, "kill_all", "kill_torchrun")
OUTER_ALONE = ("notice", "disk_full", "store_gone")
PAIRED = 0.4  # of recoveries are hit again,
WITHIN = 5.0  # seconds after they began
OBSERVERS = ("layers", "audit", "replicas", "tracker", "evidence", "explain")
DISK_BYTES = 192 << 20
FULL_SECONDS, GONE_SECONDS = 2.0, 6.0
BELOW_LIMITS = ("misread", "flip_grad", "spike")  # they may stay there
SAME = ("state_digest", "steps", "cursor", "samples_used")
STUCK_SECONDS = 900.0  # without a new attempt or step


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
    outer = OUTER + OUTER_ALONE
    inner = [_inner(kind, step, dice, ranks) for kind, step in drawn if kind not in outer]
    return inner, sorted((step, kind) for kind, step in drawn if kind in outer)


def _inner(kind: str, step: int, dice: random.Random, ranks: int) -> str:
    first, rank, tenth = (
        step * BATCH + dice.randrange(BATCH),
        dice.randrange(ranks),
        step // 10 * 10,
    )
    if kind == "poison":
        return f"poison@samples={first}-{first + dice.choice((3, 40, 90))}"
    if kind == "spike":
        return f"spike@samples={first}-{first + dice.choice((3, 31))},scale=50"
    if kind == "corrupt_checkpoint":
        return f"{kind}@step={step}"
    if kind == "slow":
        return f"slow@step={step}-{step + 2},rank={rank},seconds=0.2"
    if kind == "wrong_product":  # it takes a start at this step
        return f"{kind}@step={tenth},rank={rank}"
    if kind == "observer":
        name, how = dice.choice(OBSERVERS), dice.choice(("raise", "raise", "kill"))
        at = step if name in ("evidence", "explain") else tenth
        return f"{how}@observer={name},step={at},rank={rank},call={dice.choice((0, 0, 1))}"
    if kind in ENDINGS:
        point = dice.choice([p for p in POINTS if p != "rollback"])
        step = (tenth or 10) if point == "save" else step
        return f"{kind}@step={step},rank={rank},at={point}"
    return f"{kind}@step={step},rank={rank}"


def main() -> int:
    """Sittings, or segments of a trace; 1 when the ends of one differ, and nothing explains it."""
    options, began, code = _options(), time.monotonic(), 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that it ends what it has begun
    name, one, sum_up = "sittings", _sitting, totals
    if options.trace:
        name, one, sum_up = "segments", soak_trace.segment, soak_trace.totals
    record: dict[str, Any] = {}
    if options.record and options.record.exists():
        record = json.loads(options.record.read_text())
    done = record.get(name, [])
    while True:
        origin = head(["python", "-m", "scripts.soak", *_told(options)])
        with _folder(options.keep, str(len(done))) as folder:
            entry = one(options, folder, done)
            is_explained = bool(entry["same_digest"] or entry.get("below_limits"))
            if not is_explained and not options.keep:
                kept = tempfile.mkdtemp(prefix="holdfast-soak-kept-")
                print("kept:", shutil.move(folder, kept), file=sys.stderr, flush=True)
        done.append({key: origin[key] for key in ("date", "commit")} | entry)
        print(json.dumps(done[-1]), flush=True)
        if options.record:
            record = origin | {"totals": sum_up(done), name: done}
            options.record.write_text(json.dumps(record, indent=1) + "\n")
        code |= not is_explained
        is_over = entry.get("until_day", 0.0) >= soak_trace.DAYS
        if is_over or time.monotonic() - began > options.minutes * 60:
            return code


def _told(options: Any) -> list[str]:
    """The command without this machine's folders."""
    if options.trace:
        told = ["--trace", options.trace.name, "--seed", str(options.seed)]
        told += ["--slurm"] if options.slurm else []
    else:
        told = ["--faults", str(options.faults)]
    return [*told, *(["--record", options.record.name] if options.record else [])]


def totals(sittings: list[dict[str, Any]]) -> dict[str, Any]:
    """Over all sittings: faults and what came of them."""
    by_kind = sum((Counter(one["by_kind"]) for one in sittings), Counter[str]())
    summed = ("faults", "paired", "seconds", "processes_left")
    return {
        "sittings": len(sittings),
        "same_digest": sum(one["same_digest"] for one in sittings),
        "same_with_faults_below_limits": sum(bool(one.get("below_limits")) for one in sittings),
        **{name: sum(one[name] for one in sittings) for name in summed},
        "by_kind": dict(sorted(by_kind.items())),
    }


def _sitting(options: Any, folder: Path, earlier: list[dict[str, Any]]) -> dict[str, Any]:
    seed = max((one["seed"] for one in earlier), default=options.seed - 1) + 1
    store, began = Store(), time.monotonic()
    with _disk(folder) as (out, can_fill):
        kinds = [kind for kind in options.only or WEIGHTS if can_fill or kind != "disk_full"]
        soak = Soak(out, folder / "soak.log", store, options, kinds, seed)
        try:
            code, left = soak.run(), len(naming(f"out={out}"))
        finally:
            kill_naming(f"out={out}")
        result = {
            "seed": seed,
            "ranks": options.ranks,
            "code": code,
            "seconds": round(time.monotonic() - began),
            "launches": soak.launches,
            "processes_left": left,
            "same_digest": False,
            **soak.told(),
        }
        if code == 0:
            result |= soak.compare(folder)
    store.stop()
    return result


class Soak:
    """The run under fire; its supervisor restarts it, and we restart the supervisor."""

    def __init__(
        self, out: Path, log: Path, store: Store, options: Any, kinds: Collection[str], seed: int
    ) -> None:
        self.out, self._log, self._store, self._options = out, log, store, options
        self._dice = random.Random(seed)
        self._inner, self._outer = plan(
            options.faults, self._dice, ranks=options.ranks, kinds=kinds
        )
        self._notice = log.with_name("notice")
        self._remote = f"checkpoint.remote=s3://{BUCKET}/{seed}"  # the bucket outlives a sitting
        self._again = [kind for kind in OUTER if kind in kinds]
        self._struck: list[str] = []
        self._later: list[tuple[float, Callable[[Started], bool]]] = []
        self._ended, self._paired, self.launches = 0, 0, 0

    def run(self) -> int:
        """Returns the exit code; 124 of one that did not move."""
        code = None
        while code is None:
            self.launches += 1
            process = self._begun()
            if self.launches > 1:
                self._pair()
            code = self._watch(Started(out=self.out, process=process))
        return code

    def _watch(self, started: Started) -> int | None:
        """Strike until it ends; None where we killed all of it."""
        moved, seen, was_ours = time.monotonic(), (0, 0), False
        while started.process.poll() is None:
            time.sleep(0.1)
            step, now = metrics_step(self.out), time.monotonic()
            if (ended := len(read_lines(self.out / "attempts.jsonl")[0])) > self._ended:
                self._ended = ended
                self._pair()
            if self._outer and step >= self._outer[0][0]:
                self._later.append((now, partial(self._strike, self._outer.pop(0)[1], False)))
            due = [strike for when, strike in self._later if when <= now]
            self._later = [one for one in self._later if one[0] > now]
            was_ours |= any([strike(started) for strike in due])
            moved, seen = (now if seen != (step, ended) else moved), (step, ended)
            if now - moved > STUCK_SECONDS:
                started.kill()
                return 124
        was_ours |= started.process.returncode == EXIT_PREEMPTED  # a scheduler starts it again
        return None if was_ours else started.process.returncode

    def _begun(self) -> subprocess.Popen[str]:
        told = (
            self._remote,
            f"preempt.notice=file:{self._notice}",
            f"faults=[{_quoted(self._inner)}]",
        )
        return _begun(self.out, self._options, self._log, *told, env=self._store.env)

    def _pair(self) -> None:
        if self._again and self._dice.random() < PAIRED:
            when = time.monotonic() + self._dice.uniform(0, WITHIN)
            self._later.append((when, partial(self._strike, self._dice.choice(self._again), True)))

    def _strike(self, kind: str, paired: bool, started: Started) -> bool:
        """Whether all of it was killed."""
        ranks = [pid for pid in started.workers() if "RANK" in environment_of(pid)]
        is_gone = kind == "store_gone" and self._store.is_down
        if is_gone or (kind in OF_RANK and not ranks):  # not yet: it would change nothing
            self._later.append((time.monotonic() + 0.2, partial(self._strike, kind, paired)))
            return False
        self._struck.append(kind)
        self._paired += paired
        one = self._dice.choice(ranks) if ranks else 0
        signals = {"kill_rank": signal.SIGKILL, "freeze_rank": signal.SIGSTOP}
        if kind == "kill_all":
            started.kill()
            started.process.wait()
        elif kind == "kill_torchrun":
            for pid in set(started.workers()) - set(ranks):
                soak_trace.send(pid, signal.SIGKILL)
        elif kind == "notice":
            self._notice.touch()
            self._after(partial(self._notice.unlink, missing_ok=True))
        elif kind == "store_gone":
            self._store.stop()
            self._after(self._store.start)
        elif kind == "disk_full":
            _fill(self.out)
        elif kind in OF_RANK:
            soak_trace.send(one, signals.get(kind, signal.SIGTERM))
        return kind == "kill_all"

    def _after(self, undo: Callable[[], object]) -> None:
        self._later.append((time.monotonic() + GONE_SECONDS, lambda _: bool(undo())))

    def told(self) -> dict[str, Any]:
        """What was done and what it led to."""
        # One fault without a rank leaves a marker of each rank.
        markers = {path.name.rpartition("-")[0] for path in (self.out / "faults").glob("*-rank*")}
        tried = Counter(name.partition("-")[0] for name in markers)
        tried += Counter(self._struck)
        lasting = ("poison", "spike", "slow")
        tried += Counter(one.partition("@")[0] for one in self._inner if one.startswith(lasting))
        journal, _ = read_lines(self.out / "journal.jsonl")
        kinds = Counter(line["kind"] for line in journal)
        seconds = [
            after["time"] - before["time"]
            for before, after in pairwise(journal)
            if before["kind"] == "crash" and after["kind"] == "start"
        ] or [0.0]
        counted = ("start", "redo", "discard", "rollback", "checkpoint_damaged", "save_failed")
        return {
            "faults": sum(tried.values()),
            "paired": self._paired,
            "by_kind": dict(sorted(tried.items())),
            "journalled": {kind: kinds[kind] for kind in counted},
            "recover_seconds": {
                "median": round(statistics.median(seconds), 1),
                "most": round(max(seconds), 1),
            },
        }

    def compare(self, folder: Path) -> dict[str, Any]:
        """With the undisturbed run; with that of the faults below the limits where these differ."""
        soaked, unseen = _summary(self.out), list[str]()
        while True:
            undisturbed = folder / f"undisturbed-{len(unseen)}"
            told = (skip_override(soaked["skipped"]), f"faults=[{_quoted(unseen)}]")
            log = undisturbed.with_suffix(".log")
            code = _begun(undisturbed, self._options, log, *told).wait()
            assert code == 0, f"the undisturbed run ended with {code}: {log}"
            is_same = all(soaked[key] == _summary(undisturbed)[key] for key in SAME)
            differs_at, more = (None, []) if is_same else self._first_difference(undisturbed)
            if not set(more) - set(unseen):
                break
            unseen += more
        return {
            "same_digest": is_same and not unseen,
            "below_limits": unseen if is_same else [],
            "differs_at": differs_at,
            "digest": soaked["state_digest"][:16],
            "undisturbed_digest": _summary(undisturbed)["state_digest"][:16],
            "steps": soaked["steps"],
            "goodput": soaked["goodput"],
        }

    def _first_difference(self, undisturbed: Path) -> tuple[int | None, list[str]]:
        """The first step that is another one, and its faults that may stay below the limits."""
        runs = (Result(out=out, code=0, text="") for out in (self.out, undisturbed))
        ours, theirs = (run.counted() for run in runs)
        for step, line in sorted(ours.items()):
            if any(line[name] != theirs[step][name] for name in ("samples", "loss", "grad_norm")):
                first, stop = line["samples"]
                return step, [
                    one.text
                    for one in parse_faults(self._inner)
                    if one.kind in BELOW_LIMITS
                    and (
                        one.is_due(step, one.rank or 0)
                        or first < one.samples[1] > one.samples[0] < stop
                    )
                ]
        return None, []


def _summary(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return found


def _quoted(faults: Sequence[str]) -> str:
    """A name may have a space in it."""
    return ",".join(f"'{fault}'" for fault in faults)


def _begun(
    out: Path, options: Any, log: Path, *overrides: str, env: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "runner", "launch", "--nproc", str(options.ranks)]
    command += ["--restarts", "40", "--pause", "0.1", "--max-pause", "1", f"out={out}"]
    command += [*SETTINGS.split(), f"steps={options.faults * STEPS_A_FAULT}", *overrides]
    variables = os.environ | {"OMP_NUM_THREADS": "1"} | (env or {})
    with log.open("a") as file:
        return subprocess.Popen(
            command, stdout=file, stderr=file, text=True, env=variables, start_new_session=True
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
def _folder(keep: str | None, name: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="holdfast-soak-") as temporary:
        folder = Path(keep or temporary).absolute() / name
        folder.mkdir(parents=True)
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
    parser.add_argument("--record", type=Path, metavar="FILE", help="go on from it, and add to it")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="play it, on nodes")
    parser.add_argument("--slurm", action="store_true", help="which a real Slurm schedules")
    words = "begin no other sitting after; default 0: one"
    parser.add_argument("--minutes", type=float, default=0, metavar="M", help=words)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
