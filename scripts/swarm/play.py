"""Plays a case: starts it, ends it from outside where the case says so, and starts it again."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.system.error import EXIT_CONFIG, EXIT_DONE, EXIT_HALTED, EXIT_NO_CHECKPOINT
from runner.system.files import write_json
from runner.system.json_lines import read_lines as read_whole_lines
from scripts.swarm.case import Break, Case
from scripts.swarm.command import hangs, layout_of, overrides
from tests import warm
from tests.run import Result, Started, read_lines, start

HERE = Path(__file__).parent
TRACEBACK = "Traceback (most recent call last)"
LIMIT_SECONDS = 240.0
_MOST_STARTS = 8
_SLOW_SECONDS, _GRACE_SECONDS = 1.5, 6
_FINAL = (EXIT_DONE, EXIT_CONFIG, EXIT_HALTED, EXIT_NO_CHECKPOINT)
# How a device computes wrongly, see tests/ill.py; the sum is wrong on all ranks alike.
_ILLS: dict[str, dict[str, Any]] = {
    "noise": {"how": "moved", "site": "embedding"},
    "gradient": {"how": "gradient far", "site": "embedding"},
    "pattern": {"how": "lost", "site": "embedding", "rows": "7x2"},
    "sum": {"how": "sum"},
}
_OFFLINE = {"WANDB_MODE": "offline", "MLFLOW_ALLOW_FILE_STORE": "true"}
_NOTICE = {"seconds": 60, "reason": "drained"}
_SIGNALS = {"term": signal.SIGTERM, "int": signal.SIGINT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of a run.

    Args:
        code: of the process, or of the rank that failed first under torchrun.
        broken: how it was ended from outside; "" if it was not.
        steps: the last step that its files tell of when it had ended.
        cursor: the position up to which they tell that it had read.
        summary: what it left, {} without.
    """

    code: int
    text: str
    broken: str
    steps: int
    cursor: int
    summary: Mapping[str, Any]
    has_hung: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """All starts of a run, and where its files are."""

    out: Path
    starts: tuple[Start, ...]
    left: tuple[str, ...] = ()
    ended: tuple[Mapping[str, Any], ...] = field(default=())

    @property
    def last(self) -> Start:
        return self.starts[-1]

    @property
    def result(self) -> Result:
        return Result(out=self.out, code=self.last.code, text=self.last.text)


class Counter:
    """Training runs that were started, and cases that end in a refusal by design."""

    def __init__(self) -> None:
        self.runs = self.refused = 0
        self._lock = threading.Lock()

    def add(self) -> None:
        with self._lock:
            self.runs += 1


def exit_code(process_code: int, text: str) -> int:
    """The code of the rank that failed first, which torchrun names."""
    codes = re.findall(r"^\s*exitcode\s*:\s*(-?\d+)", text, re.MULTILINE)
    return int(codes[-1]) if process_code == 1 and codes else process_code


def play(
    case: Case, out: Path, shared: Path, counter: Counter, more: Callable[[int], Sequence[str]]
) -> Played:
    """Run the runner until it is done or refuses for good.

    Args:
        shared: what several runs read.
        more: further settings of a start.
    """
    starts: list[Start] = []
    memory = out.parent / f"{out.name}-memory"
    memory.mkdir(parents=True)
    while len(starts) < _MOST_STARTS:
        number = len(starts)
        one = case.breaks[number] if number < len(case.breaks) else None
        starts.append(_start(case, out, number, one, [*overrides(case, shared, number),
                                                      *more(number)], memory, counter))  # fmt: skip
        last = starts[-1]
        if last.has_hung or (not last.broken and last.code in _FINAL):
            break
        if last.code == EXIT_DONE:
            break
        if not last.broken and last.code == 1 and not crashes(case):
            break
    left = tuple(sorted(str(p.relative_to(memory)) for p in memory.rglob("*") if p.is_file()))
    return Played(out=out, starts=tuple(starts), left=left)


def crashes(case: Case) -> bool:
    """Whether some fault of it ends the process."""
    # A copy of the weights that differs from the others is found by an audit, and ends the start.
    ends = (
        *("kill", "abort", "raise", "mismatch", "spoil_state", "flip_bit", "wrong_product"),
        *("oom", "corrupt_snapshots"),
    )
    return hangs(case) or any(fault.startswith(ends) for fault in case.faults)


def _start(
    case: Case,
    out: Path,
    number: int,
    one: Break | None,
    words: Sequence[str],
    memory: Path,
    counter: Counter,
) -> Start:
    counter.add()
    ranks = layout_of(case, number)[1]
    mark = out.parent / f"{out.name}-mark-{number}"
    notice = out.parent / f"{out.name}-notice"
    notice.unlink(missing_ok=True)
    asked = _asked(one, mark) | {"advice": [case.advice, str(notice)]}
    env = {"SWARM": json.dumps(asked), "HOLDFAST_MEMORY_DIR": str(memory), **_OFFLINE}
    if case.sick:
        env["ILL"] = json.dumps([_ill(case.sick)])
    if case.late_copies:
        env[warm.LATE_COPIES] = "1"
    if case.flaky:
        env["SWARM_SOUND_AT"] = str(time.time() + case.flaky)
    words = [word.replace("OUT", str(out)) for word in words]
    words = [*words, f"preempt.grace_seconds={_GRACE_SECONDS}", f"preempt.notice=file:{notice}"]
    program = HERE / "program.py"
    started = start(out, *words, ranks=0 if ranks == 1 else ranks, env=env, program=program)
    broken = ""
    if one is not None:
        broken = _deliver(started, one, mark, notice, random.Random(case.seed + number))
    return _awaited(started, broken, out)


