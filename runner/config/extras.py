"""Which settings need an optional package."""

from __future__ import annotations

from collections.abc import Iterator

from runner.config.network import is_hf
from runner.config.schema import RunConfig
from runner.system.error import MissingPackage
from runner.system.extras import is_installed, lacking


def check_extras(config: RunConfig) -> None:
    """Look for every package that the settings need, before any process waits for another.

    Raises:
        MissingPackage: names each setting whose extra is not installed, one per line.
    """
    problems = [lacking(what, extra) for what, extra in _needed(config) if not is_installed(extra)]
    if problems:
        raise MissingPackage("\n".join(problems))


def _needed(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Pairs of a setting that needs an extra, and that extra."""
    kind = config.parallel.kind.value
    if kind.startswith("zero"):
        yield f"parallel={kind}", "zero"
    if config.track.tensorboard:
        yield "track=tensorboard", "tensorboard"
    if config.track.wandb:
        yield "track=wandb", "wandb"
    if config.track.mlflow:
        yield "track=mlflow", "mlflow"
    if config.data.kind.value == "text" and config.data.tokenizer is not None:
        yield f"data.tokenizer={config.data.tokenizer}", "text"
    if is_hf(config.model):
        yield "model=hf", "hf"
    if config.data._target_ is None and config.data.kind.value == "hf":
        yield "data=hf", "hf"
    if (config.checkpoint.remote or "").startswith(("s3://", "s3a://")):
        yield "checkpoint.remote=s3://...", "remote"
