"""Every rank computes the same micro-batch, with the gate closed: the state stays as it is."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from runner.data.cursor import BatchPlan
from runner.data.feed import MicroBatch
from runner.engine.modes import same_randomness
from runner.engine.protocol import MicroStep
from runner.explain.probe import drop_gradients
from runner.health.checks import device_kind, sum_of_words
from runner.policy.outlier_ranks import ByRank
from runner.system.parsing import json_text
from runner.train.run import EngineRun

_DIGEST_BYTES = 6  # what a double holds exactly
_FACTOR = 0x3F58476D1CE4E5B9  # odd: no micro-batch's checksum is lost


class SameBatch:
    """Computes a micro-batch on every rank."""

    def __init__(self, run: EngineRun, seed: int) -> None:
        self._engine, self._feed, self._ranks = run.engine, run.feed, run.observers.ranks
        self._stop = run.group.stop_look.through(self._ranks)
        self._kind = device_kind(run.group.device)  # devices of one kind give equal bits
        self._seed = seed
        self.repeats_bits = run.repeats_bits
        self._gradients = OwnGradients(run.engine.network)

    def batches(self, plan: BatchPlan, number: int) -> list[MicroBatch] | None:
        """One rank's micro-batch, the same on all ranks; None if a rank cannot read it.

        Collective.
        """
        self._stop.now()
        with same_randomness(self._engine.device):
            read = self._feed.read_again(plan, number % self._ranks.world_size)
        batches = list(read[: self._engine.works_a_step])
        failed = any(batch.unreadable for batch in batches)
        return None if self._ranks.sum([float(failed)])[0] else batches

    def compute(self, batches: Sequence[MicroBatch]) -> ByRank:
        """Compute once; of each rank the kind of its device and its numbers. Collective."""
        return self._ranks.gather([self._kind, self._own_numbers(batches)])

    def _own_numbers(self, batches: Sequence[MicroBatch]) -> list[float]:
        """Compute without changing the state.

        Returns:
            The sequences' losses and gradient norms; then a digest of all gradients, or where bits
            do not repeat the norm of each.
        """
        device = self._engine.device
        works = [
            MicroStep(batch=batch.to(device), seed=self._seed + number)
            for number, batch in enumerate(batches)
        ]
        self._ranks.ready()
        with same_randomness(device):
            with self._gradients.over():
                sums = self._engine.accumulate(self._stop.over(works))
            drop_gradients(self._engine)
        sequences = sums.sequences.to_host()
        own = self.by_parameter()
        gradients = [_digest(own)] if self.repeats_bits else list(own.values())
        return [*sequences.losses, *sequences.gradient_norms, *gradients]

    def by_parameter(self) -> dict[str, Any]:
        """Of this rank's gradients by themselves: checksums, or norms where bits do not repeat."""
        heard = self._gradients
        return heard.checksums() if self.repeats_bits else heard.norms()


def _digest(checksums: Mapping[str, int]) -> float:
    """A number that changes with any of them, the same on every machine."""
    text = json_text(checksums, sort_keys=True)
    return float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:_DIGEST_BYTES], "big"))


class OwnGradients:
    """Checksums of the gradients that this rank computes, before ranks are summed.

    Listens to the backward passes of ``network`` inside of :meth:`over`. A reduced gradient is
    everybody's: a rank that is a little wrong disappears in it. What autograd hands to a parameter
    is still this rank's alone, whole, on every engine.
    """

    def __init__(self, network: nn.Module) -> None:
        # A hook inside of a compiled block would have it compiled anew.
        self._compiled = tuple(
            f"{name}."
            for name, module in network.named_modules()
            if getattr(module, "_compiled_call_impl", None) is not None
        )
        self._modules = {
            name: module
            for name, module in network.named_modules()
            if not f"{name}.".startswith(self._compiled)
        }
        self._sums: dict[str, Tensor] = {}
        self._squares: dict[str, Tensor] = {}
        # The tensors themselves: an id alone could be another's by the next micro-batch.
        self._known: dict[int, Tensor] = {}
        self._handles: list[RemovableHandle] = []

    @contextmanager
    def over(self) -> Iterator[None]:
        """Listen; what was heard before is forgotten."""
        self._sums, self._squares = {}, {}
        # A shard is no leaf of the graph: its whole parameter is there from its module's forward
        # pass on. Parents too, for some use the parameters of modules that they never call.
        self._handles = [
            module.register_forward_pre_hook(partial(self._at_module, name))
            for name, module in self._modules.items()
        ]
        try:
            yield
        finally:
            for handle in self._handles:
                handle.remove()
            self._handles, self._known = [], {}

    def checksums(self) -> dict[str, int]:
        """Of each parameter that got a gradient, one that changes with any bit. Waits."""
        return _on_host(self._sums)

    def norms(self) -> dict[str, float]:
        """Of each parameter that got a gradient, its norm over all micro-batches. Waits."""
        return {name: square**0.5 for name, square in _on_host(self._squares).items()}

    def _at_module(self, prefix: str, module: nn.Module, inputs: object) -> None:
        for name, parameter in module.named_parameters(prefix):
            is_whole = not isinstance(parameter, DTensor) and parameter.requires_grad
            if not is_whole or id(parameter) in self._known or name.startswith(self._compiled):
                continue
            self._known[id(parameter)] = parameter
            heard = partial(self._at_gradient, name)
            self._handles.append(parameter.register_hook(heard))  # type: ignore[no-untyped-call]

    def _at_gradient(self, name: str, gradient: Tensor) -> None:
        if gradient.layout is not torch.strided or not gradient.is_floating_point():
            return
        checksum = sum_of_words(gradient)
        square = torch.linalg.vector_norm(gradient, dtype=torch.float32).double().square()
        if name in self._sums:
            checksum = self._sums[name] * _FACTOR + checksum
            square = self._squares[name] + square
        self._sums[name], self._squares[name] = checksum, square


def _on_host(numbers: dict[str, Tensor]) -> dict[str, Any]:
    """By name in order, with one wait."""
    names = sorted(numbers)
    values = torch.stack([numbers[name] for name in names]).tolist() if names else []
    return dict(zip(names, values, strict=True))
