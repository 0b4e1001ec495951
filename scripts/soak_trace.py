"""A public trace of failures, some 10,000 times faster, on nodes made of network namespaces.

Servers of the trace are drawn by the seed and dealt out to eight nodes; what befalls a server
befalls its node, at its time and until it was repaired, so clusters of failures stay clusters. Four
of the nodes train, a supervisor and a rank on each. The harness plays the scheduler of a cluster:
it sees nodes, never the run, asks the supervisor on a bad node to stop, and starts the same command
on a healthy one; where too few are healthy, the run waits. Segments of one length play the trace
one after another: each has to end with the digest of its undisturbed run. With ``--slurm`` a real
Slurm is the scheduler, of a job with one spare node.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from runner.checkpoint.disk.directory import CheckpointDirectory
from runner.run_dir.paths import RunDir
from runner.system.json_lines import read_lines
from runner.tools.goodput import (
    Costs,
    NodeFailure,
    Strategy,
    measured,
    one_tier,
    plan,
    read_failures,
    ring_goodput,
    trace_goodput,
)
from tests.cluster import Cluster, Namespaced
from tests.namespaces import Network
from tests.run import environment_of, metrics_step

TRACE = "stepfun-ai/InfiniteHBD-Trace 7aacdc8: 400 servers, 345 days, 584 faults (Apache-2.0)"
SERVERS, DAYS, SPEED = 400, 349.0, 10_000
DAY_SECONDS = 86_400 / SPEED
NODES, WORLD, SERVERS_A_NODE = 8, 4, 12
# A step waits most of its time, so that the two cores of a small machine are enough.
STEPS, STEP_SECONDS, EVERY = 300, 0.25, 10
SETTINGS = f"""
model=tiny model.layers=1 compute.precision=fp32 data=synthetic data.workers=0 steps={STEPS}
eval.every=20 eval.samples=8 optim.ema=0.9 schedule.warmup=5 debug.preflight=false
checkpoint.every={EVERY} checkpoint.clean_after=5 checkpoint.memory_every=4 guard.min_history=10
track.every=1000 track.report_minutes=null watchdog.floor_seconds=8 watchdog.slow_seconds=60
resume.stale_seconds=5 parallel.timeout_seconds=10 preempt.grace_seconds=20
faults=[slow@step=1-{STEPS},seconds={STEP_SECONDS}]
"""
# What a fault does to a node before it is asked to leave.
ABORT, FREEZE, KILL = signal.SIGABRT, signal.SIGSTOP, signal.SIGKILL
EFFECTS = {
    **dict.fromkeys(("Power Supply", "Motherboard", "CPU", "RAID Card", "Riser Card"), "crash"),
    **dict.fromkeys(("System Crash", "Operating System"), "crash"),
    **dict.fromkeys(("Parameter Plane Cable", "NIC"), "cut"),
    "GPU": "abort",
    "File System": "read_only",
}
DESCRIBED = {
    "nvidia-smi Timeout": "freeze",
    "GPU Temperature High": "drain",
    "GPU PCI link width low": "drain",
    "GPU P2P Bandwidth Low": "drain",
    "NIC Link Speed low": "drain",
    "NIC PCI link Width low": "drain",
    "Silent Data Corruption": "flip_byte",
}
UNKNOWN = ("kill", "abort", "freeze", "crash", "cut")  # "Unknown Error" is one of these by dice
GRACE_SECONDS, FREEZE_SECONDS, STUCK_SECONDS = 40.0, 12.0, 600.0


def drawn(
    failures: Sequence[NodeFailure], seed: int
) -> tuple[list[tuple[NodeFailure, int]], float]:
    """Failures of the drawn servers with their nodes, and the day on which the play begins."""
    dice = random.Random(seed)
    named = sorted({failure.node for failure in failures})
    servers = named + [f"never-failed-{number}" for number in range(SERVERS - len(named))]
    chosen = dice.sample(servers, NODES * SERVERS_A_NODE)
    node = {server: number % NODES for number, server in enumerate(chosen)}
    played = [(one, node[one.node]) for one in failures if one.node in node]
    return played, dice.uniform(0, DAYS)


@dataclass
class Slot:
    """A place in the job: the node that it is on, and the supervisor there, if it is ours."""

    node: str
    agent: subprocess.Popen[bytes] | None = None
    is_hit: bool = False

    @property
    def code(self) -> int | None:
        """How the supervisor has ended; None: not yet."""
        return self.agent and self.agent.poll()


@dataclass
class Segment:
    """One run on the nodes, while failures come.

    Args:
        clock: in days, from the beginning of the play; it goes on where the last segment ended.
        failures: (day, node, failure), in order, from the clock on.
    """

    network: Network
    out: Path
    clock: float
    failures: list[tuple[float, str, NodeFailure]]
    dice: random.Random
    slots: list[Slot | None] = field(default_factory=lambda: [None] * WORLD)
    told: list[dict[str, Any]] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)
    later: list[tuple[float, Any]] = field(default_factory=list)
    left: list[Slot] = field(default_factory=list)

    def run(self, broken: dict[str, float]) -> dict[str, Any]:
        """Play until the run is done, or stuck.

        Args:
            broken: until which day each node is; as it is, and as it is left.
        """
        began, start, waited = time.monotonic(), self.clock, 0.0
        moved, seen = began, 0
        while not self._is_done():
            time.sleep(0.1)
            now = time.monotonic()
            self.clock, before = start + (now - began) / DAY_SECONDS, self.clock
            while self.failures and self.failures[0][0] <= self.clock:
                self._befall(*self.failures.pop(0), broken)
            self._repair(broken)
            due = [what for when, what in self.later if when <= now]
            self.later = [one for one in self.later if one[0] > now]
            for what in due:
                what()
            self._schedule(broken)
            if None in self.slots:
                waited += (self.clock - before) * DAY_SECONDS
            step = metrics_step(self.out)
            moved, seen = (now, step) if step != seen or None in self.slots else (moved, seen)
            if now - moved > STUCK_SECONDS:
                break
        return self._result(time.monotonic() - began, waited)

    def _slot_on(self, node: str) -> Slot | None:
        return next((slot for slot in self.slots if slot and slot.node == node), None)

    def _is_done(self) -> bool:
        return all(slot is None or slot.code == 0 for slot in self.slots) and self._ends()

    def _ends(self) -> bool:
        """Whether it is done on a node, so that no other one is needed."""
        return any(slot and slot.code == 0 for slot in self.slots)

    def _befall(
        self, day: float, node: str, failure: NodeFailure, broken: dict[str, float]
    ) -> None:
        effect = DESCRIBED.get(failure.text) or EFFECTS.get(failure.kind, "drain")
        if failure.kind == "Unknown Error":
            effect = self.dice.choice(UNKNOWN)
        slot = self._slot_on(node)
        is_first = node not in broken
        broken[node] = max(broken.get(node, 0.0), day + failure.end - failure.begin)
        line = {"day": round(day, 2), "node": node, "class": failure.kind, "what": failure.text}
        hit = slot is not None and slot.code is None and is_first
        self.told.append(line | {"effect": effect, "hit": hit})
        if slot:
            slot.is_hit = True
        if effect == "crash" and self.network.is_up(node):
            self.network.crash(node)
        elif effect == "cut" and is_first:
            self.network.cut(node)
        if slot and hit and effect == "cut":  # nobody reaches it; it goes on by itself
            self.slots[self.slots.index(slot)] = None
            self.left.append(slot)
        elif slot and hit and effect != "crash":
            self._harm(node, effect)
            wait = FREEZE_SECONDS if effect == "freeze" else self.dice.uniform(0, 2)
            self._after(wait, partial(self._ask_to_stop, slot))

    def _harm(self, node: str, effect: str) -> None:
        ranks = [pid for pid in self.network.processes(node) if "RANK" in environment_of(pid)]
        signals = {"abort": ABORT, "freeze": FREEZE, "kill": KILL}
        if effect in signals:
            for pid in ranks:
                send(pid, signals[effect])
        elif effect == "read_only":
            words = f"mount --bind {self.out} {self.out} && mount -o remount,bind,ro {self.out}"
            subprocess.run(self.network.command(node, ["bash", "-c", words]), check=False)
        elif effect == "flip_byte":
            self._flip_byte()

    def _flip_byte(self) -> None:
        entries, _ = CheckpointDirectory(RunDir(self.out).ring).entries()
        for path in sorted(entries[-1].folder.glob("*.bin")) if entries else []:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
            return

    def _after(self, seconds: float, what: Any) -> None:
        self.later.append((time.monotonic() + seconds, what))

    def _ask_to_stop(self, slot: Slot) -> None:
        for pid, words in self.network.processes(slot.node).items():
            if "runner launch" in words and "nsenter" not in words:
                send(pid, signal.SIGTERM)
        self._after(GRACE_SECONDS, partial(self._end, slot.node, slot))

    def _end(self, node: str, slot: Slot | None = None) -> None:
        """Nothing of the run is left on the node, unless its agent has ended by itself."""
        if self.network.is_up(node) and (slot is None or slot.code is None):
            for pid in self.network.processes(node):
                send(pid, KILL)

    def _repair(self, broken: dict[str, float]) -> None:
        for node in [node for node, end in broken.items() if end <= self.clock]:
            self._boot(node)
            self.network.heal(node)
            words = f"umount {self.out} 2>/dev/null; true"
            subprocess.run(self.network.command(node, ["bash", "-c", words]), check=False)
            broken[node] = math.inf
            # What was cut off is back for a moment, before it is removed.
            self._after(self.dice.uniform(0, 3), partial(self._free, node, broken))

    def _free(self, node: str, broken: dict[str, float]) -> None:
        if self._slot_on(node):  # it is still saving
            self._after(1, partial(self._free, node, broken))
        else:
            self._end(node)
            self._boot(node)  # it has crashed again
            del broken[node]

    def _boot(self, node: str) -> None:
        if not self.network.is_up(node):
            self.network.boot(node)

    def _schedule(self, broken: dict[str, float]) -> None:
        for place, slot in enumerate(self.slots):
            if slot and (code := slot.code) not in (None, 0):
                if not slot.is_hit:
                    self.given_up.append(f"{slot.node} ended with {code}")
                self.slots[place] = None
            if self.slots[place] is None and not self._ends():
                self._place(place, broken)

    def _leave(self) -> None:
        for node in self.network.nodes:
            self._end(node)
        for slot in self.slots + self.left:
            if slot and slot.agent:
                slot.agent.wait(20)

    def _place(self, place: int, broken: dict[str, float]) -> None:
        taken = {slot.node for slot in self.slots if slot}
        free = [node for node in self.network.nodes if node not in broken and node not in taken]
        if not free:
            return
        node = self.dice.choice(free)
        if place == 0:
            self.network.point("head", node)
        words = [sys.executable, "-m", "runner", "launch", "--nproc", "1", "--pause", "0.5"]
        words += ["--nodes", str(WORLD), "--head", "head", "--name", "trace", "--restarts", "20"]
        words += ["--max-pause", "5", f"out={self.out}", *SETTINGS.split()]
        log = self.out.parent / f"{node}.log"
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        self.slots[place] = Slot(node, self.network.start(node, words, log=log, env=env))

    def _result(self, seconds: float, waited: float) -> dict[str, Any]:
        is_done = self._is_done()
        self._leave()
        summary = json.loads((self.out / "summary.json").read_text()) if is_done else {}
        journal, _ = read_lines(self.out / "journal.jsonl")
        return {
            "done": is_done,
            "given_up": self.given_up,
            "seconds": round(seconds, 1),
            "waited_for_repair_seconds": round(waited, 1),
            "digest": summary.get("state_digest", "")[:16],
            "skipped": summary.get("skipped"),
            "goodput": summary.get("goodput"),
            "starts": sum(line["kind"] == "start" for line in journal),
            "measured": _measured(self.out, journal),
            "faults": self.told,
        }


@dataclass
class UnderSlurm(Segment):
    """Slurm gives the job its nodes, and puts it back into the queue; the job has a spare."""

    cluster: Cluster = field(kw_only=True)
    job: str = ""
    state: str = ""
    next_look: float = 0.0

    def _schedule(self, broken: dict[str, float]) -> None:
        if time.monotonic() < self.next_look:
            return
        self.next_look = time.monotonic() + 1
        with contextlib.suppress(AssertionError):  # the controller is busy
            if self.job:
                self._look()
            else:
                self.job = self._submit()

    def _submit(self) -> str:
        words = ["slurm", "--nodes", str(WORLD), "--spares", "1", "--nproc", "1", "--submit"]
        words += ["--log", str(self.out.with_name("job.log")), f"out={self.out}"]
        said = self.cluster.run(sys.executable, "-m", "runner", *words, *SETTINGS.split())
        return said.split()[1]

    def _look(self) -> None:
        known = self.cluster.job(self.job)
        self.state = known["JobState"]
        nodes = list[str]()
        if self.state == "RUNNING":
            nodes = self.cluster.run("scontrol", "show", "hostnames", known["NodeList"]).split()
        self.slots = [Slot(node) for node in nodes] or [None]
        if self.state in ("FAILED", "CANCELLED", "TIMEOUT"):
            self.given_up.append(f"job {self.job}: {self.state}")
            self.job = ""

    def _is_done(self) -> bool:
        return self.state == "COMPLETED"

    def _harm(self, node: str, effect: str) -> None:
        super()._harm(node, effect)
        self._update(node, "DRAIN")
        if effect == "drain":  # nothing else befalls the job
            self._run("scontrol", "requeue", self.job)

    def _ask_to_stop(self, slot: Slot) -> None:
        """It goes on where it can; no other job gets the node."""

    def _free(self, node: str, broken: dict[str, float]) -> None:
        self._boot(node)
        self._update(node, "RESUME")
        del broken[node]

    def _boot(self, node: str) -> None:
        if not self.network.is_up(node):
            self.cluster.boot(node)

    def _update(self, node: str, state: str) -> None:
        self._run("scontrol", "update", f"NodeName={node}", f"State={state}", "Reason=trace")

    def _leave(self) -> None:
        self._run("scancel", self.job)

    def _run(self, *words: str) -> None:
        with contextlib.suppress(AssertionError):  # it is so already
            self.cluster.run(*words)


def _measured(out: Path, journal: list[dict[str, Any]]) -> dict[str, float]:
    names = ("step_seconds", "save_seconds", "stall_seconds", "restart_seconds")
    found = measured(out, journal)
    return {name: round(found[name].number, 4) for name in names if name in found}


def _planned(segments: list[dict[str, Any]]) -> dict[str, float]:
    """What ``holdfast plan`` says of such a run: of independent failures, and of these.

    At the interval that it had; the snapshots in memory are lost with their node.
    """
    seen = defaultdict(list)
    for segment in segments:
        for name, seconds in segment["measured"].items():
            seen[name].append(seconds)
    seconds = {name: statistics.median(found) for name, found in seen.items()}
    ends = list(accumulate((s["seconds"] for s in segments), initial=0.0))
    hits = [
        end + (fault["day"] - one["day"]) * DAY_SECONDS
        for end, one in zip(ends, segments, strict=False)
        for fault in one["faults"]
        if fault["hit"]
    ]
    costs = Costs(
        nodes=WORLD,
        mtbf_seconds=ends[-1] / max(1, len(hits)),
        memory_restart_seconds=seconds["restart_seconds"],
        detect_seconds=0.0,  # within the restart
        state_bytes=0.0,
        memory_share=0.0,
        **seconds,
    )
    best = replace(plan(costs, Strategy.asynchronous), steps=EVERY, disk_steps=EVERY)
    over = trace_goodput(costs, hits, ends[-1], best, random.Random(0))
    independent = ring_goodput(one_tier(costs, waits=False), steps=EVERY, per_disk=1)
    return seconds | {"goodput_if_independent": independent, "goodput_of_these": over}


def send(pid: int, number: signal.Signals) -> None:
    """A signal to a process that may have just ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def undisturbed(folder: Path) -> str:
    """The digest of the run that nothing befalls."""
    out = folder / "undisturbed"
    words = [sys.executable, "-m", "runner", "launch", "--nproc", str(WORLD), f"out={out}"]
    settings = [word for word in SETTINGS.split() if not word.startswith("faults=")]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with (folder / "undisturbed.log").open("w") as log:
        done = subprocess.run([*words, *settings], stdout=log, stderr=log, env=env, check=True)
    assert done.returncode == 0
    return str(json.loads((out / "summary.json").read_text())["state_digest"][:16])


