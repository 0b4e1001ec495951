"""Reads a torch DCP directory: ``.metadata`` says where each tensor is in ``*.distcp``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from runner.convert.stored import Moments, Source, Stored, held, inside
from runner.convert.unpickle import Shell, read_dcp_metadata, read_tensor_bytes
from runner.system.error import ConfigError

_OPTIMIZER = ("optimizer.", "optim.")
_MOMENT = re.compile(r"(?:optimizer|optim)\.state\.(.+)\.(exp_avg|exp_avg_sq|step)", re.DOTALL)
_MODEL = "model."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """A block of a tensor, and its bytes in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: Path
    start: int
    length: int


def open_dcp(folder: Path) -> Source:
    """Read and check the table of contents.

    If names begin with ``model.`` and ``optimizer.`` (or ``optim.``), only these two are
    read; one prefix of both, as ``app.`` in torch's tutorial, is removed.

    Raises:
        ConfigError: damaged or refused.
    """
    path = folder / ".metadata"
    metadata = read_dcp_metadata(path)
    try:
        tensors = _tensors(folder, path, metadata)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise ConfigError(f"{path}: {type(error).__name__}: {str(error)[:300]}") from None
    tensors = _unwrapped(tensors)
    weights = {name: tensor for name, tensor in tensors.items() if not name.startswith(_OPTIMIZER)}
    model = {name: tensor for name, tensor in weights.items() if name.startswith(_MODEL)}
    if model and len(weights) < len(tensors):
        weights = {name.removeprefix(_MODEL): tensor for name, tensor in model.items()}
    return Source(kind="torch DCP directory", weights=weights, moments=_moments(tensors, path))


def _unwrapped(tensors: dict[str, Stored]) -> dict[str, Stored]:
    """Remove a first part that all names share and that both follow."""
    around = {name.partition(".")[0] for name in tensors}
    inner = {name.partition(".")[2]: tensor for name, tensor in tensors.items()}
    has_both = all(any(name.startswith(kind) for name in inner) for kind in (_MODEL, _OPTIMIZER))
    return inner if len(around) == 1 and has_both else tensors


def _tensors(folder: Path, path: Path, metadata: Shell) -> dict[str, Stored]:
    chunks = _chunk_places(metadata)
    tensors: dict[str, Stored] = {}
    for name, entry in metadata.field("state_dict_metadata").items():
        if entry.field("chunks") is None:
            continue  # bytes, such as settings of the optimizer
        shape = _whole_numbers(entry.field("size"))
        parts = []
        for chunk in entry.field("chunks"):
            offsets = _whole_numbers(chunk.field("offsets"))
            info = chunks[str(name), offsets]
            parts.append(
                _Chunk(
                    offsets=offsets,
                    sizes=_whole_numbers(chunk.field("sizes")),
                    path=inside(folder, str(info.field("relative_path")), path),
                    start=int(info.field("offset")),
                    length=int(info.field("length")),
                )
            )
        _check_chunks(f"{path}: {name!r}", shape, parts)
        tensors[str(name)] = Stored(shape=shape, read=_Reader(str(name), shape, parts))
    return tensors


def _chunk_places(metadata: Shell) -> dict[tuple[str, tuple[int, ...]], Shell]:
    places = {}
    for index, info in metadata.field("storage_data").items():
        if info.field("transform_descriptors"):
            raise ValueError("its tensors are compressed, which is not supported")
        if index.field("offset") is not None:
            places[str(index.field("fqn")), _whole_numbers(index.field("offset"))] = info
    return places


def _whole_numbers(values: Any) -> tuple[int, ...]:
    numbers = tuple(int(value) for value in values)
    if min(numbers, default=0) < 0:
        raise ValueError(f"negative size or offset in {list(numbers)}")
    return numbers


def _check_chunks(what: str, shape: tuple[int, ...], parts: list[_Chunk]) -> None:
    for part in parts:
        if not len(part.offsets) == len(part.sizes) == len(shape):
            raise ConfigError(f"{what}: chunks of another number of dimensions")
        ends = [start + size for start, size in zip(part.offsets, part.sizes, strict=True)]
        if any(end > limit for end, limit in zip(ends, shape, strict=True)):
            raise ConfigError(f"{what}: a chunk reaches beyond the tensor")
        if math.prod(part.sizes) > part.length:
            raise ConfigError(f"{what}: a chunk of {list(part.sizes)} in {part.length} bytes")
        size = part.path.stat().st_size
        if part.start < 0 or part.length < 1 or part.start + part.length > size:
            raise ConfigError(
                f"{what}: lies at bytes {part.start} to {part.start + part.length} of "
                f"{part.path}, which has {size}: truncated"
            )
    if sum(math.prod(part.sizes) for part in parts) != math.prod(shape):
        raise ConfigError(f"{what}: chunks are missing or doubled")


class _Reader:
    """Assembles one tensor."""

    def __init__(self, name: str, shape: tuple[int, ...], parts: list[_Chunk]) -> None:
        self._name = name
        self._shape = shape
        self._parts = parts

    def __call__(self) -> torch.Tensor:
        whole = torch.empty(self._shape)
        # With the right number of elements, overlapping chunks would leave a hole.
        covered = torch.zeros(self._shape, dtype=torch.bool)
        for part in self._parts:
            block = tuple(
                slice(start, start + size)
                for start, size in zip(part.offsets, part.sizes, strict=True)
            )
            whole[block] = self._read(part).float()
            covered[block] = True
        if not bool(covered.all()):
            raise ConfigError(f"{self._parts[0].path}: chunks of {self._name!r} overlap")
        return whole

    def _read(self, part: _Chunk) -> torch.Tensor:
        with part.path.open("rb") as file:
            file.seek(part.start)
            data = file.read(part.length)
        what = f"{part.path}: {self._name!r}"
        stored = held(read_tensor_bytes(data, where=part.path), what)
        if stored.shape != part.sizes:
            raise ConfigError(f"{what}: has shape {stored.shape}, the metadata says {part.sizes}")
        return stored.read()


def _moments(tensors: Mapping[str, Stored], path: Path) -> dict[str, Moments]:
    """The moments of parameters that have all of them, by the weights' names."""
    grouped: dict[str, dict[str, Stored]] = {}
    for name, stored in tensors.items():
        if match := _MOMENT.fullmatch(name):
            grouped.setdefault(match[1], {})[match[2]] = stored
    return {
        name: Moments(
            exp_avg=parts["exp_avg"],
            exp_avg_sq=parts["exp_avg_sq"],
            updates=_updates(parts["step"], f"{path}: optimizer.state.{name}.step"),
        )
        for name, parts in grouped.items()
        if len(parts) == 3
    }


def _updates(step: Stored, what: str) -> int:
    if math.prod(step.shape) != 1:
        raise ConfigError(f"{what}: is no single number")
    value = float(step.read())
    if not value.is_integer() or value < 0:
        raise ConfigError(f"{what}: {value} is no count")
    return int(value)
