"""Tests on two samples what bit-exact training needs of a user's model.

Owns the trials and their messages. Every start runs :func:`quick_checks`;
``check-model`` runs more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from runner.data.feed import MicroBatch
from runner.engine.protocol import Engine, LocalSums, MicroStep
from runner.model.blueprint import GuestBlueprint
from runner.system.error import ConfigError

_SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of one trial.

    Args:
        name: what was tested.
        holds: None where it could not be tested.
        found: a sentence that says what was seen.
        remedy: what to do if it does not hold.
        is_fatal: whether a run must not begin without it.
        is_warning: whether a failure may be intended, and so fails no command.
    """

    name: str
    holds: bool | None
    found: str
    remedy: str = ""
    is_fatal: bool = False
    is_warning: bool = False


def same_weights(network: GuestBlueprint) -> Check:
    """Whether two builds with the same seed have equal weights."""
    is_same = network.twin.signature() == network.again().signature()
    return Check(
        name="same seed, same weights",
        holds=is_same,
        found="two builds with one seed begin alike"
        if is_same
        else "two builds with one seed begin with other weights",
        remedy="draw initial values from torch's, numpy's or Python's global generator, which are "
        "seeded for the constructor, not from one of your own or from the clock",
        is_fatal=True,
    )


def builds_without_memory(network: GuestBlueprint) -> Check:
    """Whether the constructor works on the meta device, without values of tensors."""
    why = network.why_in_memory
    return Check(
        name="builds without memory",
        holds=not why,
        found=f"the constructor needs values, so each rank makes the whole model first ({why})"
        if why
        else "tensors are made one at a time, on the ranks that hold them",
        remedy="no .item(), float(tensor) or branch on a tensor in the constructor; a model that "
        "fits into the memory of each rank may stay as it is",
    )


def repeated_step(engine: Engine, works: Sequence[MicroStep]) -> list[Check]:
    """Compute the same step twice, and compare its numbers and the buffers after it. Collective.

    Raises:
        ConfigError: the model cannot compute it.
    """
    before = {name: tensor.clone() for name, tensor in engine.buffers().items()}
    one, other = (_step(engine, works) for _ in range(2))
    after = engine.buffers()
    changed = sorted(name for name in before if not _equal(before[name], after[name]))
    alike = all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    finite = bool(torch.isfinite(torch.cat([part.flatten() for part in one])).all())
    return [
        Check(
            name="same step twice, bit for bit",
            holds=alike if finite else None,
            found=(
                "losses and gradients were equal"
                if alike
                else "the same step gave another loss or gradient: a replay is not exact"
            )
            if finite
            else "the loss or a gradient of two samples is not finite at the start",
            remedy="draw from torch's global generator only (it is seeded for each micro-batch), "
            "not from numpy or random; on CUDA avoid kernels that add in any order "
            "(torch.use_deterministic_algorithms names them)",
        ),
        Check(
            name="forward changes no buffer",
            holds=not changed,
            found=f"a forward pass changes {', '.join(changed[:3])}"
            if changed
            else "buffers are as they were",
            remedy="a discarded step could not take it back, and it would depend on how a batch is "
            "cut up: use GroupNorm or LayerNorm instead of BatchNorm, or keep that layer in eval()",
            is_fatal=True,
        ),
    ]


def quick_checks(
    network: GuestBlueprint, engine: Engine, works: Sequence[MicroStep]
) -> list[Check]:
    """Run the trials of every start. Collective."""
    return [
        same_weights(network),
        builds_without_memory(network),
        *repeated_step(engine, works),
    ]


def refuse_or_say(checks: Sequence[Check], model: str, say: Callable[[str], None]) -> None:
    """Print what does not hold, and refuse what must.

    Args:
        model: the setting that names it.

    Raises:
        ConfigError: a fatal check failed.
    """
    failed = [check for check in checks if check.holds is not True]
    fatal = [check for check in failed if check.is_fatal]
    if fatal:
        problems = "\n".join(f"  {check.found}: {check.remedy}" for check in fatal)
        raise ConfigError(f"{model}: cannot be trained exactly:\n{problems}")
    for check in failed:
        say(f"{model}: {check.found}. Remedy: {check.remedy}")


def works_of(batch: MicroBatch, number: int, device: torch.device) -> list[MicroStep]:
    """Micro-batches of a step that all hold the same few samples."""
    return [MicroStep(batch=batch.to(device), seed=_SEED) for _ in range(number)]


def _step(engine: Engine, works: Sequence[MicroStep]) -> list[torch.Tensor]:
    """Compute one step without applying it, and return its numbers."""
    try:
        sums: LocalSums = engine.accumulate(works)
    except ConfigError:
        raise
    except Exception as error:  # from the user's forward
        cause = " ".join(str(error).split())[:500]
        raise ConfigError(
            f"the model: a step on two samples fails with {type(error).__name__}: {cause}"
        ) from error
    numbers = [sums.loss, sums.grad_square, *sums.sequences.losses, *sums.sequences.gradient_norms]
    copies = [part.detach().clone().double() for part in numbers]
    device = engine.device
    engine.apply(
        skip=torch.ones((), device=device),
        grad_scale=torch.ones((), device=device),
        learning_rate=0.0,
    )
    return copies


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool(torch.equal(one, other))
