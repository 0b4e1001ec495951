"""Starts a job, starts it again when that helps, and leaves no process behind.

What is decided stands in :mod:`runner.policy.restart`; here it is carried out.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from types import FrameType

from runner.launch import process
from runner.launch.evidence import evidence, journal_lines, newest_clean
from runner.launch.exits import EXIT_DIR, final_code, outcome, read_exits
from runner.observe.lines import LineFile, read_lines
from runner.policy.restart import Again, Attempt, End, RestartRules, after

LAUNCH_ID = "HOLDFAST_LAUNCH_ID"
ATTEMPT = "HOLDFAST_ATTEMPT"
_POLL_SECONDS = 0.1
# From the first process that said how it ended: when the others are asked, when they are told
# to end at once, and when those that still say nothing are taken for dead.
_ASK_SECONDS, _INSIST_SECONDS, _DEAD_SECONDS = 3.0, 4.5, 9.0
_SRUN_SECONDS = 3.0
# A final exit code is the whole group's; the others get this long to end by themselves.
_LEAVE_SECONDS = 5.0
# One request may arrive twice, from a scheduler and through a shell.
_SAME_REQUEST_SECONDS = 1.0
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Forward(Enum):
    """Who is told when the supervisor is asked to stop."""

    ranks = "ranks"  # each rank, once it listens; torchrun itself would end them after 30 s
    srun = "srun"  # srun passes SIGUSR1 on to every process; Slurm's SIGTERM reaches them itself
    nobody = "nobody"  # whoever asked asked them too, as Slurm does within a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One attempt's command.

    Args:
        expected: names of the processes that will tell how they ended, where they are known.
        exits: folder for that, None for one of its own.
        shielded: the command ignores SIGTERM and SIGUSR1; its ranks are told themselves.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    expected: frozenset[str] = frozenset()
    exits: Path | None = None
    shielded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How one attempt ended. ``missing``: those of ``expected`` that were waited for in vain."""

    number: int
    code: int
    missing: frozenset[str]
    left_behind: Sequence[int]


class Supervisor:
    """Runs attempts of one job until it is done or a restart would not help.

    Args:
        out: the run's directory.
        launch_id: names this launch in every process of it, over all attempts.
        make_job: the command of an attempt (number, diagnose), made anew for each.
        ended: told after every attempt.
        say: one line for a person.
    """

    def __init__(
        self,
        *,
        out: Path,
        launch_id: str,
        rules: RestartRules,
        make_job: Callable[[int, bool], Job],
        say: Callable[[str], None],
        forward: Forward = Forward.ranks,
        ended: Callable[[Ended], None] = lambda _: None,
    ) -> None:
        self._out = out
        self._id = launch_id
        self._rules = rules
        self._make_job = make_job
        self._say = say
        self._forward = forward
        self._ended = ended
        self._log = AttemptLog(out, launch_id)
        self._stop: Stop = Stop()

    @property
    def was_terminated(self) -> bool:
        """Asked to stop by a signal that does not ask for a restart."""
        return self._stop.number in (signal.SIGTERM, signal.SIGINT)

    def run(self) -> End:
        """To the end; the signal handlers of this process are its own from here on."""
        self._stop.listen()
        attempts = self._log.read()
        diagnose = False
        while True:
            attempts.append(self._attempt(len(attempts) + 1, diagnose))
            next_ = after(attempts, self._rules, asked_to_stop=self._stop.is_set)
            if isinstance(next_, End):
                return next_
            self._say(self._restart_words(next_, len(attempts) + 1))
            if not self._stop.sleep(next_.pause_seconds):
                return End(reason="asked to stop", code=attempts[-1].code)
            diagnose = next_.diagnose

    def _attempt(self, number: int, diagnose: bool) -> Attempt:
        began = time.time()
        lines, clean_before = journal_lines(self._out), newest_clean(self._out)
        ended = self._run_once(number, self._make_job(number, diagnose))
        self._ended(ended)
        found = evidence(self._out, since=lines)
        if found.words:
            self._say(f"attempt {number} crashed at step {found.step}: {found.words}")
        attempt = Attempt(
            code=ended.code,
            clean_before=clean_before,
            clean_after=newest_clean(self._out),
            took_up=found.took_up,
            step=found.step,
            signature=found.signature,
            diagnosed=diagnose,
        )
        self._log.add(attempt, began=began)
        return attempt

    def _run_once(self, number: int, job: Job) -> Ended:
        mark = secrets.token_hex(8)
        with tempfile.TemporaryDirectory(prefix="holdfast-exits-") as own:
            exits = job.exits or Path(own)
            exits.mkdir(parents=True, exist_ok=True)
            told = {
                LAUNCH_ID: self._id,
                ATTEMPT: str(number),
                EXIT_DIR: str(exits),
                process.MARK: mark,
            }
            # A session of its own: a terminal's Ctrl-C is for the supervisor to pass on.
            child = subprocess.Popen(
                list(job.command),
                env=dict(job.environment) | told,
                start_new_session=True,
                preexec_fn=process.prepare_child(shielded=job.shielded),
            )
            missing = frozenset[str]()
            try:
                self._watch(child, mark, exits, job.expected)
                # A command that ended by itself has heard of everyone, whatever a network file
                # system still hides from us.
                if child.poll() is None:
                    missing = job.expected - read_exits(exits).keys()
                    self._end_step(child)
            finally:
                left = process.end_all(mark)
                child.wait()
            found = read_exits(exits)
            code = outcome(found, child.returncode)
            return Ended(number=number, code=code, missing=missing, left_behind=left)

    def _watch(
        self, child: subprocess.Popen[bytes], mark: str, exits: Path, expected: frozenset[str]
    ) -> None:
        """Until the command has ended, or should have."""
        telling = _Telling(self._forward, child, mark)
        patience = _Patience(exits, expected)
        while child.poll() is None:
            asked = patience.asks(time.monotonic())
            if self._stop.is_repeated or asked is None:
                return
            for _ in range(asked):
                process.send(child.pid, signal.SIGUSR1)
            if self._stop.number is not None:
                telling.tell(self._stop.number)
            time.sleep(_POLL_SECONDS)

    def _end_step(self, child: subprocess.Popen[bytes]) -> None:
        """Let srun end its step on all nodes before it is killed."""
        if self._forward is Forward.srun and child.poll() is None:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_SRUN_SECONDS)

    def _restart_words(self, again: Again, number: int) -> str:
        pause = f" in {again.pause_seconds:g} s" if again.pause_seconds else ""
        how = ", with collectives checked (debug.diagnose_on_crash)" if again.diagnose else ""
        return f"{again.reason}; attempt {number}{pause}{how}"


