"""Starts real runs for the drills, and reads their files."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.command.demo import skip_override as skip_override
from runner.system.json_lines import read_lines as read_whole_lines
from runner.system.process import parent
from tests import warm

# What differs between two runs of the same trajectory.
LIMITS = ("loss_limit", "norm_limit")
TIMINGS = ("seconds", "tokens_per_second", "data_wait_seconds", "time", "stalls")

# As real runs do, a drill looks at held-out samples now and then: few, so that it costs little.
EVALUATED = ("eval.every=8", "eval.samples=8")

# The second layer of model=tiny takes a quarter of a drill's time. Drills about layers ask for it.
ONE_LAYER, TWO_LAYERS = "model.layers=1", "model.layers=2"

# A model and a language that learn in seconds; the guard is armed early. In FP32, which is fast on
# every processor.
TINY = (
    "model=tiny",
    ONE_LAYER,
    "compute.precision=fp32",
    "data=synthetic",
    "data.workers=0",
    *EVALUATED,
    "steps=60",
    "schedule.warmup=5",
    "checkpoint.every=10",
    "checkpoint.clean_after=5",
    "guard.min_history=10",
    "track.every=1000",
    # Most drills are of the ladder. tests/drills/test_redo.py is of what comes before it.
    "guard.remedy=discard",
    # tests/drills/test_quick_preflight.py is of it; here it would be a tenth of a second each.
    "debug.preflight=false",
    # tests/drills/test_demo.py is of the page; here it would be a fifth of a second each.
    "track.report_minutes=null",
    "parallel.timeout_seconds=60",
)


@dataclass(frozen=True)
class Result:
    """One finished command and the run directory it worked on."""

    out: Path
    code: int
    text: str

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.out / "summary.json").read_text())

    @property
    def digest(self) -> str:
        return self.summary["state_digest"]

    @property
    def tail(self) -> str:
        """The end of the output, to show if an assertion fails."""
        return self.text[-3000:]

    def journal(self, kind: str | None = None) -> list[dict[str, Any]]:
        lines = read_lines(self.out / "journal.jsonl")
        return [line for line in lines if kind is None or line["kind"] == kind]

    def metrics(self) -> list[dict[str, Any]]:
        """The metrics without timings."""
        return without_timings(read_lines(self.out / "metrics.jsonl"))

    def counted(self) -> dict[int, dict[str, Any]]:
        """Step to the line that counts: the last applied one.

        Without the gate's limits: a guard that has just met trouble sets them lower than one that
        was told to skip it.
        """
        applied = [line for line in self.metrics() if line["action"] == "apply"]
        return {
            line["step"]: {key: value for key, value in line.items() if key not in LIMITS}
            for line in applied
        }


def without_timings(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key not in TIMINGS} for line in lines]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def command(
    out: Path, *overrides: str, ranks: int = 2, restarts: int = 0, program: Path | None = None
) -> list[str]:
    """The command; ``program`` is a script that calls the runner after preparations."""
    arguments = [*(["-m", "runner"] if program is None else [str(program)])]
    arguments += [f"out={out}", *tiny(overrides), *_bf16_for_zero(overrides), *unbroken(overrides)]
    if ranks == 0:  # no launcher at all
        return [sys.executable, *arguments]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, f"--nproc-per-node={ranks}", f"--max-restarts={restarts}", *arguments]


NO_BREAK = "no_break@step=1"
_more_faults: list[str] = []


@contextlib.contextmanager
def nothing_breaks() -> Iterator[None]:
    """Runs started inside of it have no collective that raises when a peer dies, as over NCCL."""
    _more_faults.append(NO_BREAK)
    try:
        yield
    finally:
        _more_faults.clear()


def unbroken(overrides: Sequence[str]) -> list[str]:
    """Overrides as :func:`nothing_breaks` has them: with one more fault."""
    result = list(overrides)
    if not _more_faults:
        return result
    more = ",".join(_more_faults)
    faults = [number for number, word in enumerate(result) if word.startswith("faults=[")]
    if not faults:
        return [*result, f"faults=[{more}]"]
    result[faults[-1]] = result[faults[-1]].replace("faults=[", f"faults=[{more},", 1)
    return result


def tiny(overrides: Sequence[str]) -> list[str]:
    """TINY; another model has its own number of layers, and epochs take the place of steps."""
    is_other = any(word.startswith(("model=", "model._target_=")) for word in overrides)
    in_epochs = any(word.startswith("epochs=") for word in overrides)
    given = {ONE_LAYER: is_other, "steps=60": in_epochs}
    return [word for word in TINY if not given.get(word)]


def _bf16_for_zero(overrides: Sequence[str]) -> list[str]:
    """The precision of DeepSpeed's engines; a run that changes engines uses it throughout."""
    zero = any(word.startswith("parallel=zero") for word in overrides)
    return ["compute.precision=bf16"] if zero else []


