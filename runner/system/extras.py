"""Optional packages: whether an extra is installed, and the command that installs it.

``pyproject.toml`` defines the extras; here packages are looked up, never imported. Which setting
needs which extra is in :mod:`runner.config.extras`.
"""

from __future__ import annotations

import importlib.util
from typing import Final

DISTRIBUTION: Final = "holdfast-train"
PACKAGES: Final = {
    "zero": "deepspeed",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "text": "tokenizers",
    "plot": "matplotlib",
    "remote": "s3fs",
    "hf": "datasets",
    "nvml": "pynvml",
}


def install_command(extra: str) -> str:
    """The command that installs an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def lacking(what: str, extra: str) -> str:
    """The message for a setting or file whose extra is not installed."""
    return (
        f"{what}: needs the package {PACKAGES[extra]}, which is not installed: "
        f"{install_command(extra)}"
    )


def is_installed(extra: str) -> bool:
    """Whether the extra's package can be found, without importing it."""
    return importlib.util.find_spec(PACKAGES[extra]) is not None
