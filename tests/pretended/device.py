"""This CPU-only torch believes in one CUDA device whose tensors have no memory.

Import it before torch. It builds ``stub.cpp`` (some seconds, once for each version of it and of
torch), loads it between torch's libraries and torch itself, and gives ``torch.cuda`` the streams
and events of the stub.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("stub.cpp")


class Told(IntEnum):
    """What the stub tells: an event is recorded on a stream, waited for by one, or by the host."""

    record = 1
    block = 2
    sync_event = 3
    sync_stream = 4
    sync_device = 5


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def build() -> Path:
    """The compiled stub, for this user and this torch."""
    torch_folder = _torch_folder()
    version = importlib.metadata.version("torch")
    mark = hashlib.sha256(SOURCE.read_bytes() + version.encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"holdfast-pretended-{os.geteuid()}-{mark}.so"
    if library.exists() and library.stat().st_uid == os.geteuid():
        return library
    unfinished = library.with_suffix(f".{os.getpid()}")
    include = [torch_folder / "include", torch_folder / "include/torch/csrc/api/include"]
    command: list[str | Path] = ["g++", "-O0", "-std=c++20", "-shared", "-fPIC", "-w"]
    command += [f"-I{folder}" for folder in include]
    command += [SOURCE, f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu", "-o", unfinished]
    subprocess.run(command, check=True)
    unfinished.rename(library)
    return library


def _load() -> ctypes.PyDLL:
    assert "torch" not in sys.modules, "tests.pretended.device must be imported before torch"
    stub = build()
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(_torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    loaded = ctypes.PyDLL(str(stub))
    # Before torch asks for its hooks for the first time.
    assert loaded.register_stub() == 1
    loaded.current_stream.restype = ctypes.c_int64
    return loaded


_stub = _load()

import torch  # noqa: E402
import torch._dynamo  # noqa: E402  (it looks for CUDA when it is imported: not yet)
import torch._inductor.utils  # noqa: E402

_Callback = ctypes.PYFUNCTYPE(None, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_kept: list[Any] = []  # the stub holds no reference
_spin_listeners: list[Callable[[], None]] = []


def listen(hear: Callable[[int, int, int], None]) -> None:
    """``hear(what, stream, event)`` from now on; see :class:`Told`. One listener at a time."""
    _kept[:] = [_Callback(hear)]
    _stub.listen(_kept[0])


def on_spin() -> None:
    """The host waits for an event that keeps a core busy; see :class:`Trace`."""
    for hear in _spin_listeners:
        hear()


def listen_for_spins(hear: Callable[[], None]) -> None:
    """``hear()`` from now on, at each wait of the host that is not a sleep. One at a time."""
    _spin_listeners[:] = [hear]


def current_stream() -> int:
    """The number of the current stream; 0 is the default one."""
    return int(_stub.current_stream())


class Event(torch.Event):
    """``torch.cuda.Event`` over the stub. It remembers whether the host sleeps while it waits."""

    blocking: bool

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, **named: Any) -> Event:
        event = super().__new__(cls, device="cuda", blocking=blocking)
        event.blocking = blocking
        return event

    def synchronize(self) -> None:
        if not self.blocking:
            on_spin()
        super().synchronize()

    def record(self, stream: Any = None) -> None:
        super().record(stream or torch.accelerator.current_stream())

    def wait(self, stream: Any = None) -> None:
        super().wait(stream or torch.accelerator.current_stream())


class Stream(torch.Stream):
    """``torch.cuda.Stream`` over the stub."""

    def __new__(cls, device: Any = None, priority: int = 0, **named: Any) -> Stream:
        return super().__new__(cls, device="cuda:0", priority=priority)


def _install() -> None:
    stand_ins: dict[str, Any] = {
        "Event": Event,
        "Stream": Stream,
        "current_stream": lambda device=None: torch.accelerator.current_stream(),
        "stream": lambda stream: stream,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: "NVIDIA H100 80GB HBM3",
    }
    stand_ins |= dict.fromkeys(("is_available", "is_initialized", "_is_compiled"), lambda: True)
    nothing = ("set_device", "synchronize", "manual_seed", "manual_seed_all", "_lazy_init")
    stand_ins |= dict.fromkeys(nothing, lambda *ignored: None)
    for name, stand_in in stand_ins.items():
        assert hasattr(torch.cuda, name), f"this torch has no torch.cuda.{name}: who calls it?"
        setattr(torch.cuda, name, stand_in)


_install()
