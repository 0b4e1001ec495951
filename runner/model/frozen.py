"""Selects the parameters that are not trained."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from torch import nn

from runner.model.decoder import Decoder
from runner.system.error import ConfigError


def frozen_names(names: Collection[str], patterns: Sequence[str]) -> set[str]:
    """The names that match one of the regular expressions (``re.search``).

    Raises:
        ConfigError: a pattern is invalid or matches no name, or nothing is left to train.
    """
    frozen: set[str] = set()
    for pattern in patterns:
        try:
            matching = {name for name in names if re.search(pattern, name)}
        except re.error as error:
            raise ConfigError(
                f"compute.frozen: {pattern!r} is no regular expression: {error}"
            ) from None
        if not matching:
            raise ConfigError(
                f"compute.frozen: {pattern!r} is found in no parameter's name. There are: "
                + ", ".join(sorted(names))
            )
        frozen |= matching
    if frozen and len(frozen) == len(names):
        raise ConfigError(
            f"compute.frozen={list(patterns)}: freezes all {len(names)} parameters; leave some to "
            "train"
        )
    return frozen


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Switch off gradients of the parameters from :func:`frozen_names`; raises as it does."""
    parameters = dict(model.named_parameters())
    for name in frozen_names(parameters, patterns):
        parameters[name].requires_grad_(False)


def num_frozen_multiplied(model: Decoder) -> int:
    """Number of frozen elements in matrices of products, without a mere embedding look-up."""
    looked_up = set() if model.head is None else {"embedding.weight"}
    return sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and parameter.dim() >= 2 and name not in looked_up
    )