def train(
    out: Path,
    *overrides: str,
    ranks: int = 2,
    timeout: float = 400,
    env: Mapping[str, str] | None = None,
    restarts: int = 0,
    program: Path | None = None,
    cold: bool = False,
) -> Result:
    """Run one command to its end; ``ranks=0`` starts without torchrun."""
    started = start(
        out, *overrides, ranks=ranks, env=env, restarts=restarts, program=program, cold=cold
    )
    return started.wait(timeout)


@dataclass(frozen=True)
class Started:
    """A running command, in its own session."""

    out: Path
    process: subprocess.Popen[str]

    def wait(self, timeout: float = 400) -> Result:
        """Wait until it ends; after ``timeout`` seconds kill everything and fail the test."""
        try:
            text, _ = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            text, _ = self.process.communicate()
            raise AssertionError(f"still running after {timeout:g} s:\n{text[-3000:]}") from None
        return Result(out=self.out, code=self.process.returncode, text=text)

    def pids(self) -> list[int]:
        """torchrun and its workers: they have sessions of their own, but all name ``out``."""
        return naming(f"out={self.out}")

    def workers(self) -> list[int]:
        """The ranks' processes."""
        launcher = self.process.pid
        return sorted(pid for pid in self.pids() if pid != launcher)

    def ranks(self) -> dict[int, int]:
        """Rank to its process; loaders and the like are left out."""
        pids = {}
        for pid in self.workers():
            rank = environment_of(pid).get("RANK")
            if rank is not None and parent(pid) == self.process.pid:
                pids[int(rank)] = pid
        return pids

    def kill(self) -> None:
        """SIGKILL to all of them at once, as a lost node would end."""
        kill_naming(f"out={self.out}")

    def until(self, condition: Callable[[Path], bool], timeout: float = 300) -> None:
        """Wait until a condition on ``out`` holds, or the command ends."""
        limit = time.monotonic() + timeout
        while not condition(self.out) and self.process.poll() is None:
            assert time.monotonic() < limit, f"not seen within {timeout:g} s"
            time.sleep(0.01)


def start(
    out: Path,
    *overrides: str,
    ranks: int = 2,
    env: Mapping[str, str] | None = None,
    restarts: int = 0,
    program: Path | None = None,
    cold: bool = False,
) -> Started:
    """Start one command; torchrun restarts the ranks up to ``restarts`` times.

    ``cold``: with new interpreters, for a program that changes what others import.
    """
    arguments = command(out, *overrides, ranks=ranks, restarts=restarts, program=program)
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"} | dict(env or {})
    begin = warm.WarmPopen if not cold and warm.suits(arguments, env) else subprocess.Popen
    process = begin(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        start_new_session=True,
    )
    started = Started(out=out, process=process)
    _begun.append(started)
    return started


_begun: list[Started] = []


def end_all() -> None:
    """Kill commands that :func:`start` began since the last call and that were not waited for."""
    while _begun:
        started = _begun.pop()
        if started.process.poll() is None or started.pids():
            started.kill()
            started.process.wait(10)


def _arguments(folder: Path) -> list[bytes]:
    try:
        return (folder / "cmdline").read_bytes().split(b"\0")
    except OSError:  # it has just ended
        return []


def naming(word: str) -> list[int]:
    """Processes with this word in their command line."""
    folders = (folder for folder in Path("/proc").iterdir() if folder.name.isdigit())
    return [int(folder.name) for folder in folders if word.encode() in _arguments(folder)]


def kill_naming(word: str) -> None:
    """SIGKILL to all of them, until there is none."""
    while pids := naming(word):
        for pid in pids:
            _kill(pid)
        time.sleep(0.01)


def environment_of(pid: int) -> dict[str, str]:
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(part.split("=", 1) for part in raw.split("\0") if "=" in part)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, signal.SIGKILL)


def metrics_step(out: Path) -> int:
    """The last step in the metrics, 0 without; a line being written is left out."""
    lines, _ = read_whole_lines(out / "metrics.jsonl")
    return int(lines[-1]["step"]) if lines else 0


def journalled(out: Path, kind: str) -> int:
    """How many lines of this kind the journal has by now."""
    lines, _ = read_whole_lines(out / "journal.jsonl")
    return sum(line["kind"] == kind for line in lines)


def finish(
    out: Path,
    *overrides: str,
    ranks: int = 2,
    restarts: int = 0,
    program: Path | None = None,
    cold: bool = False,
) -> Result:
    """:func:`train`, which must succeed."""
    result = train(out, *overrides, ranks=ranks, restarts=restarts, program=program, cold=cold)
    assert result.code == 0, result.tail
    assert result.summary["status"] == "done", result.tail
    return result


def left_behind(out: Path) -> list[int]:
    """Processes that still name ``out``; a moment is given to those that are ending."""
    limit = time.monotonic() + 2
    while (pids := naming(f"out={out}")) and time.monotonic() < limit:
        time.sleep(0.05)
    return pids
