"""Makes the faults of :mod:`runner.fault.spec` happen to a real run.

A fault bound to a step leaves a marker file before it acts, because several of them end the
process: without it a restart would die at the same step for ever.
"""

from __future__ import annotations

import hashlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from runner.fault.spec import ENDINGS, LASTING, Fault
from runner.system.process import host_name

_NOBODY = -1  # no rank has this number
_WRONG = 1.01  # what a device that is wrong in silence makes of 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """What to do to one micro-batch. Scales are per sequence, 1.0 for untouched ones."""

    activation_scale: tuple[float, ...] | None = None
    loss_scale: tuple[float, ...] | None = None
    nan_grad: bool = False
    flip_grad: bool = False
    in_forward: Callable[[], None] | None = None
    in_backward: Callable[[], None] | None = None


class DrillError(Exception):
    """What ``raise@...`` raises."""


class FaultInjector:
    """All faults of one rank. ``markers`` is a directory shared by restarts."""

    def __init__(self, faults: Sequence[Fault], *, rank: int, markers: Path) -> None:
        # Those of another host stay in the list: all ranks agree on the steps in which one is due.
        here = ("", host_name())
        self._faults = [one if one.host in here else replace(one, rank=_NOBODY) for one in faults]
        self.rank = rank
        self._markers = markers
        self._step_faults: set[str] = set()
        self._step = 0

    @property
    def has_any(self) -> bool:
        """Whether anything was asked for."""
        return bool(self._faults)

    def is_due(self, step: int) -> bool:
        """Whether something happens once at this step, on whichever rank."""
        return any(
            fault.kind not in LASTING and fault.steps[0] <= step < fault.steps[1]
            for fault in self._faults
        )

    def _due(self, step: int) -> list[Fault]:
        """Faults that are bound to this step on this rank."""
        return [fault for fault in self._faults if fault.is_due(step, self.rank)]

    def _begun(self, kind: str, step: int) -> Iterator[Fault]:
        """Faults of this kind that have begun on this rank by this step."""
        for fault in self._faults:
            if fault.kind == kind and step >= fault.steps[0] and fault.rank in (None, self.rank):
                yield fault

    def before_step(self, step: int) -> None:
        """Note what falls due in this step; a slow rank sleeps."""
        self._step_faults = set()
        self._step = step
        for fault in self._due(step):
            if fault.kind == "slow":
                time.sleep(fault.seconds)
            elif fault.kind not in (*ENDINGS, *LASTING) and self._fires_first_time(fault):
                self._step_faults.add(fault.kind)

    def at(self, point: str, step: int) -> None:
        """End or freeze this rank, when a fault says so at this point of this step."""
        for fault in self._endings(point, step):
            if self._fires_first_time(fault):
                _end(fault)

    def _endings(self, point: str, step: int) -> list[Fault]:
        due = [fault for fault in self._due(step) if fault.kind in ENDINGS]
        return [fault for fault in due if fault.at == point and not fault.observer]

    def in_observer(self, name: str, call: int) -> None:
        """End or freeze this rank in an observer, when a fault says so before this exchange."""
        for fault in self._due(self._step):
            if (fault.observer, fault.call) == (name, call) and self._fires_first_time(fault):
                _end(fault)

    def disturbance(self, positions: Sequence[int | None]) -> Disturbance | None:
        """What happens to the micro-batch of these stream positions (None: padding)."""
        if not self._faults:
            return None
        # One micro-batch is enough.
        nan_loss, nan_grad, flip_grad = map(self.once, ("nan_loss", "nan_grad", "flip_grad"))
        nan_loss |= self.lasts("sticky", self._step)
        usual = _WRONG if self.lasts("wrong", self._step) else 1.0
        activation = tuple(math.nan if self._hit("poison", p) else usual for p in positions)
        spikes = [self._hit("spike", p) for p in positions]
        loss = tuple(math.nan if nan_loss else fault.scale if fault else 1.0 for fault in spikes)
        forward, backward = self._ending_in("forward"), self._ending_in("backward")
        if any(len(positions) > fault.rows for fault in self._begun("oom", self._step)):
            forward = _run_out_of_memory
        is_scaled = any(scale != 1.0 for scale in (*activation, *loss))
        if not (is_scaled or nan_grad or flip_grad or forward or backward):
            return None
        return Disturbance(
            activation_scale=activation,
            loss_scale=loss,
            nan_grad=nan_grad,
            flip_grad=flip_grad,
            in_forward=forward,
            in_backward=backward,
        )

    def _ending_in(self, point: str) -> Callable[[], None] | None:
        return partial(self.at, point, self._step) if self._endings(point, self._step) else None

    def in_step(self, kind: str) -> bool:
        """Whether a fault of this kind falls due on this rank in this step."""
        return kind in self._step_faults

    def once(self, kind: str) -> bool:
        """The same, the first time in this step, however often the step is computed."""
        is_due = kind in self._step_faults
        self._step_faults.discard(kind)
        return is_due

    def spoils_product(self, step: int) -> bool:
        """Whether the device check of a start at this step is to find a wrong product here."""
        due = [fault for fault in self._due(step) if fault.kind == "wrong_product"]
        return any(map(self._fires_first_time, due))

    def in_modules(self, kind: str) -> list[tuple[str, Callable[[], bool]]]:
        """Names of modules with a fault of this kind on this rank, and whether it is due now.

        "overflow": their output overflows at times; "wrong_grad": from a step on the gradients of
        their own weights are a little wrong.
        """

        def is_due(fault: Fault) -> bool:
            due = self._due(self._step) if kind == "overflow" else self._begun(kind, self._step)
            return fault in due

        return [
            (fault.module, partial(is_due, fault))
            for fault in self._faults
            if fault.kind == kind and fault.rank in (None, self.rank)
        ]

    def lasts(self, kind: str, step: int) -> bool:
        """Whether a fault of this kind has begun by this step, and goes on."""
        return any(self._begun(kind, step))

    def _hit(self, kind: str, position: int | None) -> Fault | None:
        for fault in self._faults:
            first, stop = fault.samples
            if fault.kind == kind and position is not None and first <= position < stop:
                return fault
        return None

    def _fires_first_time(self, fault: Fault) -> bool:
        name = hashlib.sha256(fault.text.encode()).hexdigest()[:16]
        marker = self._markers / f"{fault.kind}-{name}-rank{self.rank}"
        self._markers.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        os.fsync(descriptor)
        os.close(descriptor)
        return True


def _run_out_of_memory() -> None:
    """In the words of torch's CUDACachingAllocator.cpp."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. (On purpose.)")


def _end(fault: Fault) -> None:
    if fault.kind == "raise":
        raise DrillError(f"raised on purpose ({fault.text})")
    if fault.kind == "hang":
        while True:
            time.sleep(60)
    number = {"kill": signal.SIGKILL, "abort": signal.SIGABRT, "stop": signal.SIGSTOP}[fault.kind]
    os.kill(os.getpid(), number)
