"""Reads from a run's directory how far an attempt came and what ended it. Writes nothing."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from typing import Any

from runner.checkpoint.disk.directory import CheckpointDirectory
from runner.policy.nodes import DIED, SLOW
from runner.policy.restart import HARDWARE
from runner.policy.retention.records import State
from runner.run_dir.paths import RunDir
from runner.system.error import EXIT_HALTED, EXIT_PREEMPTED, ConfigError
from runner.system.json_lines import iter_lines, read_lines, step_of
from runner.system.units import ranks_in

_ENDS = {"start": None, "halt": EXIT_HALTED, "preempted": EXIT_PREEMPTED}

# The list of nodes that failed (``out/bad_nodes``).


class BadNodes:
    """``out/bad_nodes``: a node a line, with the time and the reason. A person may edit it."""

    def __init__(self, out: Path) -> None:
        self.path = out / "bad_nodes"

    def read(self) -> dict[str, str]:
        """Each listed node, with the time and reason of its newest line."""
        if not self.path.exists():
            return {}
        lines = (line.split(maxsplit=1) for line in self.path.read_text().splitlines())
        return {row[0]: " ".join(row[1:]) for row in lines if row and row[0][0] != "#"}

    def add(self, nodes: Iterable[str], reason: str) -> None:
        """Append those that are not listed yet."""
        known = self.read()
        when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        text = "".join(f"{node} {when} {reason}\n" for node in nodes if node not in known)
        if text:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+") as file:
                file.seek(0)  # a person's editor may leave the last line without an end
                file.write(text if (file.read() or "\n").endswith("\n") else f"\n{text}")


def refuse_listed(out: Path, node: str) -> None:
    """
    Raises:
        ConfigError: this node is listed in ``out/bad_nodes``.
    """
    bad = BadNodes(out)
    reason = bad.read().get(short_name(node))
    if reason is not None:
        raise ConfigError(
            f"{node} is listed in {bad.path} ({reason}), and the run can go on without it: delete "
            "its line when it is mended, or start on another node"
        )


def short_name(host: str) -> str:
    """The name by which ``out/bad_nodes`` lists a host."""
    return host.partition(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareFault:
    """A start that ended because the hardware of ``host``, one of ``num_hosts``, is at fault."""

    host: str
    reason: str
    num_hosts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """How far one attempt came, and what ended it.

    ``cause`` (a kind of :mod:`runner.health.root_cause`) and ``signature`` are None where no
    process said what failed; ``time``: when it was journalled, in seconds since the epoch.
    ``hardware``: of every start in the attempt, because torchrun may have started the ranks again.
    ``code``: an end on purpose that the journal tells, which a user's torchrun hides; None without.
    """

    took_up: bool
    step: int
    hardware: tuple[HardwareFault, ...]
    cause: str | None = None
    signature: str | None = None
    reason: str | None = None
    time: float | None = None
    code: int | None = None


def newest_clean(out: Path) -> int:
    """Step of the furthest clean checkpoint, -1 without one."""
    entries, _ = CheckpointDirectory(RunDir(out).ring).entries()
    steps = [entry.record.step for entry in entries if entry.record.state is State.clean]
    return max(steps, default=-1)


def journal_lines(out: Path) -> int:
    """How many lines the journal has."""
    return len(read_lines(RunDir(out).journal)[0])


def evidence(out: Path, *, since: int) -> Evidence:
    """Read the journal from line ``since`` on; the step is the one after the last that it names."""
    lines = read_lines(RunDir(out).journal)[0][since:]
    # A crash that no rank survived to report is journalled by the next start, before its own line.
    lines = list(dropwhile(lambda line: line.get("kind") != "start", lines))
    starts = [line for line in lines if line.get("kind") == "start"]
    hardware = tuple(_hardware_faults(lines))
    # The first crash in the journal is the cause; those after it are its consequences.
    crash = next((line for line in lines if line.get("kind") == "crash"), None)
    if crash is not None:
        return Evidence(
            took_up=True,
            step=int(crash.get("step", 0)),
            cause=_detail(crash, "cause"),
            signature=_detail(crash, "signature"),
            reason=str(crash.get("reason", "")),
            hardware=hardware,
            time=crash.get("time"),
        )
    done = 0
    for line in iter_lines(RunDir(out).metrics):
        done = step_of(line) if line.get("action") == "apply" else done
    begun = step_of(starts[-1]) if starts else 0
    kinds = (str(line.get("kind")) for line in reversed(lines))
    last = next((kind for kind in kinds if kind in _ENDS), "")
    step = max(done, begun) + 1
    return Evidence(took_up=bool(starts), step=step, hardware=hardware, code=_ENDS.get(last))


def has_to_leave(crash: Evidence, *, node: str, least: int) -> bool:
    """Whether this node leaves the run for good; without a scheduler only its supervisor can.

    It does if a start ended by the fault of its hardware and had ``least`` other nodes: without
    them nothing could go on.
    """
    return any(
        short_name(fault.host) == short_name(node) and fault.num_hosts - 1 >= least
        for fault in crash.hardware
    )


def node_events(out: Path, *, since: int) -> list[tuple[str, str, str, float]]:
    """What the journal says of hosts from line ``since`` on: host, kind, reason and time of each.

    A host fell silent if all of its ranks did, and others did not.
    """
    events: list[tuple[str, str, str, float]] = []
    hosts: dict[str, set[int]] = {}
    for number, line in enumerate(read_lines(RunDir(out).journal)[0]):
        kind, cause, when = line.get("kind"), _detail(line, "cause"), line.get("time")
        if kind == "start":
            hosts = {host: ranks_in(str(text)) for host, text in _hosts(line).items()}
        if number < since or not isinstance(when, int | float):
            continue
        told = line.get("ranks")
        ranks = set(told if isinstance(told, list) else ())
        guilty, what = list[str](), HARDWARE
        if kind == "crash" and cause == HARDWARE:
            guilty = [_detail(line, "host") or ""]
        elif kind in ("straggler", "replica_mismatch"):
            what = SLOW if kind == "straggler" else HARDWARE
            guilty = [host for host, own in hosts.items() if own & ranks]
        elif kind == "crash" and cause == "silence":
            what = DIED
            guilty = [host for host, own in hosts.items() if own <= ranks]
        if any(guilty) and len(guilty) < max(2, len(hosts)):
            events += [(host, what, str(line.get("reason", "")), float(when)) for host in guilty]
    return events


def _hardware_faults(lines: Iterable[dict[str, Any]]) -> Iterator[HardwareFault]:
    """Of the first crash after each start; those after it are its consequences."""
    hosts: set[str] = set()
    is_ended = True
    for line in lines:
        if line.get("kind") == "start":
            hosts = set(map(short_name, _hosts(line)))
            is_ended = False
        elif line.get("kind") == "crash" and not is_ended:
            is_ended = True
            host = _detail(line, "host")
            if host and _detail(line, "cause") == HARDWARE:
                reason = str(line.get("reason", ""))
                yield HardwareFault(host=host, reason=reason, num_hosts=len(hosts))


def _hosts(start: dict[str, Any]) -> dict[str, Any]:
    detail = start.get("detail")
    hosts = detail.get("hosts") if isinstance(detail, dict) else None
    return hosts if isinstance(hosts, dict) else {}


def _detail(crash: dict[str, Any], name: str) -> str | None:
    detail = crash.get("detail")
    value = detail.get(name) if isinstance(detail, dict) else None
    return str(value) if value else None
