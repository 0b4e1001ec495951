"""Weights that another program saved: which kind of place it is, and its tensors one at a time.

DeepSpeed and DCP directories have modules of their own; here are torch and safetensors files.
Shapes are known before a byte of a tensor is read, so that a caller can refuse first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from runner.checkpoint.unpickle import as_mapping, read_tensor_file
from runner.error import ConfigError

_NESTED = ("model", "module", "state_dict", "model_state_dict")
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor still on disk: ``read`` gives it, of any floating dtype, in ``shape``."""

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
    """``kind`` in words; weights and, where there are any, moments by the source's names."""

    kind: str
    weights: Mapping[str, Stored]
    moments: Mapping[str, Moments]


def open_source(place: Path) -> Source:
    """Find out what lies there and read its table of contents.

    Raises:
        ConfigError: nothing known, damaged, or refused.
    """
    # The two readers import this module for its values.
    from runner.checkpoint.foreign_dcp import open_dcp
    from runner.checkpoint.foreign_deepspeed import is_deepspeed, open_deepspeed

    if place.is_file():
        return _open_safetensors([place]) if place.suffix == ".safetensors" else _open_torch(place)
    if not place.is_dir():
        raise ConfigError(f"{place}: no such file or directory")
    if (place / ".metadata").is_file():
        return open_dcp(place)
    if is_deepspeed(place):
        return open_deepspeed(place)
    if files := _safetensors_in(place):
        return _open_safetensors(files)
    raise ConfigError(
        f"{place}: no checkpoint that can be imported; known are DeepSpeed's directory (latest, or "
        "one of its global_stepN), torch DCP's (.metadata), *.safetensors, a torch file"
    )


def held(tensor: Any, what: str) -> Stored:
    """A tensor of a file that is open already.

    Raises:
        ConfigError: it is no ordinary dense tensor of floating point numbers.
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


def _open_torch(path: Path) -> Source:
    tree = as_mapping(read_tensor_file(path), "the content", path)
    for key in _NESTED:
        if isinstance(tree.get(key), Mapping):
            tree = tree[key]
            break
    weights = {str(name): held(tensor, f"{path}: {name!r}") for name, tensor in tree.items()}
    return Source(kind="torch file", weights=weights, moments={})


def _safetensors_in(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    except Exception as error:  # damage may take any form
        raise ConfigError(f"{index}: {type(error).__name__}: {error}") from None
    return [inside(folder, name, index) for name in sorted(names)]


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


def _open_safetensors(paths: list[Path]) -> Source:
    weights: dict[str, Stored] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        except Exception as error:  # SafetensorError is made in Rust
            raise ConfigError(f"{path}: cannot be imported: {error}") from None
        if doubled := sorted(shapes.keys() & weights.keys()):
            raise ConfigError(f"{path}: {doubled[0]!r} is in another file too")
        for name, shape in shapes.items():
            weights[name] = Stored(shape=tuple(shape), read=_reader(path, name))
    return Source(kind="safetensors", weights=weights, moments={})


def _reader(path: Path, name: str) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        with safe_open(path, framework="pt") as file:
            return held(file.get_tensor(name), f"{path}: {name!r}").read()

    return read
