"""Reads ``faults=[...]``. Pure: a fault here is a value, :mod:`runner.fault.inject` does it.

    nan_grad@step=20,rank=1          NaN in the backward pass of one rank
    nan_loss@step=20,rank=1          NaN in the loss of one rank
    flip_grad@step=20,rank=1         a high exponent bit of one number of a gradient
    misread@step=20,rank=1           the rank's samples of this step come as others, once
    spoil_state@step=20,rank=1       a high exponent bit of one weight, before the step
    overflow@step=20-24,module=blocks.1.ffn
                                     in these steps the largest number that this module of the model
                                     gives is infinite, in the run's precision and in no wider one
    sticky@step=20,rank=1            from this step on whatever the rank computes is NaN
    wrong@step=20,rank=1             from this step on what it computes is 1 % off: finite, silent
    wrong_grad@step=20,rank=1,module=blocks.1.ffn.down
                                     from this step on the gradient that the rank computes of this
                                     module's own weights is 1 % off: finite, silent
    poison@samples=400-431           these stream positions always give NaN activations
    spike@samples=400-431,scale=50   these weigh 50 times: a finite, wild loss and gradient
    kill@step=30,rank=0              SIGKILL
    abort@step=30,rank=0             SIGABRT, as a failed assertion in C++ gives
    raise@step=30,rank=0             an exception
    stop@step=30,rank=1              SIGSTOP: the whole process freezes
    hang@step=30,rank=1              the training thread stops moving
        each with at=POINT: fetch (default), forward, backward, agree, apply, save, rollback;
        or with observer=explain,call=2: in an observer, before its second exchange with other
        ranks; 0: as it begins
    skip_collective@step=30,rank=1   the rank leaves the step's all-reduce out
    other_collective@step=30,rank=1  it enters a broadcast instead
    other_shape@step=30,rank=1       it hands over one number more
    mismatch@step=30,rank=1          the rank claims to be somewhere else
    no_break@step=1,rank=0           from this step on the rank waits for ever in a collective
                                     that breaks, as it would over NCCL; also after a restart
    flip_bit@step=30,rank=1          one bit of the rank's copy of replicated state
    wrong_product@step=0,rank=1      the device check of the start at this step finds other bits
    oom@step=30,rank=1,rows=2        from this step on a micro-batch of more sequences than these
                                     does not fit into the rank's memory
    slow@step=30-60,rank=1,seconds=0.2
    corrupt_checkpoint@step=40       one byte of the newest checkpoint on disk is flipped
    corrupt_snapshots@step=40,rank=1 one byte of each of the rank's snapshots in memory

Ranges are inclusive. Without ``rank`` every rank is meant; with ``host=NAME`` those on this host,
and on no other that takes its place. A fault bound to one step fires
once per run, also across restarts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from runner.system.error import ConfigError

KINDS = (
    *("nan_grad", "nan_loss", "flip_grad", "misread", "spoil_state", "sticky", "wrong"),
    *("wrong_grad", "overflow", "poison", "spike", "kill", "abort", "raise", "stop", "hang"),
    *("skip_collective", "other_collective", "other_shape", "flip_bit", "mismatch"),
    *("wrong_product", "slow", "no_break", "oom", "corrupt_checkpoint", "corrupt_snapshots"),
)
# The others need a step, and may name a rank or a host.
_REQUIRED = {
    "wrong_grad": {"step", "module"},
    "overflow": {"step", "module"},
    "poison": {"samples"},
    "spike": {"samples"},
    "slow": {"step", "seconds"},
    "oom": {"step", "rows"},
}
# What ends or freezes a rank, and where in a step it may.
ENDINGS = ("kill", "abort", "raise", "stop", "hang")
# Not bound to one step, and so no marker is left.
LASTING = ("slow", "no_break", "sticky", "wrong", "wrong_grad", "oom", "overflow")
POINTS = ("fetch", "forward", "backward", "agree", "apply", "save", "rollback")
_OPTIONAL = {
    **{kind: {"rank", "host", "at", "observer", "call"} for kind in ENDINGS},
    "spike": {"scale"},
    "poison": set[str](),
    "corrupt_checkpoint": set[str](),
}
_RANGE = re.compile(r"(\d{1,15})(?:-(\d{1,15}))?")
_DEFAULT_SCALE = 50.0
_SHOWN = 500  # characters of what is wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """``steps`` and ``samples`` are half-open; ``rank`` None and ``host`` "" mean every one."""

    text: str
    kind: str
    steps: tuple[int, int] = (0, 0)
    samples: tuple[int, int] = (0, 0)
    rank: int | None = None
    host: str = ""
    scale: float = _DEFAULT_SCALE
    seconds: float = 0.0
    rows: int = 0
    at: str = "fetch"
    module: str = ""
    observer: str = ""
    call: int = 0

    def is_due(self, step: int, rank: int) -> bool:
        """Whether it is bound to this step on this rank."""
        return self.steps[0] <= step < self.steps[1] and self.rank in (None, rank)


def parse_faults(texts: Sequence[str]) -> tuple[Fault, ...]:
    """Parse every element of ``faults``.

    Raises:
        ConfigError: naming the element, what is wrong with it and what is allowed.
    """
    return tuple(_parse(text) for text in texts)


def _parse(text: str) -> Fault:
    kind, at, rest = text.partition("@")
    if kind not in KINDS or not at:
        raise _refusal(text, f"a fault is KIND@key=value,...; kinds: {', '.join(KINDS)}")
    pairs = [_pair(text, part) for part in rest.split(",") if part]
    given = dict(pairs)
    if len(given) < len(pairs):
        raise _refusal(text, "a key is repeated")
    required = _REQUIRED.get(kind, {"step"})
    allowed = sorted(required | _OPTIONAL.get(kind, {"rank", "host"}))
    if missing := required - given.keys():
        raise _refusal(text, f"{kind} needs {', '.join(sorted(missing))}")
    if unknown := given.keys() - set(allowed):
        unknown_keys = ", ".join(sorted(unknown))
        raise _refusal(text, f"{kind} knows no {unknown_keys}; it takes {', '.join(allowed)}")
    at = given.get("at", "fetch")
    if at not in POINTS:
        raise _refusal(text, f"at={at} is none of {', '.join(POINTS)}")
    return Fault(
        text=text,
        kind=kind,
        steps=_range(text, given, "step"),
        samples=_range(text, given, "samples"),
        rank=int(_number(text, given, "rank")) if "rank" in given else None,
        host=given.get("host", ""),
        scale=_number(text, given, "scale", _DEFAULT_SCALE),
        seconds=_number(text, given, "seconds"),
        rows=int(_number(text, given, "rows")),
        at=at,
        module=given.get("module", ""),
        observer=given.get("observer", ""),
        call=int(_number(text, given, "call")),
    )


def _refusal(text: str, why: str) -> ConfigError:
    return ConfigError(f"faults: {text[:_SHOWN]!r}: {why[:_SHOWN]}")


def _pair(text: str, part: str) -> tuple[str, str]:
    name, equals, value = part.partition("=")
    if not equals:
        raise _refusal(text, f"{part!r} is not key=value")
    return name.strip(), value.strip()


def _range(text: str, given: dict[str, str], name: str) -> tuple[int, int]:
    if name not in given:
        return (0, 0)
    match = _RANGE.fullmatch(given[name])
    if match is None:
        raise _refusal(text, f"{name}={given[name]} is not a whole number or FIRST-LAST")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise _refusal(text, f"{name}={given[name]} runs backwards")
    return first, last + 1


def _number(text: str, given: dict[str, str], name: str, default: float = 0.0) -> float:
    try:
        value = float(given.get(name, default))
    except ValueError:
        value = float("nan")
    if not 0 <= value < 1e9 or (name == "rank" and value != int(value)):
        raise _refusal(text, f"{name}={given[name]} is not a number of 0 or more")
    return value
