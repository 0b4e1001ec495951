"""Settings that make a device repeat a computation bit for bit, and a check that it does.

CPUs with the kernels used here need no setting. On CUDA flash attention's backward
pass, some of cuBLAS and Inductor, and NCCL's choice of an algorithm may differ between two runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import MutableMapping, Sequence
from contextlib import AbstractContextManager

import torch

from runner.engine.protocol import Engine, MicroStep

# Libraries read these when they start. NCCL: one algorithm in a fixed order, no in-switch sums.
_SETTINGS = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NCCL_NVLS_ENABLE": "0",
    "TORCHINDUCTOR_DETERMINISTIC": "1",
}


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
    watch: AbstractContextManager[object] = contextlib.nullcontext(),  # noqa: B008  # has no state
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
