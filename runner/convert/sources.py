"""Finds out the format of another program's weights, and reads its tensors one at a time.

DeepSpeed and DCP directories have modules of their own; here are torch and safetensors files.
Shapes are known before a byte of a tensor is read, so that a caller can refuse first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from runner.convert.dcp import open_dcp
from runner.convert.deepspeed import is_deepspeed, open_deepspeed
from runner.convert.stored import Source, Stored, held, inside
from runner.convert.unpickle import as_mapping, read_tensor_file
from runner.system.error import ConfigError

_NESTED = ("model", "module", "state_dict", "model_state_dict")
_INDEX = "model.safetensors.index.json"


def open_source(place: Path) -> Source:
    """Find out the format and read its table of contents.

    Raises:
        ConfigError: unknown, damaged, or refused.
    """
    if place.is_file():
        return _open_safetensors([place]) if place.suffix == ".safetensors" else _open_torch(place)
    if not place.is_dir():
        raise ConfigError(f"{place}: no such file or directory")
    if (place / ".metadata").is_file():
        return open_dcp(place)
    if is_deepspeed(place):
        return open_deepspeed(place)
    if files := safetensors_in(place):
        return _open_safetensors(files)
    raise ConfigError(
        f"{place}: no checkpoint that can be imported; known are DeepSpeed's directory (latest, or "
        "one of its global_stepN), torch DCP's (.metadata), *.safetensors, a torch file"
    )


def _open_torch(path: Path) -> Source:
    tree = as_mapping(read_tensor_file(path), "the content", path)
    for key in _NESTED:
        if isinstance(tree.get(key), Mapping):
            tree = tree[key]
            break
    weights = {str(name): held(tensor, f"{path}: {name!r}") for name, tensor in tree.items()}
    return Source(kind="torch file", weights=weights, moments={})


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
    return [inside(folder, name, index) for name in sorted(names)]


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
