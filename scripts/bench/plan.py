"""Defines how much is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The options of the command.

    ``model`` and ``overrides`` are the runner's settings; ``pairs`` scales how often each
    comparison is repeated.
    """

    quick: bool
    ranks: int
    has_gpu: bool
    overrides: Sequence[str] = ()
    say: Callable[[str], None] = print

    def pairs(self, number: int) -> int:
        """``number`` for a full run, a fifth of it for a quick one."""
        return max(5, number // 5) if self.quick else number

    @property
    def size(self) -> list[str]:
        """Settings of the model and batch: the runner's own defaults on a CPU (nano, 32 x 256)."""
        if not self.has_gpu:
            return ["batch.global_size=8"] if self.quick else []
        batch = [f"batch.global_size={8 * self.ranks}", "batch.micro_size=8"]
        return ["model=small", "data.seq_len=1024", *batch]

    @property
    def short(self) -> list[str]:
        """Settings that make steps short: costs that do not grow with the batch stand out."""
        if self.has_gpu:
            return ["model=nano", "data.seq_len=256", f"batch.global_size={4 * self.ranks}"]
        return [f"batch.global_size={2 * self.ranks}", "data.seq_len=64"]

    @property
    def large(self) -> list[str]:
        """With a GPU, steps that are the device's and not Python's: compiled on both sides."""
        batch = [f"batch.global_size={4 * self.ranks}", "batch.micro_size=4"]
        return ["model=llama_1b", "compute.compile=true", "data.seq_len=2048", *batch]

    @property
    def block(self) -> int:
        """Steps in a row of one side. With a GPU many, for nothing waits within them."""
        return 10 if self.has_gpu else 2
