"""Two training loops take turns on the same ranks, some steps each.

Whatever disturbs the machine then disturbs both, and the ratio is taken turn by turn. In every
other turn the passenger comes first: what a block leaves behind (a warm cache, a hot chip) does not
always fall on the same side.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from runner.distributed.device import find_device
from runner.distributed.env import RankEnv, place_from
from runner.distributed.rendezvous import end_group, start_group, take_device
from runner.health.leave import leave
from runner.system.error import ConfigError

Pair = tuple[float, float]
_KEPT_LOSSES = 20


def own_device(wanted: str, place: RankEnv) -> torch.device:
    """Choose the device and make it this process's own; see :func:`find_device`.

    Raises:
        ConfigError: it does not exist, or there are too few GPUs.
    """
    found = find_device(wanted, place, os.environ)
    if found.problem:
        raise ConfigError(found.problem)
    return take_device(found)


@contextmanager
def on_this_rank() -> Iterator[tuple[RankEnv, torch.device]]:
    """Within the group of all ranks; the process ends with it."""
    place = place_from(os.environ)
    device = own_device("auto", place)
    start_group(place, device, timeout_seconds=300)
    try:
        yield place, device
    except Exception:
        traceback.print_exc()
        leave(1)  # an orderly exit would wait for loaders
    end_group()
    leave(0)


class Clock:
    """Seconds of a stretch of work on this rank: CUDA events where there is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._began = 0.0
        if self._cuda:
            self._first = torch.cuda.Event(enable_timing=True)
            self._last = torch.cuda.Event(enable_timing=True)

    def start(self) -> None:
        """Wait for the other ranks, then start."""
        if self._cuda:
            torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()
        if self._cuda:
            torch.cuda.synchronize()
            self._first.record()
        self._began = time.perf_counter()

    def stop(self) -> float:
        """Seconds since :meth:`start`; waits for the device, once."""
        if not self._cuda:
            return time.perf_counter() - self._began
        self._last.record()
        self._last.synchronize()
        return self._first.elapsed_time(self._last) / 1e3


class Turns:
    """Blocks of ``block`` steps of the driving loop and of ``passenger``: D P, P D, D P, ...

    Args:
        passenger: takes one step.
        settle: called at the end of each of the passenger's blocks, within its time.
        warmup, pairs: blocks not counted, blocks counted.
        check: called with :meth:`losses` when the warm-up is over, before a block is counted;
            on all ranks.
    """

    def __init__(
        self,
        passenger: Callable[[], object],
        *,
        device: torch.device,
        block: int,
        warmup: int,
        pairs: int,
        settle: Callable[[], object] = lambda: None,
        check: Callable[[list[float]], object] = lambda losses: None,
    ) -> None:
        self._passenger = passenger
        self._settle = settle
        self._check = check
        self._device = device
        self._clock = Clock(device)
        self._block, self._warmup, self._pairs = block, warmup, pairs
        self._taken: list[Pair] = []
        self._losses: list[torch.Tensor] = []
        self._steps_of_block = 0
        self._has_begun = False
        self._ahead: float | None = None  # the passenger's block of the next pair

    def drive(self, step: Callable[[], object]) -> None:
        """Take the driver's steps until all is measured; they may return its loss."""
        while not self.after_step(step()):
            pass

    def after_step(self, loss: object = None) -> bool:
        """The driver has taken a step; True when all is measured and it must end.

        Args:
            loss: its mean cross-entropy on this rank; the first ones are kept.
        """
        if isinstance(loss, torch.Tensor) and len(self._losses) < _KEPT_LOSSES:
            self._losses.append(loss.detach().float().reshape(()))
        if not self._has_begun:  # the first step makes optimizer state and starts loaders
            self._has_begun = True
            self._clock.start()
            return False
        self._steps_of_block += 1
        if self._steps_of_block < self._block:
            return False
        self._steps_of_block = 0
        driver = self._clock.stop()
        if self._ahead is None:
            self._taken.append((driver, self._passengers_block()))
            if len(self._taken) < self._warmup + self._pairs:
                self._ahead = self._passengers_block()
        else:
            self._taken.append((driver, self._ahead))
            self._ahead = None
        if len(self._taken) == self._warmup:
            self._check(self.losses())
        if len(self._taken) == self._warmup + self._pairs:
            return True
        self._clock.start()
        return False

    def _passengers_block(self) -> float:
        self._clock.start()
        for _ in range(self._block):
            self._passenger()
        self._settle()
        return self._clock.stop()

    def pairs(self) -> list[Pair]:
        """(driver, passenger) seconds of each counted block, of the slowest rank. Collective."""
        table = torch.tensor(self._taken[self._warmup :], dtype=torch.float64).to(self._device)
        dist.all_reduce(table, op=dist.ReduceOp.MAX)
        return [(float(a), float(b)) for a, b in table.tolist()]

    def losses(self) -> list[float]:
        """The driver's first losses, averaged over ranks. Collective."""
        if not self._losses:
            return []
        mean = torch.stack(self._losses).to(self._device).double()
        dist.all_reduce(mean)
        return [float(value) / dist.get_world_size() for value in mean.tolist()]
