"""The interface of every engine and what all have, and its argument and result types.

An engine owns parameters, gradients and optimizer state. It decides nothing: it receives the gate
as a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from runner.engine.buffers import RunningBuffers
from runner.engine.wider_precision import WiderTwin

# By name, (sum, count) of what a model measures besides its loss: of each sample [B], or in all.
Metrics = Mapping[str, tuple[torch.Tensor, torch.Tensor]]

# (name, full shape, flat start, count) -> FP32 CPU values of a fresh parameter.
InitialValues = Callable[[str, tuple[int, ...], int, int], torch.Tensor]


class Batch(Protocol):
    """Tensors of one micro-batch on the engine's device; see ``runner.data.feed``."""

    @property
    def real(self) -> torch.Tensor | None:
        """Bool [B], False for padding rows; None if the labels mark them."""

    def inputs(self) -> dict[str, torch.Tensor]:
        """Input tensors by name, each with first dimension B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroStep:
    """One micro-batch to compute. ``seed`` sets dropout, so that a replay repeats it."""

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
    """:class:`Suspects` still on the device: one FP32 tensor [B] per micro-batch.

    The next step does not overwrite them.
    """

    losses: tuple[torch.Tensor, ...]
    gradient_norms: tuple[torch.Tensor, ...]
    counts: tuple[torch.Tensor, ...] = ()  # number of terms in each loss

    def to_host(self) -> Suspects:
        """Copy to the host. Waits for the device."""
        return Suspects(
            losses=[value for losses in self.losses for value in losses.tolist()],
            gradient_norms=[value for norms in self.gradient_norms for value in norms.tolist()],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """This rank's part of an evaluation.

    ``losses`` are summed cross-entropy in nats per sequence, FP32 [B] per micro-batch, on the
    device, and ``counts`` the number of terms in each, as in a step; ``total`` and ``count`` are
    their sums, FP64 scalars; ``metrics`` are the model's own, [B] per micro-batch.
    """

    losses: tuple[torch.Tensor, ...]
    counts: tuple[torch.Tensor, ...]
    total: torch.Tensor
    count: torch.Tensor
    metrics: tuple[Metrics, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSums:
    """This rank's part of a step, FP64 scalars on the device.

    ``loss`` is summed cross-entropy in nats, ``grad_square`` the squared norm of this rank's
    share of the reduced gradient such that the sum over ranks is the global one (of the
    gradient summed, not averaged, over tokens), ``nonfinite`` 1.0 when this rank's own loss
    or backward pass met NaN or Inf, ``count`` the number of terms in the loss (tokens; a model's
    own losses may count something else). ``sequences`` has the same numbers per sequence.
    ``metrics`` are the model's own.
    """

    loss: torch.Tensor
    grad_square: torch.Tensor
    nonfinite: torch.Tensor
    count: torch.Tensor
    sequences: Sequences
    metrics: Metrics = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A live view of this rank's part of one tensor of the state.

    ``name`` is "param/...", "exp_avg/..." or another kind of optimizer state; ``local`` is 1-D,
    elements ``[start, start + len(local))`` of the flattened tensor of ``shape``. Parameters are
    FP32.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    local: torch.Tensor


def slice_of(name: str, whole: torch.Tensor, index: int, count: int) -> Shard:
    """Slice number ``index`` of ``count``; a view."""
    flat = whole.view(-1)
    size = -(-len(flat) // count)
    start = min(len(flat), size * index)
    return Shard(name=name, shape=tuple(whole.shape), start=start, local=flat[start : start + size])


# Makes a context that observes a network while it computes.
Watch = Callable[[nn.Module], AbstractContextManager[None]]


def unwatched(network: nn.Module) -> AbstractContextManager[None]:
    """Nobody looks."""
    return nullcontext()


class Engine(Protocol):
    """One way to lay a model over ranks. All methods but the views are collective.

    Attributes:
        device: of the computation.
        network: the model, with parameters in the engine's own form.
        objective: the module that is called with a batch; it contains the network.
        running: the buffers that forward passes change. :meth:`shards` has them, :meth:`apply`
            alone changes them, and :meth:`finish_load` gives them to the network.
        twin: the copy that computes in a wider precision. :meth:`apply` frees its memory.
        works_a_step: micro-batches that each step must have, whatever its samples; 1 where it may
            have any number.
        applies_wider: whether :meth:`apply` can use the gradients of :meth:`accumulate_wider`.
        gradient_factor: what gradients are multiplied by in the backward pass.
    """

    device: torch.device
    network: nn.Module
    objective: nn.Module
    running: RunningBuffers
    twin: WiderTwin
    applies_wider: bool
    works_a_step: int = 1
    gradient_factor: float = 1.0
    _home: torch.device
    _parameters: dict[str, nn.Parameter]
    _is_half_way: bool

    def __init__(self, objective: nn.Module, *, device: torch.device, home: torch.device) -> None:
        """
        Args:
            home: where weights and optimizer live.
        """
        self.device = device
        self.objective = objective
        self.network = objective.get_submodule("network")
        self.running = RunningBuffers(self.network)
        self.twin = WiderTwin()
        self._home = home
        self._parameters = dict(sorted(self.network.named_parameters()))
        self._is_half_way = False  # through forward and backward passes

    @property
    def replica(self) -> tuple[int, int]:
        """(index, count) among the replicas of this rank's shards; (0, 1) without replicas."""
        return 0, 1

    @property
    def waits_for_host(self) -> bool:
        """Whether each step waits until the host has read the gate."""

    def initialise(self, values: InitialValues) -> None:
        """Fill this rank's shards of the parameters; moments and counts are zero."""
        for shard in self.shards():
            kind, _, name = shard.name.partition("/")
            if kind == "param":
                shard.local.copy_(values(name, shard.shape, shard.start, len(shard.local)))

    def accumulate(self, works: Sequence[MicroStep]) -> LocalSums:
        """Run forward and backward of all micro-batches; leaves reduced (summed) gradients."""

    def accumulate_wider(
        self, works: Sequence[MicroStep], *, watch: Watch = unwatched
    ) -> LocalSums:
        """Like :meth:`accumulate`, in the twin's precision, with ``watch`` around its network."""

    def recover(self) -> None:
        """Drop what is left of a forward or backward pass that raised, alike on all ranks.

        Raises:
            RankError: this engine cannot go on after such a pass.
        """

    def apply(
        self, *, skip: torch.Tensor, grad_scale: torch.Tensor, learning_rate: float
    ) -> str | None:
        """One optimizer step on gradients divided by ``grad_scale``, unless ``skip`` is 1.

        Both FP32 scalars on the device. A skipped step leaves parameters, moments and
        update counts bit-identical. Gradients are dropped either way.

        Does not wait for the device.

        Returns:
            None, or why the engine itself skipped a step that the gate let through; the same on all
            ranks.
        """

    def gradients(self) -> Mapping[str, torch.Tensor]:
        """This rank's parts of the reduced gradients by parameter, FP32, until :meth:`apply`.

        Partitioned like the shards; omits gradients that the engine cannot separate.
        """

    def evaluate(self, batches: Sequence[Batch]) -> Evaluated:
        """Run forward passes over this rank's batches. Waits for the device once."""

    def shards(self) -> list[Shard]:
        """Views of the whole state, in a fixed order of names.

        A frozen parameter has "param/..." only.
        """
        index, count = self._place
        slices = [slice_of(name, whole, index, count) for name, whole in self._uncut().items()]
        return sorted([*self._cut(), *slices], key=lambda shard: shard.name)

    @property
    def _place(self) -> tuple[int, int]:
        """(index, count) among the ranks that hold one copy of the state."""

    def _cut(self) -> Iterable[Shard]:
        """This rank's shards of the tensors that are cut."""

    def _uncut(self, *, is_loaded: bool = False) -> dict[str, torch.Tensor]:
        """State that every rank has whole; with ``is_loaded`` each has loaded its slice of it."""

    def full(self, name: str) -> torch.Tensor:
        """The whole tensor called ``name``, on the CPU, on every rank."""

    def replicated(self) -> tuple[int, list[torch.Tensor]]:
        """The id of this rank's replica group, and the replicated tensors.

        They are equal bit for bit within a group. Empty if every rank holds its own part.
        """

    def update_counts(self) -> dict[str, int]:
        """Number of applied updates of each trained parameter, by name."""

    def complete_copies(self) -> None:
        """Exchange the slices of its shards that the replicas have filled, each one its own."""
        return None  # without replicas

    def finish_load(self, update_counts: Mapping[str, int]) -> None:
        """Set the counts and refresh derived tensors after the shards were overwritten."""
