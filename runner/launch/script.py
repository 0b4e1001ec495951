"""Supervises any script: counts restarts by the progress it prints, and collects evidence."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from runner.health.flight_recorder import entries_of
from runner.health.nvml import library
from runner.health.rank_report import Frame, Report, own_line, thread_frames
from runner.health.root_cause import RootCause, by_text, find_root_cause
from runner.launch import process_tree
from runner.launch.attempt import Ended, Job
from runner.launch.supervisor import Supervisor
from runner.policy.restart import Attempt, ExitCodes, RestartRules
from runner.system.files import read_bounded
from runner.system.output import Sink
from runner.system.process import parent, signal_name

# Copies a script's output, and finds progress and fatal errors in it.


# "step 12", "iter: 12", "global_step=12", "12/500 [" as progress bars have it.
PROGRESS = r"(?i)\b(?:global_)?(?:step|iter|iteration)s?\b\D{0,3}(\d+)|\b(\d+)/\d+ \["
_MOST_LINES = 5000
_MOST_LINE = 1 << 14
_RANK = re.compile(r"^\[(?:rank)?(\d+)\]:\s?")
_FRAME = re.compile(r'^\s+File "([^"]+)", line (\d+), in (\S+)')
_ERROR = re.compile(r"^([A-Za-z_][\w.]*)(?:: (.*))?$")
_FAILED = re.compile(
    r"rank\s+: (\d+) \(local_rank: \d+\)[^\n]*\n[^\n]*exitcode\s+: (-?\d+) \(pid: \d+\)"
)
_TRACEBACK = "Traceback (most recent call last):"
_DUMP_BYTES = 1 << 28
# Percent of the time since the last sample (a second or less) in which a kernel ran; a display or
# a monitor takes some.
_AT_WORK = 5


class Said:
    """Reads a pipe in a thread and copies it to standard output.

    Args:
        descriptor: the pipe's reading end; closed when the pipe ends.
        progress: a pattern whose first matching group is the step.
    """

    def __init__(self, descriptor: int, progress: str) -> None:
        self.step = -1  # the highest seen so far
        self.heard = time.monotonic()
        self.lines: deque[str] = deque(maxlen=_MOST_LINES)
        self.num_lines = 0
        self._progress = re.compile(progress)
        self._descriptor = descriptor
        self._sink = Sink(1, "standard output")
        self._rest = b""
        self._thread = threading.Thread(target=self._read, name="said", daemon=True)
        self._thread.start()

    def finish(self, seconds: float = 2.0) -> None:
        """Read what is still in the pipe."""
        self._thread.join(seconds)
        self._sink.drain(seconds)

    def since(self, number: int) -> list[str]:
        """The lines from ``number`` on."""
        have = list(self.lines)
        return have[max(0, len(have) - (self.num_lines - number)) :]

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._descriptor, 1 << 16)
            except OSError:
                break
            if not data:
                break
            self.heard = time.monotonic()
            self._sink.put(data)
            self._take(data)
        self._take(b"\n")
        os.close(self._descriptor)

    def _take(self, data: bytes) -> None:
        # A progress bar goes back to the line's beginning.
        *lines, self._rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        if len(self._rest) > _MOST_LINE:
            lines, self._rest = [*lines, self._rest], b""
        for raw in lines:
            line = raw[:_MOST_LINE].decode(errors="replace")
            if not line.strip():
                continue
            self.lines.append(line)
            self.num_lines += 1
            for match in self._progress.finditer(line):
                number = next((group for group in match.groups() if group), "")
                if number.isdecimal() and len(number) < 16:
                    self.step = max(self.step, int(number))


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """An exception that was printed; ``rank`` is None where nothing says whose it is.

    ``frames`` are (file, line, function), outermost first.
    """

    rank: int | None
    kind: str
    message: str
    frames: tuple[tuple[str, int, str], ...]

    @property
    def is_launchers(self) -> bool:
        """Whether it is torchrun's own exception, which says only that a rank failed."""
        return self.kind.endswith("ChildFailedError")


def tracebacks(lines: Sequence[str]) -> list[Printed]:
    """The exceptions in these lines, in order."""
    printed: list[Printed] = []
    open_: dict[int | None, list[tuple[str, int, str]]] = {}
    for line in lines:
        mark = _RANK.match(line)
        rank = int(mark[1]) if mark else None
        text = line[mark.end() :] if mark else line
        if _TRACEBACK in text:
            open_[rank] = []
        elif rank in open_:
            frame = _FRAME.match(text)
            if frame:
                open_[rank].append((frame[1], int(frame[2]), frame[3]))
            elif text[:1].strip() and (error := _ERROR.match(text)):
                frames = tuple(open_.pop(rank))
                message = error[2] or ""
                printed.append(Printed(rank=rank, kind=error[1], message=message, frames=frames))
    return printed


