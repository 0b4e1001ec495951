"""The weights in a Hugging Face folder: names, shapes, and any range of any tensor.

Only safetensors: a pickled file can run code. Must not know which network they belong to.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open

from runner.convert.sources import safetensors_in
from runner.system.error import ConfigError

# As named in a file's header.
_DTYPES: Final = ("F64", "F32", "F16", "BF16")
_PICKLED: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class PretrainedWeights:
    """Tensors in the safetensors files of a folder; reads only the requested range.

    Args:
        folder: it holds one file, or several and their index.

    Raises:
        ConfigError: there are no weights, or they are damaged, pickled, or not floating point.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        signature = hashlib.sha256()
        for path in _files(folder):
            try:
                with safe_open(path, framework="pt") as file:
                    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                    shapes = {name: tuple(tensor.get_shape()) for name, tensor in slices.items()}
                    dtypes = {name: str(tensor.get_dtype()) for name, tensor in slices.items()}
                size = path.stat().st_size
            except Exception as error:  # SafetensorError is made in Rust
                raise ConfigError(f"model.path: {path} cannot be read: {error}") from None
            if doubled := sorted(shapes.keys() & self._files.keys()):
                raise ConfigError(f"model.path: {path}: {doubled[0]!r} is in another file too")
            for name in sorted(shapes):
                if dtypes[name] not in _DTYPES:
                    raise ConfigError(
                        f"model.path: {path}: {name!r} is {dtypes[name]}; weights must be one of "
                        f"{', '.join(_DTYPES)}: quantised ones cannot be trained, take the "
                        "model that they were made from"
                    )
                signature.update(
                    f"{path.name} {size} {name} {shapes[name]} {dtypes[name]}\n".encode()
                )
            self._files |= dict.fromkeys(shapes, path)
            self._shapes |= shapes
        self._signature = signature.hexdigest()

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each tensor, by its name in the files."""
        return self._shapes

    def signature(self) -> str:
        """A digest of the files' headers; ranks compare it."""
        return self._signature

    def read(self, name: str, start: int, count: int) -> torch.Tensor:
        """Elements ``[start, start + count)`` of a flattened tensor, FP32 1-D on the CPU.

        Raises:
            ConfigError: it cannot be read, or holds NaN or Inf.
        """
        path, shape = self._files[name], self._shapes[name]
        if not count:
            return torch.empty(0)
        per_row = math.prod(shape[1:])
        first, last = start // per_row, -(-(start + count) // per_row)
        try:
            with safe_open(path, framework="pt") as file:
                rows = file.get_slice(name)[first:last] if shape else file.get_tensor(name)
        except Exception as error:  # as above
            raise ConfigError(f"model.path: {path}: {name!r} cannot be read: {error}") from None
        values: torch.Tensor = rows.reshape(-1).float()
        values = values[start - first * per_row :][:count].clone()
        if not bool(values.isfinite().all()):
            raise ConfigError(
                f"model.path: {path}: {name!r} holds NaN or Inf; a run cannot begin from that"
            )
        return values


def _files(folder: Path) -> list[Path]:
    if files := safetensors_in(folder):
        return files
    if pickled := sorted(path.name for kind in _PICKLED for path in folder.glob(kind)):
        raise ConfigError(
            f"model.path={folder}: has weights as {pickled[0]} only, a pickled file, which can run "
            "code when it is read; write them as *.safetensors (save_pretrained does) where you "
            "trust it"
        )
    raise ConfigError(
        f"model.path={folder}: has no *.safetensors; put the weights there, or begin from fresh "
        "ones with model.init=random"
    )
