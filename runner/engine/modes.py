"""How a network computes: in which mode, from which random numbers, and whether bits repeat.

CPUs with the kernels used here need no setting to repeat a computation bit for bit. On CUDA flash
attention's backward pass, some of cuBLAS and Inductor, and NCCL's choice of an algorithm may differ
between two runs.

Owns the only calls of ``eval()`` in this package: a module may be kept in evaluation mode by its
owner (a frozen encoder), and ``train()`` on the whole network would begin to train it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from runner.engine.protocol import Engine, MicroStep

# Libraries read these when they start. NCCL: one algorithm in a fixed order, no in-switch sums.
_SETTINGS = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NCCL_NVLS_ENABLE": "0",
    "TORCHINDUCTOR_DETERMINISTIC": "1",
}


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Every module is in evaluation mode inside, and in its own mode afterwards.

    FSDP2 keeps the root's parameters gathered after a forward pass without a backward pass; they
    are dropped at the end, because weights that are loaded later would not reach them.
    """
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training
        reshard(network)


def in_evaluation(copy: nn.Module) -> nn.Module:
    """Put a copy, which nobody trains, into evaluation mode for good."""
    return copy.eval()


def reshard(network: nn.Module) -> None:
    """Drop the gathered parameters of FSDP2, so that ``parameters()`` gives the shards.

    Not collective.
    """
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def same_randomness(device: torch.device) -> Iterator[None]:
    """Restore the generators of Python, numpy, torch and the device afterwards."""
    python_state, numpy_state, torch_state = (
        random.getstate(),
        np.random.get_state(),
        torch.get_rng_state(),
    )
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)


def be_deterministic(environment: MutableMapping[str, str]) -> dict[str, str]:
    """Enable determinism in this process; call it before CUDA starts. Keeps what the user has set.

    Returns:
        The effective environment variables.
    """
    for name, value in _SETTINGS.items():
        environment.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    # Nothing here reads uninitialised memory.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010
    torch.backends.cudnn.benchmark = False
    return {name: environment[name] for name in _SETTINGS}


def repeats_bits(
    engine: Engine,
    works: Sequence[MicroStep],
    watch: AbstractContextManager[object] = nullcontext(),  # noqa: B008  # has no state
) -> bool:
    """Whether this rank gets the same bits from ``works`` twice. Collective; changes nothing.

    Compares losses and gradient norms, of the step and of each sequence; the gradients are dropped.

    Args:
        watch: context entered for the first computation.
    """
    with watch:
        first = step_numbers(engine, works)
    second = step_numbers(engine, works)
    return len(first) == len(second) and all(map(_same_bits, first, second))


def step_numbers(engine: Engine, works: Sequence[MicroStep]) -> list[torch.Tensor]:
    """The numbers of one step, first those of the losses. It is not applied. Collective."""
    sums = engine.accumulate(works)
    sequences = sums.sequences
    numbers = [sums.loss, *sequences.losses, sums.grad_square, *sequences.gradient_norms]
    copies = [number.detach().clone() for number in numbers]
    true = torch.ones((), device=engine.device)
    engine.apply(skip=true, grad_scale=true, learning_rate=0.0)
    return copies


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit; NaN equals itself."""
    int_types = {4: torch.int32, 8: torch.int64}
    a, b = (x.contiguous().view(int_types[x.element_size()]) for x in (left, right))
    return bool(torch.equal(a, b))
