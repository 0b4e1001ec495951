"""Reads pickles of other programs without running any code in them.

Only the globals named here are ever looked up. Those that are not torch's own tensors become
:class:`Shell` objects of ours, so no class of another library is instantiated. Anything else is
refused by name; there is no option to trust more.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import pickletools
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from runner.system.error import ConfigError
from runner.system.files import read_bounded

_METADATA_BYTES = 1 << 30


class Shell:
    """Replaces an object of another library: has its state, none of its behaviour."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __new__(cls, *arguments: object) -> Shell:
        shell = object.__new__(cls)
        shell.arguments, shell.state = arguments, None
        return shell

    def __setstate__(self, state: object) -> None:
        self.state = state

    def field(self, name: str) -> Any:
        """One attribute of the object that was saved; None if it has none."""
        return self.state.get(name) if isinstance(self.state, dict) else None


# Globals in files of DeepSpeed 0.19, besides tensors and plain containers.
_DEEPSPEED = (
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
)

_DCP = "torch.distributed.checkpoint"
_DCP_SHELLS = {
    (f"{_DCP}.metadata", "Metadata"),
    (f"{_DCP}.metadata", "TensorStorageMetadata"),
    (f"{_DCP}.metadata", "TensorProperties"),
    (f"{_DCP}.metadata", "ChunkStorageMetadata"),
    (f"{_DCP}.metadata", "BytesStorageMetadata"),
    (f"{_DCP}.metadata", "MetadataIndex"),
    (f"{_DCP}.metadata", "StorageMeta"),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib", "WindowsPath"),
}
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)} | {
    "Size": torch.Size
}


def read_tensor_file(path: Path) -> Any:
    """Open a file of ``torch.save``; its tensors are on the CPU, mapped and not read yet.

    Raises:
        ConfigError: damaged, or it holds more than tensors, plain containers and the shells.
    """
    with _refusing(path):
        mapped = zipfile.is_zipfile(path)
        if mapped:
            _check_zip(path, path.stat().st_size)
        return _load(path, mmap=mapped)


def read_tensor_bytes(data: bytes, *, where: Path) -> Any:
    """:func:`read_tensor_file` for a part of a file."""
    with _refusing(where):
        if zipfile.is_zipfile(io.BytesIO(data)):
            _check_zip(io.BytesIO(data), len(data))
        return _load(io.BytesIO(data), mmap=None)


def _load(source: Path | io.BytesIO, *, mmap: bool | None) -> Any:
    with _only_shells():
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)


@contextlib.contextmanager
def _only_shells() -> Iterator[None]:
    """Hide the classes that libraries registered with torch as loadable, such as DTensor."""
    registered = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        torch.serialization.add_safe_globals([(_shell(), name) for name in _DEEPSPEED])
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(registered)


def _check_zip(source: Path | io.BytesIO, size: int) -> None:
    """Refuse compressed entries: torch.save stores, so nothing may unpack to more than its size."""
    with zipfile.ZipFile(source) as archive:
        entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError("a compressed archive, which torch.save does not write")
    if sum(entry.file_size for entry in entries) > size:
        raise ValueError("an archive whose parts overlap")


def read_dcp_metadata(path: Path) -> Shell:
    """The ``.metadata`` of a torch DCP directory, as :class:`Shell` objects.

    Raises:
        ConfigError: damaged, or it names a global that such a file has no need of.
    """
    with _refusing(path):
        data = read_bounded(path, _METADATA_BYTES, follow=True)
        _check_memo(data)
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
        if not isinstance(metadata, Shell):
            raise ValueError(f"holds {type(metadata).__name__}, not DCP's Metadata")
        return metadata


def _check_memo(data: bytes) -> None:
    """Bound the indices of the unpickler's memo: five bytes could make it take gigabytes."""
    for code, argument, _ in pickletools.genops(data):
        if "PUT" in code.name and argument is not None and argument > len(data):
            raise ValueError(f"memo index {argument} in a file of {len(data)} bytes")


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        # Of this reading only: a file can set attributes of the classes it is given.
        self._shells = {place: _shell() for place in _DCP_SHELLS}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._shells:
            return self._shells[module, name]
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise pickle.UnpicklingError(_refusal(f"{module}.{name}"))

    def persistent_load(self, identity: object) -> Any:
        raise pickle.UnpicklingError("refers to an object outside of the file")


def _shell() -> type[Shell]:
    return type("Shell", (Shell,), {})


def _refusal(name: str) -> str:
    return f"names the global {name}, which is not on the list of what may be loaded"


class _refusing:
    """Turns any error from reading a foreign file into one that names the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, ConfigError):
            return
        reason = _reason(error)
        raise ConfigError(f"{self._path}: cannot be imported: {reason}") from None


def _reason(error: Exception) -> str:
    text = str(error)
    named = re.search(r"(?:global:|unsupported) GLOBAL (\w[\w.]*)", text)
    if named is not None:
        return _refusal(named[1])
    if text.startswith("Weights only load failed"):
        # torch goes on to advise weights_only=False, which nobody should follow.
        return "holds more than tensors and plain containers, or is damaged"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:1])}"


def as_mapping(value: Any, what: str, path: Path) -> Mapping[Any, Any]:
    """``value``, which must be a mapping.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}: {what} is {type(value).__name__}, not a mapping")
    return value
