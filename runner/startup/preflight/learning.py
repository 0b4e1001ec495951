"""Tests whether the model learns: loss, gradients and updates, in FP64, FP32 and BF16; the rate."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.config.schema import OptimKind, Precision
from runner.engine.modes import evaluating, in_evaluation
from runner.engine.optimizer import OptimizerSettings
from runner.model.loss import NOT_COUNTED
from runner.model.objective import INPUT, LABELS, has_own_losses
from runner.startup import checks
from runner.startup.checks import Check, not_tried
from runner.startup.preflight.subject import (
    Inputs,
    Subject,
    Trainer,
    answers,
    mean_loss,
    objective,
    trains_adapters,
)
from runner.system.units import first_few

_STEPS_TO_TRAIN = 4  # in a low-rank pair one gradient is zero at first
_KNOWN, _LIKELIER = 0.7, 0.8  # of ln V: what knows text; of the loss: what is clearly lower
_BY_HEART = 0.1  # nats
_ROWS, _LENGTH = 4, 32
_MOST_STEPS, _MOST_SECONDS = 300, 12.0
_LOW = 5000  # a rate so many times below the turning point is too low; fine-tuning uses low rates
_FIRST_RATE, _GROWTH, _RANGE_STEPS, _RANGE_SECONDS = 1e-6, 1.13, 110, 12.0
_TABLES = ("pos", "rotary", "inv_freq", "freqs")  # parameters of positions, which few samples train
_MOST_ELEMENTS = 30_000_000  # in FP64, three times
_MOST_TENSORS = 40
# Relative; for a model in FP64 throughout, and for one that casts to FP32 inside.
_EXACT, _ROUGH = 1e-4, 2e-2
_MOVES = (1e-4, 1e-3, 1e-5, 1e-2)  # share of the loss that a step along the gradient should change
_JUMP = 0.75  # of what is unexplained at twice the distance
_BF16_NATS, _BF16_COSINE = 0.02, 0.98
_COUNTS = 1e-2  # share of the whole gradient's norm: less is noise in BF16


def first_loss(subject: Subject) -> Iterator[Check]:
    """Compare the first loss with that of a uniform guess, and with that of ids one off."""
    name = "first loss against ln V"
    if subject.vocab_size < 2:
        yield not_tried(name, "the data has no number of token ids")
        return
    uniform = math.log(subject.vocab_size)
    loss = _shifted_loss(subject, 0)
    yield checks.first_loss(loss, uniform)
    shifted = {shift: _shifted_loss(subject, shift) for shift in (1, -1)}
    best = min(shifted, key=lambda shift: shifted[shift])
    name = "ids are the model's"
    if not min(loss, shifted[best]) < _KNOWN * uniform:
        yield not_tried(name, "the weights know no text yet")
        return
    yield Check(
        name=name,
        holds=shifted[best] > _LIKELIER * loss,
        found=f"the loss is {loss:.4g}; with all ids {best:+} it is {shifted[best]:.4g}",
        remedy="the ids begin at another number than the model's: another tokenizer, or a table "
        "that was counted from 1",
    )


def _shifted_loss(subject: Subject, shift: int) -> float:
    """The mean loss of the first batches with ``shift`` added to each id, modulo their number."""
    model = objective(subject.network)
    losses = []
    with torch.no_grad(), evaluating(model):
        for number in range(len(subject.batches)):
            inputs = subject.inputs(_ROWS, None, number)
            labels = inputs[LABELS]
            moved = (inputs[INPUT] + shift) % subject.vocab_size
            counted = torch.where(
                labels == NOT_COUNTED, labels, (labels + shift) % subject.vocab_size
            )
            losses.append(float(mean_loss(model, {**inputs, INPUT: moved, LABELS: counted})))
    return sum(losses) / len(losses)


def trained(subject: Subject) -> Iterator[Check]:
    """Test which parameters are trained, get a gradient, and change."""
    network = subject.copy()
    parameters = dict(network.named_parameters())
    yield _frozen(subject, parameters)
    before = {name: p.detach().clone() for name, p in parameters.items() if p.requires_grad}
    seen: set[str] = set()
    trainer = Trainer(subject, network, with_dropout=True)
    for number in range(_STEPS_TO_TRAIN):
        trainer.step(subject.inputs(_ROWS, None, number), max(subject.config.optim.lr, 1e-4))
        grads = {name: parameters[name].grad for name in before}
        seen |= {name for name, grad in grads.items() if grad is not None and (grad != 0).any()}
    yield checks.gradients_reach(list(before), seen)
    same = sorted(n for n in before if n in seen and torch.equal(before[n], parameters[n]))
    yield Check.of(
        "each trained parameter changes",
        f"{first_few(same)} did not, in {_STEPS_TO_TRAIN} updates" if same else "",
        f"all did, in {_STEPS_TO_TRAIN} updates",
        "something writes it back, or its values are too large for updates of this rate",
    )


def _frozen(subject: Subject, parameters: Mapping[str, nn.Parameter]) -> Check:
    frozen = {n: p.numel() for n, p in parameters.items() if not p.requires_grad}
    others = [n for n in frozen if not any(word in n.lower() for word in _TABLES)]
    by_settings = bool(subject.config.compute.frozen)
    holds = by_settings or not others or trains_adapters(parameters)
    how = "by the settings" if by_settings else "by the model itself"
    message = "every parameter is trained"
    if frozen:
        share = 100 * sum(frozen.values()) / sum(p.numel() for p in parameters.values())
        message = f"{first_few(list(frozen))}: {share:.2g} % of the elements are frozen, {how}"
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
    shape = " x ".join(str(size) for size in next(iter(inputs.values())).shape[:2])
    return Check(
        name=name,
        holds=holds,
        found=f"the loss of {shape} went from {start:.4g} to {best:.3g} in {steps} "
        f"updates at a rate of {rate:g}",
        remedy="check the connections of the model: labels, masks, detached or frozen parts, "
        "an output that is not the sum of what was computed",
    )


def _aim(start: float) -> float:
    return _BY_HEART if start > 1 else 0.2 * start


def _memorised(
    subject: Subject, inputs: Inputs, rate: float, began: float
) -> tuple[float, float, int]:
    """Overfit; returns the lowest loss, the first loss, and the number of updates."""
    optim = replace(subject.config.optim, kind=OptimKind.adamw, groups=[])
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
    own = subject.config.optim.lr
    is_high, is_low = own > turn / 2, own < turn / _LOW
    message = f"optim.lr={own:g} is " + ("too high" if is_high else "very low")
    return Check(
        name=name,
        holds=not (is_high or is_low),
        found=template.format(min(turn, rates[-1])) + (f"; {message}" if is_high or is_low else ""),
        remedy=f"try optim.lr={turn / 10:.1g}",
        is_warning=turn / (10 * _LOW) < own < 2 * turn,
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


def gradients(subject: Subject) -> Check:
    """Compare each tensor's gradient with finite differences of the loss, in FP64."""
    name = "gradients are those of the loss"
    if subject.num_parameters > _MOST_ELEMENTS:
        return not_tried(name, f"{subject.num_parameters:,} parameters in FP64 take too long")
    cpu = torch.device("cpu")
    network = in_evaluation(copy.deepcopy(subject.network).to(cpu).double())
    inputs = {name: tensor.to(cpu) for name, tensor in subject.inputs(2, 24).items()}
    inputs = {n: t.double() if t.is_floating_point() else t for n, t in inputs.items()}
    loss_of = _exact_loss if subject.has_tokens else _own_loss
    loss_of(network, inputs).backward()  # type: ignore[no-untyped-call]
    trained = [(n, p) for n, p in network.named_parameters() if p.grad is not None]
    trained = [(n, p) for n, p in trained if float(p.grad.norm()) > 0]  # type: ignore[union-attr]
    step = -(-len(trained) // _MOST_TENSORS)
    began = time.monotonic()
    worst, where, count = 0.0, "", 0
    wrong: list[str] = []
    jumps: list[str] = []
    for one, parameter in trained[::step] if step else []:
        error, is_jump = _error(lambda: loss_of(network, inputs), parameter)
        count += 1
        if error > worst:
            worst, where = error, one
        if error > _ROUGH:
            (jumps if is_jump else wrong).append(one)
        if time.monotonic() - began > _MOST_SECONDS:
            break
    if not count:
        return not_tried(name, "no parameter has a gradient")
    if jumps and not wrong:
        return Check(
            name=name,
            holds=False,
            found=f"at {first_few(jumps)} the loss jumps, so that no difference tells its slope",
            remedy="a choice in the model, as top-k routing, jumps and is sound; otherwise try "
            "torch.autograd.gradcheck on it",
            is_warning=True,
        )
    rough = "" if worst < _EXACT else "; somewhere it computes in FP32"
    return Check.of(
        name,
        f"of {first_few(wrong)} it is {worst:.2g} off" if wrong else "",
        f"{count} of {len(trained)} tensors agree to {worst:.1g} (worst: {where}){rough}",
        "a custom backward (autograd.Function, custom kernel) does not match its forward; "
        "try torch.autograd.gradcheck on it",
    )


def _exact_loss(network: nn.Module, inputs: Inputs) -> Tensor:
    """The run's token loss in FP64, which a run sums in FP32."""
    if has_own_losses(network):
        return _own_loss(network, inputs)
    labels = inputs[LABELS]
    logits = answers(network, inputs, 0, labels.shape[1])
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NOT_COUNTED)


