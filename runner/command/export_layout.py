"""The layout of an export: name, shape and source of each tensor, and further files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from runner.checkpoint.disk.directory import Entry
from runner.checkpoint.dtypes import dtype_of
from runner.engine.buffers import SAVED

# A parameter's whole value in FP32, by the name it has in the checkpoint.
Read = Callable[[str], torch.Tensor]
PARAM = "param/"
AVERAGE = "ema/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One tensor to write; ``make`` gives it in FP32, or a buffer in its own type.

    ``dtype``: it is written in it; None: in the layout's.
    """

    shape: tuple[int, ...]
    make: Callable[[Read], torch.Tensor]
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The layout of an export.

    Args:
        stem: of the weights' file names, ``model`` for ``model.safetensors``.
        tensors: by name.
        dtype: they are written in it.
        finish: writes further files into the folder; returns notes for the user.
    """

    stem: str
    tensors: Mapping[str, Output]
    dtype: torch.dtype
    finish: Callable[[Path], Sequence[str]]

    def dtype_of(self, name: str) -> torch.dtype:
        """The type in which a tensor is written."""
        return self.tensors[name].dtype or self.dtype


LayoutOf = Callable[[Entry], Layout]


def shapes_in(entry: Entry) -> dict[str, tuple[int, ...]]:
    """Whole shapes of a checkpoint's parameters, by name and in its order."""
    return {
        name.removeprefix(PARAM): shape
        for name, shape in sorted(entry.manifest.shapes.items())
        if name.startswith(PARAM)
    }


def buffers_in(entry: Entry) -> dict[str, Output]:
    """The buffers of a checkpoint that a ``state_dict`` has, in their own types."""
    prefix = f"{SAVED}/"
    return {
        name.removeprefix(prefix): Output(
            shape=shape,
            make=partial(_read, name.removeprefix(prefix)),
            dtype=dtype_of(entry.manifest.dtype(name)),
        )
        for name, shape in sorted(entry.manifest.shapes.items())
        if name.startswith(prefix)
    }


def has_average(entry: Entry) -> bool:
    """Whether an average of the weights was kept (``optim.ema``), and has begun."""
    is_there = any(name.startswith(AVERAGE) for name in entry.manifest.shapes)
    return is_there and any(entry.manifest.update_counts.values())


def exported_name(entry: Entry, name: str) -> str:
    """The tensor that is exported for a parameter, its average where there is one, or for a
    buffer."""
    if (buffer := f"{SAVED}/{name}") in entry.manifest.shapes:
        return buffer
    average = f"{AVERAGE}{name}"
    is_averaged = has_average(entry) and average in entry.manifest.shapes
    return average if is_averaged else f"{PARAM}{name}"


def as_it_is(name: str, shape: tuple[int, ...]) -> Output:
    """The unchanged parameter of this name."""
    return Output(shape=shape, make=partial(_read, name))


def _read(name: str, read: Read) -> torch.Tensor:
    return read(name)


def plain_layout(entry: Entry, *, dtype: torch.dtype = torch.float32) -> Layout:
    """The model's own parameter names, and no other file."""
    return Layout(
        stem="model",
        tensors={
            **{name: as_it_is(name, shape) for name, shape in shapes_in(entry).items()},
            **buffers_in(entry),
        },
        dtype=dtype,
        finish=lambda folder: (),
    )
