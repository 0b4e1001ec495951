"""Looks at a step's first micro-batch on one rank: its gradient's norm, and the load of experts.

Owns the hooks, which are there only in a step that is measured, and change nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from runner.engine.activations import Hooked

_ROUTERS = ("router", "gate")  # what routers are called
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # of experts
_CHOSEN = ("top_k", "num_experts_per_tok")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Router:
    """A module that sends each token to ``num_chosen`` of ``num_experts``."""

    name: str
    module: nn.Module
    num_experts: int
    num_chosen: int


class FirstBatch(Hooked):
    """Measures one rank's first micro-batch of a step.

    Args:
        objective: computes losses from a batch.
        units: modules of the network whose weights may be gathered in their own forward alone.
        is_compiled: the units are compiled, so nothing is measured.
        factor: what the engine multiplies gradients by.
    """

    def __init__(
        self, objective: nn.Module, units: Sequence[nn.Module], *, is_compiled: bool, factor: float
    ) -> None:
        super().__init__()
        network = objective.get_submodule("network")
        self._objective, self._factor = objective, factor
        self._modules = [] if is_compiled else [network, *units]
        self.routers = [] if is_compiled else routers_of(network)
        self._num_trained = sum(one.requires_grad for one in network.parameters())
        self._is_inside = self._has_begun = False
        self._known: set[int] = set()
        self._squares: list[Tensor] = []
        self._loads: dict[str, Tensor] = {}

    @property
    def size(self) -> int:
        """Length of the result of :meth:`end`."""
        return 2 + sum(router.num_experts for router in self.routers)

    def begin(self, *, is_inside: bool) -> None:
        """Measure the step that is computed next; ``is_inside`` False: nothing of it."""
        self._unhook()
        self._error, self._is_inside, self._has_begun = None, is_inside, False
        self._known, self._squares, self._loads = set(), [], {}
        if is_inside and self._modules:
            hook = self._objective.register_forward_pre_hook(self._safe(self._at_begin))
            self._handles = [hook]

    def end(self, counts: Sequence[Tensor], device: torch.device) -> Tensor:
        """Stop measuring; FP64: the gradient's squared norm and the count of terms, then the loads.

        A load is the number of choices of each expert. NaN where nothing was measured; 0 on ranks
        that do not measure.

        Args:
            counts: terms of each sample's loss, by micro-batch.

        Raises:
            Exception: what measuring raised in the middle of the step.
        """
        self._unhook()
        self._require_sound()
        if not self._is_inside:
            return torch.zeros(self.size, dtype=torch.float64, device=device)
        unknown = torch.full((2,), torch.nan, dtype=torch.float64, device=device)
        if self._squares and counts and len(self._known) == self._num_trained:
            square = torch.stack(self._squares).to(device).sum() / self._factor**2
            unknown = torch.stack([square, counts[0].sum().double().to(device)])
        loads = [
            self._loads.get(one.name, torch.full((one.num_experts,), torch.nan, device=device))
            for one in self.routers
        ]
        return torch.cat([unknown, *(load.double() for load in loads)])

    def _at_begin(self, module: nn.Module, inputs: object) -> None:
        if self._has_begun:  # the second micro-batch
            self._unhook()
            return
        self._has_begun = True
        # Behind the hooks that gather weights; weights that are not gathered yet are DTensors.
        looks = [
            one.register_forward_pre_hook(self._safe(self._at_weights)) for one in self._modules
        ]
        looks += [
            router.module.register_forward_hook(self._safe(partial(self._at_router, router)))
            for router in self.routers
        ]
        self._handles += looks

        def at_end(module: nn.Module, inputs: object, output: object) -> None:
            """The units' forward is repeated in backward, where activations are recomputed."""
            for look in looks:
                look.remove()

        self._handles.append(self._objective.register_forward_hook(self._safe(at_end)))

    def _at_weights(self, module: nn.Module, inputs: object) -> None:
        for parameter in module.parameters():
            is_here = parameter.requires_grad and not isinstance(parameter, DTensor)
            if is_here and id(parameter) not in self._known:
                self._known.add(id(parameter))
                hook = parameter.register_hook(self._safe(self._at_gradient))  # type: ignore[no-untyped-call]
                self._handles.append(hook)

    def _at_gradient(self, gradient: Tensor) -> None:
        norm = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32)
        self._squares.append(norm.double().square())

    @torch.no_grad()
    def _at_router(self, router: Router, module: nn.Module, inputs: object, output: Any) -> None:
        chosen = _chosen(output, router)
        if chosen is not None:
            experts = torch.arange(router.num_experts, device=chosen.device)
            # Compared, not counted by index: on CUDA that is not deterministic.
            self._loads[router.name] = (chosen.flatten()[:, None] == experts).sum(dim=0)


def _chosen(output: Any, router: Router) -> Tensor | None:
    """The experts of each token: among what the router gives, or by the largest of its logits."""
    parts = output if isinstance(output, tuple | list) else (output,)
    tensors = [one.detach() for one in parts if isinstance(one, Tensor) and one.dim() >= 2]
    for one in tensors:
        if one.dtype in (torch.int64, torch.int32) and one.shape[-1] == router.num_chosen:
            return one
    for one in tensors:
        if one.is_floating_point() and one.shape[-1] == router.num_experts:
            return one.topk(router.num_chosen, dim=-1).indices
    return None


def routers_of(network: nn.Module) -> list[Router]:
    """The routers of a mixture of experts, by their name and the number of experts."""
    modules = dict(network.named_modules())
    routers = []
    for name, module in modules.items():
        above, _, last = name.rpartition(".")
        owner = modules[above]
        if last not in _ROUTERS:
            continue
        experts = getattr(owner, "experts", None)
        num = _number(module, owner, _COUNTS) or (
            len(experts) if isinstance(experts, nn.ModuleList) else 0
        )
        chosen = _number(module, owner, _CHOSEN) or 1
        if num > chosen:
            routers.append(Router(name=name, module=module, num_experts=num, num_chosen=chosen))
    return routers


def _number(module: nn.Module, owner: nn.Module, names: Sequence[str]) -> int:
    values = (getattr(one, name, None) for one in (module, owner) for name in names)
    return next((value for value in values if isinstance(value, int)), 0)
