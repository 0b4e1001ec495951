"""Wraps the parts of a run, so that the faults of :mod:`runner.fault.inject` come from outside.

A step passes through five seams: the phases of a rank's heartbeat, the feed, the group
of ranks, the engine, and the modules inside that engine. Each wrapper acts like the part it wraps
except for the fault, so that neither the step nor the forward pass knows of faults. Without
faults nothing is wrapped.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from runner.fault.inject import Disturbance, FaultInjector
from runner.system.error import ConfigError

Part = TypeVar("Part")
# Of a micro-batch: cross-entropy, the loss to train on, and what is counted; [B] each.
Losses = tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]

_SLIGHTLY_WRONG = 1.01  # what a device makes of 1 in a gradient; BF16 rounds less away
# The phases in which an ``at=POINT`` lies; "fetch" is the begin of a step.
_POINTS = ("agree", "apply")


def wrap_heart(heart: Part, faults: FaultInjector, files: CheckpointFiles) -> Part:
    """Wrap a heartbeat, so that faults happen as the step enters its phases.

    Args:
        files: the files that faults may damage.
    """
    return cast(Part, FaultyHeart(heart, faults, files)) if faults.has_any else heart


def wrap_group(group: Part, faults: FaultInjector) -> Part:
    """Wrap a group, in which this rank may enter a wrong collective or claim a wrong identity."""
    return cast(Part, FaultyGroup(group, faults)) if faults.has_any else group


def wrap_feed(feed: Part, faults: FaultInjector) -> Part:
    """Wrap a feed whose samples may be corrupted."""
    return cast(Part, FaultyFeed(feed, faults)) if faults.has_any else feed


def wrap_engine(engine: Part, faults: FaultInjector, inside: MicroBatchFaults) -> Part:
    """Wrap an engine whose replicated state and micro-batches may be damaged.

    Args:
        inside: given to the engine, and attached to its modules.
    """
    return cast(Part, FaultyEngine(engine, faults, inside)) if faults.has_any else engine


class _Wrapped:
    """Passes everything else through to the wrapped object."""

    def __init__(self, part: Any, faults: FaultInjector) -> None:
        self._part = part
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


class FaultyHeart(_Wrapped):
    """See :class:`runner.health.heartbeat.Heartbeat`; the watchdog knows the phase by then."""

    _step = 0

    def __init__(self, part: Any, faults: FaultInjector, files: CheckpointFiles) -> None:
        super().__init__(part, faults)
        self._files = files

    def begin_step(self, step: int) -> None:
        self._part.begin_step(step)
        self._step = step
        if self._faults.lasts("no_break", step):
            never_break()
        self._faults.before_step(step)
        if self._faults.in_step("corrupt_checkpoint") and self._faults.rank == 0:
            damage_checkpoint(self._files.newest())
        if self._faults.in_step("corrupt_snapshots"):
            for file in self._files.snapshot_files():
                flip_bit(file)
        self._faults.at("fetch", step)

    def enter(self, phase: str, **more: Any) -> None:
        self._part.enter(phase, **more)
        if phase in _POINTS:
            self._faults.at(phase, self._step)


def never_break() -> None:
    """Make this process's collectives wait for ever instead of raising, as over NCCL.

    A collective of gloo breaks by itself when a peer dies. NCCL's does not, and the training
    thread waits for the device for ever; so does whoever waits here.
    """
    from torch._C._distributed_c10d import Work

    waits: Any = Work.wait
    if getattr(waits, "never_breaks", False):
        return

    def wait(work: Any, *arguments: Any, **more: Any) -> Any:
        try:
            return waits(work, *arguments, **more)
        except RuntimeError:
            while True:
                threading.Event().wait(60)

    wait.never_breaks = True  # type: ignore[attr-defined]
    setattr(Work, "wait", wait)  # noqa: B010  # it has another signature


class FaultyFeed(_Wrapped):
    """See :class:`runner.data.feed.Feed`."""

    def fetch(self, plan: Any, ledger: Any) -> Any:
        fetched = self._part.fetch(plan, ledger)
        if not self._faults.once("misread"):
            return fetched
        wrong = tuple(_misread(batch) for batch in fetched.micro_batches)
        self._part.put(plan, wrong)  # as they lie in memory from here on
        return replace(fetched, micro_batches=wrong)


def _misread(batch: Any) -> Any:
    """Reverse the tokens of each sequence: valid ids in a meaningless order."""
    if batch.fields is None:
        return replace(batch, tokens=batch.tokens.flip(1))
    wrong = {k: v * 1e4 if v.is_floating_point() else v for k, v in batch.fields.items()}
    return replace(batch, fields=wrong)


class FaultyGroup(_Wrapped):
    """See :class:`runner.distributed.agreement.Ranks`."""

    def __init__(self, group: Any, faults: FaultInjector) -> None:
        super().__init__(group, faults)
        self._claimed: set[int] = set()  # steps for which this rank claims to be elsewhere

    def all_reduce(self, packed: torch.Tensor) -> None:
        if self._faults.in_step("skip_collective"):
            return
        if self._faults.in_step("other_collective"):
            dist.broadcast(packed, src=dist.get_rank())
            return
        if self._faults.in_step("other_shape"):
            packed = torch.cat([packed, packed])  # one longer, gloo may abort both ranks
        self._part.all_reduce(packed)

    def fingerprint(self, identity: Mapping[str, Any]) -> list[float]:
        if self._faults.in_step("mismatch"):
            self._claimed.add(identity["step"])
        numbers: list[float] = self._part.fingerprint(self._claim(identity))
        return numbers

    def require_alike(self, sums: Sequence[float], identity: Mapping[str, Any]) -> None:
        self._part.require_alike(sums, self._claim(identity))

    def may_repeat(self, step: int) -> bool:
        """Forbid speculation where a fault is due: it happens only once."""
        return not self._faults.is_due(step) and bool(self._part.may_repeat(step))

    def _claim(self, identity: Mapping[str, Any]) -> dict[str, Any]:
        step = identity["step"]
        return {**identity, "step": step + int(step in self._claimed)}


class FaultyEngine(_Wrapped):
    """See :class:`runner.engine.protocol.Engine`."""

    def __init__(self, engine: Any, faults: FaultInjector, inside: MicroBatchFaults) -> None:
        super().__init__(engine, faults)
        self._inside = inside

    def accumulate(self, works: Sequence[Any]) -> Any:
        if self._faults.once("flip_bit"):
            _flip_bit(self._part.replicated()[1])
        if self._faults.once("spoil_state"):
            parameters = (s.local for s in self._part.shards() if s.name.startswith("param/"))
            _flip_highest(max(parameters, key=torch.numel))
        self._inside.begin(self._faults.disturbance(work.batch.positions) for work in works)
        return self._part.accumulate(works)


class MicroBatchFaults:
    """The faults' way into an engine's computation: what it does to losses, before they count.

    One call of the model belongs to each disturbance.
    """

    def __init__(self) -> None:
        self._due: deque[Disturbance | None] = deque()
        self._now: Disturbance | None = None
        self._is_scaled = False

    def attach(
        self, model: nn.Module, embedding: nn.Module, faults: FaultInjector | None = None
    ) -> None:
        """Reach the embedding's output and gradient, and modules that are at fault.

        After the engine has set its own hooks there, so that its probe sees what is done to the
        gradient.
        """
        model.register_forward_pre_hook(self._at_model)
        embedding.register_forward_hook(self._at_embedding)
        if faults is None:
            return
        for name, is_due in faults.in_modules("overflow"):
            _named(model, name).register_forward_hook(partial(_overflowing, is_due))
        for name, is_due in faults.in_modules("wrong_grad"):
            _named(model, name).register_forward_pre_hook(_WrongGradient(is_due))

    def begin(self, disturbances: Iterable[Disturbance | None]) -> None:
        """Of the micro-batches that come now, in their order."""
        self._due = deque(disturbances)

    def __call__(self, losses: Losses) -> Losses:
        fault, self._now = self._now, None
        if fault is None:
            return losses
        scales = [fault.loss_scale]
        if not self._is_scaled:  # the embedding's output is not one row a sample
            scales.append(fault.activation_scale)
        for scale in scales:
            if scale is not None:
                factor = torch.tensor(scale, device=losses[0].device)
                losses = losses[0] * factor, losses[1] * factor, *losses[2:]
        return losses

    def _at_model(self, module: nn.Module, inputs: object) -> None:
        self._now = self._due.popleft() if self._due else None
        self._is_scaled = False
        if self._now is not None and self._now.in_forward is not None:
            self._now.in_forward()

    def _at_embedding(self, module: nn.Module, inputs: object, output: Any) -> Any:
        fault = self._now
        if fault is None:
            return output
        if isinstance(output, tuple):
            return (self._disturbed(output[0], fault), *output[1:])
        return self._disturbed(output, fault)

    def _disturbed(self, output: torch.Tensor, fault: Disturbance) -> torch.Tensor:
        # Another tensor than the one on which the engine's probe is: in the backward pass this
        # one's gradient comes first.
        output = output.view_as(output)
        scales = fault.activation_scale
        if scales is not None and output.dim() and len(output) % len(scales) == 0:
            scale = torch.tensor(scales, device=output.device, dtype=output.dtype)
            scale = scale.repeat(len(output) // len(scales))
            output = output * scale.view(-1, *[1] * (output.dim() - 1))
            self._is_scaled = True
        if not output.requires_grad:
            output.requires_grad_()  # a frozen embedding
        output.register_hook(  # type: ignore[no-untyped-call]
            lambda grad: _at_embedding_gradient(grad, fault)
        )
        return output


def _named(model: nn.Module, name: str) -> nn.Module:
    """
    Raises:
        ConfigError: the model has no such module.
    """
    known: dict[str, nn.Module] = dict(model.get_submodule("network").named_modules())
    if name not in known:
        some = ", ".join(list(known)[1:12])
        raise ConfigError(f"faults: module={name}: the model has {some}, ...")
    return known[name]


class _WrongGradient:
    """Scales the gradients of a module's own weights, before they are summed over ranks."""

    def __init__(self, is_due: Callable[[], bool]) -> None:
        self._is_due = is_due
        self._known: dict[int, torch.Tensor] = {}

    def __call__(self, module: nn.Module, inputs: object) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in self._known:
                self._known[id(parameter)] = parameter
                parameter.register_hook(self._scaled)  # type: ignore[no-untyped-call]

    def _scaled(self, gradient: torch.Tensor) -> torch.Tensor | None:
        return gradient * _SLIGHTLY_WRONG if self._is_due() else None


