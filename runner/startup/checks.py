"""What the checks of a model and its data conclude, each once: its name, its limit, its remedy.

``start``, ``check-model`` and ``preflight`` choose what to check. They measure through the engine
(below) or on copies of the model (:mod:`runner.startup.preflight`).
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from runner.data.dataset import NOT_COUNTED
from runner.data.feed import MicroBatch
from runner.engine import modes
from runner.engine.protocol import Batch, Engine, MicroStep
from runner.model.blueprint import GuestBlueprint
from runner.system.error import ConfigError
from runner.system.units import first_few

# Share of the effect that the token has from its place on. A causal model has 0; sums in another
# order and FFTs round. A mean over 1,000 positions leaks a thousandth.
ROUNDING = 1e-4
_FIRST_NATS, _FIRST_SHARE = 0.5, 0.05  # of ln V
_WRONG_NATS, _WRONG_SHARE = 2.0, 0.4
_ADAPTERS = ("lora", "adapter", "prompt", "prefix", "ia3", "dora")


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

    @classmethod
    def of(cls, name: str, problem: str, fine: str, remedy: str, **kind: bool) -> Check:
        """Holds where there is no ``problem``; that, or ``fine``, is what was seen."""
        return cls(name=name, holds=not problem, found=problem or fine, remedy=remedy, **kind)


def not_tried(name: str, why: str) -> Check:
    """A check that was not run, and why."""
    return Check(name=name, holds=None, found=f"not tried: {why}")


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return any(word in name.lower() for word in _ADAPTERS)


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


def no_look_ahead(what: str, *, before: float, effect: float, place: int) -> Check:
    """Whether a changed token changes ``what`` only from its place on.

    Args:
        before: the largest change before the place.
        effect: the largest change from there on.
    """
    message = "another token changes nothing before it"
    if before:
        message = f"another token at position {place} changes {what} before it by {before:.2g}"
    return Check(
        name="no look at later tokens",
        holds=before <= ROUNDING * effect,
        found=f"{message} ({effect:.2g} from there on)",
        remedy="the model sees the token that it must predict: check the attention mask, "
        "convolutions without causal padding, norms or means over the sequence, and labels among "
        "the inputs",
    )


def earlier_matter(what: str, *, own: float, later: float, far: int = 1) -> Check:
    """Whether a changed token changes ``what`` after its place.

    Args:
        own: the change at its own place.
        later: the largest change after it, seen ``far`` positions on.
    """
    problem = f"another token changes nothing after it ({later:.2g}; {own:.2g} at its own place)"
    return Check.of(
        "earlier tokens matter",
        "" if later > ROUNDING * own else problem,
        f"another token changes {what} after it by {later:.2g}, at least {far} positions on",
        "each position is on its own: is attention masked to the diagonal or zeroed, does "
        "the mask have the right sense, is a projection's output dropped",
    )


def first_loss(loss: float, uniform: float) -> Check:
    """Whether an untrained model's loss is that of a uniform guess, in nats a token."""
    apart = loss - uniform
    is_near = abs(apart) <= max(_FIRST_NATS, _FIRST_SHARE * uniform)
    is_wrong = not math.isfinite(loss) or apart > max(_WRONG_NATS, _WRONG_SHARE * uniform)
    return Check(
        name="first loss against ln V",
        holds=is_near,
        found=f"{loss:.4g} nats a token; a uniform guess among {math.exp(uniform):.0f} has "
        f"{uniform:.4g}",
        remedy="initial weights too large (of a tied embedding, often), or a loss that is a sum"
        if apart > 0
        else "trained before, or it sees its labels, or the loss is divided twice",
        is_warning=not is_near and not is_wrong,
    )


def gradients_reach(trained: Sequence[str], reached: Collection[str]) -> Check:
    """Whether each trained parameter got a gradient other than zero."""
    still = [name for name in trained if name not in reached]
    return Check.of(
        "each trained parameter gets a gradient",
        f"no gradient reaches {first_few(still)}" if still else "",
        f"all {len(trained)} tensors get one",
        "use it in forward (no detach, no no_grad, no .data on the way), or freeze it: "
        "compute.frozen=[REGEX]",
    )


# Checks that compute through the engine, with the weights that it holds. They change nothing.
#
# Every start of a user's model runs :func:`exactness_checks`, and every start
# :func:`sanity_checks`; ``check-model`` adds some of its own. All are collective, and equal on all
# ranks.

_SEED = 1
_SEEDS = 3
_RATE = 1e-3  # of the updates of a trial
_CLOSE = 5e-3  # of a loss; BF16 and other shapes round by less


