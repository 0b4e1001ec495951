"""What every engine offers, and the values it takes and gives.

An engine owns parameters, gradients and optimizer state. It decides nothing: the gate comes
in as a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

# (name, full shape, flat start, count) -> FP32 CPU values of a fresh parameter.
InitialValues = Callable[[str, tuple[int, ...], int, int], torch.Tensor]


class Batch(Protocol):
    """Tensors of one micro-batch on the engine's device; see ``runner.data.feed``."""

    @property
    def real(self) -> torch.Tensor | None:
        """Bool [B], False for rows that are padding; None where the labels say it."""
        ...

    def inputs(self) -> dict[str, torch.Tensor]:
        """By name, each with first dimension B."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroStep:
    """One micro-batch to compute. ``seed`` drives dropout, so that a replay repeats it."""

    batch: Batch
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspects:
    """Per-sequence numbers of one step on this rank, micro-batch by micro-batch.

    ``losses`` are summed nats, ``gradient_norms`` norms of the gradient at the embedding's
    output. Both FP32, [sequences of this rank].
    """

    losses: list[float]
    gradient_norms: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """:class:`Suspects` while they are on the device: one FP32 tensor [B] a micro-batch.

    They are the step's own: the next step leaves them alone.
    """

    losses: tuple[torch.Tensor, ...]
    gradient_norms: tuple[torch.Tensor, ...]
    counts: tuple[torch.Tensor, ...] = ()  # what each loss is a sum of

    def to_host(self) -> Suspects:
        """Waits for the device."""
        return Suspects(
            losses=[value for losses in self.losses for value in losses.tolist()],
            gradient_norms=[value for norms in self.gradient_norms for value in norms.tolist()],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """This rank's part of an evaluation.

    ``losses`` are summed cross-entropy in nats per sequence, FP32 [B] a micro-batch, on the
    device; ``total`` their sum, an FP64 scalar; ``num_tokens`` what was counted.
    """

    losses: tuple[torch.Tensor, ...]
    total: torch.Tensor
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSums:
    """This rank's part of a step, FP64 scalars on the device.

    ``loss`` is summed cross-entropy in nats, ``grad_square`` the squared norm of this rank's
    share of the reduced gradient such that the sum over ranks is the global one (of the
    gradient summed, not averaged, over tokens), ``nonfinite`` 1.0 when this rank's own loss
    or backward pass met NaN or Inf, ``count`` what the loss is a sum of (tokens; a model's own
    losses may count something else). ``sequences`` says the same of each sequence by itself.
    """

    loss: torch.Tensor
    grad_square: torch.Tensor
    nonfinite: torch.Tensor
    count: torch.Tensor
    sequences: Sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A live view of this rank's part of one tensor of the state.

    ``name`` is "param/...", "exp_avg/..." or whatever else an optimizer keeps; ``local`` 1-D,
    elements ``[start, start + len(local))`` of the flattened tensor of ``shape``. Parameters are
    FP32.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    local: torch.Tensor


# What is to look at a network while it computes.
Watch = Callable[[nn.Module], AbstractContextManager[None]]


def unwatched(network: nn.Module) -> AbstractContextManager[None]:
    """Nobody looks."""
    return nullcontext()


class WiderPrecision(Protocol):
    """See :class:`runner.engine.wider.WiderTwin`."""

    @property
    def dtype(self) -> torch.dtype | None:
        """What it computes in; None where there is none."""
        ...

    def give(self, wider: Any) -> None:
        """Say how it is made; without, there is none."""
        ...

    def open(self) -> None:
        """Make it, unless it is there. No collective, and needs memory."""
        ...

    def close(self) -> None:
        """Give its memory back."""
        ...


class Engine(Protocol):
    """One way to lay a model over ranks. All methods but the views are collective."""

    @property
    def device(self) -> torch.device: ...

    @property
    def replica(self) -> tuple[int, int]:
        """(index, count) of the copies of this rank's shards; (0, 1) when there is one."""
        ...

    @property
    def network(self) -> nn.Module:
        """The model, its parameters in whatever form the engine keeps them."""
        ...

    @property
    def objective(self) -> torch.nn.Module:
        """The module that is called with a batch; it has the network."""
        ...

    @property
    def waits_for_host(self) -> bool:
        """Whether each step waits until the host has read the gate."""
        ...

    def initialise(self, values: InitialValues) -> None:
        """Fill this rank's shards of the parameters; moments and counts are zero."""
        ...

    def accumulate(self, works: Sequence[MicroStep]) -> LocalSums:
        """Forward and backward of all micro-batches; gradients are left reduced (summed)."""
        ...

    @property
    def twin(self) -> WiderPrecision:
        """What computes in a wider precision. :meth:`apply` gives its memory back."""
        ...

    @property
    def applies_wider(self) -> bool:
        """Whether :meth:`apply` takes what :meth:`accumulate_wider` has left."""
        ...

    def accumulate_wider(
        self, works: Sequence[MicroStep], *, watch: Watch = unwatched
    ) -> LocalSums:
        """As :meth:`accumulate`, in the twin's precision, under ``watch`` of its network."""
        ...

    def apply(
        self, *, skip: torch.Tensor, grad_scale: torch.Tensor, learning_rate: float
    ) -> str | None:
        """One optimizer step on gradients divided by ``grad_scale``, unless ``skip`` is 1.

        Both FP32 scalars on the device. A skipped step leaves parameters, moments and
        update counts bit-identical. Gradients are gone afterwards either way.

        Waits for nothing on the device.

        Returns:
            None, or why the engine itself skipped a step that was not to be skipped; the same
            on all ranks.
        """
        ...

    def gradients(self) -> Mapping[str, torch.Tensor]:
        """This rank's parts of the reduced gradients by parameter, FP32, until :meth:`apply`.

        Cut as the shards are; without those that the engine cannot tell apart.
        """
        ...

    def evaluate(self, batches: Sequence[Batch]) -> Evaluated:
        """Forward passes alone, of this rank's batches. Waits once."""
        ...

    def shards(self) -> list[Shard]:
        """Views of the whole state, in a fixed order of names.

        A frozen parameter has "param/..." only.
        """
        ...

    def buffers(self) -> dict[str, torch.Tensor]:
        """Tensors of the network that are no parameters, by name; the same on all ranks."""
        ...

    def full(self, name: str) -> torch.Tensor:
        """The whole tensor called ``name``, on the CPU, on every rank."""
        ...

    def replicated(self) -> tuple[int, list[torch.Tensor]]:
        """The number that this rank's copies share with other ranks', and the copies.

        They are equal bit by bit. Empty where every rank holds its own part.
        """
        ...

    def update_counts(self) -> dict[str, int]:
        """Applied updates by name, of the parameters that are trained."""
        ...

    def finish_load(self, update_counts: Mapping[str, int]) -> None:
        """Called after the shards were overwritten: set counts, refresh what derives."""
        ...
