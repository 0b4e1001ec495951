"""Weights in safetensors files: names, shapes, and any range of any tensor.

Pickled files are refused: reading one can run code. Must not know which network the weights belong
to.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open

from runner.system.error import ConfigError
from runner.system.files import read_bounded, write_json
from runner.system.parsing import parse_json

_INDEX: Final = "model.safetensors.index.json"
# As named in a file's header.
_DTYPES: Final = ("F64", "F32", "F16", "BF16")
_PICKLED: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_CONVERT: Final = (
    "Other formats are pickled and can run code when they are read: convert what you trust with "
    "its maker's own converter (torch.distributed.checkpoint.format_utils, DeepSpeed's "
    "zero_to_fp32.py) and safetensors.torch.save_file; docs/running.md has the commands"
)


class StoredWeights:
    """Tensors in safetensors files; reads only the requested range.

    Args:
        setting: what named the files, for messages.

    Attributes:
        shapes: of each tensor, by its name in the files.

    Raises:
        ConfigError: they are damaged.
    """

    def __init__(self, files: Sequence[Path], setting: str) -> None:
        self._setting = setting
        self._files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        signature = hashlib.sha256()
        for path in files:
            try:
                with safe_open(path, framework="pt") as file:
                    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                    shapes = {name: tuple(tensor.get_shape()) for name, tensor in slices.items()}
                    dtypes = {name: str(tensor.get_dtype()) for name, tensor in slices.items()}
                size = path.stat().st_size
            except Exception as error:  # SafetensorError is made in Rust
                raise ConfigError(f"{setting}: {path} cannot be read: {error}") from None
            if doubled := sorted(shapes.keys() & self._files.keys()):
                raise ConfigError(f"{setting}: {path}: {doubled[0]!r} is in another file too")
            for name in sorted(shapes):
                line = f"{path.name} {size} {name} {shapes[name]} {dtypes[name]}\n"
                signature.update(line.encode())
            self._files |= dict.fromkeys(shapes, path)
            self.shapes |= shapes
            self._dtypes |= dtypes
        self._signature = signature.hexdigest()

    def signature(self) -> str:
        """A digest of the files' headers; ranks compare it."""
        return self._signature

    def read(self, name: str, start: int, count: int) -> torch.Tensor:
        """Elements ``[start, start + count)`` of a flattened tensor, FP32 1-D on the CPU.

        Raises:
            ConfigError: it cannot be read, is not floating point, or holds NaN or Inf.
        """
        path, shape = self._files[name], self.shapes[name]
        where = f"{self._setting}: {path}: {name!r}"
        if self._dtypes[name] not in _DTYPES:
            raise ConfigError(
                f"{where} is {self._dtypes[name]}; weights must be one of {', '.join(_DTYPES)} "
                "(floating point): quantised ones cannot be trained, take the model that they were "
                "made from"
            )
        if not count:
            return torch.empty(0)
        per_row = math.prod(shape[1:])
        first, last = start // per_row, -(-(start + count) // per_row)
        try:
            with safe_open(path, framework="pt") as file:
                rows = file.get_slice(name)[first:last] if shape else file.get_tensor(name)
        except Exception as error:  # as above
            raise ConfigError(f"{where} cannot be read: {error}") from None
        values: torch.Tensor = rows.reshape(-1).float()
        values = values[start - first * per_row :][:count].clone()
        if not bool(values.isfinite().all()):
            raise ConfigError(f"{where} holds NaN or Inf; a run cannot begin from that")
        return values


def open_source(place: Path) -> StoredWeights:
    """The tensors of a safetensors file, or of a folder of them, that are imported.

    Raises:
        ConfigError: nothing there, damaged, or in another format.
    """
    if not place.exists():
        raise ConfigError(f"{place}: no such file or directory")
    if place.is_file():
        files = [place] if place.suffix == ".safetensors" else []
    else:
        files = _safetensors_in(place)
    if not files:
        raise ConfigError(f"{place}: has no safetensors. {_CONVERT}")
    return StoredWeights(files, "import")


def open_pretrained(folder: Path) -> StoredWeights:
    """The weights of ``model.path``.

    Raises:
        ConfigError: there are none, or they are damaged or pickled.
    """
    if files := _safetensors_in(folder):
        return StoredWeights(files, "model.path")
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


def _safetensors_in(folder: Path) -> list[Path]:
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


# The files of a tokenizer: finds and copies them.

TOKENIZER: Final = "tokenizer.json"
CONFIG: Final = "tokenizer_config.json"
FILES: Final = (
    TOKENIZER,
    CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
)
_TOKENIZER_BYTES: Final = 1 << 26
FAST_CLASS: Final = "PreTrainedTokenizerFast"


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder has a tokenizer that transformers would find."""
    return any((folder / name).is_file() for name in (TOKENIZER, CONFIG, "tokenizer.model"))


def copy_tokenizer(source: Path, folder: Path, *, end: int | None = None) -> bool:
    """Copy a tokenizer's files, and add what transformers needs beside a lone ``tokenizer.json``.

    Args:
        source: a folder, or a ``tokenizer.json``.
        end: the token that ends a document, used if the files do not name one.

    Returns:
        Whether there was a tokenizer to copy.

    Raises:
        ConfigError: it cannot be copied.
    """
    try:
        if source.is_file():
            shutil.copyfile(source, folder / TOKENIZER)
        for name in FILES:
            # Not onto itself: an export may go into the tokenizer's own folder.
            if (source / name).is_file() and source.resolve() != folder.resolve():
                shutil.copyfile(source / name, folder / name)
        if (folder / TOKENIZER).is_file() and not (folder / CONFIG).is_file():
            called = None if end is None else _name_of(folder / TOKENIZER, end)
            write_json(folder / CONFIG, {"tokenizer_class": FAST_CLASS, "eos_token": called})
    except OSError as error:
        raise ConfigError(f"{source}: cannot be copied to {folder} ({error})") from None
    return has_tokenizer(folder)


def _name_of(path: Path, token: int) -> str | None:
    """The text of a token that was added to the vocabulary of a ``tokenizer.json``."""
    try:
        tree = parse_json(read_bounded(path, _TOKENIZER_BYTES, follow=True))
        return next((new["content"] for new in tree["added_tokens"] if new["id"] == token), None)
    except (ValueError, KeyError, TypeError, RecursionError):  # it is as it is
        return None
