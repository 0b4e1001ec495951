"""Reads GPUs' faults, slowdowns, utilisation and use from NVIDIA's management library (NVML).

Needs the extra ``nvml``; without it, or without its driver, nothing is reported.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from runner.system.process import in_thread

# Slowed by the hardware itself: HW slowdown, HW thermal slowdown, HW power brake. See
# nvmlClocksEventReasons in NVML's reference.
_SLOWED = 0x8 | 0x40 | 0x80


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHealth:
    """The health of one GPU.

    Args:
        broken: why it must not be used, in words that :mod:`runner.health.root_cause` recognises;
            "" if it may.
        warnings: what a person should look at.
    """

    broken: str = ""
    warnings: tuple[str, ...] = ()


def gpu_health(uuid: str) -> GpuHealth | None:
    """Health of the GPU with this UUID (with or without ``GPU-``); None where it is unknown."""
    with library() as nvml:
        if nvml is None:
            return None
        return _health(nvml, uuid)


@contextlib.contextmanager
def library() -> Iterator[Any]:
    """NVML until it is closed; None where it is not installed, or there is no driver."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # NVML's error classes are its own
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _health(nvml: Any, uuid: str) -> GpuHealth | None:
    try:
        handle = _handle(nvml, uuid)
    except nvml.NVMLError as error:
        is_lost = isinstance(error, nvml.NVMLError_GpuIsLost)
        return GpuHealth(broken="NVML: GPU is lost") if is_lost else None
    try:
        rows = _ask(nvml, lambda: nvml.nvmlDeviceGetRemappedRows(handle))
        errors = _ask(
            nvml,
            lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
        )
        slowed = _ask(nvml, lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except nvml.NVMLError:
        return GpuHealth(broken="NVML: GPU is lost")
    _, _, is_pending, has_failed = rows or (0, 0, 0, 0)
    if has_failed:
        return GpuHealth(broken="NVML: row remapping failed: the GPU's memory is worn out")
    warnings = [
        *(["memory rows wait to be remapped: reset the GPU"] if is_pending else []),
        *([f"{errors} uncorrected ECC errors since its driver was loaded"] if errors else []),
        *(["its clocks are slowed by heat or power"] if (slowed or 0) & _SLOWED else []),
    ]
    return GpuHealth(warnings=tuple(warnings))


def _handle(nvml: Any, uuid: str) -> Any:
    return nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")


def _ask(nvml: Any, read: Callable[[], Any]) -> Any:
    """The answer; None where this GPU does not support the question. Raises if it is lost."""
    try:
        return read()
    except AttributeError:  # an older binding has no such function
        return None
    except nvml.NVMLError as error:
        if isinstance(error, nvml.NVMLError_GpuIsLost):
            raise
        return None


class GpuMeter:
    """Memory, power, temperature and clock of one GPU, asked for again and again.

    A GPU that has fallen off the bus may never answer, so a thread asks, and what is told is the
    answer to the call before.

    Args:
        uuid: with or without ``GPU-``; "" for a device that is no GPU.
    """

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._asked: Future[list[float]] | None = None
        self._told: list[float] = []
        self._is_known = bool(uuid)

    def read(self) -> list[float]:
        """GiB in use, watts, degrees Celsius, MHz of the multiprocessors; 0 for an unknown one.

        Empty where nothing is known.
        """
        if self._asked is not None and self._asked.done():
            self._told = [] if self._asked.exception() else self._asked.result()
            self._is_known = bool(self._told)
            self._asked = None
        if self._is_known and self._asked is None:
            self._asked = in_thread(partial(_use, self._uuid), "gpu meter")
        return self._told


def _use(uuid: str) -> list[float]:
    with library() as nvml:
        if nvml is None:
            return []
        gpu = _handle(nvml, uuid)
        reads: tuple[Callable[[], float], ...] = (
            lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used / 2**30,
            lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
            lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
            lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
        )
        return [float(_ask(nvml, read) or 0) for read in reads]
