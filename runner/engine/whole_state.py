"""State that every rank has whole: each saves a slice of it, and all get the whole at a load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from runner.engine.protocol import slice_of

# All-gather into one tensor; torch 2.13 renamed it and warns of the old name.
gather_flat: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def complete(
    wholes: Mapping[str, torch.Tensor],
    index: int,
    count: int,
    *,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Complete the tensors from the slices that the ranks of ``group`` have loaded. Collective."""
    for name, whole in wholes.items():
        if count == 1 or not whole.numel():
            continue
        part = slice_of(name, whole, index, count).local
        size = -(-whole.numel() // count)
        # As bytes, since backends lack some dtypes.
        own = torch.zeros(size, dtype=whole.dtype, device=device)
        own[: len(part)] = part
        gathered = own.new_empty(size * count)
        gather_flat(gathered.view(torch.uint8), own.view(torch.uint8), group=group)
        whole.view(-1).copy_(gathered[: whole.numel()])


_NAMES: Final = "_scalar_parameters"


def give_dimension(model: nn.Module) -> None:
    """Make each parameter of shape ``[]`` one of shape ``[1]``; tied ones stay tied."""
    replacements: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        names = [
            name
            for name, parameter in module._parameters.items()
            if parameter is not None and not parameter.dim()
        ]
        for name in names:
            old: Any = module._parameters[name]
            new = nn.Parameter(old.detach().view(1), old.requires_grad)
            module._parameters[name] = replacements.setdefault(id(old), new)
        if names:
            _show_views(module, frozenset(names))


def scalar_names(model: nn.Module) -> frozenset[str]:
    """The parameters that :func:`give_dimension` changed."""
    return frozenset(
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in getattr(type(module), _NAMES, ())
    )


def _show_views(module: nn.Module, names: frozenset[str]) -> None:
    """As torch's parametrizations do: a subclass of the module's own class, with properties."""
    kind = type(module)
    views: dict[str, Any] = {name: property(_View(name)) for name in names}
    module.__class__ = type(kind.__name__, (kind,), {_NAMES: names, **views})


class _View:
    """Reads a parameter as a scalar."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, module: nn.Module) -> Tensor:
        parameter = module._parameters[self._name]
        assert parameter is not None
        # FSDP2 itself looks at it while it is cut; a rank may have none of it.
        return parameter if isinstance(parameter, DTensor) else parameter.view(())
