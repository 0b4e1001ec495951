"""Gives every setting to both sides or refuses it, and checks that both train equally."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from runner.config.compose import flat
from runner.config.schema import RunConfig
from scripts.bench.process import MeasureError

# Settings that reach the other side through the task: its fields, the model, the token batches.
CARRIED = frozenset(
    [
        *(f"model.{name}" for name in (
            "dim", "layers", "heads", "kv_heads", "ffn_dim", "vocab_size", "tied_head", "qk_norm",
            "norm_eps", "rope_theta", "rope_scaling", "init_std",
        )),
        "compute.precision", "compute.compile", "compute.recompute",
        *(f"data.{name}" for name in (
            "kind", "path", "suffixes", "field", "tokenizer", "token_dtype", "vocab_size",
            "seq_len", "begin_token", "end_token", "held_out", "samples", "cache", "workers",
        )),
        *(f"optim.{name}" for name in ("lr", "beta1", "beta2", "eps", "weight_decay", "clip")),
        *(f"schedule.{name}" for name in ("warmup", "floor", "total")),
        "batch.global_size", "batch.micro_size", "seed",
    ]
)  # fmt: skip
# Settings without a counterpart there: their costs are measured.
OWN = ("guard", "checkpoint", "watchdog", "debug", "preempt", "track", "resume", "explain")
# Settings that the measurement sets itself.
MEASURED = frozenset(["out", "parallel.kind", "parallel.shard_size", "parallel.max_ranks"])
_NOT_GIVEN = ("out", "steps", "parallel")
# What matrices are multiplied in.
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

# Nats between the losses of one step on both sides, of the first one and of those that follow.
# What was measured: FP32 differs by the order of sums, less than 1e-6; in BF16 they round at other
# places, 0.0003 at the first step and up to 0.044 at the twentieth.
FIRST_GAP = {"fp32": 5e-6, "bf16": 2e-3}
LATER_GAP = {"fp32": 1e-4, "bf16": 0.06}


def refuse_measured(overrides: Sequence[str]) -> None:
    """
    Raises:
        MeasureError: a setting that the user cannot choose here.
    """
    for text in overrides:
        key = text.lstrip("+~").partition("=")[0]
        if key.partition(".")[0] in _NOT_GIVEN:
            raise MeasureError(f"{text}: the benchmark sets {key} itself")


def refuse_uneven(config: RunConfig, plain: RunConfig) -> None:
    """
    Args:
        plain: the settings of a measurement without further ones.

    Raises:
        MeasureError: ``config`` has settings that the runner would use, but not the other side.
    """
    usual, problems = flat(plain), []
    if config.parallel.kind.value == "ddp":  # it keeps what is whole; so do the others
        usual["parallel.reshard_after_forward"] = False
    for key, value in flat(config).items():
        is_shared = key in CARRIED or key in MEASURED or key.partition(".")[0] in OWN
        if not is_shared and value != usual.get(key):
            problems.append(f"{key}={value}: the other side knows only {usual.get(key)}")
    if not config.optim.clip:
        problems.append("optim.clip=0: the other side always clips")
    if problems:
        raise MeasureError("settings must go to both sides: " + "; ".join(problems))


def watch_precision(block: nn.Module, precision: str) -> None:
    """Check once, in the first forward pass, that a matrix product has the right dtype.

    Losses do not show it: BF16 under autocast is about as far from a BF16 model as from FP32.

    Raises:
        MeasureError: within that pass, it has another.
    """
    product = next(module for module in block.modules() if isinstance(module, nn.Linear))

    def look(module: nn.Module, given: Any, output: torch.Tensor) -> None:
        handle.remove()
        if output.dtype is not DTYPES[precision]:
            raise MeasureError(
                f"the other side multiplies in {output.dtype}, the runner {precision}"
            )

    handle = product.register_forward_hook(look)


def refuse_other_losses(ours: Sequence[float], theirs: Sequence[float], precision: str) -> None:
    """
    Args:
        ours, theirs: mean cross-entropy in nats of the first steps.

    Raises:
        MeasureError: they differ by more than this precision makes them, or there are none.
    """
    both = list(zip(ours, theirs, strict=False))
    if not both:
        raise MeasureError("no losses were compared")
    for number, (a, b) in enumerate(both, start=1):
        most = (LATER_GAP if number > 1 else FIRST_GAP)[precision]
        if not abs(a - b) <= most:
            raise MeasureError(
                f"losses of step {number} differ: {a:.6f} and {b:.6f} nats, more than {most:g} in "
                f"{precision}: not the same training"
            )