def same_weights(network: GuestBlueprint) -> Check:
    """Whether two builds with the same seed have equal weights."""
    is_same = network.twin.signature() == network.again().signature()
    return Check.of(
        "same seed, same weights",
        "" if is_same else "two builds with one seed begin with other weights",
        "two builds with one seed begin alike",
        "draw initial values from torch's, numpy's or Python's global generator, which are "
        "seeded for the constructor, not from one of your own or from the clock",
        is_fatal=True,
    )


def builds_without_memory(network: GuestBlueprint) -> Check:
    """Whether the constructor works on the meta device, without values of tensors."""
    why = network.twin.why
    problem = f"the constructor needs values, so each rank makes the whole model first ({why})"
    return Check.of(
        "builds without memory",
        problem if why else "",
        "tensors are made one at a time, on the ranks that hold them",
        "no .item(), float(tensor) or branch on a tensor in the constructor; a model that "
        "fits into the memory of each rank may stay as it is",
    )


def repeated_step(engine: Engine, works: Sequence[MicroStep]) -> list[Check]:
    """Compute the same step twice, and compare its numbers and the buffers after it. Collective.

    Raises:
        ConfigError: the model cannot compute it.
    """
    before = {name: tensor.clone() for name, tensor in engine.network.named_buffers()}
    first, second = (step_numbers(engine, works) for _ in range(2))
    after = dict(engine.network.named_buffers())
    changed = sorted(name for name in before if not torch.equal(before[name], after[name]))
    kept = engine.running.names
    holds: bool | None = are_equal(first, second)
    found = "losses and gradients were equal"
    if not torch.isfinite(torch.cat([part.flatten().double() for part in first])).all():
        holds, found = None, "the loss or a gradient of two samples is not finite at the start"
    elif not holds:
        found = "the same step gave another loss or gradient: a replay is not exact"
    unchanged = "no forward pass changes one"
    if kept:
        unchanged = (
            f"{len(kept)} that forward passes change ({', '.join(kept[:2])}, ...) are undone, "
            "saved and averaged over the ranks"
        )
    return [
        Check(
            name="same step twice, bit for bit",
            holds=holds,
            found=found,
            remedy="draw from torch's global generator only (it is seeded for each micro-batch), "
            "not from numpy or random; on CUDA avoid kernels that add in any order "
            "(torch.use_deterministic_algorithms names them)",
        ),
        Check.of(
            "buffers belong to the state",
            f"a step that is not applied changes {', '.join(changed[:3])}" if changed else "",
            unchanged,
            "let each forward pass in training change what any of them changes, and no "
            "module change another's buffers",
            is_fatal=True,
        ),
    ]


def running_buffers(engine: Engine, works: Sequence[MicroStep]) -> list[str]:
    """Names of the buffers that a step or an evaluation changes on this rank; it is undone.

    Collective; the weights must be there.

    Raises:
        ConfigError: the model cannot compute it, or makes buffers as it does.
    """

    def compute() -> None:
        step_numbers(engine, works)
        sample_losses(engine, works[0].batch)

    return engine.running.written_by(compute) if engine.running.has_any else []


def exactness_checks(
    network: GuestBlueprint, engine: Engine, works: Sequence[MicroStep]
) -> list[Check]:
    """Test on two samples what bit-exact training needs of a user's model. Collective."""
    repeated = repeated_step(engine, works)
    return [
        same_weights(network),
        builds_without_memory(network),
        *repeated,
        # A model that does not repeat itself differs from itself anyway.
        *(samples_alone(engine, works) if all(check.holds for check in repeated) else ()),
    ]


def samples_alone(engine: Engine, works: Sequence[MicroStep]) -> list[Check]:
    """Evaluate each sample without the others, and compare losses and calls. Collective."""
    gathered = _gathered(engine.network)
    batch = works[0].batch
    # For each sample a batch of it alone, of the same size.
    num_rows = len(next(iter(batch.inputs().values())))
    batches = [BatchRows(batch, [row] * num_rows) for row in range(num_rows)]
    calls: list[list[tuple[str, str]]] = []
    losses = []
    with _noted(gathered, calls):
        for one in batches:
            calls.append([])
            losses.append(sample_losses(engine, one)[0])
    checks = [_independent(torch.stack(losses), sample_losses(engine, batch))]
    if gathered:
        shapes = {str([list(t.shape) for t in one.inputs().values()]) for one in batches}
        uneven = _differing(calls, has_shapes=len(shapes) == 1)
        checks.append(_equal_calls(uneven | _dropped(engine, works, gathered)))
    return checks


