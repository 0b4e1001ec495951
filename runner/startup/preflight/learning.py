"""Tests whether the model learns: first loss, gradients, updates, one batch overfitted, rate."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from runner.config.schema import OptimKind
from runner.engine.modes import evaluating
from runner.engine.optimizer import OptimizerSettings
from runner.model.loss import NOT_COUNTED
from runner.model.objective import LABELS
from runner.startup import checks
from runner.startup.checks import Check, named, not_tried
from runner.startup.preflight.subject import (
    Inputs,
    Subject,
    Trainer,
    mean_loss,
    objective,
    trains_adapters,
)

_STEPS_TO_TRAIN = 4  # in a low-rank pair one gradient is zero at first
_BY_HEART = 0.1  # nats
_ROWS, _LENGTH = 4, 32
_MOST_STEPS, _MOST_SECONDS = 300, 12.0
_LOW = 5000  # a rate so many times below the turning point is too low; fine-tuning uses low rates
_FIRST_RATE, _GROWTH, _RANGE_STEPS, _RANGE_SECONDS = 1e-6, 1.13, 110, 12.0
_TABLES = ("pos", "rotary", "inv_freq", "freqs")  # parameters of positions, which few samples train


def first_loss(subject: Subject) -> Check:
    """Compare the untrained model's loss with that of a uniform guess."""
    name = "first loss against ln V"
    if subject.vocab_size < 2:
        return not_tried(name, "the data has no number of token ids")
    uniform = math.log(subject.vocab_size)
    model = objective(subject.network)
    with torch.no_grad(), evaluating(model):
        losses = [
            float(mean_loss(model, subject.inputs(_ROWS, None, number)))
            for number in range(len(subject.batches))
        ]
    return checks.first_loss(sum(losses) / len(losses), uniform)


def trained(subject: Subject) -> Iterator[Check]:
    """Test which parameters are trained, get a gradient, and change."""
    network = subject.copy()
    parameters = dict(network.named_parameters())
    yield _frozen(subject, parameters)
    before = {name: p.detach().clone() for name, p in parameters.items() if p.requires_grad}
    seen: set[str] = set()
    trainer = Trainer(subject, network, with_dropout=True)
    for number in range(_STEPS_TO_TRAIN):
        trainer.step(subject.inputs(_ROWS, None, number), max(subject.rate, 1e-4))
        seen |= {n for n in before if _has_gradient(parameters[n])}
    yield checks.gradients_reach(list(before), seen)
    same = sorted(n for n in before if n in seen and torch.equal(before[n], parameters[n]))
    yield Check(
        name="each trained parameter changes",
        holds=not same,
        found=f"{named(same)} did not, in {_STEPS_TO_TRAIN} updates"
        if same
        else f"all did, in {_STEPS_TO_TRAIN} updates",
        remedy="something writes it back, or its values are too large for updates of this rate",
    )


def _has_gradient(parameter: torch.nn.Parameter) -> bool:
    return parameter.grad is not None and bool((parameter.grad != 0).any())


def _frozen(subject: Subject, parameters: Mapping[str, torch.nn.Parameter]) -> Check:
    frozen = {n: p.numel() for n, p in parameters.items() if not p.requires_grad}
    others = [n for n in frozen if not any(word in n.lower() for word in _TABLES)]
    holds = subject.frozen_by_settings or not others or trains_adapters(parameters)
    how = "by the settings" if subject.frozen_by_settings else "by the model itself"
    message = "every parameter is trained"
    if frozen:
        share = 100 * sum(frozen.values()) / sum(p.numel() for p in parameters.values())
        message = f"{named(list(frozen))}: {share:.2g} % of the elements are frozen, {how}"
    return Check(
        name="what is frozen is meant to be",
        holds=holds,
        found=message,
        remedy="requires_grad is off for them: say so with compute.frozen=[REGEX], or train them",
    )


