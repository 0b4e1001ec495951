"""Tests one GPU: matrix products, memory and NVML. A CPU is not tested."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from runner.distributed.device import device_name
from runner.health.nvml import gpu_health
from runner.startup.model_check import Check
from runner.startup.preflight.bandwidth import bandwidth
from runner.startup.preflight.subject import Subject, not_tried

_SIZE = 8192
_SECONDS = 1.0
_COPIED_BYTES = 1 << 30


def hardware(subject: Subject) -> Iterator[Check]:
    """Test the GPU that is used, and the links between those of this machine."""
    if subject.device.type != "cuda":
        yield not_tried("the GPU", "there is none, or parallel.device=cpu")
    else:
        yield _products(subject.device)
        yield _memory(subject.device)
        yield _told(subject.device)
    yield bandwidth(subject)


def _products(device: torch.device) -> Check:
    torch.manual_seed(1)
    one, other = (torch.randn(_SIZE, _SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    first = one @ other
    torch.cuda.synchronize(device)
    began, count, is_same = time.monotonic(), 0, True
    while time.monotonic() - began < _SECONDS:
        again = one @ other
        torch.cuda.synchronize(device)
        count += 1
    seconds = (time.monotonic() - began) / count
    is_same = bool(torch.equal(first, again))
    speed = 2 * _SIZE**3 / seconds / 1e12
    return Check(
        name="products of the GPU",
        holds=is_same,
        found=f"{torch.cuda.get_device_name(device)}: {speed:.0f} TFLOP/s in BF16"
        + ("" if is_same else "; the same product gave other bits"),
        remedy="a device that computes otherwise each time must not be trained on",
    )


def _memory(device: torch.device) -> Check:
    source = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    torch.cuda.synchronize(device)
    began = time.monotonic()
    for _ in range(10):
        target.copy_(source)
    torch.cuda.synchronize(device)
    speed = 10 * 2 * _COPIED_BYTES / (time.monotonic() - began) / 1e9
    return Check(name="memory of the GPU", holds=True, found=f"{speed:.0f} GB/s in a copy")


def _told(device: torch.device) -> Check:
    name = "what NVML tells"
    uuid = device_name(device)
    health = gpu_health(uuid) if uuid else None
    if health is None:
        return not_tried(name, "it is not there: pip install 'holdfast-train[nvml]'")
    faults = [health.broken] if health.broken else list(health.warnings)
    return Check(
        name=name,
        holds=not faults,
        found="; ".join(faults) or "no fault and no brake",
        remedy="leave the node out",
        is_warning=not health.broken,
    )