def _ill(sick: str) -> dict[str, Any]:
    """As tests/ill.py takes it."""
    how, step, ranks = re.fullmatch(r"(\w+)@step=(\d+),ranks=([\d+]+)", sick).groups()  # type: ignore[union-attr]
    of = [] if how == "sum" else [int(rank) for rank in ranks.split("+")]
    return {**_ILLS[how], "at": int(step), "ranks": of}


def _asked(one: Break | None, mark: Path) -> dict[str, Any]:
    if one is None:
        return {}
    phase, _, count = one.at.partition(":")
    is_slow = phase in ("evaluate", "explain")
    return {"mark": [phase, int(count), str(mark)], "slow": _SLOW_SECONDS if is_slow else 0.0}


def _deliver(started: Started, one: Break, mark: Path, notice: Path, dice: random.Random) -> str:
    """End it where the case says; returns how, "" where it had ended before."""
    limit = time.monotonic() + LIMIT_SECONDS
    while not mark.exists():
        if started.process.poll() is not None or time.monotonic() > limit:
            return ""
        time.sleep(0.005)
    time.sleep(one.delay)
    if started.process.poll() is not None:
        return ""
    if one.how == "notice":
        write_json(notice, _NOTICE)
        return one.how
    ranks = started.ranks() or {0: started.process.pid}
    if one.how == "kill":
        started.kill()
        return one.how
    victims = [dice.choice(list(ranks.values()))] if one.how == "kill_one" else [*ranks.values()]
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, _SIGNALS.get(one.how, signal.SIGKILL))
    return one.how


def _awaited(started: Started, broken: str, out: Path) -> Start:
    has_hung = False
    try:
        text, _ = started.process.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        has_hung = True
        started.kill()
        text, _ = started.process.communicate()
    steps, cursor = reached(out)
    summary = out / "summary.json"
    return Start(
        code=exit_code(started.process.returncode, text),
        text=text,
        broken=broken,
        steps=steps,
        cursor=cursor,
        summary=json.loads(summary.read_text()) if summary.exists() else {},
        has_hung=has_hung,
    )


def reached(out: Path) -> tuple[int, int]:
    """The last step and the end of the last position that a run's files tell of.

    A discard is journalled before its metrics are, and a kill may come in between; where new
    weights begin follows from the journal.
    """
    metrics, _ = read_whole_lines(out / "metrics.jsonl")
    journalled, _ = read_whole_lines(out / "journal.jsonl")
    discards = [line for line in journalled if line["kind"] == "discard"]
    steps = [metrics[-1]["step"]] if metrics else [0]
    cursors = [line.get("cursor", 0) for line in metrics]
    cursors += [line["samples"][1] for line in discards if line["samples"]]
    return max([*steps, *(line["step"] for line in discards)]), max(cursors, default=0)


def play_loop(case: Case, out: Path, mode: str, counter: Counter) -> Played:
    """Run a script with a guard (or the plain loop) until it is done or refuses."""
    out.mkdir(parents=True, exist_ok=True)
    memory = out.parent / f"{out.name}-memory"
    memory.mkdir(parents=True, exist_ok=True)
    file = out / "case.json"
    file.write_text(json.dumps({"case": case.to_json()}))
    starts: list[Start] = []
    while len(starts) < _MOST_STARTS:
        counter.add()
        one = case.breaks[len(starts)] if len(starts) < len(case.breaks) else None
        ranks = layout_of(case, len(starts))[1] if mode == "guarded" else case.ranks
        started = _start_loop(case, out, file, mode, memory, ranks)
        broken = one.how if one and mode == "guarded" else ""
        starts.append(_awaited(started, broken, out / "run"))
        last = starts[-1]
        again = last.broken or goes_on(last.text)
        if last.has_hung or last.code == EXIT_DONE or not again:
            break
    ended = [json.loads(path.read_text()) for path in sorted(out.glob(f"end-{mode}-*.json"))]
    return Played(out=out, starts=tuple(starts), ended=tuple(ended))


def goes_on(text: str) -> bool:
    """Whether a loop that ended so is started again: it could not go back, or memory ran out."""
    return "CannotReadAgain" in text or "CUDA out of memory" in text


def _start_loop(case: Case, out: Path, file: Path, mode: str, memory: Path, ranks: int) -> Started:
    command = [sys.executable]
    if case.ranks > 1 or case.engine != "single":
        launcher = ["-m", "torch.distributed.run", "--standalone"]
        command += [*launcher, f"--nproc-per-node={ranks}"]
    command += [str(HERE / "loop.py"), f"out={out}", str(file), mode]
    own = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "HOLDFAST_MEMORY_DIR": str(memory)}
    env = os.environ | own
    if case.late_copies and mode == "guarded":
        env[warm.LATE_COPIES] = "1"
    assert warm.suits(command, env)
    process = warm.WarmPopen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env,
        cwd=warm.ROOT, start_new_session=True,
    )  # fmt: skip
    return Started(out=out, process=process)


def journal(out: Path) -> list[dict[str, Any]]:
    path = out / "journal.jsonl"
    return read_lines(path) if path.exists() else []


def positions(ranges: Sequence[Sequence[int]]) -> set[int]:
    return {p for start, stop in ranges for p in range(start, stop)}


def tail(text: str) -> str:
    """What the run itself said last, without torchrun's summary of it."""
    lines = [
        line
        for line in own(text).splitlines()
        if line.strip() and "elastic/multiprocessing" not in line
    ]
    errors = [number for number, line in enumerate(lines) if "rror: " in line]
    return " | ".join(lines[errors[-1] :][:4] if errors else lines[-6:])[-900:]


def own(text: str) -> str:
    """Without what torchrun prints where a rank has failed."""
    if "ChildFailedError" not in text:
        return text
    return text.rpartition("ChildFailedError")[0].rpartition(TRACEBACK)[0]
