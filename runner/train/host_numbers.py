"""Numbers on their way from the device to the host."""

from __future__ import annotations

import torch


class HostNumbers:
    """A tensor that is copied to the host; nothing waits for it until it is read.

    Args:
        numbers: a vector on the device; on a CPU it is read as it is.
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        self._on_host = numbers
        self._arrived: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._on_host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._on_host.copy_(numbers, non_blocking=True)
            # Blocking: waiting leaves the core to hashing threads.
            self._arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._arrived.record()

    def read(self) -> list[float]:
        """The numbers. Waits until the device has finished what they depend on."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [float(value) for value in self._on_host.tolist()]
