"""The training loss of each source of a mixture, as one more part of what ranks sum in a step."""

from __future__ import annotations

from collections.abc import Callable

import torch

from runner.data.cursor import BatchPlan
from runner.data.mixture import MixtureOrder
from runner.engine.protocol import Sequences

OwnPositions = Callable[[BatchPlan], list[int | None]]
ToDevice = Callable[[list[float]], torch.Tensor]


class SourceLosses:
    """
    Args:
        order: None where there are no sources, and so nothing to sum.
        own_positions: stream positions of this rank's rows, None for padding.
        to_device: numbers as FP64, without waiting for the device.
    """

    def __init__(
        self, order: MixtureOrder | None, own_positions: OwnPositions, to_device: ToDevice
    ) -> None:
        self._order = order
        self._own_positions = own_positions
        self._to_device = to_device
        self.num = 0 if order is None else len(order.names)

    def packed(self, plan: BatchPlan, sequences: Sequences) -> list[torch.Tensor]:
        """This rank's sums: the loss of each source, then what it counts; FP64 ``[2 * num]``.

        In a list: none where there are no sources. Waits for nothing.
        """
        if self._order is None:
            return []
        sources = self._order.sources(plan.indices).tolist()
        where = dict(zip(plan.positions.tolist(), sources, strict=True))
        rows = [-1 if at is None else where.get(at, -1) for at in self._own_positions(plan)]
        of_row = self._to_device([float(source) for source in rows])
        values = torch.stack([torch.cat(sequences.losses), torch.cat(sequences.counts)]).double()
        numbers = torch.arange(self.num, dtype=torch.float64, device=values.device)
        # Chosen, not multiplied: a row that is NaN is so in its own source alone.
        chosen = torch.where(of_row == numbers[:, None, None], values, 0.0)
        return [chosen.sum(dim=2).T.reshape(-1)]

    def read(self, sums: list[float]) -> tuple[tuple[float, float], ...]:
        """(loss, count) of each source, of the sums over all ranks."""
        return tuple(zip(sums[: self.num], sums[self.num :], strict=True))
