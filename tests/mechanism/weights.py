"""The initial weights of a decoder that is not sharded, as the engines have them."""

from __future__ import annotations

import torch

from runner.model.blueprint import initial_range, initial_std
from runner.model.decoder import Decoder


def set_initial_weights(decoder: Decoder, *, seed: int) -> None:
    """Write every initial weight of an unsharded decoder, in its own dtype, on its device."""
    for name, parameter in decoder.named_parameters():
        std, size = initial_std(name, decoder.shape), parameter.numel()
        values = initial_range(name, parameter.shape, std, seed=seed, start=0, count=size)
        with torch.no_grad():
            parameter.copy_(values.view(parameter.shape))
