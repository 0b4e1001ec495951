"""The metrics that a loop has handed over and that no step has taken yet."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from runner.embed.state.codec import pack, unpack
from runner.system.error import ConfigError
from runner.train.own_metrics import Sums, check_name

_WHERE, _TWO = "guard.log", 2


class Logged:
    """Sums and counts by name; state of the loop, because an evaluation goes with the next step.

    Attributes:
        sums: replaced at each change, so that holding it is a copy.
    """

    def __init__(self) -> None:
        self.sums: Sums = {}

    def add(self, values: Mapping[str, Any], device: torch.device) -> None:
        """See :meth:`runner.Guard.log`.

        Raises:
            ConfigError: a value is no number, or a name cannot be one.
        """
        sums = dict(self.sums)
        for name, value in values.items():
            check_name(name, _WHERE, is_evaluated=False)
            pair = value if isinstance(value, tuple | list) else (value, 1)
            if len(pair) != _TWO:
                raise ConfigError(
                    f"{_WHERE}: {name!r} is {type(value).__name__} of {len(pair)}; give a number, "
                    "or (sum, count)"
                )
            total, count = (_number(name, one).to(device) for one in pair)
            if name in sums:
                total, count = total + sums[name][0], count + sums[name][1]
            sums[name] = total, count
        self.sums = sums

    def take(self) -> Sums:
        """The sums so far, which are let go."""
        taken, self.sums = self.sums, {}
        return taken

    def to_json(self) -> Any:
        """This rank's sums as JSON. Waits for the device where there are any."""
        return pack(
            {name: [float(one) for one in pair] for name, pair in self.sums.items()}, _WHERE
        )

    def load_json(self, stored: Any, device: torch.device) -> None:
        """Inverse of :meth:`to_json`; None: of a checkpoint that has none."""
        pairs = {} if stored is None else unpack(stored)
        self.sums = {
            name: (_number(name, total).to(device), _number(name, count).to(device))
            for name, (total, count) in pairs.items()
        }


def _number(name: str, value: Any) -> torch.Tensor:
    """A metric's value, or its sum or count, as an FP64 scalar. Does not wait for a device.

    Raises:
        ConfigError: it is no number.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        whole = value.detach()
        return (whole.full_tensor() if isinstance(whole, DTensor) else whole).double().reshape(())
    if isinstance(value, Real):
        return torch.tensor(float(value), dtype=torch.float64)
    what = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else None
    raise ConfigError(
        f"{_WHERE}: {name!r} is {what or f'{type(value).__name__} {value!r:.60}'}; give a number "
        "(or a tensor of one), or (sum, count) of two"
    )
