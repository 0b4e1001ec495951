"""Starts a job again while that helps. :mod:`runner.policy.restart` decides whether it does."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from runner.config.schema import RunConfig
from runner.distributed.env import ATTEMPT, LAUNCH_ID, RESTART
from runner.health.notice import taken_back
from runner.launch.attempt import Ended, Job, Stop, run_once
from runner.launch.crash_evidence import (
    BadNodes,
    evidence,
    has_to_leave,
    journal_lines,
    newest_clean,
    node_events,
    short_name,
)
from runner.launch.node_memory import NodeMemory
from runner.launch.stand_by import StandBy
from runner.policy.restart import HARDWARE, Attempt, End, RestartRules, after
from runner.run_dir.lease import is_done
from runner.run_dir.paths import RunDir
from runner.system.error import EXIT_CRASH, EXIT_DONE, EXIT_PREEMPTED, Preempted
from runner.system.json_lines import parse_line
from runner.system.parsing import json_text

_REASON = 300  # characters of a reason in out/bad_nodes
# NFS whose server was replaced or is gone, a disk that is lost, FUSE without its process.
T = TypeVar("T")

# How storage answers that is away, or full, for a while.
_AWAY = {errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN}
_AWAY |= {errno.ENOSPC, errno.EDQUOT}
_AWAY_SECONDS = 2.0


class Supervisor(ABC):
    """Makes attempts until the job is done or a restart would not help.

    Args:
        folder: has the list of attempts, so that a requeued job knows the earlier ones.
        launch_id: names this launch in that list.
        say: prints one line for a person.
    """

    def __init__(
        self, folder: Path, launch_id: str, rules: RestartRules, say: Callable[[str], None]
    ) -> None:
        self._log = folder / "attempts.jsonl"
        self._id = launch_id
        self._rules = rules
        self._say = say
        self.stop = Stop()
        self.attempts: list[Attempt] = []

    @abstractmethod
    def attempt(self, number: int, *, diagnose: bool) -> Attempt:
        """Run the job once.

        Args:
            diagnose: check its collectives.
        """

    def wait_for_turn(self) -> End | None:
        """Wait until the next attempt may begin; why there is none, or None."""
        return None

    def end_for_good(self) -> End | None:
        """Why no attempt may follow the last, whatever the rules say; None where one may."""
        return None

    def run(self) -> End:
        """Run to the end. From here on the supervisor handles this process's signals."""
        self.stop.listen()
        try:
            return self._run()
        except Preempted as asked:
            return End(reason=str(asked), code=EXIT_PREEMPTED)

    def _run(self) -> End:
        attempts = self.attempts = self.until_it_answers(self._earlier)
        diagnose = False
        while True:
            self._await_storage()
            if end := self.wait_for_turn():
                return end
            number, began = len(attempts) + 1, time.time()
            attempts.append(self.attempt(number, diagnose=diagnose))
            times = {"began": round(began, 3), "ended": round(time.time(), 3)}
            line = {"launch_id": self._id} | times | asdict(attempts[-1])
            note = partial(_append_line, self._log, line)
            next_ = self.end_for_good() or after(
                attempts, self._rules, asked_to_stop=self.stop.is_set
            )
            try:
                note() if isinstance(next_, End) else self.until_it_answers(note)
            except OSError as error:
                self._say(f"attempt {number} is not noted: {error}")
            if isinstance(next_, End):
                return next_
            pause = f" in {next_.pause_seconds:g} s" if next_.pause_seconds else ""
            how = ", with collectives checked (debug.diagnose_on_crash)" if next_.diagnose else ""
            self._say(f"{next_.reason}; attempt {number + 1}{pause}{how}")
            if not self.stop.sleep(next_.pause_seconds):
                return End(reason="asked to stop", code=attempts[-1].code)
            diagnose = next_.diagnose

    def run_once(self, job: Job) -> Ended:
        """One attempt's command; what it left on the storage can then be read."""
        ended = run_once(job, self.stop)
        self._await_storage()
        return ended

    def _await_storage(self) -> None:
        """Wait until the run's storage answers."""
        with contextlib.suppress(OSError):  # there may be no such folder yet
            self.until_it_answers(lambda: os.scandir(self._log.parent).close())

    def until_it_answers(self, ask: Callable[[], T]) -> T:
        """Ask until the storage is there and has room.

        Raises:
            OSError: from ``ask``, another one.
            Preempted: a stop was asked for meanwhile.
        """
        has_said = False
        while True:
            try:
                return ask()
            except OSError as error:
                if error.errno not in _AWAY:
                    raise
                if not has_said:
                    self._say(f"{error}: no attempt before it answers again")
                    has_said = True
                if not self.stop.sleep(_AWAY_SECONDS):
                    raise Preempted(f"asked to stop, and {error}") from None

    def _earlier(self) -> list[Attempt]:
        """The attempts of this launch so far; supervisors on other nodes may append to the list."""
        if not self._log.exists():
            return []
        names = Attempt.__dataclass_fields__
        lines = map(parse_line, self._log.read_bytes().splitlines())  # a torn one hides no other
        return [
            Attempt(**{name: value for name, value in line.items() if name in names})
            for line in lines
            if line is not None and line.get("launch_id") == self._id
        ]