def by_heart(subject: Subject) -> Check:
    """Overfit a few short sequences, at the best of a few learning rates."""
    name = "one batch is learned by heart"
    inputs = subject.inputs(_ROWS, _LENGTH)
    if LABELS in inputs and not bool((inputs[LABELS] != NOT_COUNTED).any()):
        inputs = subject.inputs(_ROWS)
    began = time.monotonic()
    tries = []
    for rate in (3e-3, 1e-2, 1e-3, 3e-2):
        tries.append((*_memorised(subject, inputs, rate, began), rate))
        if tries[-1][0] < _aim(tries[-1][1]) or time.monotonic() - began > _MOST_SECONDS:
            break
    best, start, steps, rate = min(tries)
    holds: bool | None = best < _aim(start)
    if not holds and steps < 100:
        holds = None  # a large model on a small machine
    if not holds and trains_adapters(dict(subject.network.named_parameters())):
        holds = best < 0.98 * start  # adapters cannot memorise much
    return Check(
        name=name,
        holds=holds,
        found=f"the loss of {_shape(inputs)} went from {start:.4g} to {best:.3g} in {steps} "
        f"updates at a rate of {rate:g}",
        remedy="check the connections of the model: labels, masks, detached or frozen parts, "
        "an output that is not the sum of what was computed",
    )


def _aim(start: float) -> float:
    return _BY_HEART if start > 1 else 0.2 * start


def _shape(inputs: Inputs) -> str:
    return " x ".join(str(size) for size in next(iter(inputs.values())).shape[:2])


def _memorised(
    subject: Subject, inputs: Inputs, rate: float, began: float
) -> tuple[float, float, int]:
    """Overfit; returns the lowest loss, the first loss, and the number of updates."""
    optim = replace(subject.optimizer.optim, kind=OptimKind.adamw, groups=[])
    adamw = OptimizerSettings(optim)
    trainer = Trainer(subject, subject.copy(), with_dropout=False, settings=adamw)
    start = best = trainer.step(inputs, rate)
    steps = 1
    for steps in range(2, _MOST_STEPS + 1):
        loss = trainer.step(inputs, rate * min(1.0, steps / 10))
        if not math.isfinite(loss):
            break
        best = min(best, loss)
        if best < _aim(start) or time.monotonic() - began > _MOST_SECONDS:
            break
    return best, start, steps


def rate_range(subject: Subject) -> Check:
    """Raise the rate from step to step on a copy, and find where the loss turns."""
    name = "the rate is in range"
    trainer = Trainer(subject, subject.copy(), with_dropout=True)
    began = time.monotonic()
    rates, losses = [], []
    rate = _FIRST_RATE
    for number in range(_RANGE_STEPS):
        losses.append(trainer.step(subject.inputs(8, None, number), rate))
        rates.append(rate)
        rate *= _GROWTH
        if not math.isfinite(losses[-1]) or losses[-1] > 3 * losses[0]:
            break
        if time.monotonic() - began > _RANGE_SECONDS:
            return not_tried(name, f"{number + 1} steps took {_RANGE_SECONDS:.0f} s")
    turn = _turn(rates, losses)
    template = "with a rising rate the loss turns at {:.2g}; a tenth of that is a good start"
    if turn is None:
        turn = 2 * rates[-1]
        template = "the loss did not turn at rates up to {:.2g}"
    is_high, is_low = subject.rate > turn / 2, subject.rate < turn / _LOW
    message = f"optim.lr={subject.rate:g} is " + ("too high" if is_high else "very low")
    return Check(
        name=name,
        holds=not (is_high or is_low),
        found=template.format(min(turn, rates[-1])) + (f"; {message}" if is_high or is_low else ""),
        remedy=f"try optim.lr={turn / 10:.1g}",
        is_warning=turn / (10 * _LOW) < subject.rate < 2 * turn,
    )


def _turn(rates: list[float], losses: list[float]) -> float | None:
    """The rate with the lowest smoothed loss, if the loss clearly rises after it."""
    smooth: list[float] = []
    for loss in losses:
        if not math.isfinite(loss):
            break
        smooth.append(loss if not smooth else 0.7 * smooth[-1] + 0.3 * loss)
    if len(smooth) < 10:
        return None
    best = min(range(len(smooth)), key=smooth.__getitem__)
    rose = len(smooth) < len(losses) or max(smooth[best:]) > smooth[best] + max(
        0.02 * abs(smooth[best]), 0.2 * (smooth[0] - smooth[best])
    )
    return rates[best] if rose else None
