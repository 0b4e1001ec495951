"""How a network computes: in which mode, from which random numbers, and whether bits repeat.

CPUs with the kernels used here need no setting to repeat a computation bit for bit. On CUDA flash
attention's backward pass, some of cuBLAS and Inductor, and NCCL's choice of an algorithm may differ
between two runs.

Owns the only calls of ``eval()`` in this package: a module may be kept in evaluation mode by its
owner (a frozen encoder), and ``train()`` on the whole network would begin to train it.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

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
    return len(first) == len(second) and all(map(same_bits, first, second))


def step_numbers(engine: Engine, works: Sequence[MicroStep]) -> list[torch.Tensor]:
    """The numbers of one step, first those of the losses. It is not applied. Collective."""
    sums = engine.accumulate(works)
    sequences = sums.sequences
    numbers = [sums.loss, *sequences.losses, sums.grad_square, *sequences.gradient_norms]
    copies = [number.detach().clone() for number in numbers]
    drop_gradients(engine)
    return copies


def drop_gradients(engine: Engine) -> None:
    """End a step that is not applied."""
    one = torch.ones((), device=engine.device)
    engine.apply(skip=one, grad_scale=one, learning_rate=0.0)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit; NaN equals itself."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    a, b = (x.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for x in (left, right))
    return bool(torch.equal(a, b))