def failures(lines: Sequence[str]) -> list[tuple[int, int]]:
    """(rank, exit code) of torchrun's own summary; the first observed failure comes first."""
    text = "\n".join(lines)
    rest, _, root = text.rpartition("Root Cause (first observed failure)")
    codes = [(int(rank), int(code)) for rank, code in _FAILED.findall(root)]
    codes += [(int(rank), int(code)) for rank, code in _FAILED.findall(rest)]
    return list(dict.fromkeys(codes))


_DUMPS = "flight-recorder-rank"
_ERROR_FILE = "error.json"
_ABORT_SECONDS, _SPY_SECONDS = 2.0, 10.0
_LOOK_SECONDS = 1.0  # seconds between two readings of the GPUs
_TAIL = 400  # lines that are kept as evidence
_WAITS = ("torch/distributed/", "torch/autograd/")  # places in which a rank waits for others


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """
    Args:
        quiet_seconds: seconds without output, and without work on the GPUs, after which the script
            counts as hung; 0: never.
        busy_seconds: seconds without output after which it counts as hung although its GPUs work;
            a collective that hangs keeps a GPU at work.
        start_seconds: in place of ``quiet_seconds`` before the first step is seen: imports, weights
            and compilation print nothing for long; 0: never.
        progress: a pattern whose first matching group is the step.
        folder: takes the evidence and the list of attempts.
    """

    quiet_seconds: float
    busy_seconds: float
    start_seconds: float
    progress: str
    folder: Path


class ScriptSupervisor(Supervisor):
    """Supervises a command that knows nothing of it; progress is the step that it prints."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        watched: Watched,
        rules: RestartRules,
        launch_id: str,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(watched.folder, launch_id, rules, say)
        self._command = command
        self._environment = environment
        self._watched = watched
        self._gpus_work = partial(at_work, environment.get("CUDA_VISIBLE_DEVICES"))

    def attempt(self, number: int, *, diagnose: bool) -> Attempt:
        best = max((earlier.clean_after for earlier in self.attempts), default=-1)
        folder = self.until_it_answers(lambda: self._new_folder(number))
        reading, writing = os.pipe()
        said = Said(reading, self._watched.progress)
        watchdog = _Watchdog(said, self._watched, folder, self._gpus_work)
        try:
            job = Job(
                command=self._command,
                environment=dict(self._environment) | settings(folder),
                output=writing,
                late=watchdog.late,
            )
            ended = self.run_once(job)
        finally:
            os.close(writing)
            said.finish()
        cause = None if ended.code == 0 else _cause(said, watchdog, folder, ended)
        if cause is not None:
            with contextlib.suppress(OSError):
                (folder / "output.txt").write_text("\n".join(said.since(said.num_lines - _TAIL)))
            self._say(f"attempt {number}: {cause.reason} (evidence: {folder})")
        return Attempt(
            code=_code_of_ranks(ended.code, said.lines, self._rules.codes),
            clean_before=best,
            clean_after=max(best, said.step),
            took_up=said.step >= 0,
            step=max(0, said.step),
            cause=cause.kind if cause else None,
            signature=cause.signature if cause else None,
            reason=cause.reason if cause else None,
        )

    def _new_folder(self, number: int) -> Path:
        """One for an attempt's evidence; an earlier launch, or one beside it, may have begun it."""
        while True:
            folder = self._watched.folder / f"attempt-{number:04d}"
            try:
                folder.mkdir(parents=True)
                return folder
            except FileExistsError:
                number += 1


def _code_of_ranks(code: int, lines: Iterable[str], ours: ExitCodes) -> int:
    """torchrun ends with 1, or is ended, whatever its ranks ended with: theirs, if one of ours."""
    codes = {one for _, one in failures(list(lines)) if one != -signal.SIGTERM}
    is_ours = len(codes) == 1 and codes <= {*ours.final, ours.preempted}
    return codes.pop() if code in (1, 128 + signal.SIGKILL) and is_ours else code


def settings(folder: Path) -> dict[str, str]:
    """Variables that make torch leave evidence, under their newer and older names.

    NCCL's handling of errors stays as the launcher has it: a collective that times out ends its
    process, after the dump.
    """
    dumps = str(folder.absolute() / _DUMPS)
    return {
        "PYTHONUNBUFFERED": "1",  # otherwise a pipe gets no output for long
        "PYTHONFAULTHANDLER": "1",
        # torchrun copies the first failure's here; a script with @record that runs alone, its own.
        "TORCHELASTIC_ERROR_FILE": str(folder.absolute() / _ERROR_FILE),
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": dumps,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": dumps,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }


