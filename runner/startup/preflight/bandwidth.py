"""Measures how fast the GPUs of this machine sum a buffer together; skipped with fewer than two."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import torch
import torch.distributed as dist

from runner.startup.model_check import Check
from runner.startup.preflight.subject import Subject, not_tried

_NAME = "bandwidth between GPUs"
_BYTES = 256 << 20
_WARMUP, _REPEATS = 3, 10
_SECONDS = 60.0
# GB/s of bus bandwidth of eight GPUs over NVLink, as reported for NVIDIA's nccl-tests. A fifth less
# suggests that a link is down.
_USUAL = {"H100 80GB HBM3": 460.0, "A100-SXM4": 230.0}
_LEAST = 0.8


def bandwidth(subject: Subject) -> Check:
    """Sum a buffer over all GPUs of this machine, a process each."""
    number = torch.cuda.device_count() if subject.device.type == "cuda" else 0
    if number < 2:
        return not_tried(_NAME, "there are fewer than two GPUs here; for ranks see docs/scale.md")
    speed = all_reduce_speed("nccl", number, _BYTES)
    return judged(speed, number, torch.cuda.get_device_name(subject.device))


def judged(speed: float | None, number: int, device: str) -> Check:
    """The check of a measured speed in GB/s; None: the processes failed or took too long."""
    if speed is None:
        return Check(
            name=_NAME,
            holds=False,
            found=f"{number} processes did not sum a buffer together within {_SECONDS:.0f} s",
            remedy="NCCL_DEBUG=INFO shows which link or library; a run would hang as well",
        )
    usual = next((known for name, known in _USUAL.items() if name in device), None)
    compared = "" if usual is None else f"; eight of this kind reach about {usual:.0f}"
    return Check(
        name=_NAME,
        holds=usual is None or speed >= _LEAST * usual,
        found=f"{number} GPUs: {speed:.3g} GB/s in an all-reduce of {_BYTES >> 20} MiB{compared}",
        remedy="see nvidia-smi nvlink --status and topo -m: a link may be down, or traffic goes "
        "through the host",
        is_warning=True,
    )


def all_reduce_speed(backend: str, number: int, num_bytes: int) -> float | None:
    """Bus bandwidth in GB/s: 2 (n - 1) / n of the bytes cross each link.

    Returns:
        None where the processes failed, or took longer than a minute.
    """
    context = multiprocessing.get_context("spawn")
    results: SimpleQueue[float] = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [
            context.Process(
                target=_reduce, args=(rank, number, backend, num_bytes, store, results), daemon=True
            )
            for rank in range(number)
        ]
        for process in ranks:
            process.start()
        until = time.monotonic() + _SECONDS
        for process in ranks:
            process.join(max(0.0, until - time.monotonic()))
        failed = [process for process in ranks if process.exitcode != 0]
        for process in failed:
            process.kill()
            process.join()
        if failed:
            return None
        seconds = max(results.get() for _ in ranks)
    return 2 * (number - 1) / number * num_bytes / seconds / 1e9


def _reduce(
    rank: int, number: int, backend: str, num_bytes: int, store: str, results: SimpleQueue[float]
) -> None:
    """In a process of its own: put the seconds of one all-reduce."""
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=number)
    buffer = torch.zeros(num_bytes // 4, device=device)
    for _ in range(_WARMUP):
        dist.all_reduce(buffer)
    _wait(device)
    began = time.monotonic()
    for _ in range(_REPEATS):
        dist.all_reduce(buffer)
    _wait(device)
    results.put((time.monotonic() - began) / _REPEATS)
    dist.barrier()
    dist.destroy_process_group()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
