"""Which ranks hold which stage of a pipeline, and what the stages' states are together.

Without a pipeline all ranks are one stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from runner.distributed.agreement import Ranks
from runner.system.error import ConfigError

Pipeline = DeviceMesh | dist.ProcessGroup


@dataclass(frozen=True, slots=True)
class Holders:
    """Ranks that hold the same, and their group; None: all ranks, or one."""

    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None


class Stages:
    """The stages of a pipeline, of which each rank holds one. Making it is collective.

    Attributes:
        count: how many stages there are.
        members: the ranks of each stage.
        own: the ranks of this rank's stage, and their group.
        everybody: all ranks.

    Args:
        pipeline: a mesh of one dimension, or a group, of the ranks that a sample passes; this
            rank's place in it is the number of its stage. None: there is no pipeline.

    Raises:
        ConfigError: it is no such mesh or group, or the ranks' pipelines differ in length.
    """

    def __init__(self, ranks: Ranks, pipeline: Pipeline | None = None) -> None:
        self._ranks = ranks
        self.everybody = self.own = Holders(tuple(range(ranks.world_size)), None)
        self.members, self.number = [self.everybody.ranks], 0
        if pipeline is not None:
            self._learn(pipeline)

    def _learn(self, pipeline: Pipeline) -> None:
        def place() -> tuple[int, int]:
            is_line = isinstance(pipeline, DeviceMesh) and pipeline.ndim == 1
            if not is_line and not isinstance(pipeline, dist.ProcessGroup):
                raise ConfigError(
                    f"pipeline={str(pipeline)[:80]}: must be a DeviceMesh of one dimension "
                    '(mesh["pp"]) or a ProcessGroup, of the ranks that a sample passes'
                )
            group: Any = pipeline.get_group() if isinstance(pipeline, DeviceMesh) else pipeline
            return dist.get_rank(group), dist.get_world_size(group)

        by_rank = self._ranks.gather(self._ranks.all_or_none("reading pipeline=", place))
        if len({length for _, length in by_rank}) > 1:
            raise ConfigError(
                f"pipeline=: the ranks' pipelines have {[length for _, length in by_rank]} ranks; "
                "all must have equally many stages"
            )
        self.number, count = by_rank[self._ranks.rank]
        self.members = [
            tuple(rank for rank, (number, _) in enumerate(by_rank) if number == stage)
            for stage in range(count)
        ]
        # Every rank takes part in the making of each group.
        groups = [
            dist.new_group(list(ranks)) if 1 < len(ranks) < len(by_rank) else None
            for ranks in self.members
        ]
        self.own = Holders(self.members[self.number], groups[self.number])

    @property
    def count(self) -> int:
        return len(self.members)

    @property
    def index(self) -> int:
        """This rank's place among the ranks of its stage."""
        return self.own.ranks.index(self._ranks.rank)

    def gather(self, value: Any) -> list[Any]:
        """The JSON value of each stage's first rank, on every rank. Collective."""
        if self.count == 1:
            return [value]
        by_rank = self._ranks.gather(None if self.index else value)
        return [by_rank[ranks[0]] for ranks in self.members]

    def distinct(self, names: Iterable[str]) -> dict[str, str]:
        """Each name as it is on all stages: one that others have as well gets the stage's number.

        Collective.
        """
        own = list(names)
        others = self.gather(own)
        others.pop(self.number)
        taken = {name for stage in others for name in stage}
        return {n: f"stage{self.number}.{n}".rstrip(".") if n in taken else n for n in own}

    def union(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What any stage has, by name. Collective."""
        return {name: value for stage in self.gather(values) for name, value in stage.items()}


def merged(stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of all stages' optimizers and modules, as if one rank had them all.

    Args:
        stages: of each what :meth:`LoopState.capture` returns for one rank.

    Raises:
        ConfigError: an optimizer has other options on another stage.
    """
    first = stages[0]
    optimizers = []
    for number, of_first in enumerate(first["optimizers"]):
        of_stages = [stage["optimizers"][number] for stage in stages]
        for other in of_stages:
            if other["groups"] != of_first["groups"]:
                raise ConfigError(
                    f"Guard: optimizer {number} has the options {str(of_first['groups'])[:120]} on "
                    f"one stage of the pipeline, {str(other['groups'])[:120]} on another; give the "
                    "groups of all stages the same"
                )
        lists = {
            key: [
                [name for of in of_stages for name in of[key][group]]
                for group in range(len(of_first[key]))
            ]
            for key in ("members", "first")
        }
        states = _union(of["states"] for of in of_stages)
        optimizers.append({"states": states, "groups": of_first["groups"], **lists})
    return {
        **first,
        "optimizers": optimizers,
        "modes": {
            key: sorted(name for stage in stages for name in stage["modes"][key])
            for key in first["modes"]
        },
        "modules": {
            key: _union(stage["modules"][key] for stage in stages) for key in first["modules"]
        },
    }


def _union(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}