@dataclass(eq=False)
class _Watchdog:
    """Ends a script that made no progress for too long; records its ranks' stacks first.

    Args:
        gpus_work: whether a GPU of the script runs a kernel at this moment.
    """

    said: Said
    watched: Watched
    folder: Path
    gpus_work: Callable[[], bool]
    stacks: dict[int, list[Frame]] = field(default_factory=dict)
    _looked: float = -math.inf
    _worked: float = -math.inf

    def late(self, mark: str) -> str:
        """Why the script must be ended; empty while it need not."""
        reason = self._why()
        if not reason:
            return ""
        marked = process_tree.marked(mark)
        pids = process_tree.ranks(mark) or [pid for pid in marked if parent(pid) not in marked]
        # A launcher would end the others once the first is gone.
        for launcher in {parent(pid) for pid in pids} & set(marked):
            if launcher is not None:
                process_tree.send(launcher, signal.SIGSTOP)
        for pid in pids:
            rank = process_tree.rank_of(pid)  # a process that has ended cannot be asked
            self.stacks[rank] = self._ask(pid)
        return reason

    def _why(self) -> str:
        """Why the script counts as hung; empty while it makes progress."""
        is_starting = self.said.step < 0
        quiet = self.watched.start_seconds if is_starting else self.watched.quiet_seconds
        if not quiet:
            return ""
        now = time.monotonic()
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            if self.gpus_work():
                self._worked = now
        silent, idle = now - self.said.heard, now - self._worked
        busy = max(quiet, self.watched.busy_seconds)
        printed = "printed no step" if self.said.num_lines else "printed nothing"
        words = f" (it had {printed} yet: a larger --quiet-start?)" if is_starting else ""
        if min(silent, idle) >= quiet:
            return f"no output for {quiet:g} s{words}"
        if silent >= busy:
            return f"no output for {busy:g} s, though its GPUs are at work{words}"
        return ""

    def _ask(self, pid: int) -> list[Frame]:
        """The frames of one process, outermost first; empty if it does not answer."""
        if spy := shutil.which("py-spy"):
            self._spy(spy, pid)
        if not process_tree.catches(pid, signal.SIGABRT):
            return []
        before = self.said.num_lines
        process_tree.send(pid, signal.SIGABRT)
        limit = time.monotonic() + _ABORT_SECONDS
        while process_tree.is_there(pid) and time.monotonic() < limit:
            time.sleep(0.02)
        time.sleep(0.1)  # its last output is in the pipe
        threads = thread_frames("\n".join(self.said.since(before)))
        return threads[-1] if threads else []  # the main thread is the last

    def _spy(self, spy: str, pid: int) -> None:
        path = self.folder / f"py-spy-{process_tree.rank_of(pid)}.txt"
        command = [spy, "dump", "--pid", str(pid)]
        # It may have no permission to read it, and the like.
        with contextlib.suppress(OSError, subprocess.SubprocessError), path.open("wb") as file:
            subprocess.run(command, stdout=file, stderr=file, timeout=_SPY_SECONDS, check=False)


def read_dumps(folder: Path, prefix: str) -> dict[int, list[dict[str, Any]]]:
    """Read the entries of each rank from the files ``prefix`` + rank that are readable."""
    by_rank = {}
    for path in sorted(folder.glob(f"{prefix}*")):
        rank = path.name.removeprefix(prefix)
        if rank.isdecimal():
            try:
                by_rank[int(rank)] = entries_of(read_bounded(path, _DUMP_BYTES))
            except Exception:  # half written by a process that died; the other ranks' dumps suffice
                continue
    return by_rank


def at_work(visible: str | None) -> bool:
    """Whether a kernel ran lately on any GPU. A collective that waits for a rank runs, too.

    Args:
        visible: as CUDA_VISIBLE_DEVICES: indices or UUIDs with commas between; None: all GPUs.

    Returns:
        False also if that is unknown.
    """
    with library() as nvml:
        if nvml is None:
            return False
        try:
            handles = _handles(nvml, visible)
            return any(nvml.nvmlDeviceGetUtilizationRates(h).gpu >= _AT_WORK for h in handles)
        except nvml.NVMLError:
            return False


