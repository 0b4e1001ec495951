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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from runner.fault.spec import ENDINGS, LASTING, Fault

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFault:
    """``is_due`` tells whether the module of that name is at fault now."""

    module: str
    is_due: Callable[[], bool]


class DrillError(Exception):
    """What ``raise@...`` raises."""


class FaultInjector:
    """All faults of one rank. ``markers`` is a directory shared by restarts."""

    def __init__(
        self,
        faults: Sequence[Fault],
        *,
        rank: int,
        markers: Path,
    ) -> None:
        self._faults = faults
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

    def before_step(self, step: int) -> None:
        """Note what falls due in this step; a slow rank sleeps."""
        self._step_faults = set()
        self._step = step
        for fault in self._faults:
            if fault.kind in ENDINGS or not fault.is_due(step, self.rank):
                continue
            if fault.kind == "slow":
                time.sleep(fault.seconds)
            elif fault.kind in LASTING:
                continue
            elif self._fires_first_time(fault):
                self._step_faults.add(fault.kind)

    def at(self, point: str, step: int) -> None:
        """End or freeze this rank, when a fault says so at this point of this step."""
        for fault in self._endings(point, step):
            if self._fires_first_time(fault):
                _end(fault)

    def _endings(self, point: str, step: int) -> list[Fault]:
        return [
            fault
            for fault in self._faults
            if fault.kind in ENDINGS
            and fault.at == point
            and not fault.observer
            and fault.is_due(step, self.rank)
        ]

    def in_observer(self, name: str, call: int) -> None:
        """End or freeze this rank in what only looks, when a fault says so before this exchange."""
        for fault in self._faults:
            is_due = fault.observer == name and fault.call == call
            if is_due and fault.is_due(self._step, self.rank) and self._fires_first_time(fault):
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
        forward = self._out_of_memory(len(positions)) or self._ending_in("forward")
        backward = self._ending_in("backward")
        scales = (*activation, *loss)
        if not (nan_grad or flip_grad or forward or backward) and all(
            scale == 1.0 for scale in scales
        ):
            return None
        return Disturbance(
            activation_scale=activation,
            loss_scale=loss,
            nan_grad=nan_grad,
            flip_grad=flip_grad,
            in_forward=forward,
            in_backward=backward,
        )

    def _out_of_memory(self, rows: int) -> Callable[[], None] | None:
        due = any(
            fault.kind == "oom"
            and self._step >= fault.steps[0]
            and fault.rank in (None, self.rank)
            and rows > fault.rows
            for fault in self._faults
        )
        return _run_out_of_memory if due else None

    def _ending_in(self, point: str) -> Callable[[], None] | None:
        step = self._step
        return (lambda: self.at(point, step)) if self._endings(point, step) else None

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
        return any(
            fault.kind == "wrong_product"
            and fault.is_due(step, self.rank)
            and self._fires_first_time(fault)
            for fault in self._faults
        )

    def overflows(self) -> Sequence[ModuleFault]:
        """Modules whose output is to overflow at times."""
        return self._modules("overflow", lambda fault: fault.is_due(self._step, self.rank))

    def wrong_gradients(self) -> Sequence[ModuleFault]:
        """Modules the gradients of whose own weights are to be a little wrong on this rank."""
        return self._modules("wrong_grad", lambda fault: self._step >= fault.steps[0])

    def _modules(self, kind: str, is_due: Callable[[Fault], bool]) -> Sequence[ModuleFault]:
        return [
            ModuleFault(module=fault.module, is_due=partial(is_due, fault))
            for fault in self._faults
            if fault.kind == kind and fault.rank in (None, self.rank)
        ]

    def lasts(self, kind: str, step: int) -> bool:
        """Whether a fault of this kind has begun by this step, and goes on."""
        return any(
            fault.kind == kind and step >= fault.steps[0] and fault.rank in (None, self.rank)
            for fault in self._faults
        )

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