def segment(options: Any, folder: Path, earlier: list[dict[str, Any]]) -> dict[str, Any]:
    """Play on from where the segments with this seed ended."""
    mine = [one for one in earlier if one["seed"] == options.seed]
    clock = mine[-1]["until_day"] if mine else 0.0
    expected = undisturbed(folder)
    nodes = [f"node{number}" for number in range(NODES)]
    played, first = drawn(read_failures(options.trace), options.seed)
    lap = clock // DAYS * DAYS
    coming = sorted(
        (lap + more + (one.begin - first) % DAYS, nodes[node], one)
        for one, node in played
        for more in (0, DAYS)
    )
    broken = {node: day + one.end - one.begin for day, node, one in coming if day < clock}
    broken = {node: end for node, end in broken.items() if end > clock}
    coming = [one for one in coming if one[0] >= clock]
    rest = (folder / "run", clock, coming, random.Random(len(earlier)))
    if options.slurm:
        with Cluster(nodes) as cluster:
            assert isinstance(cluster.machines, Namespaced)
            run: Segment = UnderSlurm(cluster.machines.network, *rest, cluster=cluster)
            result = run.run(broken)
    else:
        with Network(f"ht{os.getpid()}", nodes, folder / "net", 81) as network:
            run = Segment(network, *rest)
            result = run.run(broken)
    same = result["digest"] == expected and result["skipped"] == []
    days = {"day": round(clock, 3), "until_day": round(run.clock, 3)}
    return {"seed": options.seed, "slurm": options.slurm} | days | {"same_digest": same} | result


def totals(segments: list[dict[str, Any]]) -> dict[str, Any]:
    """Over all segments: failures, what came of them, where the time went."""
    faults = [fault for one in segments for fault in one["faults"]]
    hit = [fault for fault in faults if fault["hit"]]
    alone = [one for one in segments if one["done"] and not one["given_up"]]
    seconds = sum(one["seconds"] for one in segments)
    return {
        "segments": len(segments),
        "same_digest": sum(one["same_digest"] for one in segments),
        "days": round(sum(one["until_day"] - one["day"] for one in segments), 1),
        "faults": len(faults),
        "hit_the_run": len(hit),
        "recovered_without_a_hand": sum(fault["hit"] for one in alone for fault in one["faults"]),
        "by_effect": dict(sorted(Counter(fault["effect"] for fault in hit).items())),
        "seconds": round(seconds),
        "waited_for_repair_seconds": round(sum(s["waited_for_repair_seconds"] for s in segments)),
        "goodput": round(sum((s["goodput"] or 0) * s["seconds"] for s in segments) / seconds, 4),
        "plan": {name: round(value, 4) for name, value in _planned(segments).items()}
        if any("restart_seconds" in one["measured"] for one in segments)
        else {},  # nothing that struck was met yet
    }
