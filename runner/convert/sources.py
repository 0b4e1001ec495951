"""Weights in safetensors files, read one tensor at a time.

Shapes are known before a byte of a tensor is read, so that a caller can refuse first. Pickled
files are refused: reading one can run code.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from runner.system.error import ConfigError

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor still on disk: ``read`` returns it, of any floating dtype, in ``shape``."""

    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


def open_source(place: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, or of a folder of them, by their names.

    Raises:
        ConfigError: nothing there, damaged, or in another format.
    """
    if place.is_file():
        if place.suffix != ".safetensors":
            raise ConfigError(f"{place}: no safetensors file. {_CONVERT}")
        return _open_files([place])
    if not place.is_dir():
        raise ConfigError(f"{place}: no such file or directory")
    if files := safetensors_in(place):
        return _open_files(files)
    raise ConfigError(f"{place}: has no *.safetensors. {_CONVERT}")


_CONVERT = (
    "Other formats are pickled and can run code when they are read: convert what you trust with "
    "its maker's own converter (torch.distributed.checkpoint.format_utils, DeepSpeed's "
    "zero_to_fp32.py) and safetensors.torch.save_file; docs/running.md has the commands"
)


def safetensors_in(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those in its index, or else all.

    Raises:
        ConfigError: the index is damaged, or names a missing file.
    """
    index = folder / _INDEX
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    except Exception as error:  # damage may take any form
        raise ConfigError(f"{index}: {type(error).__name__}: {error}") from None
    return [_inside(folder, name, index) for name in sorted(names)]


def _inside(folder: Path, name: str, index: Path) -> Path:
    path = folder / name
    try:
        is_inside = path.resolve().is_relative_to(folder.resolve())
        is_file = path.is_file()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{index}: file name {name!r}: {error}") from None
    if not is_inside or ".." in Path(name).parts:
        raise ConfigError(f"{index}: file name {name!r} leads out of the directory")
    if not is_file:
        raise ConfigError(f"{index}: {name!r} is not there")
    return path


def _open_files(paths: list[Path]) -> dict[str, Stored]:
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
    return weights


def _reader(path: Path, name: str) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        with safe_open(path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        if not tensor.is_floating_point():
            raise ConfigError(
                f"{path}: {name!r}: a {tensor.dtype} tensor, not one of floating point numbers"
            )
        return tensor

    return read
