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
        self._rank = rank
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
            if fault.kind in ENDINGS or not fault.is_due(step, self._rank):
                continue
            if fault.kind == "slow":
                time.sleep(fault.seconds)
            elif fault.kind in LASTING:
                continue
            elif self._fires_first_time(fault):
                self._step_faults.add(fault.kind)

    def at(self, point: str, step: int) -> None:
        """End or freeze this rank, when a fault says so at this point of this step."""
        for fault in self._faults:
            is_due = fault.kind in ENDINGS and fault.at == point and not fault.observer
            if is_due and fault.is_due(step, self._rank) and self._fires_first_time(fault):
                _end(fault)

    def in_observer(self, name: str, call: int) -> None:
        """End or freeze this rank in what only looks, when a fault says so before this exchange."""
        for fault in self._faults:
            is_due = fault.observer == name and fault.call == call
            if is_due and fault.is_due(self._step, self._rank) and self._fires_first_time(fault):
                _end(fault)

    def disturbance(self, positions: Sequence[int | None]) -> Disturbance | None:
        """What happens to the micro-batch of these stream positions (None: padding)."""
        if not self._faults:
            return None
        nan_loss = "nan_loss" in self._step_faults or self._lasts("sticky", self._step)
        nan_grad = "nan_grad" in self._step_faults
        flip_grad = "flip_grad" in self._step_faults
        # One micro-batch is enough; the marker kinds are consumed by the first.
        self._step_faults -= {"nan_loss", "nan_grad", "flip_grad"}
        usual = _WRONG if self._lasts("wrong", self._step) else 1.0
        activation = tuple(math.nan if self._hit("poison", p) else usual for p in positions)
        loss = tuple(math.nan if nan_loss else self._spike(p) for p in positions)
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
            and fault.rank in (None, self._rank)
            and rows > fault.rows
            for fault in self._faults
        )
        return _run_out_of_memory if due else None

    def _ending_in(self, point: str) -> Callable[[], None] | None:
        step = self._step
        due = any(
            fault.kind in ENDINGS
            and fault.at == point
            and not fault.observer
            and fault.is_due(step, self._rank)
            for fault in self._faults
        )
        return (lambda: self.at(point, step)) if due else None

    def flips_bit(self) -> bool:
        """Whether this rank's copy of the state is to be damaged before this step."""
        is_due = "flip_bit" in self._step_faults
        self._step_faults.discard("flip_bit")  # once, however often the step is computed
        return is_due

    def damages_checkpoint(self) -> bool:
        """Whether this rank is to damage the newest checkpoint on disk before this step."""
        return self._rank == 0 and "corrupt_checkpoint" in self._step_faults

    def damages_snapshots(self) -> bool:
        """Whether this rank is to damage its snapshots in memory before this step."""
        return "corrupt_snapshots" in self._step_faults

    def spoils_product(self, step: int) -> bool:
        """Whether the device check of a start at this step is to find a wrong product here."""
        return any(
            fault.kind == "wrong_product"
            and fault.is_due(step, self._rank)
            and self._fires_first_time(fault)
            for fault in self._faults
        )

    def spoils_state(self) -> bool:
        """Whether a weight that this rank holds is to be wrong from this step on."""
        is_due = "spoil_state" in self._step_faults
        self._step_faults.discard("spoil_state")
        return is_due

    def never_breaks(self, step: int) -> bool:
        """Whether this rank's collectives are to wait for ever where they would break."""
        return self._lasts("no_break", step)

    def misreads(self) -> bool:
        """Whether this rank's samples of this step are to be wrong, the first time they come."""
        is_due = "misread" in self._step_faults
        self._step_faults.discard("misread")
        return is_due

    def overflows(self) -> Sequence[ModuleFault]:
        """Modules whose output is to overflow at times."""
        return [
            ModuleFault(module=fault.module, is_due=partial(self._is_due_now, fault))
            for fault in self._faults
            if fault.kind == "overflow"
        ]

    def wrong_gradients(self) -> Sequence[ModuleFault]:
        """Modules the gradients of whose own weights are to be a little wrong on this rank."""
        return [
            ModuleFault(module=fault.module, is_due=partial(self._lasts_now, fault))
            for fault in self._faults
            if fault.kind == "wrong_grad" and fault.rank in (None, self._rank)
        ]

    def _lasts_now(self, fault: Fault) -> bool:
        return self._step >= fault.steps[0]

    def _is_due_now(self, fault: Fault) -> bool:
        return fault.is_due(self._step, self._rank)

    def _lasts(self, kind: str, step: int) -> bool:
        return any(
            fault.kind == kind and step >= fault.steps[0] and fault.rank in (None, self._rank)
            for fault in self._faults
        )

    def wrong_collective(self) -> str | None:
        """The way in which this rank's collective is to go wrong in this step, if any.

        ``skip_collective``, ``other_collective`` or ``other_shape``.
        """
        wrong = ("skip_collective", "other_collective", "other_shape")
        return next((kind for kind in wrong if kind in self._step_faults), None)

    def claims_other_identity(self) -> bool:
        """Whether this rank's fingerprint is to be wrong in this step."""
        return "mismatch" in self._step_faults

    def _hit(self, kind: str, position: int | None) -> Fault | None:
        for fault in self._faults:
            first, stop = fault.samples
            if fault.kind == kind and position is not None and first <= position < stop:
                return fault
        return None

    def _spike(self, position: int | None) -> float:
        fault = self._hit("spike", position)
        return fault.scale if fault else 1.0

    def _fires_first_time(self, fault: Fault) -> bool:
        name = hashlib.sha256(fault.text.encode()).hexdigest()[:16]
        marker = self._markers / f"{fault.kind}-{name}-rank{self._rank}"
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
