"""Which device is told to be at fault, and by what."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from runner.health.nvml import GpuHealth, GpuMeter, gpu_health
from runner.health.rank_checks import DeviceReport, check_devices, faulty_device
from runner.health.root_cause import is_hardware

WELL = DeviceReport(host="n1", kind="H200 13.0", bits=["a", "a"], wrong_sums=0)
OTHER = replace(WELL, bits=["b", "b"], host="n2")


@pytest.mark.parametrize(
    ("reports", "ranks", "words"),
    [
        ([WELL] * 4, None, ""),
        ([WELL, replace(OTHER, kind="A100 13.0"), WELL], None, ""),
        ([WELL, OTHER, WELL], (1,), "rank 1 on n2: its device gives other bits"),
        ([WELL, OTHER], (), "it is unknown"),
        ([WELL, WELL, OTHER, OTHER], (), "it is unknown"),
        ([WELL, replace(OTHER, bits=["a", "b"])], (1,), "rank 1 on n2: its device gives other"),
        ([WELL, WELL, replace(OTHER, broken="NVML: GPU is lost")], (2,), "n2: NVML: GPU is lost"),
        ([replace(WELL, wrong_sums=3)] * 2, (), "ranks 0 and 1: an all-reduce of known numbers"),
        ([replace(WELL, warnings=("hot",))] * 2, None, ""),
    ],
)
def test_who_is_at_fault(
    reports: list[DeviceReport], ranks: tuple[int, ...] | None, words: str
) -> None:
    fault = faulty_device(reports)
    assert (fault.ranks if fault else None) == ranks
    if fault:
        assert words in fault.reason
        line = fault.incident(step=3, incarnation=2)
        assert line.detail["cause"] == "hardware"
        assert bool(line.detail["host"]) == bool(fault.ranks), "a node is left out by its name only"


class OneRank:
    rank, world_size = 0, 1

    def all_reduce(self, packed: torch.Tensor) -> None:
        pass

    def gather(self, value: Any) -> list[Any]:
        return [value]


@pytest.mark.parametrize("adds", [0.0, 1.0])
def test_a_sum_is_compared_with_the_right_one(adds: float) -> None:
    class Ranks(OneRank):
        def all_reduce(self, packed: torch.Tensor) -> None:
            packed[5] += adds

    fault = check_devices(torch.device("cpu"), Ranks(), print)  # type: ignore[arg-type]
    assert (fault is not None) == bool(adds)


class NVMLError(Exception):
    pass


class Lost(NVMLError):
    pass


def library(**answers: Any) -> ModuleType:
    """In the shape of nvidia-ml-py: an answer that is an exception is raised."""
    made = ModuleType("pynvml")

    def answering(answer: Any) -> Any:
        def ask(*_: Any) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

        return ask

    told = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetHandleByUUID": "handle",
        "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
        "nvmlDeviceGetTotalEccErrors": 0,
        "nvmlDeviceGetCurrentClocksEventReasons": 0,
    } | answers
    for name, answer in told.items():
        setattr(made, name, answering(answer))
    made.NVMLError, made.NVMLError_GpuIsLost = NVMLError, Lost  # type: ignore[attr-defined]
    made.NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1  # type: ignore[attr-defined]
    made.NVML_VOLATILE_ECC = 0  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({}, GpuHealth()),
        ({"nvmlInit": NVMLError("no driver")}, None),
        ({"nvmlDeviceGetHandleByUUID": NVMLError("not found")}, None),
        ({"nvmlDeviceGetHandleByUUID": Lost()}, GpuHealth(broken="NVML: GPU is lost")),
        ({"nvmlDeviceGetRemappedRows": Lost()}, GpuHealth(broken="NVML: GPU is lost")),
        ({"nvmlDeviceGetRemappedRows": NVMLError("not supported")}, GpuHealth()),
        (
            {"nvmlDeviceGetTotalEccErrors": 2, "nvmlDeviceGetCurrentClocksEventReasons": 0x44},
            GpuHealth(
                warnings=(
                    "2 uncorrected ECC errors since its driver was loaded",
                    "its clocks are slowed by heat or power",
                )
            ),
        ),
        (
            {"nvmlDeviceGetRemappedRows": (0, 1, 1, 0)},
            GpuHealth(warnings=("memory rows wait to be remapped: reset the GPU",)),
        ),
    ],
)
def test_what_nvml_tells(
    answers: dict[str, Any], expected: GpuHealth | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library(**answers))
    assert gpu_health("0000") == expected


def test_a_gpu_that_does_not_answer_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told is the answer to the call before; questions that it does not know are 0."""
    answers = threading.Event()

    def memory(_: Any) -> Any:
        assert answers.wait(60)
        return SimpleNamespace(used=3 << 30)

    made = library(nvmlDeviceGetPowerUsage=NVMLError("not supported"), nvmlDeviceGetTemperature=61)
    made.nvmlDeviceGetMemoryInfo, made.nvmlDeviceGetClockInfo = memory, lambda *_: 1980  # type: ignore[attr-defined]
    made.NVML_TEMPERATURE_GPU = made.NVML_CLOCK_SM = 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", made)
    meter = GpuMeter("0000")
    assert meter.read() == meter.read() == []
    answers.set()
    limit = time.monotonic() + 60
    while not (told := meter.read()) and time.monotonic() < limit:
        time.sleep(0.01)
    assert told == [3.0, 0.0, 61.0, 1980.0]
    monkeypatch.setitem(sys.modules, "pynvml", None)
    absent = GpuMeter("0000")
    assert absent.read() == GpuMeter("").read() == []


def test_an_older_binding_lacks_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    old = library(nvmlDeviceGetRemappedRows=(0, 0, 1, 0))
    del old.nvmlDeviceGetCurrentClocksEventReasons
    monkeypatch.setitem(sys.modules, "pynvml", old)
    told = gpu_health("0000")
    assert told == GpuHealth(warnings=("memory rows wait to be remapped: reset the GPU",))


def test_worn_out_memory_is_the_hardwares(monkeypatch: pytest.MonkeyPatch) -> None:
    worn = library(nvmlDeviceGetRemappedRows=(0, 9, 0, 1))
    monkeypatch.setitem(sys.modules, "pynvml", worn)
    told = gpu_health("GPU-0000")
    assert told is not None and is_hardware(told.broken)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_health("0000") is None