class _Telling:
    """Passes the request to stop on, once to each process."""

    def __init__(self, forward: Forward, child: subprocess.Popen[bytes], mark: str) -> None:
        self._forward = forward
        self._command = [child.pid]
        self._mark = mark
        self._told: set[int] = set()

    def tell(self, number: int) -> None:
        for pid in self._whom(_as_stop(number)):
            if pid not in self._told:
                self._told.add(pid)
                process.send(pid, _as_stop(number))

    def _whom(self, number: int) -> Sequence[int]:
        if self._forward is Forward.nobody:
            return ()
        if self._forward is Forward.srun:
            return self._command if number == signal.SIGUSR1 else ()
        found = process.ranks(self._mark) if self._forward is Forward.ranks else []
        # A rank that is still starting would die of it.
        return [pid for pid in found if process.catches(pid, number)] if found else self._command


def _as_stop(number: int) -> int:
    """Ctrl-C asks for the same as SIGTERM."""
    return signal.SIGTERM if number == signal.SIGINT else number


class _Patience:
    """What to do about those who have not yet said how they ended, when others have."""

    def __init__(self, exits: Path, expected: frozenset[str]) -> None:
        self._exits = exits
        self._expected = expected
        self._first_told: float | None = None
        self._final_told: float | None = None
        self._asked = 0

    def asks(self, now: float) -> int | None:
        """How many requests to end are due for the job; None: it is to be ended now."""
        found = read_exits(self._exits)
        # torchrun with restarts left would start a finished group again.
        if final_code(found) is not None and self._final_told is None:
            self._final_told = now
        if self._final_told is not None and now - self._final_told > _LEAVE_SECONDS:
            return None
        if not found or not self._expected - found.keys():
            return 0
        self._first_told = now if self._first_told is None else self._first_told
        waited = now - self._first_told
        if waited > _DEAD_SECONDS:
            return None
        due = (waited > _ASK_SECONDS) + (waited > _INSIST_SECONDS) - self._asked
        self._asked += due
        return due


class Stop:
    """The request to stop: the first signal asks, the second insists."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.is_repeated = False
        self._since = 0.0

    def listen(self) -> None:
        for number in _STOPS:
            signal.signal(number, self._note)

    @property
    def is_set(self) -> bool:
        return self.number is not None

    def sleep(self, seconds: float) -> bool:
        """False when it was interrupted by the request."""
        limit = time.monotonic() + seconds
        while not self.is_set and (left := limit - time.monotonic()) > 0:
            time.sleep(min(left, _POLL_SECONDS))
        return not self.is_set

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.number is None:
            self.number, self._since = number, time.monotonic()
        elif time.monotonic() - self._since > _SAME_REQUEST_SECONDS:
            self.is_repeated = True


class AttemptLog:
    """``out/attempts.jsonl``: a line an attempt, so that a requeued job knows the earlier ones."""

    def __init__(self, out: Path, launch_id: str) -> None:
        self._path = out / "attempts.jsonl"
        self._id = launch_id

    def read(self) -> list[Attempt]:
        """Those of this launch, in order."""
        names = Attempt.__dataclass_fields__
        return [
            Attempt(**{name: value for name, value in line.items() if name in names})
            for line in read_lines(self._path)[0]
            if line.get("launch_id") == self._id
        ]

    def add(self, attempt: Attempt, *, began: float) -> None:
        """Append durably."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _, length = read_lines(self._path)
        file = LineFile(self._path, length=length)
        times = {"launch_id": self._id, "began": round(began, 3), "ended": round(time.time(), 3)}
        file.append(json.loads(json.dumps(times | asdict(attempt))), durably=True)
        file.close()


def new_launch_id(environment: Mapping[str, str]) -> str:
    """The one given from outside, or a new one."""
    return environment.get(LAUNCH_ID) or f"{os.uname().nodename}-{os.getpid()}-{int(time.time())}"
