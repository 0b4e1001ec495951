"""A job that fails, event by event, on a clock: :mod:`runner.tools.goodput` is held
against it.

It knows none of the formulas. It walks from snapshot to snapshot, remembers which are where and
from when on they can be used, and goes back to the newest one that is left.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from runner.tools.goodput import Costs


@dataclass
class Job:
    """``work`` is the seconds of useful work that the present state holds."""

    costs: Costs
    steps: int
    stall: float
    lag: float  # until a snapshot is on disk
    per_disk: int
    share: float  # of failures that memory snapshots survive
    random: random.Random
    clock: float = 0.0
    work: float = 0.0
    failures: int = 0
    next_failure: float = 0.0
    in_memory: float | None = 0.0
    on_disk: float = 0.0
    writing: list[tuple[float, float]] = field(default_factory=list)  # (usable from, work)

    def run(self, failures: int) -> float:
        """Work over time, up to so many failures."""
        self._set_alarm()
        while self.failures < failures:
            self._period()
        return self.work / self.clock

    def _set_alarm(self) -> None:
        self.next_failure = self.clock + self.random.expovariate(1 / self.costs.mtbf_seconds)

    def _period(self) -> None:
        work = self.steps * self.costs.step_seconds
        end = self.clock + work + self.stall
        if self.next_failure < end:
            self._fail()
            return
        self.clock = end
        self.work += work
        self.in_memory = self.work
        self._land_writes()
        if round(self.work / work) % self.per_disk == 0:
            self.writing.append((self.clock + self.lag, self.work))

    def _land_writes(self) -> None:
        for at, work in list(self.writing):
            if at <= self.clock:
                self.on_disk = work
                self.writing.remove((at, work))

    def _fail(self) -> None:
        """Until a start succeeds."""
        costs = self.costs
        while True:
            self.clock = self.next_failure
            self.failures += 1
            self._land_writes()
            if self.random.random() >= self.share:
                self.in_memory = None
            if self.in_memory is None:
                self.writing.clear()  # what was being written was in that memory
            has_memory = self.share > 0 and self.in_memory is not None
            restart = costs.memory_restart_seconds if has_memory else costs.restart_seconds
            self.clock += costs.detect_seconds  # a second failure meanwhile changes nothing
            self._set_alarm()
            if self.next_failure >= self.clock + restart:
                break
        self.clock += restart
        self._land_writes()
        self.work = self.in_memory if has_memory else self.on_disk
        self.in_memory = self.work
