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
from runner.model.quantised import (
    NO_BASE,
    digest_of,
    inexact,
    keep_layout,
    quantised_weights,
    require_one_base,
    require_same_base,
)
from runner.system.error import ConfigError

_log = logging.getLogger(__name__)


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
        by_rank = ranks.gather(digest_of(own) if own else NO_BASE)
        for members in stages.members:
            require_one_base(by_rank, members)
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
        require_same_base(stored.get("digest", NO_BASE), self.digest)
