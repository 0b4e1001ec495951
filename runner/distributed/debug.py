"""What torch.distributed and NCCL check and record. Set it before the group exists."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, MutableMapping
from pathlib import Path

# 3 keeps NCCL's communicators until the recorders are read; 1 is torchrun's default for its
# workers, and tears them down.
_ASYNC_ERRORS, _TORCHRUNS = "3", "1"
_DUMPS = "flight-recorder-rank"  # torch appends the rank
# The flight recorder keeps the last collectives of each rank; NCCL dumps it on a time-out.
_ALWAYS = {
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": _ASYNC_ERRORS,
    # The training thread raises what a failed device says, and reports it. NCCL's watchdog would
    # raise the same in its own thread, and abort the process before the report is written.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}


def debug_settings(kind: str, *, subsystems: str, folder: Path) -> dict[str, str]:
    """Environment variables for ``debug=off|nccl|collectives``."""
    settings = dict(_ALWAYS)
    settings["TORCH_FR_DUMP_TEMP_FILE"] = str(folder / _DUMPS)
    if kind != "off":
        # Records each collective's begin on the device by an event: a device that hangs before
        # a collective can then be distinguished from a network that is down.
        settings["TORCH_NCCL_ENABLE_TIMING"] = "1"
    if kind == "nccl":
        settings |= {
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": subsystems,
            "NCCL_DEBUG_FILE": str(folder / "nccl.%h.%p.log"),
        }
    elif kind == "collectives":
        settings["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    return settings


def is_nccl(backends: str) -> bool:
    """Whether a backend's name, or one of several (``cpu:gloo,cuda:nccl``), is an NCCL.

    torch 2.14 has three: ``nccl2`` (what ``nccl`` makes), ``nccl-lazy`` and ``nccl-legacy``.
    """
    return "nccl" in backends


def is_torchruns_own(environment: Mapping[str, str]) -> bool:
    """Whether NCCL's error handling is torchrun's default, not a choice of the user or of us."""
    setting = environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    return setting == _TORCHRUNS and "TORCHELASTIC_RUN_ID" in environment


def set_debug(environment: MutableMapping[str, str], settings: dict[str, str]) -> dict[str, str]:
    """Apply settings that the user has not set; returns the effective values.

    torchrun's own choice is not the user's: see :func:`is_torchruns_own`.
    """
    if is_torchruns_own(environment):
        del environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"]
    for name, value in settings.items():
        environment.setdefault(name, value)
    return {name: environment[name] for name in settings}


def keep_dump(folder: Path, rank: int) -> None:
    """Rename what NCCL dumped in an earlier incarnation of this rank; it would be overwritten.

    The new name begins with the time of the dump, UTC.
    """
    dump = folder / f"{_DUMPS}{rank}"
    with contextlib.suppress(OSError):  # mostly: there is none
        when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(dump.stat().st_mtime))
        dump.rename(folder / f"{when}-{dump.name}")
