"""A node that failed before lets others go first, and is checked before others depend on it.

It waits outside of the rendezvous: a spare, which waits inside of it, takes its place. It takes
part after all once the run does not move without it.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE

from runner.health.root_cause import is_hardware
from runner.launch import meeting_point
from runner.launch.attempt import Stop
from runner.launch.node_memory import NodeMemory
from runner.policy.nodes import PASSED, Standing
from runner.policy.restart import HARDWARE, End
from runner.run_dir.paths import RunDir
from runner.system.error import EXIT_CRASH, EXIT_DONE, EXIT_HALTED, EXIT_PREEMPTED
from runner.system.json_lines import last_line

_POLL_SECONDS = 1.0
_START_SECONDS = 300.0  # of the check: imports from a slow disk
_ENDS = {"done": EXIT_DONE, "halted": EXIT_HALTED}


@dataclass(eq=False)
class StandBy:
    """One node of several.

    Args:
        patience_seconds: for each fault that is remembered.
        check_seconds: how long its devices are checked.
        begin_seconds: how long a run that has begun without this node may not move.
        meeting: host and port where the nodes meet, if that is here.
    """

    memory: NodeMemory
    out: Path
    host: str
    environment: Mapping[str, str]
    patience_seconds: float
    check_seconds: float
    begin_seconds: float
    meeting: tuple[str, int] | None
    say: Callable[[str], None]
    _held: subprocess.Popen[bytes] | None = None

    @property
    def holds_meeting(self) -> bool:
        """Whether the nodes meet here without this node's torchrun."""
        return self._held is not None

    def wait(self, stop: Stop) -> End | None:
        """Wait for this node's turn; None: it takes part now."""
        if self.memory.standing(self.host).is_trusted(time.time()):
            return None
        if self.meeting and not self.holds_meeting:
            command = meeting_point.command(self.out, self.meeting)
            self._held = subprocess.Popen(command, env=dict(self.environment))
        if fault := self.check(stop):
            return End(reason=f"{self.host} does not take part: {fault}", code=EXIT_CRASH)
        standing = self.memory.standing(self.host)
        if standing.is_trusted(time.time()):
            return None
        return self._let_others_begin(standing, stop)

    def _let_others_begin(self, standing: Standing, stop: Stop) -> End | None:
        patience = self.patience_seconds * standing.turns
        self.say(
            f"{self.host} lets other nodes go first ({standing.reason or 'it failed before'}); it "
            f"takes part if the run has not begun without it within {patience:g} s"
        )
        run, began = RunDir(self.out), time.monotonic()
        first = seen = _files(run)
        while stop.sleep(_POLL_SECONDS):
            now, files = time.monotonic(), _files(run)
            if files != seen:
                seen, began = files, now
            is_new = seen.get(run.summary) != first.get(run.summary)
            end = (run.stored_summary() or {}).get("status") if is_new else None
            if end in _ENDS:
                return End(reason=f"the run is {end} without {self.host}", code=_ENDS[end])
            is_under_way = seen != first and (last_line(run.journal) or {}).get("kind") != "crash"
            limit = max(patience, self.begin_seconds) if is_under_way else patience
            is_over = standing.is_trusted(time.time())
            if is_over or now - began > limit:
                why = "its probation is over" if is_over else "the run does not move without it"
                self.say(f"{self.host} takes part: {why}")
                return None
        return End(reason="asked to stop", code=EXIT_PREEMPTED)

    def check(self, stop: Stop) -> str:
        """Check this node's devices, if they were not since its last fault; the result is noted.

        Returns:
            What is wrong; "" also where the check could not be made, which proves nothing.
        """
        if self.memory.standing(self.host).is_tested:
            return ""
        command = [sys.executable, "-m", "runner.health.burn_in", str(self.check_seconds)]
        limit = time.monotonic() + self.check_seconds + _START_SECONDS
        with subprocess.Popen(
            command, env=dict(self.environment), stdout=PIPE, stderr=PIPE, text=True
        ) as process:
            while process.poll() is None and time.monotonic() < limit and stop.sleep(0.1):
                pass
            process.kill()
            fault, errors = (text.strip() for text in process.communicate())
        if process.returncode and is_hardware(errors):
            fault = errors.splitlines()[-1]
        if fault:
            self.memory.note(self.host, HARDWARE, f"check before it took part: {fault}")
        elif process.returncode == 0:
            self.memory.note(self.host, PASSED, "")
        return fault

    def close(self, stop: Stop, *, at_once: bool) -> None:
        """End the meeting point, at once or with the run; after a request to stop at once."""
        if self._held is not None:
            while not at_once and self._held.poll() is None and stop.sleep(_POLL_SECONDS):
                pass
            self._held.terminate()
            self._held.wait()


def _files(run: RunDir) -> dict[Path, tuple[int, int]]:
    """What changes while a run moves. Not its times against this host's clock, which may differ."""
    found = {}
    for path in (run.metrics, run.journal, run.summary):
        with contextlib.suppress(OSError):
            facts = path.stat()
            found[path] = (facts.st_size, facts.st_mtime_ns)
    return found
