"""What torch.distributed and NCCL check and record. To be set before the group exists."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

# The flight recorder keeps the last collectives of each rank; NCCL dumps it on a time-out.
_ALWAYS = {
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
}


def debug_settings(kind: str, *, subsystems: str, folder: Path) -> dict[str, str]:
    """Environment variables for ``debug=off|nccl|collectives``."""
    settings = dict(_ALWAYS)
    settings["TORCH_FR_DUMP_TEMP_FILE"] = str(folder / "flight-recorder-rank")
    if kind == "nccl":
        settings |= {
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": subsystems,
            "NCCL_DEBUG_FILE": str(folder / "nccl.%h.%p.log"),
        }
    elif kind == "collectives":
        settings["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    return settings


def set_debug(environment: MutableMapping[str, str], settings: dict[str, str]) -> dict[str, str]:
    """Apply settings that the user has not set; returns the effective values."""
    for name, value in settings.items():
        environment.setdefault(name, value)
    return {name: environment[name] for name in settings}
