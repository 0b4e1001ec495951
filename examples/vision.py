"""A small ResNet on pictures, with flips, crops and accuracy: python examples/vision.py epochs=3"""

import sys

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad, relu

from runner.__main__ import main


class Pictures:  # a bright bar in noise: across, or down
    def __len__(self):
        return 600

    def __getitem__(self, i):
        noise = np.random.default_rng(i).normal(0, 0.5, (3, 16, 16)).astype(np.float32)
        noise[:, 6:9] += 1
        image = torch.from_numpy(noise if i % 2 else noise.transpose(0, 2, 1).copy())
        image = image.flip(-1) if torch.rand(()) < 0.5 else image
        y, x = torch.randint(0, 5, (2,)).tolist()
        return {"image": pad(image, (2, 2, 2, 2))[:, y : y + 16, x : x + 16], "label": i % 2}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in "12")
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x):
        return relu(x + self.norm2(self.two(relu(self.norm1(self.one(x))))))


class ResNet(nn.Sequential):
    def __init__(self, width=16):
        pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 2)]
        super().__init__(nn.Conv2d(3, width, 3, padding=1), Block(width), Block(width), *pool)

    def losses(self, batch):
        logits = self(batch["image"])
        sums = cross_entropy(logits, batch["label"], reduction="none")
        right = (logits.argmax(-1) == batch["label"]).float()
        ones = torch.ones_like(sums)
        return sums, ones, {"accuracy": (right, ones)}


if __name__ == "__main__":
    own = "model._target_=vision.ResNet", "data._target_=vision.Pictures"
    sys.exit(main([*own, "parallel=single", "optim.lr=1e-2", *sys.argv[1:]]))
