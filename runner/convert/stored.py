"""Tensors that another program saved, still on disk: the common result of all readers here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from runner.system.error import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor still on disk: ``read`` returns it, of any floating dtype, in ``shape``."""

    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """AdamW's state of one parameter."""

    exp_avg: Stored
    exp_avg_sq: Stored
    updates: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Weights and, if there are any, moments, by the source's names; ``kind`` names its format."""

    kind: str
    weights: Mapping[str, Stored]
    moments: Mapping[str, Moments]


def held(tensor: Any, what: str) -> Stored:
    """A tensor of a file that is open already.

    Raises:
        ConfigError: it is not an ordinary dense tensor of floating point numbers.
    """
    if (
        type(tensor) not in (torch.Tensor, torch.nn.Parameter)
        or tensor.layout is not torch.strided
        or tensor.device.type != "cpu"
        or not tensor.is_floating_point()
    ):
        kind = f"{tensor.dtype} tensor" if torch.is_tensor(tensor) else type(tensor).__name__
        raise ConfigError(f"{what}: a {kind}, not a dense tensor of floating point numbers")
    if tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
        raise ConfigError(f"{what}: shows more elements than are stored")
    return Stored(shape=tuple(tensor.shape), read=lambda: tensor.detach())


def inside(folder: Path, name: str, told_by: Path) -> Path:
    """The file called ``name`` in ``folder``.

    Raises:
        ConfigError: the name leads out of the folder, or there is no such file.
    """
    path = folder / name
    try:
        is_inside = path.resolve().is_relative_to(folder.resolve())
        is_file = path.is_file()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{told_by}: file name {name!r}: {error}") from None
    if not is_inside or ".." in Path(name).parts:
        raise ConfigError(f"{told_by}: file name {name!r} leads out of the directory")
    if not is_file:
        raise ConfigError(f"{told_by}: {name!r} is not there")
    return path
