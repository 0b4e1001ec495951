"""Starts a job again while that helps. :mod:`runner.policy.restart` decides whether it does."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from runner.distributed.env import ATTEMPT, LAUNCH_ID
from runner.launch.attempt import Ended, Job, Stop, run_once
from runner.launch.bad_nodes import BadNodes
from runner.launch.crash_evidence import evidence, journal_lines, newest_clean, short_name
from runner.launch.left_out import has_to_leave
from runner.policy.restart import Again, Attempt, End, RestartRules, after
from runner.system.exit_codes import EXIT_CRASH, EXIT_DONE
from runner.system.parsing import json_text

_REASON = 300  # characters of a reason in out/bad_nodes


class Supervisor:
    """Runs attempts of one job until it is done or a restart would not help.

    Args:
        out: the run's directory.
        launch_id: names this launch in every process of it, over all attempts.
        node: this node's name if each node has its own supervisor. Its attempts are then hidden
            from the ranks, because all ranks of a group must see the same.
        least_nodes: without which there is no run, if their number may vary; None if it is fixed.
        make_job: the command of an attempt (number, diagnose), made anew for each.
        ended: called after every attempt with its number.
        say: prints one line for a person.
    """

    def __init__(
        self,
        *,
        out: Path,
        launch_id: str,
        node: str | None = None,
        least_nodes: int | None = None,
        rules: RestartRules,
        make_job: Callable[[int, bool], Job],
        say: Callable[[str], None],
        ended: Callable[[int, Ended], None] = lambda number, ended: None,
    ) -> None:
        self._out = out
        self._told = {LAUNCH_ID: launch_id}
        self._node, self._least_nodes = node, least_nodes
        self._rules = rules
        self._make_job = make_job
        self._say = say
        self._ended = ended
        self._log = AttemptLog(out, launch_id if node is None else f"{launch_id}@{node}")
        self.stop = Stop()
        self.attempts: list[Attempt] = []
        self._is_stuck = False
        self.is_left_out = False  # the others go on without this node

    def run(self) -> End:
        """Run to the end. From here on the supervisor handles this process's signals."""
        self.stop.listen()
        attempts = self.attempts = self._log.read()
        diagnose = False
        while True:
            attempts.append(self._attempt(len(attempts) + 1, diagnose))
            if self._is_stuck:
                return End(
                    reason="processes of this attempt do not end (state D): another one would "
                    "start beside them, with their memory taken; this node needs a person",
                    code=attempts[-1].code or EXIT_CRASH,
                )
            if self.is_left_out:
                return End(
                    reason=f"{self._node} is left out, and the others go on; when it is mended, "
                    f"delete its line in {self._out / 'bad_nodes'} and start this command again",
                    code=EXIT_CRASH,
                )
            next_ = after(attempts, self._rules, asked_to_stop=self.stop.is_set)
            if isinstance(next_, End):
                return next_
            self._say(restart_sentence(next_, len(attempts) + 1))
            if not self.stop.sleep(next_.pause_seconds):
                return End(reason="asked to stop", code=attempts[-1].code)
            diagnose = next_.diagnose

    def _attempt(self, number: int, diagnose: bool) -> Attempt:
        began = time.time()
        lines, clean_before = journal_lines(self._out), newest_clean(self._out)
        job = self._make_job(number, diagnose)
        variables = self._told | ({ATTEMPT: str(number)} if self._node is None else {})
        ended = run_once(replace(job, environment=dict(job.environment) | variables), self.stop)
        self._list_bad_nodes(ended)
        if ended.reason:
            self._say(f"attempt {number} was ended: {ended.reason}")
        self._ended(number, ended)
        crash = evidence(self._out, since=lines)
        if crash.reason:
            self._say(f"attempt {number} crashed at step {crash.step}: {crash.reason}")
        for fault in crash.hardware:
            self._list(fault.host, f"hardware: {fault.reason}")
        if self._node is not None and self._least_nodes is not None:
            self.is_left_out = has_to_leave(crash, node=self._node, least=self._least_nodes)
        attempt = Attempt(
            code=ended.code,
            clean_before=clean_before,
            clean_after=newest_clean(self._out),
            took_up=crash.took_up,
            step=crash.step,
            cause=crash.cause,
            signature=crash.signature,
            diagnosed=diagnose,
        )
        self._log.add(attempt, began=began)
        return attempt

    def _list_bad_nodes(self, ended: Ended) -> None:
        """List this node as bad if processes of the attempt survive SIGKILL."""
        self._is_stuck = bool(ended.stuck) and ended.code != EXIT_DONE
        if ended.stuck:
            pids = ", ".join(map(str, ended.stuck))
            self._list(os.uname().nodename, f"processes that do not end (state D): {pids}")

    def _list(self, host: str, reason: str) -> None:
        BadNodes(self._out).add([short_name(host)], reason[:_REASON])
        self._say(f"{host}: {reason[:_REASON]} (listed in {self._out / 'bad_nodes'})")


def restart_sentence(again: Again, number: int) -> str:
    """The line that announces attempt ``number``, and why it follows."""
    pause = f" in {again.pause_seconds:g} s" if again.pause_seconds else ""
    how = ", with collectives checked (debug.diagnose_on_crash)" if again.diagnose else ""
    return f"{again.reason}; attempt {number}{pause}{how}"


class AttemptLog:
    """``out/attempts.jsonl``: a line an attempt, so that a requeued job knows the earlier ones.

    Supervisors on several nodes may append to it; a torn line of one hides no line of another.
    """

    def __init__(self, out: Path, launch_id: str) -> None:
        self._path = out / "attempts.jsonl"
        self._id = launch_id

    def read(self) -> list[Attempt]:
        """The attempts of this launch, in order."""
        if not self._path.exists():
            return []
        names = Attempt.__dataclass_fields__
        lines = [_parsed(text) for text in self._path.read_bytes().splitlines()]
        return [
            Attempt(**{name: value for name, value in line.items() if name in names})
            for line in lines
            if line.get("launch_id") == self._id
        ]

    def add(self, attempt: Attempt, *, began: float) -> None:
        """Append one attempt durably."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        times = {"launch_id": self._id, "began": round(began, 3), "ended": round(time.time(), 3)}
        with self._path.open("a+b") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            mend = b"" if file.read(1) in (b"", b"\n") else b"\n"
            file.write(mend + json_text(times | asdict(attempt)).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except ValueError:
        return {}
    return line if isinstance(line, dict) else {}


def new_launch_id(environment: Mapping[str, str]) -> str:
    """The launch id from the environment, or a new one."""
    return environment.get(LAUNCH_ID) or f"{os.uname().nodename}-{os.getpid()}-{int(time.time())}"
