"""The initial weights of a decoder that is not sharded, as the engines have them."""

from __future__ import annotations

import torch

from runner.model.decoder import Decoder
from runner.model.initial import initial_range, initial_rule


def set_initial_weights(decoder: Decoder, *, seed: int) -> None:
    """Write every initial weight of an unsharded decoder, in its own dtype, on its device."""
    for name, parameter in decoder.named_parameters():
        rule = initial_rule(name, decoder.shape)
        values = initial_range(
            name=name,
            shape=tuple(parameter.shape),
            std=rule.std,
            ones=rule.ones,
            seed=seed,
            start=0,
            count=parameter.numel(),
        )
        with torch.no_grad():
            parameter.copy_(values.view(parameter.shape))
