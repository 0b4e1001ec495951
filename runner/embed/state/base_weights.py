"""The quantised weights under a loop's adapters: in no checkpoint, held by a digest.

The digest is of what the weights hold, not of files: the same base in other files is the same, and
the same files quantised otherwise are another.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from runner.distributed.agreement import Ranks
from runner.embed.state.stages import Stages
from runner.model.quantised import digest_of, inexact, keep_layout, quantised_weights
from runner.system.error import ConfigError

_log = logging.getLogger(__name__)
_NONE = "none"  # the digest of no quantised weight


class BaseWeights:
    """The quantised weights of a loop's models. Making it is collective.

    Args:
        modules: by name.

    Attributes:
        tensors: by name.
        digest: of all stages' weights.

    Raises:
        ConfigError: a weight cannot be held so, or the ranks have other ones.
    """

    def __init__(
        self, modules: Sequence[tuple[str, nn.Module]], ranks: Ranks, stages: Stages
    ) -> None:
        def look() -> dict[str, str]:
            self._weights = quantised_weights(modules)
            keep_layout(self._weights.values())
            return {name: weight.digest(name) for name, weight in self._weights.items()}

        own = ranks.all_or_none("looking at quantised weights", look)
        self.tensors: dict[str, Tensor] = {n: w.tensor for n, w in self._weights.items()}
        by_rank = ranks.gather(digest_of(own) if own else _NONE)
        for rank in stages.own.ranks:
            first = stages.own.ranks[0]
            if by_rank[rank] != by_rank[first]:
                raise ConfigError(
                    f"the quantised weights have digest {by_rank[first]} on rank {first}, "
                    f"{by_rank[rank]} on rank {rank}; load the same files on all ranks, quantised "
                    "with the same settings and library"
                )
        distinct = list(dict.fromkeys(by_rank[ranks_of[0]] for ranks_of in stages.members))
        self.digest = distinct[0] if len(distinct) == 1 else digest_of(dict.fromkeys(distinct, ""))
        if ranks.rank == 0:
            for sentence in inexact(self._weights):
                _log.warning("%s", sentence)

    def require_unchanged(self) -> None:
        """
        Raises:
            ConfigError: the loop has changed a weight, which no checkpoint would have.
        """
        for name, weight in self._weights.items():
            if not weight.is_unchanged:
                raise ConfigError(
                    f"the loop has changed {name!r}, a quantised weight, and no checkpoint holds "
                    "it (merging adapters into quantised weights rounds them, and cannot be "
                    "undone); merge after training, into a copy of the model"
                )

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint holds of them."""
        return {"digest": self.digest}

    def require_same(self, stored: Mapping[str, Any]) -> None:
        """
        Raises:
            ConfigError: a checkpoint was made on other weights.
        """
        there = stored.get("digest", _NONE)
        if there != self.digest:
            raise ConfigError(
                f"the run in out was trained on another base: its quantised weights have digest "
                f"{there}, those of this model {self.digest}. Load the model that the run began "
                "with, quantised with the same settings and the same version of the library, or "
                "choose another out"
            )
