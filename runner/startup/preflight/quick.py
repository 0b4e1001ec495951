"""The short form of preflight, at each start of a run: four forward passes and a step of one batch.

It uses the engine with the loaded, sharded weights: the loss at chosen positions shows what a
position attends to. It changes nothing; a failed check is only journalled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from runner.data.feed import MicroBatch
from runner.engine.protocol import Engine, MicroStep
from runner.startup.model_check import Check

_NOT_COUNTED = -100
_ROWS = 2
_ROUNDING = 1e-4  # relative difference of losses computed by kernels of other devices or shapes
_FIRST_NATS, _FIRST_SHARE = 0.5, 0.05  # of ln V
_ADAPTERS = ("lora", "adapter", "prompt", "prefix", "ia3", "dora")  # begin with a gradient of 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickSubject:
    """The batch and numbers that the checks use.

    Args:
        batch: samples that are token ids, the same on all ranks, on the host.
        works: micro-batches that a step must have: DeepSpeed counts them.
        vocab_size: of the data.
        untrained_loss: nats a token of a model that knows nothing; None where it is trained.
        sum: element-wise over the ranks.
    """

    batch: MicroBatch
    works: int
    vocab_size: int
    untrained_loss: float | None
    sum: Callable[[list[float]], list[float]]


def quick_checks(engine: Engine, subject: QuickSubject) -> list[Check]:
    """Run the checks. Collective; the result is the same on all ranks."""
    checks = [*_looks(engine, subject)]
    if subject.untrained_loss is not None:
        checks.append(_first_loss(engine, subject, subject.untrained_loss))
    checks.append(_gradients(engine, subject))
    return checks


def _looks(engine: Engine, subject: QuickSubject) -> list[Check]:
    """Check that only later losses change with a token.

    Labels that do not count restrict the loss to one side.
    """
    batch = _some(subject.batch)
    length = batch.tokens.shape[1]
    middle = length // 2
    if length < 4:
        return []
    other = batch.tokens.clone()
    other[:, middle] = (other[:, middle] + 1) % max(subject.vocab_size, 2)
    before = batch.targets.clone()
    before[:, middle:] = _NOT_COUNTED
    after = batch.targets.clone()
    after[:, : middle + 1] = _NOT_COUNTED
    pairs = [(before, "before"), (after, "after")]
    moved = {}
    for targets, where in pairs:
        plain = _losses(engine, replace(batch, targets=targets), subject)
        changed = _losses(engine, replace(batch, targets=targets, tokens=other), subject)
        scale = max(map(abs, plain), default=0.0)
        apart = max((abs(a - b) for a, b in zip(plain, changed, strict=True)), default=0.0)
        moved[where] = apart / scale if scale > 0 else math.nan
    checks = []
    if math.isfinite(moved["before"]):
        checks.append(
            Check(
                name="no look at later tokens",
                holds=moved["before"] <= _ROUNDING,
                found=f"another token changes the loss before it by {moved['before']:.2g} of it",
                remedy="the model sees the token that it must predict: a causal mask "
                "is missing somewhere; `holdfast preflight` shows how far it sees",
            )
        )
    if math.isfinite(moved["after"]):
        checks.append(
            Check(
                name="earlier tokens matter",
                holds=moved["after"] > 0,
                found=f"another token changes the loss after it by {moved['after']:.2g} of it",
                remedy="each position is on its own: is attention masked to the diagonal or zeroed",
            )
        )
    return checks


def _first_loss(engine: Engine, subject: QuickSubject, uniform: float) -> Check:
    batch = _some(subject.batch)
    count = max(1, sum(batch.counts()))
    loss = sum(_losses(engine, batch, subject)) / count
    most = max(_FIRST_NATS, _FIRST_SHARE * uniform)
    return Check(
        name="first loss against ln V",
        holds=abs(loss - uniform) <= most,
        found=f"the first loss is {loss:.4g} nats a token; a model that knows nothing has "
        f"{uniform:.4g}",
        remedy="above: initial weights too large, or a loss that is a sum; below: trained before, "
        "or it sees its labels",
    )


def _gradients(engine: Engine, subject: QuickSubject) -> Check:
    """Whether a gradient reaches each trained parameter; one that adapters hold back may be 0."""
    work = MicroStep(batch=subject.batch.to(engine.device), seed=1)
    engine.accumulate([work] * subject.works)
    own = engine.gradients()
    trained = [n for n, p in engine.network.named_parameters() if p.requires_grad]
    sizes = [float(own[n].abs().max()) if n in own and own[n].numel() else 0.0 for n in trained]
    one = torch.ones((), device=engine.device)
    engine.apply(skip=one, grad_scale=one, learning_rate=0.0)
    is_some = [float(size != 0) for size in sizes]  # NaN counts as a gradient
    all_ranks = subject.sum(is_some)
    still = [n for n, number in zip(trained, all_ranks, strict=True) if not number]
    still = [n for n in still if not any(word in n.lower() for word in _ADAPTERS)]
    some = ", ".join(still[:3]) + (f" and {len(still) - 3} more" if len(still) > 3 else "")
    return Check(
        name="each trained parameter gets a gradient",
        holds=not still,
        found=f"no gradient reaches {some}" if still else f"all {len(trained)} tensors get one",
        remedy="not used in forward, or detached; freeze it if it must not train (compute.frozen)",
    )


def _losses(engine: Engine, batch: MicroBatch, subject: QuickSubject) -> list[float]:
    """The loss of each sequence: the mean over ranks, which all compute the same batch."""
    evaluated = engine.evaluate([batch.to(engine.device)])
    own = [float(value) for losses in evaluated.losses for value in losses.tolist()]
    *sums, ranks = subject.sum([*own, 1.0])
    return [value / ranks for value in sums]


def _some(batch: MicroBatch) -> MicroBatch:
    """The first rows."""
    return replace(
        batch,
        tokens=batch.tokens[:_ROWS],
        targets=batch.targets[:_ROWS],
        segments=None if batch.segments is None else batch.segments[:_ROWS],
        positions=batch.positions[:_ROWS],
    )


def failed(checks: Sequence[Check]) -> list[Check]:
    """The failed checks."""
    return [check for check in checks if check.holds is False]
