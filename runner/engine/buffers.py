"""Buffers that forward passes change, such as running statistics: state, gated as the weights are.

The rule: each micro-batch of a step begins with the buffers from before the step. After the step a
floating-point buffer is the mean of what the micro-batches of all ranks have made of it, each with
the weight of its number of samples that count; of integers and truth values it is the largest. So
a step changes a running statistic once, whatever the number of ranks and micro-batches.

What a network computes with are working copies. The state itself changes only where weights do: in
an update that the gate lets through, and in a load. Probes, evaluations and forward passes that are
repeated for their activations leave no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from runner.system.error import ConfigError

SAVED, UNSAVED = "buffer", "unsaved_buffer"  # kinds of state: whether a state_dict has it
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def is_buffer(name: str) -> bool:
    """Whether a name in a checkpoint is a buffer's."""
    return name.partition("/")[0] in (SAVED, UNSAVED)


def has_running_statistics(module: nn.Module) -> bool:
    """Whether its forward pass changes its buffers in training mode, unseen by torch's counters."""
    return isinstance(module, _NormBase) and module.track_running_stats


@dataclass(slots=True)
class BufferCopy:
    """A buffer of a module, and a copy of it.

    ``seen`` is the buffer itself, as it was copied last, and ``version`` torch's count of its
    in-place changes then.
    """

    owner: nn.Module
    key: str
    copy: torch.Tensor
    seen: torch.Tensor
    version: int

    @property
    def has_new_version(self) -> bool:
        """Whether it was replaced, or torch recorded an in-place change.

        Torch does not record batch norm's kernels.
        """
        live = self.live
        return live is not self.seen or live._version != self.version

    @property
    def live(self) -> torch.Tensor:
        """The buffer as its module has it now.

        Raises:
            ConfigError: it is gone, or has another shape or type.
        """
        buffer = self.owner._buffers.get(self.key)
        if buffer is None or buffer.shape != self.copy.shape or buffer.dtype != self.copy.dtype:
            now = "gone" if buffer is None else f"{buffer.dtype} {list(buffer.shape)}"
            raise ConfigError(
                f"buffer {self.key!r} of {type(self.owner).__name__} was "
                f"{self.copy.dtype} {list(self.copy.shape)} and is {now}: changes of values are "
                "undone, not of shapes; register it with its full size"
            )
        return buffer

    def remember(self) -> None:
        """The copy is as the buffer is now."""
        self.seen = self.live
        self.version = self.seen._version


