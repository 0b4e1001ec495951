"""Keys of earlier versions: what a command that has one is told, and how an old run is read."""

from __future__ import annotations

from typing import Any, Final

RENAMED: Final = {
    "model.precision": "compute.precision",
    "model.compile": "compute.compile",
    "model.frozen": "compute.frozen",
    "model.loss_fp32": "compute.loss_fp32",
    "model.activation_checkpointing": "compute.recompute",
}


def former_key(key: str) -> str | None:
    """What became of a key; None if it never was one."""
    return f"is now called {RENAMED[key]}" if key in RENAMED else None


def as_now(stored: dict[str, Any]) -> dict[str, Any]:
    """Settings that an earlier version stored, by their present names."""
    former = {RENAMED[name]: value for name, value in stored.items() if name in RENAMED}
    return {name: value for name, value in stored.items() if name not in RENAMED} | former
