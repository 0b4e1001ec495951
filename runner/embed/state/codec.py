"""Encodes values of any ``state_dict`` as exact JSON, and back. Nothing is pickled."""

from __future__ import annotations

import base64
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from runner.system.error import ConfigError

_TAG = "~"
PackTensor = Callable[[torch.Tensor, str], Any]
UnpackTensor = Callable[[Any], torch.Tensor]


def pack(value: Any, where: str, tensor: PackTensor | None = None) -> Any:
    """JSON for ``value``: plain Python values, NumPy's, tensors, and containers of them.

    Args:
        where: names the value in an error.
        tensor: makes JSON for a tensor and its name; without it the bytes are included.

    Raises:
        ConfigError: it holds an object of an unsupported type.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, np.generic | np.ndarray):  # NumPy's float64 is a float as well
        return _pack_numpy(value, where)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _tagged("float", repr(float(value)))
    if isinstance(value, torch.Tensor):
        _require_values(value, where)
        return _tagged("tensor", (tensor or inline)(value, where))
    if isinstance(value, bytes | bytearray):
        return _tagged("bytes", _text(bytes(value)))
    return _pack_container(value, where, tensor)


def _require_values(tensor: torch.Tensor, where: str) -> None:
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    if not is_dense or tensor.is_quantized or tensor.is_meta:
        kind = "meta" if tensor.is_meta else "nested" if tensor.is_nested else str(tensor.layout)
        kind = "quantized" if tensor.is_quantized else kind
        raise ConfigError(f"{where}: is a tensor that cannot be saved ({kind}); dense ones can")


def _pack_numpy(value: np.generic | np.ndarray[Any, Any], where: str) -> Any:
    array = np.ascontiguousarray(value)
    if array.dtype.hasobject:
        raise ConfigError(f"{where}: cannot save a NumPy array of Python objects")
    kind = "array" if isinstance(value, np.ndarray) else "scalar"
    return _tagged(kind, [array.dtype.str, list(np.shape(value)), _text(array.tobytes())])


def _pack_container(value: Any, where: str, tensor: PackTensor | None) -> Any:
    if isinstance(value, Mapping):
        items = [
            (pack(key, f"a key of {where}"), pack(item, f"{where}.{key}", tensor))
            for key, item in value.items()
        ]
        if isinstance(value, Counter):
            return _tagged("counter", [list(pair) for pair in items])
        if all(isinstance(key, str) and not key.startswith(_TAG) for key, _ in items):
            return dict(items)
        return _tagged("dict", [list(pair) for pair in items])
    for name, kind in (("tuple", tuple), ("set", set), ("deque", deque)):
        if isinstance(value, kind):
            ordered = sorted(value) if kind is set else value
            return _tagged(name, [pack(i, f"{where}.{n}", tensor) for n, i in enumerate(ordered)])
    if isinstance(value, list):
        return [pack(item, f"{where}.{number}", tensor) for number, item in enumerate(value)]
    raise ConfigError(
        f"{where}: is a {type(value).__module__}.{type(value).__qualname__}, which cannot be "
        "saved; plain values, NumPy arrays, tensors and containers of them can"
    )


def unpack(value: Any, tensor: UnpackTensor | None = None) -> Any:
    """Inverse of :func:`pack`.

    Raises:
        KeyError, TypeError, ValueError: :func:`pack` did not make it.
    """
    if isinstance(value, list):
        return [unpack(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: unpack(item, tensor) for key, item in value.items()}
    kind, packed = value[_TAG], value["v"]
    if kind == "tensor":
        return (tensor or outline)(packed)
    if kind in ("dict", "counter"):
        pairs = {unpack(key): unpack(item, tensor) for key, item in packed}
        return Counter(pairs) if kind == "counter" else pairs
    decoders: dict[str, Callable[[], Any]] = {
        "float": lambda: float(packed),
        "bytes": lambda: base64.b64decode(packed),
        "array": lambda: _array(packed),
        "scalar": lambda: _array(packed)[()],
        "tuple": lambda: tuple(unpack(item, tensor) for item in packed),
        "set": lambda: {unpack(item, tensor) for item in packed},
        "deque": lambda: deque(unpack(item, tensor) for item in packed),
    }
    return decoders[kind]()


def _tagged(kind: str, value: Any) -> dict[str, Any]:
    return {_TAG: kind, "v": value}


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _array(packed: Any) -> np.ndarray[Any, Any]:
    dtype, shape, text = packed
    return np.frombuffer(base64.b64decode(text), dtype=np.dtype(dtype)).reshape(shape).copy()


def inline(value: torch.Tensor, where: str) -> Any:
    """JSON for a tensor, including its bytes."""
    flat = value.detach().cpu().contiguous().reshape(-1)
    return [str(value.dtype), list(value.shape), _text(flat.view(torch.uint8).numpy().tobytes())]


def outline(packed: Any) -> torch.Tensor:
    """Inverse of :func:`inline`, on the CPU."""
    dtype, shape, text = packed
    data = torch.frombuffer(bytearray(base64.b64decode(text) or b"\0"), dtype=torch.uint8)
    size = math.prod(shape) * dtype_of(dtype).itemsize
    return data[:size].view(dtype_of(dtype)).reshape(shape).clone()


def dtype_of(name: str) -> torch.dtype:
    """The dtype with a name such as ``torch.float32``.

    Raises:
        ValueError: there is no such dtype.
    """
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype")
    return dtype