class RunningBuffers:
    """The buffers of one network on one rank; equal on all ranks between steps."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._constant: dict[str, BufferCopy] = {}
        self._kept: dict[str, BufferCopy] = {}
        # Floating-point ones, then integers, by name; those of one type lie in one tensor.
        self._ordered: list[BufferCopy] = []
        self._flats: list[tuple[torch.Tensor, list[int]]] = []  # with places in the order
        self._is_trial = False
        self._sums: torch.Tensor | None = None  # then the sum of the weights
        self._largest: torch.Tensor | None = None
        self.note()

    def note(self) -> None:
        """Note the network's buffers as they are now. Nothing may be kept yet."""
        assert not self._kept
        self._constant = {}
        for name, buffer in self._network.named_buffers():
            prefix, _, key = name.rpartition(".")
            owner = self._network.get_submodule(prefix)
            self._constant[name] = BufferCopy(owner, key, buffer, buffer, buffer._version)

    @property
    def has_any(self) -> bool:
        """Whether the network has any buffers, changing or not."""
        return bool(self._constant or self._kept)

    @property
    def names(self) -> list[str]:
        """Of those that are kept as state."""
        return sorted(self._kept)

    def written_by(self, compute: Callable[[], None]) -> list[str]:
        """Names of buffers that ``compute`` changes, beside those that are kept; it is undone.

        Running statistics are always among them. If any of these belong to a ``state_dict``, all
        that do are: so that an export is whole.

        Raises:
            ConfigError: a forward pass makes buffers.
        """
        before = {name: buffer.live.detach().clone() for name, buffer in self._constant.items()}
        known = {name for name, _ in self._network.named_buffers()}
        self._is_trial = True
        try:
            compute()
        finally:
            self._is_trial = False
        if unknown := sorted({name for name, _ in self._network.named_buffers()} - known):
            raise ConfigError(
                f"a forward pass makes the buffer {unknown[0]}, which is not there when a "
                "checkpoint is loaded: register it in the constructor with its full size, or use "
                "runner.Guard in a loop of your own"
            )
        changed = [
            name
            for name, buffer in self._constant.items()
            if buffer.has_new_version
            or has_running_statistics(buffer.owner)
            or not torch.equal(buffer.live, before[name])
        ]
        for name, buffer in self._constant.items():
            buffer.owner._buffers[buffer.key] = buffer.seen
            with torch.no_grad():
                buffer.seen.copy_(before[name])
            buffer.remember()
        if any(_kind(self._constant[name]) == SAVED for name in changed):
            changed += [name for name, buffer in self._constant.items() if _is_whole(buffer)]
        return sorted(set(changed))

    def keep(self, names: Collection[str]) -> None:
        """These change in forward passes: they are state from now on, with their present values.

        Raises:
            ConfigError: the network has none of this name, or of a type that cannot be kept.
        """
        for name in sorted(set(names) - self._kept.keys()):
            buffer = self._constant.pop(name, None)
            if buffer is None:
                raise ConfigError(
                    f"the run's checkpoints hold the buffer {name}, which this model does not "
                    "have: give the model of the run, or another out"
                )
            if buffer.live.dtype not in (*_FLOATS, *_INTEGERS):
                raise ConfigError(
                    f"the buffer {name} is {buffer.live.dtype} and changes in forward passes; what "
                    "changes may be a floating-point number of 16 bits or more, a signed integer, "
                    "uint8 or bool"
                )
            buffer.copy = buffer.live.detach()
            buffer.remember()
            self._kept[name] = buffer
        self._lay_out()

    def _lay_out(self) -> None:
        """Give buffers of one type copies in one tensor: few kernels handle all of them."""
        kept = [self._kept[name] for name in self.names if self._kept[name].copy.numel()]
        self._ordered = sorted(kept, key=lambda buffer: not buffer.copy.is_floating_point())
        self._flats = []
        for dtype in dict.fromkeys(buffer.copy.dtype for buffer in self._ordered):
            places = [n for n, buffer in enumerate(self._ordered) if buffer.copy.dtype is dtype]
            members = [self._ordered[place] for place in places]
            flat = torch.cat([buffer.copy.reshape(-1) for buffer in members])
            parts = torch.split(flat, [buffer.copy.numel() for buffer in members])
            for buffer, part in zip(members, parts, strict=True):
                buffer.copy = part.view(buffer.copy.shape)
            self._flats.append((flat, places))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The state by "kind/name", contiguous.

        The network has what is written there after :meth:`restore`.
        """
        return {
            f"{_kind(buffer)}/{name}": buffer.copy
            for name, buffer in sorted(self._kept.items())
            if buffer.copy.numel()
        }

    def drop(self) -> None:
        """Forget what forward passes have made of the buffers."""
        self._sums = self._largest = None

    @torch.no_grad()
    def restore(self) -> None:
        """Give the network the buffers of the state again."""
        if self._ordered:
            for buffer in self._ordered:
                buffer.owner._buffers[buffer.key] = buffer.seen
            copies = [buffer.copy for buffer in self._ordered]
            torch._foreach_copy_([buffer.seen for buffer in self._ordered], copies)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Undo what forward passes inside do to the buffers."""
        self.restore()
        try:
            yield
        finally:
            self.restore()

    @torch.no_grad()
    def take(self, counts: torch.Tensor) -> None:
        """Take what the forward pass of a micro-batch in training has made of the buffers.

        Before its backward pass, which may repeat forward passes. Does not wait for the device.

        Args:
            counts: number of terms in each sample's loss, [B].

        Raises:
            ConfigError: a buffer has changed that is not kept.
        """
        if not self._is_trial:
            self._require_constant()
        if not self._ordered:
            return
        weight = (counts > 0).sum().double()
        floats, integers = self._working(is_float=True), self._working(is_float=False)
        # A selection: padding may give NaN.
        parts = [torch.where(weight > 0, buffer.double() * weight, 0.0) for buffer in floats]
        sums = torch.cat([*parts, weight.view(1)])
        self._sums = sums if self._sums is None else self._sums + sums
        for buffer in integers:
            own = torch.where(weight > 0, buffer.long(), torch.iinfo(torch.int64).min)
            self._largest = own if self._largest is None else self._largest.maximum(own)

    def _working(self, *, is_float: bool) -> list[torch.Tensor]:
        """The working copies in their order, in one tensor; empty if there are none."""
        own = [
            buffer.live for buffer in self._ordered if buffer.copy.is_floating_point() is is_float
        ]
        return [torch.cat([buffer.detach().reshape(-1) for buffer in own])] if own else []

    def _require_constant(self) -> None:
        for name, buffer in self._constant.items():
            # What no ``state_dict`` has may be a cache (of positions, say) that grows with samples.
            if _kind(buffer) == UNSAVED:
                continue
            if buffer.has_new_version or (
                has_running_statistics(buffer.owner) and buffer.owner.training
            ):
                raise ConfigError(
                    f"a forward pass changes the buffer {name}, and did not when this run was "
                    "begun, so that its checkpoints do not hold it: let it change from the first "
                    "step on (and give another out), or keep its module in eval()"
                )

    def total(self) -> torch.Tensor | None:
        """A number that is not finite if any buffer of this step is not; FP64 scalar."""
        return None if self._sums is None else self._sums.sum()

    def move_to(self, other: RunningBuffers) -> None:
        """Hand what the forward passes have made of the buffers to another copy of the network."""
        other._sums, other._largest = self._sums, self._largest

    @torch.no_grad()
    def follow(self, other: RunningBuffers) -> None:
        """Be as another copy of the network is between steps."""
        self.keep(other._kept)
        theirs = dict(other._network.named_buffers())
        for name, buffer in self._constant.items():
            if theirs[name].shape == buffer.live.shape:  # a cache may have grown there
                buffer.live.copy_(theirs[name])
                buffer.remember()
        for name, buffer in self._kept.items():
            buffer.copy.copy_(other._kept[name].copy)
        self.restore()

    @torch.no_grad()
    def update(self, skip: torch.Tensor) -> None:
        """Change the state as the module says, unless ``skip`` is 1. Collective.

        Does not wait for the device.
        """
        sums, largest = self._sums, self._largest
        self.drop()
        if sums is None:
            return
        if dist.get_world_size() > 1:
            dist.all_reduce(sums)
            if largest is not None:
                dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        stays = (skip != 0) | (sums[-1] == 0)
        means = sums[:-1] / sums[-1]
        sizes = [buffer.copy.numel() for buffer in self._ordered]
        num_floats = sum(buffer.copy.is_floating_point() for buffer in self._ordered)
        pieces = [*torch.split(means, sizes[:num_floats])]
        pieces += [] if largest is None else torch.split(largest, sizes[num_floats:])
        for flat, places in self._flats:
            fresh = torch.cat([pieces[place] for place in places]).to(flat.dtype)
            flat.copy_(torch.where(stays, flat, fresh))
        self.restore()


def _is_whole(buffer: BufferCopy) -> bool:
    """Whether a ``state_dict`` has it, and a checkpoint can."""
    return _kind(buffer) == SAVED and buffer.live.dtype in (*_FLOATS, *_INTEGERS)


def _kind(buffer: BufferCopy) -> str:
    return UNSAVED if buffer.key in buffer.owner._non_persistent_buffers_set else SAVED
