"""A node that failed before lets others go first, and is checked before others depend on it.

It waits outside of the rendezvous: a spare, which waits inside of it, takes its place. It takes
part where no spare is left, and where the run does not move without it.

A head node that does not take part hosts the rendezvous all the same, which needs nothing of it but
its store: :func:`hosting_command`, which ends some seconds after the run did.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import PIPE
from typing import Any

from runner.config.schema import RunConfig
from runner.health.root_cause import is_hardware
from runner.launch.attempt import Stop
from runner.launch.crash_evidence import short_name
from runner.launch.node_memory import NodeMemory
from runner.launch.process_tree import Preparation
from runner.launch.torchrun import Agent, is_head
from runner.policy.nodes import PASSED, choose
from runner.policy.restart import HARDWARE, End
from runner.run_dir.lease import last_beat
from runner.run_dir.paths import RunDir
from runner.system.error import EXIT_CRASH, EXIT_DONE, EXIT_HALTED, EXIT_PREEMPTED
from runner.system.process import in_thread, own_module

_POLL_SECONDS = 1.0
_START_SECONDS = 300.0  # of the check: imports from a slow disk
_ENDS = {"done": EXIT_DONE, "halted": EXIT_HALTED}
_BEAT_SECONDS, _GONE_SECONDS = 5.0, 30.0
# Nodes of one job do not start at the same instant.
_TOGETHER_SECONDS = 10.0
# A run that has not moved for so long has been given up by its other nodes.
_SILENT_SECONDS = 3600.0
# For the nodes to wait for each other in this store, once their ranks are done.
_LAST_SECONDS = 15.0


class Present:
    """Which hosts have launched one run: a file each, touched while its supervisor lives.

    A host is there while its file changes, by this host's own clock: others' may differ.
    """

    def __init__(self, folder: Path, host: str) -> None:
        self._folder, self._own = folder, folder / host
        self._is_over = threading.Event()
        self._seen: dict[str, tuple[int, float]] = {}
        self._beats = in_thread(self._beat, "present")

    def hosts(self) -> Sequence[str]:
        """Their names, in order.

        Raises:
            OSError: the folder cannot be read.
        """
        now, seen = time.monotonic(), dict[str, tuple[int, float]]()
        for one in self._folder.iterdir() if self._folder.exists() else ():
            with contextlib.suppress(FileNotFoundError):
                mark = one.stat().st_mtime_ns
                before = self._seen.get(one.name, (None, now))
                seen[one.name] = mark, before[1] if before[0] == mark else now
        self._seen = seen
        return sorted(name for name, (_, at) in seen.items() if now - at < _GONE_SECONDS)

    def close(self) -> None:
        """This host is there no more; a disk that does not answer is not waited for."""
        self._is_over.set()
        with contextlib.suppress(OSError):
            self._beats.result(_POLL_SECONDS)

    def _beat(self) -> None:
        while not self._is_over.is_set():
            with contextlib.suppress(OSError):
                self._folder.mkdir(parents=True, exist_ok=True)
                self._own.touch()
            self._is_over.wait(_BEAT_SECONDS)
        self._own.unlink(missing_ok=True)
        self._folder.rmdir()  # fails where others are there


class StandBy:
    """This node among those that launched the run.

    Args:
        agent: how many nodes the run has use for, and where they meet.
        say: prints one line for a person.
    """

    def __init__(
        self,
        config: RunConfig,
        memory: NodeMemory,
        agent: Agent,
        environment: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self._run = RunDir(Path(config.out))
        self._rules = config.cluster
        self._memory, self._environment, self._say = memory, dict(environment), say
        self._host = short_name(environment.get("SLURMD_NODENAME") or os.uname().nodename)
        self._count = agent.nodes.most
        self._head = agent.head if is_head(agent) else None
        self._others_by = time.monotonic() + _TOGETHER_SECONDS * (self._count > 1)
        self._present: Present | None = None
        self._held: subprocess.Popen[str] | None = None  # the place where the nodes meet
        self._is_waiting = False

    def joining(self, command: Sequence[str]) -> list[str]:
        """A torchrun command as it is where the nodes may meet here without it."""
        return [word.replace("is_host=1", f"is_host={int(self._held is None)}") for word in command]

    def wait(self, stop: Stop) -> End | None:
        """Wait for this node's turn; None: it takes part now."""
        if self._present is None and self._count > 1:
            folder = self._memory.folder / "launched" / self._memory.run
            self._present = Present(folder, self._host)
        if not self._memory.standing(self._host).faults:
            return None
        if self._head and not self._held:
            self._held = self._start(hosting_command(self._run.out, self._head))
        self._is_waiting = True
        if fault := self.check(stop):
            return End(reason=f"{self._host} does not take part: {fault}", code=EXIT_CRASH)
        end = self._let_others_begin(stop)
        self._is_waiting = end is not None
        return end

    def _let_others_begin(self, stop: Stop) -> End | None:
        words = f"{self._host} failed before ({self._memory.standing(self._host).reason}), and"
        first, beat, moved = self._run.stored_summary(), "", time.monotonic()
        has_told = False
        while stop.sleep(_POLL_SECONDS):
            summary, now = self._run.stored_summary() or {}, time.monotonic()
            if summary != first and (end := summary.get("status")) in _ENDS:
                return End(reason=f"the run is {end} without {self._host}", code=_ENDS[end])
            if beat != (beat := last_beat(self._run.incarnation)):
                moved = now
            is_stuck = now - moved > self._rules.patience_seconds
            if self._are_better_there() and not is_stuck:
                if not has_told:
                    has_told = True
                    self._say(f"{words} lets other nodes go first")
            elif is_stuck or now > self._others_by:
                why = "the run does not move without it" if is_stuck else "no better node is free"
                self._say(f"{words} takes part: {why}")
                return None
        return End(reason="asked to stop", code=EXIT_PREEMPTED)

    def _are_better_there(self) -> bool:
        """Whether the run has enough nodes without this one, as far as anything is known."""
        hosts = (self._memory.ask(self._present.hosts) if self._present else None) or ()
        known = self._memory.standings([*hosts, self._host])
        chosen = choose(hosts, count=self._count, known=known)
        return known[self._host].faults > 0 and chosen is not None and self._host not in chosen

    def check(self, stop: Stop) -> str:
        """Check this node's devices, if they were not since its last fault; the result is noted.

        Returns:
            What is wrong; "" also where the check could not be made, which proves nothing.
        """
        if self._memory.standing(self._host).is_tested:
            return ""
        seconds = self._rules.burn_in_seconds
        command = own_module("runner.health.rank_checks", str(seconds))
        limit = time.monotonic() + seconds + _START_SECONDS
        with self._start(command, stdout=PIPE, stderr=PIPE) as process:
            while process.poll() is None and time.monotonic() < limit and stop.sleep(0.1):
                pass
            process.kill()
            fault, errors = (text.strip() for text in process.communicate())
        if process.returncode and is_hardware(errors):
            fault = errors.splitlines()[-1]
        if fault:
            self._memory.note(self._host, HARDWARE, f"check before it took part: {fault}")
        elif process.returncode == 0:
            self._memory.note(self._host, PASSED, "")
        return fault

    def _start(self, command: Sequence[str], **streams: Any) -> subprocess.Popen[str]:
        alone = Preparation(parent=os.getpid(), shielded=False, is_torchrun=False)
        words = alone.command(command)
        return subprocess.Popen(words, env=self._environment, text=True, **streams)

    def close(self, stop: Stop) -> None:
        """Leave. Where the nodes meet here, and go on without this one, at the end of the run."""
        if self._present:
            self._present.close()
        if self._held:
            while self._is_waiting and self._held.poll() is None and stop.sleep(_POLL_SECONDS):
                pass
            self._held.terminate()
            self._held.wait()


def hosting_command(out: Path, head: tuple[str, int]) -> list[str]:
    """The command that hosts the rendezvous."""
    return own_module("runner.launch.stand_by", str(out), head[0], str(head[1]))


def main(arguments: Sequence[str]) -> None:
    """
    Args:
        arguments: the run's directory; host and port of the place.
    """
    # Not above: the supervisor only needs the command, and nothing of torch.
    from torch.distributed import TCPStore

    out, host, port = Path(arguments[0]), arguments[1], int(arguments[2])
    began = time.time()
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, multi_tenant=True)
    while not _is_over(RunDir(out), began):
        time.sleep(_POLL_SECONDS)
    time.sleep(_LAST_SECONDS)
    del store


def _is_over(run: RunDir, began: float) -> bool:
    summary = run.stored_summary() or {}
    with contextlib.suppress(OSError):  # the storage may be away: the others meet here even so
        if summary.get("status") in (*_ENDS, "preempted") and run.summary.stat().st_mtime > began:
            return True
        moved = run.metrics.stat().st_mtime if run.metrics.exists() else began
        return time.time() - max(moved, began) > _SILENT_SECONDS
    return False


if __name__ == "__main__":
    main(sys.argv[1:])