def _handles(nvml: Any, visible: str | None) -> list[Any]:
    if visible is None:
        return [nvml.nvmlDeviceGetHandleByIndex(n) for n in range(nvml.nvmlDeviceGetCount())]
    handles = []
    for name in filter(None, (word.strip() for word in visible.split(","))):
        if name.isdecimal():
            handles.append(nvml.nvmlDeviceGetHandleByIndex(int(name)))
        elif name.startswith("GPU-"):
            handles.append(nvml.nvmlDeviceGetHandleByUUID(name))
    return handles


def _cause(said: Said, watchdog: _Watchdog, folder: Path, ended: Ended) -> RootCause | None:
    """Who died first and why; None where that is unknown."""
    step = max(0, said.step)
    if ended.reason:
        return _hang(watchdog.stacks, ended.reason, step)
    lines = list(said.lines)
    dumps = read_dumps(folder, _DUMPS)
    failed = failures(lines)
    world_size = max([*dumps, *(rank for rank, _ in failed)], default=0) + 1
    phase = "training" if said.step >= 0 else "start"
    report = partial(Report, world_size=world_size, step=step, phase=phase)
    by_rank = _reports(lines, _recorded(folder), failed, report)
    for rank, entries in dumps.items():
        by_rank.setdefault(rank, report(rank=rank, kind="called", collectives=entries))
    reports = list(by_rank.values())
    if not reports:
        message = f"ended with {ended.code}"
        return RootCause(kind="exit", ranks=(), step=step, reason=message, signature=message)
    return find_root_cause(reports, world_size)


def _recorded(folder: Path) -> list[Printed]:
    """The exceptions in torchelastic's error file, which has the first failure; empty without it.

    If the output of ranks goes to files (torchrun --redirects), this file is the only source.
    """
    try:
        record = json.loads((folder / _ERROR_FILE).read_text(errors="replace"))
        stack = str(record["message"]["extraInfo"]["py_callstack"])
    except (OSError, ValueError, LookupError, TypeError):
        return []
    return tracebacks(stack.splitlines())


def _reports(
    lines: Sequence[str],
    recorded: Sequence[Printed],
    failed: Sequence[tuple[int, int]],
    report: Callable[..., Report],
) -> dict[int, Report]:
    """One report for each rank, in the order of deaths: what it printed, else how it ended."""
    reports: dict[int, Report] = {}
    order = [rank for rank, _ in failed]
    first = order[0] if order else 0
    for printed in [*tracebacks(lines), *(replace(one, rank=first) for one in recorded)]:
        if printed.is_launchers:
            continue
        rank = printed.rank
        if rank is None:  # before the group exists, no rank is named
            rank = next((r for r, code in failed if code > 0 and r not in reports), 0)
        if rank not in reports:
            frames = [{"file": f, "line": n, "function": name} for f, n, name in printed.frames]
            reports[rank] = report(
                rank=rank,
                kind=by_text(printed.kind, printed.message),
                message=": ".join(filter(None, (printed.kind, printed.message))),
                time=float(order.index(rank) if rank in order else len(order)),
                stacks=[{"thread": "MainThread", "frames": frames}],
            )
    for place, (rank, code) in enumerate(failed):
        # With SIGTERM the launcher ends those who live on.
        if rank not in reports and code != -signal.SIGTERM:
            reports[rank] = report(
                rank=rank,
                kind="signal" if code < 0 else "exit",
                message=f"killed by signal {-code} ({signal_name(-code)})"
                if code < 0
                else f"ended with {code}",
                time=float(place),
            )
    return reports


def _hang(stacks: Mapping[int, list[Frame]], message: str, step: int) -> RootCause:
    """Name the ranks that hang: those that do not wait for others, if there are any."""
    waiting = {
        r: f
        for r, f in stacks.items()
        if any(place in str(frame["file"]) for frame in f for place in _WAITS)
    }
    busy = {r: f for r, f in stacks.items() if r not in waiting and f}
    chosen = busy or waiting
    places = {rank: own_line(frames) for rank, frames in chosen.items()}
    at = "; ".join(f"rank {rank} is at {place}" for rank, place in sorted(places.items())[:8])
    rest = f"; rank {', '.join(map(str, sorted(waiting)))} waits for others" if busy else ""
    rest = rest if waiting else ""
    first = min(places.items(), default=(0, "an unknown place"))[1]
    return RootCause(
        kind="hang",
        ranks=tuple(sorted(chosen)),
        step=step,
        reason=f"hung at step {step}: {message}; {at or 'no rank answers where it is'}{rest}",
        signature=f"hang {re.sub(r'[0-9]+', 'N', first)}",
    )