def _own_loss(network: nn.Module, inputs: Inputs) -> Tensor:
    sums, counts = network.losses(inputs)[:2]  # type: ignore[operator]  # metrics may follow
    loss: Tensor = sums.sum() / counts.sum().clamp(min=1)
    return loss


def _error(loss_of: Callable[[], Tensor], parameter: nn.Parameter) -> tuple[float, bool]:
    """The relative error of one tensor's gradient, at the best of a few distances.

    Also whether the loss jumps there: at half that distance as much of it is unexplained, where a
    wrong gradient would leave half.
    """
    assert parameter.grad is not None
    norm = float(parameter.grad.norm())
    direction = parameter.grad / norm
    original = parameter.detach().clone()
    loss = float(loss_of().detach())

    def unexplained(length: float) -> float:
        sides = []
        for sign in (1.0, -1.0):
            with torch.no_grad():
                parameter.copy_(original + sign * length * direction)
                sides.append(float(loss_of()))
        return abs(sides[0] - sides[1] - 2 * length * norm)

    best, at = float("inf"), 0.0
    for move in _MOVES:
        length = move * max(abs(loss), 1e-3) / norm
        best, at = min((best, at), (unexplained(length) / (2 * length * norm), length))
        if best < _EXACT:
            break
    is_jump = best > _ROUGH and unexplained(at / 2) > _JUMP * unexplained(at)
    with torch.no_grad():
        parameter.copy_(original)
    return best, is_jump