def _independent(alone: torch.Tensor, together: torch.Tensor) -> Check:
    """Whether a sample's loss depends on the others of its micro-batch."""
    difference = float(((alone - together).abs() / together.abs().clamp(min=1e-6)).max())
    problem = (
        f"a sample's loss depends on the others of its micro-batch (by {difference:.2g} of "
        "it), as in a contrastive loss: poison, kill and resume are exact on the same number of "
        "ranks, but another number, or a micro-batch halved for memory, trains another objective"
    )
    return Check.of(
        "samples are independent",
        "" if difference <= _CLOSE else problem,
        "a sample has the same loss beside other samples",
        "keep batch.micro_size and the number of ranks; micro-batches are not put together",
        is_warning=True,
    )


def _equal_calls(uneven: set[str]) -> Check:
    """Whether each sample calls the same parts, where each call gathers a part.

    A rank that calls an expert, and another one that calls the next, would gather each other's
    weights: both are collectives of one size.
    """
    problem = (
        f"{', '.join(sorted(uneven)[:3])} is not called alike for each sample, and each call "
        "gathers its weights or reduces its gradient, which all ranks must do together"
    )
    return Check.of(
        "each sample calls the same parts",
        problem if uneven else "",
        "the modules that are gathered one by one are called alike for all samples",
        "give the model a method blocks() that returns the modules to gather, without "
        "experts or layers that are left out at random ([]: all at once); or use "
        "parallel=ddp or zero1, which gather nothing in forward",
        is_fatal=True,
    )


def _dropped(
    engine: Engine, works: Sequence[MicroStep], gathered: Mapping[nn.Module, str]
) -> set[str]:
    """Modules that some seeds leave out in training."""
    calls: list[list[tuple[str, str]]] = []
    with _noted(gathered, calls):
        for seed in range(_SEED, _SEED + _SEEDS):
            calls.append([])
            step_numbers(engine, [replace(work, seed=seed) for work in works])
    return _differing(calls, has_shapes=True)


def _gathered(network: nn.Module) -> dict[nn.Module, str]:
    """Modules whose call is collective, with FSDP2 or with DeepSpeed's stages 2 and 3."""
    if dist.get_world_size() == 1:
        return {}
    return {
        module: name
        for name, module in network.named_modules()
        if isinstance(module, FSDPModule)
        or any(
            # DeepSpeed gathers it (stage 3), or reduces its gradient in backward (stage 2).
            hasattr(parameter, "ds_id") or hasattr(parameter, "is_reduced_in_order")
            for parameter in module.parameters(recurse=False)
        )
    }


class BatchRows:
    """Some rows of a batch."""

    def __init__(self, batch: Batch, rows: list[int]) -> None:
        self._batch = batch
        self._rows = rows

    @property
    def real(self) -> torch.Tensor | None:
        return None if self._batch.real is None else self._batch.real[self._rows]

    def inputs(self) -> dict[str, torch.Tensor]:
        return {name: tensor[self._rows] for name, tensor in self._batch.inputs().items()}


