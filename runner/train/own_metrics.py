"""Metrics of a user's own: sums and counts by name, reduced with a step's or evaluation's numbers.

A name has its place in the packed vector from the step after the first that has it; that first step
costs one more collective, in which the ranks agree on the name. Equal on all ranks: which steps
have a name, and so what is packed, raised and written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from runner.distributed.agreement import Ranks
from runner.policy.columns import EVALUATED, is_ours
from runner.system.error import ConfigError

# By name: sum and count, FP64 scalars of this rank.
Sums = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
_NAME = re.compile(r"[A-Za-z][\w.-]*(/[\w.-]+)*")
_MOST_NAMES, _LONGEST = 256, 100


def check_name(name: object, where: str, *, is_evaluated: bool) -> None:
    """
    Args:
        is_evaluated: whether ``eval_`` and the name is the metric in an evaluation.

    Raises:
        ConfigError: it cannot be the name of a metric.
    """
    if not isinstance(name, str) or len(name) > _LONGEST or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{where}: {name!r:.120} is no name of a metric; give up to {_LONGEST} letters, "
            "digits, '_', '.', '-' and '/', a letter first"
        )
    if is_ours(name) or (is_evaluated and name.startswith(EVALUATED)):
        raise ConfigError(
            f"{where}: a metric cannot be called {name!r}: columns of metrics.jsonl are called so "
            f"already; give it another name, such as {'own_' + name.replace('/', '_')!r}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMetrics:
    """This rank's metrics of one step, and the names that had places when they were packed.

    Attributes:
        flags: whether there are new names, and whether each known one was given.
        sums: of the known ones, each with its count, FP64 on the device. To be summed over ranks
            behind the flags, which lie on the host: they go to the device with the step's others.
    """

    flags: tuple[float, ...]
    sums: torch.Tensor
    names: tuple[str, ...]
    own: Sums
    _agreed: MetricNames

    @property
    def length(self) -> int:
        return 1 + 3 * len(self.names)

    def read(self, totals: Sequence[float]) -> dict[str, float]:
        """The metrics by name: sum by count over all ranks; none that counted nothing.

        Collective where a rank has a new name, or some ranks lack one.

        Args:
            totals: :attr:`flags` and :attr:`sums`, summed over the ranks.

        Raises:
            ConfigError: the ranks give different names, or one that cannot be; on all ranks.
        """
        num = len(self.names)
        is_new, given, sums = totals[0] > 0, totals[1 : 1 + num], totals[1 + num :]
        if is_new or not self._agreed.are_complete(given):
            return self._agreed.agree(self.own)
        return _means(zip(self.names, sums[::2], sums[1::2], strict=True))


class MetricNames:
    """The names that all ranks have agreed on since this start.

    Args:
        where: who gives the metrics, for messages.
        are_evaluated: whether ``eval_`` and a name is kept for the metric in an evaluation.
        groups: of samples, whose metrics are called ``NAME/GROUP``.

    Attributes:
        names: those agreed on.
    """

    def __init__(
        self, ranks: Ranks, where: str, *, are_evaluated: bool, groups: Sequence[str] = ()
    ) -> None:
        self._ranks = ranks
        self._where = where
        self._are_evaluated = are_evaluated
        self._groups = groups
        self.names: tuple[str, ...] = ()

    def pack(self, own: Sums, device: torch.device) -> PackedMetrics:
        """Pack this rank's metrics. Waits for nothing."""
        names = self.names
        flags = (float(bool(own.keys() - set(names))), *(float(name in own) for name in names))
        sums = torch.zeros(0, dtype=torch.float64, device=device)
        if names:
            nothing = torch.zeros((), dtype=torch.float64, device=device)
            pairs = [own.get(name, (nothing, nothing)) for name in names]
            sums = torch.stack([one for pair in pairs for one in pair])
        return PackedMetrics(flags=flags, sums=sums, names=names, own=own, _agreed=self)

    def are_complete(self, given: Sequence[float]) -> bool:
        """Whether each name was given by all ranks or by none."""
        return all(count in (0.0, self._ranks.world_size) for count in given)

    def agree(self, own: Sums) -> dict[str, float]:
        """Agree on the names of one step; returns its metrics. Collective.

        Raises:
            ConfigError: see :meth:`PackedMetrics.read`.
        """
        by_rank = self._ranks.gather(
            {name: [float(one) for one in pair] for name, pair in own.items()}
        )
        first, *others = by_rank
        for rank, other in enumerate(others, start=1):
            for name in sorted(first.keys() ^ other.keys()):
                has, lacks = (0, rank) if name in first else (rank, 0)
                raise ConfigError(
                    f"{self._where}: rank {has} gives the metric {name!r} and rank {lacks} does "
                    "not, in the same step; give the same names on all ranks, one that has "
                    "nothing to count as (0, 0)"
                )
        names = sorted({*self.names, *first})
        by_group = {f"{name}/{group}" for name in names for group in self._groups}
        for name in sorted(first.keys() - by_group):
            check_name(name, self._where, is_evaluated=self._are_evaluated)
        if len(names) - len(by_group) > _MOST_NAMES:
            raise ConfigError(
                f"{self._where}: {len(names)} metrics by different names, such as {names[-1]!r}; "
                f"at most {_MOST_NAMES}; leave numbers of steps and samples out of names"
            )
        self.names = tuple(names)
        sums = (
            (name, *(sum(of_rank[name][at] for of_rank in by_rank) for at in (0, 1)))
            for name in sorted(first)
        )
        return _means(sums)


def _means(sums: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    return {name: total / count for name, total, count in sums if count}