def low_precision(subject: Subject) -> Check:
    """Compare the same step in BF16 and in FP32."""
    name = "BF16 gives the same step as FP32"
    losses, grads = [], []
    for dtype in (None, torch.bfloat16):
        network = subject.copy().to(dtype)  # None: as it is
        model = in_evaluation(objective(network, dtype=dtype))
        loss = mean_loss(model, subject.inputs(4, 128))
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
        grads.append(
            {n: p.grad.double() for n, p in network.named_parameters() if p.grad is not None}
        )
    whole = sum(float(grad.square().sum()) for grad in grads[0].values()) ** 0.5
    cosines = {
        n: float(F.cosine_similarity(grad.flatten(), grads[1][n].flatten(), dim=0))
        for n, grad in grads[0].items()
        if n in grads[1] and float(grad.norm()) > _COUNTS * whole
    }
    apart = abs(losses[1] - losses[0])
    low = sorted((c, n) for n, c in cosines.items() if not c > _BF16_COSINE)
    is_near = apart < _BF16_NATS * max(1.0, abs(losses[0]) / 5)
    worst = min(cosines.values(), default=1.0)
    direction = f", gradients of a tensor at a cosine of {worst:.4f} or more"
    if low:
        turned = first_few([name for _, name in low])
        direction = f"; the gradient of {turned} points elsewhere (cosine {low[0][0]:.3f})"
    return Check(
        name=name,
        holds=is_near and not low,
        found=f"losses {apart:.2g} nats apart{direction}",
        remedy="compute sums, norms, softmax and exponentials of large numbers in FP32 inside the "
        "layer; or compute.precision=fp32",
        is_warning=subject.config.compute.precision is Precision.fp32,
    )