@contextlib.contextmanager
def _noted(
    modules: Mapping[nn.Module, str], calls: Sequence[list[tuple[str, str]]]
) -> Iterator[None]:
    """Note name and shapes of each call of these modules in the last list of ``calls``."""

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        shapes = [list(arg.shape) for arg in args if isinstance(arg, torch.Tensor)]
        calls[-1].append((modules[module], str(shapes)))

    hooks = [module.register_forward_pre_hook(note) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _differing(calls: Sequence[Sequence[tuple[str, str]]], *, has_shapes: bool) -> set[str]:
    """Names whose calls are not alike in all lists."""
    counted = [Counter(call if has_shapes else call[0] for call in one) for one in calls]
    every = set().union(*counted)
    uneven = {key for key in every if len({one[key] for one in counted}) > 1}
    return {key if isinstance(key, str) else key[0] for key in uneven}


def works_of(batch: MicroBatch, number: int, device: torch.device) -> list[MicroStep]:
    """Micro-batches of a step that all hold the same few samples."""
    return [MicroStep(batch=batch.to(device), seed=_SEED) for _ in range(number)]


@contextlib.contextmanager
def _in_words(what: str, batch: Batch) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # from the user's forward
        cause = " ".join(str(error).split())[:500]
        names = ", ".join(batch.inputs())
        held = f"; the batch holds {names}" if isinstance(error, KeyError) else ""
        raise ConfigError(
            f"the model: {what} on two samples fails with {type(error).__name__}: {cause}{held}"
        ) from error


def sample_losses(engine: Engine, batch: Batch) -> torch.Tensor:
    """The loss of each sample, FP64."""
    with _in_words("an evaluation", batch):
        return engine.evaluate([batch]).losses[0].detach().double()


def step_numbers(engine: Engine, works: Sequence[MicroStep]) -> list[torch.Tensor]:
    """:func:`runner.engine.modes.step_numbers`, with the model's own errors explained."""
    with _in_words("a step", works[0].batch):
        return modes.step_numbers(engine, works)


def step_losses(engine: Engine, works: Sequence[MicroStep]) -> list[torch.Tensor]:
    """The losses of one step; a device may add gradients in any order."""
    return step_numbers(engine, works)[: 1 + len(works)]


def are_equal(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Whether two steps gave the same numbers."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# -- what every model should do ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialBatch:
    """The batch and numbers of :func:`sanity_checks`.

    Args:
        batch: a few samples that are token ids, the same on all ranks, on the host.
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


def sanity_checks(engine: Engine, trial: TrialBatch) -> list[Check]:
    """Six forward passes and a step of one batch. Collective; the same result on all ranks."""
    checks = [*_attends(engine, trial)]
    if trial.untrained_loss is not None:
        count = max(1, sum(trial.batch.counts()))
        losses = _mean_losses(engine, trial, trial.batch)
        checks.append(first_loss(sum(losses) / count, trial.untrained_loss))
    works = works_of(trial.batch, trial.works, engine.device)
    trained, reached = with_gradient(engine, works, updates=0)
    seen = trial.sum([float(name in reached) for name in trained])
    # One step tells nothing of adapters, which begin with a gradient of 0.
    known = {n for n, ranks in zip(trained, seen, strict=True) if ranks or is_adapter(n)}
    return [*checks, gradients_reach(trained, known)]


def _attends(engine: Engine, trial: TrialBatch) -> Iterator[Check]:
    """How another token in the middle changes the loss of what comes before, there and after it.

    Labels that do not count restrict the loss to one side.
    """
    batch = trial.batch
    length = batch.tokens.shape[1]
    middle = length // 2
    if length < 4:
        return
    other = batch.tokens.clone()
    other[:, middle] = (other[:, middle] + 1) % max(trial.vocab_size, 2)

    def moved(begin: int, end: int) -> float:
        targets = torch.full_like(batch.targets, NOT_COUNTED)
        targets[:, begin:end] = batch.targets[:, begin:end]
        if not bool((targets != NOT_COUNTED).any()):
            return math.nan
        plain = _mean_losses(engine, trial, replace(batch, targets=targets))
        changed = _mean_losses(engine, trial, replace(batch, targets=targets, tokens=other))
        return max(abs(a - b) for a, b in zip(plain, changed, strict=True))

    before, own, later = moved(0, middle), moved(middle, middle + 1), moved(middle + 1, length)
    effects = [effect for effect in (own, later) if math.isfinite(effect)]
    if math.isfinite(before) and effects:
        yield no_look_ahead("the loss", before=before, effect=max(effects), place=middle)
    if math.isfinite(later):
        own = own if math.isfinite(own) else 0.0
        yield earlier_matter("the loss", own=own, later=later)


def _mean_losses(engine: Engine, trial: TrialBatch, batch: MicroBatch) -> list[float]:
    """The loss of each sequence: the mean over ranks, which all compute the same batch."""
    evaluated = engine.evaluate([batch.to(engine.device)])
    own = [float(value) for losses in evaluated.losses for value in losses.tolist()]
    *sums, ranks = trial.sum([*own, 1.0])
    return [value / ranks for value in sums]


def with_gradient(
    engine: Engine, works: Sequence[MicroStep], *, updates: int
) -> tuple[list[str], set[str]]:
    """Trained parameters, and those whose gradient on this rank was not zero in some step.

    Args:
        updates: steps that are applied before the last one, which is not.
    """
    trained = [n for n, p in engine.network.named_parameters() if p.requires_grad]
    reached: set[str] = set()
    device = engine.device
    for number in range(updates + 1):
        sums = engine.accumulate(works)
        own = engine.gradients()
        # NaN counts as a gradient.
        reached |= {n for n in trained if n in own and bool((own[n] != 0).any())}
        engine.apply(
            skip=torch.full((), float(number == updates), device=device),
            grad_scale=sums.count.float().clamp(min=1),
            learning_rate=_RATE,
        )
    return trained, reached
