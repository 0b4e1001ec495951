"""Trains a network of your own on data of your own: bars across, down and diagonal in noise.

torchrun --nproc-per-node=2 examples/own_model.py out=runs/pictures steps=100
"""

import sys

import numpy as np
from torch import Tensor, nn, ones_like
from torch.nn.functional import cross_entropy

from runner.__main__ import main


class Pictures:  # the same index gives the same sample
    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        picture = np.random.default_rng(index).normal(0, 0.5, (12, 12)).astype(np.float32)
        at = np.arange(12)
        picture[((6, at), (at, 6), (at, at))[index % 3]] += 1
        return {"picture": picture, "kind": np.array(index % 3)}


class Net(nn.Sequential):
    def __init__(self, width: int = 32) -> None:
        super().__init__(nn.Linear(144, width), nn.ReLU(), nn.Linear(width, 3))

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """A sum and a count a sample: the step divides by the sum of all counts."""
        sums = cross_entropy(self(batch["picture"].flatten(1)), batch["kind"], reduction="none")
        return sums, ones_like(sums)


if __name__ == "__main__":
    own = "model._target_=own_model.Net", "data._target_=own_model.Pictures"
    sys.exit(main([*own, *sys.argv[1:]]))
