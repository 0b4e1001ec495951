"""Checks that a loop calls the guard after backward and before its weights change.

An update made before the call could not be refused. In the first steps of a start values are
compared, later torch's version counters of in-place changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from runner.distributed.agreement import Ranks
from runner.embed.state.geometry import local
from runner.system.error import ConfigError

_COMPARED = 3  # first steps, in which weights and gradients are compared by value
_TOLERANCE = 1e-6  # of a gradient's norm between ranks; where it was reduced it is the same


class LoopOrder:
    """Watches the weights between a step's first batch and ``guard.ok``.

    Args:
        parameters: of the models and optimizers, by name.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], ranks: Ranks) -> None:
        self._parameters = parameters
        self._ranks = ranks
        self._num_begun = 0
        self._versions: list[int] = []
        self._values: list[float | None] | None = None

    @property
    def is_compared(self) -> bool:
        """Whether this is one of the first steps."""
        return 0 < self._num_begun <= _COMPARED

    def begin(self) -> None:
        """Remember the weights as a step's first batch finds them."""
        self._num_begun += 1
        self._versions = self._current_versions()
        self._values = self._current_values() if self.is_compared else None

    def require_unchanged(self) -> None:
        """
        Raises:
            ConfigError: a weight has changed since :meth:`begin`.
        """
        names = list(self._parameters)
        now = self._current_versions()
        changed = [n for n, a, b in zip(names, self._versions, now, strict=True) if a != b]
        if not changed and self._values is not None:
            values = self._current_values()
            changed = [n for n, a, b in zip(names, self._values, values, strict=True) if a != b]
        if changed:
            raise ConfigError(
                f"guard.ok: {changed[0]!r}{_others(changed)} changed between the batch and the "
                "question, so that a bad step could not be refused. Call guard.ok after backward "
                "and before whatever changes weights: an optimizer's step (also one in a hook of "
                "backward, or of an optimizer that perturbs weights first), an average of weights "
                "in forward (update it under `if guard.ok(loss)`)"
            )

    def require_alike(self, square: float) -> None:
        """Plain weights and their gradients are the same on all ranks. Collective.

        Args:
            square: of the norm of this rank's gradients of plain tensors.

        Raises:
            ConfigError: they differ, so that the ranks train different models.
        """
        plain = [
            value
            for value, p in zip(self._values or [], self._parameters.values(), strict=False)
            if not isinstance(p, DTensor)
        ]
        weights = None if None in plain else math.fsum(value for value in plain if value)
        by_rank = self._ranks.gather([weights, _word(square)])
        for what, numbers in zip(("weights", "gradients"), zip(*by_rank, strict=True), strict=True):
            known = [number for number in numbers if number is not None]
            if len(known) == len(numbers) and max(known) - min(known) > _TOLERANCE * max(known):
                raise ConfigError(
                    f"guard.ok: the ranks' {what} differ (their norms: "
                    f"{', '.join(f'{number:.6g}' for number in known[:8])}): wrap the model in "
                    "DistributedDataParallel or fully_shard, and let gradients be reduced before "
                    "guard.ok is called"
                )

    def _current_versions(self) -> list[int]:
        return [parameter._version for parameter in self._parameters.values()]

    def _current_values(self) -> list[float | None]:
        """A number for each parameter that changes with its values."""
        with torch.no_grad():
            parts = [local(parameter) for parameter in self._parameters.values()]
            sums = [_checksum(part) for part in parts]
            return [_word(float(value)) for value in sums]


def _checksum(part: torch.Tensor) -> torch.Tensor:
    if part.is_complex():
        part = torch.view_as_real(part)
    flat = part.reshape(-1)
    wide = flat.double() if flat.numel() < 1 << 16 else flat.float()
    norm: torch.Tensor = torch.linalg.vector_norm(wide)
    return norm


def _word(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _others(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