def _overflowing(is_due: Callable[[], bool], module: nn.Module, inputs: object, output: Any) -> Any:
    """The largest number of a module's output becomes infinite."""
    if not is_due():
        return output
    first = output[0] if isinstance(output, tuple) else output
    size = first.detach().abs()
    wrong = torch.where(size >= size.amax(), torch.inf, first)
    return (wrong, *output[1:]) if isinstance(output, tuple) else wrong


def _at_embedding_gradient(grad: torch.Tensor, fault: Disturbance) -> torch.Tensor:
    if fault.in_backward is not None:
        fault.in_backward()
    if fault.flip_grad:
        grad = grad.clone(memory_format=torch.contiguous_format)
        _flip_highest(grad)
    return grad * torch.nan if fault.nan_grad else grad


def _flip_highest(numbers: torch.Tensor) -> None:
    """The highest bit of the largest number's exponent that is 0: it becomes astronomical."""
    flat = numbers.view(-1)
    kind, highest = (torch.int32, 30) if flat.element_size() == 4 else (torch.int16, 14)
    largest = int(flat.abs().argmax())
    # From 2 on the first is set.
    flat.view(kind)[largest] ^= 1 << (highest - int(flat[largest].abs() >= 2))


def _flip_bit(copies: list[torch.Tensor]) -> None:
    """Of a number's upper half: the lowest of FP32 is rounded away by the next update."""
    if copies:
        words = copies[0].view(-1).view(torch.int16)
        words[copies[0].element_size() // 2 - 1] ^= 1


class CheckpointFiles(Protocol):
    """Where the files to damage are; a ring implements it."""

    def newest(self) -> Path | None:
        """Folder of the newest committed checkpoint."""

    def snapshot_files(self) -> list[Path]:
        """This rank's files of the snapshots in memory."""


def damage_checkpoint(folder: Path | None) -> None:
    """Flip a bit in the first shard file; does nothing without a checkpoint."""
    shards = sorted(folder.glob("*.bin")) if folder else []
    if shards:
        flip_bit(shards[0])


def flip_bit(path: Path) -> None:
    """Flip a bit in the middle of the file, and sync it."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0x10]))
        file.flush()
        os.fsync(file.fileno())
