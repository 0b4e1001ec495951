"""Plays some cases at a time, shrinks those that fail, and keeps count."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.swarm.case import Case, simpler, size
from scripts.swarm.check import check, kind_of
from scripts.swarm.command import MIXED
from scripts.swarm.draw import draw
from scripts.swarm.play import Counter
from scripts.swarm.twins import Twins
from tests import warm

_TEXT = "\n".join(f"line {n}: {'the quick brown fox ' * (n % 7 + 1)}" for n in range(400))
_MOST_TRIES = 25  # of shrinking one case


@dataclass(slots=True, kw_only=True)
class Report:
    """What a session did: training runs, and cases that were refused by design among others."""

    cases: int = 0
    runs: int = 0
    refused: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)
    flaky: list[dict[str, Any]] = field(default_factory=list)


class Bench:
    """A folder, warm processes, and the twins of one session."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.counter = folder, Counter()
        self.shared = folder / "shared"
        (self.shared / "text").mkdir(parents=True)
        (self.shared / "text" / "a.txt").write_text(_TEXT)
        (self.shared / "texts").mkdir()
        for number, name in enumerate(MIXED):
            (self.shared / "texts" / f"{name}.txt").write_text(_TEXT[number:] + name)
        self._twins = Twins(folder / "twins", self.shared, self.counter)
        self._number = 0
        self._lock = threading.Lock()

    def failures(self, case: Case) -> list[str]:
        """Play it in a folder of its own, which stays only where something is wrong."""
        with self._lock:
            self._number += 1
            folder = self.folder / f"case-{self._number}"
        folder.mkdir()
        wrong = check(case, folder, self._twins, self.shared, self.counter)
        shutil.rmtree(folder, ignore_errors=True)
        return wrong

    def shrink(self, case: Case, wrong: list[str]) -> tuple[Case, list[str]]:
        """The smallest case found that fails alike."""
        kind, tries, is_smaller = kind_of(wrong), 0, True
        while is_smaller and tries < _MOST_TRIES:
            is_smaller = False
            for less in simpler(case):
                tries += 1
                again = self.failures(less)
                if again and kind_of(again) == kind:
                    case, wrong, is_smaller = less, again, True
                    break
                if tries >= _MOST_TRIES:
                    break
        return case, wrong


@contextlib.contextmanager
def bench() -> Iterator[Bench]:
    """A bench whose files and processes are gone at the end."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = Path(tempfile.mkdtemp(prefix="swarm-"))
    try:
        yield Bench(folder)
    finally:
        warm.close()
        shutil.rmtree(folder, ignore_errors=True)


def processor_seconds() -> float:
    """Of this process and all that has ended under it."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def run(
    seed: int,
    minutes: float,
    *,
    jobs: int,
    keep: Path,
    say: Callable[[str], None],
    most_failures: int = 1_000,
    shrinks: bool = True,
) -> Report:
    """Draw and play cases until the time is over."""
    report, limit = Report(), time.monotonic() + 60 * minutes
    with bench() as the_bench, ThreadPoolExecutor(jobs) as pool:
        numbers = iter(range(seed, 10**12))
        pending: dict[Future[list[str]], tuple[int, Case]] = {}
        while True:
            is_over = time.monotonic() > limit or len(report.failures) >= most_failures
            while not is_over and len(pending) < jobs:
                number = next(numbers)
                case = draw(number)
                pending[pool.submit(the_bench.failures, case)] = number, case
            if not pending:
                break
            done, _ = wait(pending, return_when=FIRST_COMPLETED)
            for one in done:
                number, case = pending.pop(one)
                report.cases += 1
                if wrong := one.result():
                    say(f"seed {number}: {size(case)} features: {wrong[0][:600]}")
                    _keep(the_bench, report, number, case, wrong, keep, say, shrinks=shrinks)
        report.runs, report.refused = the_bench.counter.runs, the_bench.counter.refused
        return report


def _keep(
    the_bench: Bench,
    report: Report,
    number: int,
    case: Case,
    wrong: list[str],
    keep: Path,
    say: Callable[[str], None],
    *,
    shrinks: bool,
) -> None:
    is_flaky = kind_of(the_bench.failures(case)) != kind_of(wrong)
    if shrinks and not is_flaky:
        case, wrong = the_bench.shrink(case, wrong)
    keep.mkdir(parents=True, exist_ok=True)
    file = keep / f"{number}{'-flaky' if is_flaky else ''}.json"
    row = {"seed": number, "wrong": wrong, "case": case.to_json()}
    file.write_text(json.dumps(row, indent=1) + "\n")
    if is_flaky:
        say(f"seed {number}: passes when played again: flaky, in {file}")
        report.flaky.append(row)
        return
    report.failures.append(row)
    say(
        f"seed {number}: shrunk to {size(case)} features in {file}: {case.describe()}: "
        f"{wrong[0][:600]}"
    )
