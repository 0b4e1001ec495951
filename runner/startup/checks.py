"""What the checks of a model and its data conclude, each once: its name, its limit, its remedy.

``start``, ``check-model`` and ``preflight`` choose what to check. They measure through the engine
(:mod:`runner.startup.engine_checks`) or on copies of the model (:mod:`runner.startup.preflight`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

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
