"""The training loss of each source of a mixture, summed over ranks with the step's other
numbers."""

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
        order: order of the sources; None without sources, so nothing is summed.
        own_positions: stream positions of this rank's rows, None for padding.
        to_device: moves numbers to the device as FP64, without waiting.
    """

    def __init__(
        self, order: MixtureOrder | None, own_positions: OwnPositions, to_device: ToDevice
    ) -> None:
        self._order = order
        self._own_positions = own_positions
        self._to_device = to_device
        self.num = 0 if order is None else len(order.names)

    def packed(self, plan: BatchPlan, sequences: Sequences) -> list[torch.Tensor]:
        """This rank's sums: each source's loss, then its number of terms; FP64 ``[2 * num]``.

        In a list, which is empty without sources. Does not wait.
        """
        if self._order is None:
            return []
        sources = self._order.sources(plan.indices).tolist()
        source_of = dict(zip(plan.positions.tolist(), sources, strict=True))
        rows = [-1 if at is None else source_of.get(at, -1) for at in self._own_positions(plan)]
        of_row = self._to_device([float(source) for source in rows])
        values = torch.stack([torch.cat(sequences.losses), torch.cat(sequences.counts)]).double()
        numbers = torch.arange(self.num, dtype=torch.float64, device=values.device)
        # Selected, not multiplied by a mask: a NaN row must affect its own source only.
        chosen = torch.where(of_row == numbers[:, None, None], values, 0.0)
        return [chosen.sum(dim=2).T.reshape(-1)]

    def read(self, sums: list[float]) -> tuple[tuple[float, float], ...]:
        """(loss, count) of each source, from the sums over all ranks."""
        return tuple(zip(sums[: self.num], sums[self.num :], strict=True))