def _append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Append a line durably, and after a torn one begin a new line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        mend = b"" if file.read(1) in (b"", b"\n") else b"\n"
        file.write(mend + json_text(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


class JobSupervisor(Supervisor):
    """Supervises a command that trains with this runner.

    Args:
        out: the run's directory.
        launch_id: names this launch in every process of it, over all attempts.
        name: the same where each node has its own supervisor, which then has a ``launch_id`` of its
            own: its attempts are hidden from the ranks, because all of a group must see the same.
        least_nodes: without which there is no run, if their number may vary; None if it is fixed.
        make_job: the command of an attempt (number, diagnose), made anew for each.
        ended: called after every attempt with its number.
    """

    def __init__(
        self,
        *,
        out: Path,
        launch_id: str,
        name: str | None = None,
        least_nodes: int | None = None,
        rules: RestartRules,
        make_job: Callable[[int, bool], Job],
        say: Callable[[str], None],
        ended: Callable[[int, Ended], None] = lambda number, ended: None,
    ) -> None:
        super().__init__(out, launch_id, rules, say)
        self._out = out
        self._shared = {LAUNCH_ID: name or launch_id}
        self._node, self._least_nodes = name and os.uname().nodename, least_nodes
        self.memory: NodeMemory | None = None  # is told what happened to hosts
        self.stand_by: StandBy | None = None  # has this node wait for its turn
        self.config: RunConfig | None = None  # of the command, where that is known
        self._make_job = make_job
        self._ended = ended
        self._is_stuck = False
        self._restart: dict[str, float] = {}  # when the attempt before failed and ended
        self.is_left_out = False  # the others go on without this node

    def wait_for_turn(self) -> End | None:
        # The other nodes may have ended, and not come again.
        if self._node and self.config and is_done(RunDir(self._out), self.config):
            self._say(f"out={self._out} is done; no other node is waited for")
            return End(reason="done", code=EXIT_DONE)
        return self.stand_by.wait(self.stop) if self.stand_by else None

    def leave(self) -> None:
        """Tell the other nodes that this one is there no more."""
        if self.stand_by:
            self.stand_by.close(self.stop)

    def end_for_good(self) -> End | None:
        if self._is_stuck:
            return End(
                reason="processes of this attempt do not end (state D): another one would "
                "start beside them, with their memory taken; this node needs a person",
                code=self.attempts[-1].code or EXIT_CRASH,
            )
        if self.is_left_out:
            return End(
                reason=f"{self._node} is left out, and the others go on; when it is mended, "
                f"delete its line in {self._out / 'bad_nodes'} and start this command again",
                code=EXIT_CRASH,
            )
        setting = self.config.preempt.notice if self.config else "none"
        if self.attempts[-1].code == EXIT_PREEMPTED and (notice := taken_back(setting)):
            self.is_left_out = self._least_nodes is not None
            return End(reason=f"this machine is taken back ({notice})", code=EXIT_PREEMPTED)
        return None

    def attempt(self, number: int, *, diagnose: bool) -> Attempt:
        lines, clean_before = journal_lines(self._out), newest_clean(self._out)
        job = self.until_it_answers(lambda: self._make_job(number, diagnose))
        variables = self._shared | ({ATTEMPT: str(number)} if self._node is None else {})
        if self._restart:
            variables[RESTART] = json_text(self._restart | {"started": time.time()})
        if self.stand_by:
            job = replace(job, command=self.stand_by.joining(job.command))
        ended = self.run_once(replace(job, environment=dict(job.environment) | variables))
        ended_at = time.time()
        crash = evidence(self._out, since=lines)
        if ended.code and not ended.is_told:  # the ranks of a script tell no exit codes
            ended = replace(ended, code=crash.code or ended.code)
        self._list_bad_nodes(ended)
        if ended.reason:
            self._say(f"attempt {number} was ended: {ended.reason}")
        self.until_it_answers(lambda: self._ended(number, ended))
        self._restart = {"noticed": crash.time or ended_at, "ended": ended_at}
        if crash.reason and ended.code:  # else torchrun has started it again, and it is done
            self._say(f"attempt {number} crashed at step {crash.step}: {crash.reason}")
        for fault in crash.hardware:
            self._list(fault.host, f"hardware: {fault.reason}")
        if self.memory is not None:
            for host, kind, reason, when in node_events(self._out, since=lines):
                self.memory.note(host, kind, reason, when)
        if self._node is not None and self._least_nodes is not None:
            self.is_left_out = has_to_leave(crash, node=self._node, least=self._least_nodes)
        return Attempt(
            code=ended.code,
            clean_before=clean_before,
            clean_after=newest_clean(self._out),
            took_up=crash.took_up,
            step=crash.step,
            cause=crash.cause,
            signature=crash.signature,
            reason=crash.reason,
            diagnosed=diagnose,
        )

    def _list_bad_nodes(self, ended: Ended) -> None:
        """List this node as bad if processes of the attempt survive SIGKILL."""
        self._is_stuck = bool(ended.stuck) and ended.code != EXIT_DONE
        if ended.stuck:
            pids = ", ".join(map(str, ended.stuck))
            host, reason = os.uname().nodename, f"processes that do not end (state D): {pids}"
            self._list(host, reason)
            if self.memory is not None:
                self.memory.note(host, HARDWARE, reason)

    def _list(self, host: str, reason: str) -> None:
        name, reason = short_name(host), reason[:_REASON]
        self.until_it_answers(lambda: BadNodes(self._out).add([name], reason))
        self._say(f"{host}: {reason} (listed in {self._out / 'bad_nodes'})")


def new_launch_id(environment: Mapping[str, str]) -> str:
    """The launch id from the environment, or a new one."""
    return environment.get(LAUNCH_ID) or f"{os.uname().nodename}-{os.getpid()}-{int(time.time())}"
