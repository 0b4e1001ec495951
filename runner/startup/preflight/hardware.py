"""Tests GPUs: products, memory and NVML of one, and the links between those of this machine."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, spawn

from runner.distributed.device import device_name
from runner.health.nvml import gpu_health
from runner.startup.checks import Check, not_tried
from runner.startup.preflight.subject import Subject
from runner.system.error import install_command

_NAME = "bandwidth between GPUs"
_BUFFER_BYTES = 256 << 20
_WARMUP, _REPEATS = 3, 10
_MOST_SECONDS = 60.0
# GB/s of bus bandwidth of eight GPUs over NVLink, as reported for NVIDIA's nccl-tests. A fifth less
# suggests that a link is down.
_USUAL = {"H100 80GB HBM3": 460.0, "A100-SXM4": 230.0}
_LEAST = 0.8
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
        yield _health(subject.device)
    yield bandwidth(subject)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, the mean of ten."""
    for _ in range(_WARMUP):
        run()
    _wait(device)
    began = time.monotonic()
    for _ in range(_REPEATS):
        run()
    _wait(device)
    return (time.monotonic() - began) / _REPEATS


def _products(device: torch.device) -> Check:
    torch.manual_seed(1)
    one, other = (torch.randn(_SIZE, _SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    first = again = one @ other
    _wait(device)
    began, count = time.monotonic(), 0
    while time.monotonic() - began < _SECONDS:
        again = one @ other
        _wait(device)
        count += 1
    speed = 2 * _SIZE**3 * count / (time.monotonic() - began) / 1e12
    is_same = torch.equal(first, again)
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
    speed = 2 * _COPIED_BYTES / _seconds(lambda: target.copy_(source), device) / 1e9
    return Check(name="memory of the GPU", holds=True, found=f"{speed:.0f} GB/s in a copy")


def _health(device: torch.device) -> Check:
    name = "what NVML tells"
    uuid = device_name(device)
    health = gpu_health(uuid) if uuid else None
    if health is None:
        return not_tried(name, f"it is not there: {install_command('nvml')}")
    faults = [health.broken] if health.broken else list(health.warnings)
    return Check(
        name=name,
        holds=not faults,
        found="; ".join(faults) or "no fault and no brake",
        remedy="leave the node out",
        is_warning=not health.broken,
    )


def bandwidth(subject: Subject) -> Check:
    """Sum a buffer over all GPUs of this machine, a process each."""
    number = torch.cuda.device_count() if subject.device.type == "cuda" else 0
    if number < 2:
        return not_tried(_NAME, "there are fewer than two GPUs here; for ranks see docs/scale.md")
    speed = all_reduce_speed("nccl", number, _BUFFER_BYTES)
    return judged(speed, number, torch.cuda.get_device_name(subject.device))


def judged(speed: float | None, number: int, device: str) -> Check:
    """The check of a measured speed in GB/s; None: the processes failed or took too long."""
    if speed is None:
        return Check(
            name=_NAME,
            holds=False,
            found=f"{number} processes did not sum a buffer together within {_MOST_SECONDS:.0f} s",
            remedy="NCCL_DEBUG=INFO shows which link or library; a run would hang as well",
        )
    usual = next((known for name, known in _USUAL.items() if name in device), None)
    compared = "" if usual is None else f"; eight of this kind reach about {usual:.0f}"
    return Check(
        name=_NAME,
        holds=usual is None or speed >= _LEAST * usual,
        found=f"{number} GPUs: {speed:.3g} GB/s in an all-reduce of "
        f"{_BUFFER_BYTES >> 20} MiB{compared}",
        remedy="see nvidia-smi nvlink --status and topo -m: a link may be down, or traffic goes "
        "through the host",
        is_warning=True,
    )


def all_reduce_speed(backend: str, number: int, num_bytes: int) -> float | None:
    """Bus bandwidth in GB/s: 2 (n - 1) / n of the bytes cross each link.

    Returns:
        None where the processes failed, or took longer than a minute.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = (number, backend, num_bytes, folder)
        ranks = spawn(_reduce, arguments, number, join=False, daemon=True)  # type: ignore[no-untyped-call]
        until = time.monotonic() + _MOST_SECONDS
        try:
            while not ranks.join(timeout=1.0):
                if time.monotonic() > until:
                    return None
        except ProcessException:
            return None
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
        seconds = max(float(path.read_text()) for path in Path(folder).glob("seconds-*"))
    return 2 * (number - 1) / number * num_bytes / seconds / 1e9


def _reduce(rank: int, number: int, backend: str, num_bytes: int, folder: str) -> None:
    """In a process of its own: leave the seconds of one all-reduce."""
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = f"file://{folder}/store"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=number)
    buffer = torch.zeros(num_bytes // 4, device=device)
    seconds = _seconds(lambda: dist.all_reduce(buffer), device)
    (Path(folder) / f"seconds-{rank}").write_text(repr(seconds))
    dist.barrier()
    dist.destroy_process_group()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
