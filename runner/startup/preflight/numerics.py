"""Tests whether gradients fit the loss, and how BF16 changes both."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.engine.modes import in_evaluation
from runner.model.loss import NOT_COUNTED
from runner.model.objective import LABELS, has_own_losses
from runner.startup.checks import Check, named, not_tried
from runner.startup.preflight.subject import (
    Inputs,
    Subject,
    answers,
    mean_loss,
    objective,
)

_MOST_ELEMENTS = 30_000_000  # in FP64, three times
_MOST_TENSORS, _MOST_SECONDS = 40, 12.0
_EXACT, _ROUGH = (
    1e-4,
    2e-2,
)  # relative; for a model in FP64 throughout, and for one that casts to FP32 inside
_MOVES = (1e-4, 1e-3, 1e-5, 1e-2)  # share of the loss that a step along the gradient should change
_JUMP = 0.75  # of what is unexplained at twice the distance
_BF16_NATS, _BF16_COSINE = 0.02, 0.98
_COUNTS = 1e-2  # share of the whole gradient's norm: less is noise in BF16


def gradients(subject: Subject) -> Check:
    """Compare each tensor's gradient with finite differences of the loss, in FP64."""
    name = "gradients are those of the loss"
    if subject.num_parameters > _MOST_ELEMENTS:
        return not_tried(name, f"{subject.num_parameters:,} parameters in FP64 take too long")
    cpu = torch.device("cpu")
    network = in_evaluation(copy.deepcopy(subject.network).to(cpu).double())
    inputs = {n: _double(t.to(cpu)) for n, t in subject.inputs(2, 24).items()}
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
            found=f"at {named(jumps)} the loss jumps, so that no difference tells its slope",
            remedy="a choice in the model, as top-k routing, jumps and is sound; otherwise try "
            "torch.autograd.gradcheck on it",
            is_warning=True,
        )
    rough = "" if worst < _EXACT else "; somewhere it computes in FP32"
    return Check(
        name=name,
        holds=not wrong,
        found=f"of {named(wrong)} it is {worst:.2g} off"
        if wrong
        else f"{count} of {len(trained)} tensors agree to {worst:.1g} (worst: {where}){rough}",
        remedy="a custom backward (autograd.Function, custom kernel) does not match its forward; "
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
    sums, counts = network.losses(inputs)  # type: ignore[operator]
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


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def low_precision(subject: Subject) -> Check:
    """Compare the same step in BF16 and in FP32."""
    name = "BF16 gives the same step as FP32"
    losses, grads = [], []
    for dtype in (None, torch.bfloat16):
        network = subject.copy()
        network = network if dtype is None else network.to(dtype)
        model = in_evaluation(objective(network, dtype=dtype))
        loss = mean_loss(model, subject.inputs(4, 128))
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
        grads.append(
            {n: p.grad.double() for n, p in network.named_parameters() if p.grad is not None}
        )
    whole = sum(float(grad.square().sum()) for grad in grads[0].values()) ** 0.5
    cosines = {
        n: float(
            torch.nn.functional.cosine_similarity(grad.flatten(), grads[1][n].flatten(), dim=0)
        )
        for n, grad in grads[0].items()
        if n in grads[1] and float(grad.norm()) > _COUNTS * whole
    }
    apart = abs(losses[1] - losses[0])
    low = sorted((c, n) for n, c in cosines.items() if not c > _BF16_COSINE)
    is_near = apart < _BF16_NATS * max(1.0, abs(losses[0]) / 5)
    worst = min(cosines.values(), default=1.0)
    return Check(
        name=name,
        holds=is_near and not low,
        found=f"losses {apart:.2g} nats apart, gradients of a tensor at a cosine of {worst:.4f} or "
        "more"
        if not low
        else f"losses {apart:.2g} nats apart; the gradient of "
        f"{named([n for _, n in low])} points elsewhere (cosine {low[0][0]:.3f})",
        remedy="compute sums, norms, softmax and exponentials of large numbers in FP32 inside the "
        "layer; or compute.precision=fp32",
        is_warning=not subject.is_bf16,
    )
