"""Tests what the model attends to, by pairs of forward passes that differ in one token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from runner.engine.modes import evaluating, in_evaluation
from runner.model.decoder import Decoder
from runner.model.objective import INPUT, LABELS, SEGMENTS, accepted_by, has_own_losses
from runner.startup.checks import ROUNDING, Check, earlier_matter, no_look_ahead, not_tried
from runner.startup.preflight.subject import Inputs, Subject, answers

_ROWS, _LENGTH = 2, 128
_ORDER = 1e-5  # share of the effect of another token: order may matter little at the start


def future(subject: Subject) -> Check:
    """Test that a changed token changes nothing before it."""
    leaked, at, seen = 0.0, 0, 0.0
    for place, length, apart in _changes(subject, last=True):
        before = max(apart(0, place), apart(0, place, in_training=True))
        seen = max(seen, apart(place, length))
        if before > leaked:
            leaked, at = before, place
    return no_look_ahead("the output", before=leaked, effect=seen, place=at)


def context(subject: Subject) -> Check:
    """Test that a changed token changes its own place and something after it."""
    own, later, far = 0.0, 0.0, 0
    for place, length, apart in _changes(subject):
        own = max(own, apart(place, place + 1))
        for distance in (1, 2, 4, 8, 16, 32, 64):
            moved = apart(place + distance, length)
            far = max(far, distance if moved > ROUNDING * own else 0)
            later = max(later, moved)
    return earlier_matter("the output", own=own, later=later, far=far)


def own_token(subject: Subject) -> Check:
    """Test that the output at a position depends on the token there."""
    own, later = 0.0, 0.0
    for place, length, apart in _changes(subject, last=True):
        own = max(own, apart(place, place + 1))
        later = max(later, apart(place + 1, min(place + 2, length)))
    moves = f"another token changes the output at its own position by {own:.2g}"
    return Check(
        name="the label of a position is predicted from its token",
        holds=own > 0 and own > 1e-3 * later,
        found=moves if own > 0 else "a token does not affect the output at its own position",
        remedy="labels[b, t] is already the token after input_ids[b, t]: no shift in the model; or "
        "the input never reaches the output",
    )


def order(subject: Subject) -> Check:
    """Test that swapping two tokens changes the first layer that mixes positions.

    The whole model would prove little: even without positions a causal layer shows the next
    one how many tokens came before (arXiv 2305.19466).
    """
    name = "the order of tokens matters"
    inputs = subject.inputs(_ROWS, _LENGTH)
    length = inputs[INPUT].shape[1]
    moved = usual = 0.0
    where = ""
    for place in _places(inputs):
        swapped = _swapped(inputs, place)
        if swapped is None or place + 2 >= length:
            continue
        changed = _changed(subject, inputs, place)
        mixing = _first_mixing(subject, [inputs, changed, swapped], place + 2)
        where = mixing[0] or where
        usual, moved = max(usual, mixing[1]), max(moved, mixing[2])
    if usual == 0:
        return not_tried(name, "no token matters after its place")
    return Check(
        name=name,
        holds=moved > _ORDER * usual,
        found=f"two tokens that change places change what {where or 'the model'} says after them "
        f"by {moved:.2g} (another token: {usual:.2g})",
        remedy="positions are missing: are position embeddings added, are rotary ones applied to "
        "queries and keys, does the position number rise along the sequence",
    )


def _first_mixing(subject: Subject, runs: list[Inputs], begin: int) -> tuple[str, float, float]:
    """Find the first module where an earlier token matters: its name, and the two differences.

    Args:
        runs: outputs for the plain input, with one token changed, and with two tokens swapped.
        begin: the first position after the changed ones.
    """
    noted = [_noted(subject, inputs) for inputs in runs]
    for (name, plain), (_, changed), (_, swapped) in zip(*noted, strict=False):
        if not plain.shape == changed.shape == swapped.shape:
            continue
        scale = float(plain.abs().max())
        usual = float((plain - changed)[:, begin:].abs().max())
        if usual > 1e-6 * scale:
            return name, usual, float((plain - swapped)[:, begin:].abs().max())
    length = runs[0][INPUT].shape[1]
    usual, moved = (_apart(subject, runs[0], other, begin, length) for other in runs[1:])
    return "", usual, moved


@torch.no_grad()
def _noted(subject: Subject, inputs: Inputs) -> list[tuple[str, Tensor]]:
    """Record each module's output [B, T, ...], in the order of execution."""
    network = in_evaluation(subject.copy().double())
    length = inputs[INPUT].shape[1]
    outputs: list[tuple[str, Tensor]] = []

    def hook(name: str) -> Callable[..., None]:
        def note(module: nn.Module, given: object, output: object) -> None:
            first = output[0] if isinstance(output, tuple | list) and output else output
            if isinstance(first, Tensor) and first.dim() >= 3 and first.shape[1] == length:
                outputs.append((name, first.detach().double()))

        return note

    for name, module in network.named_modules():
        if name:
            module.register_forward_hook(hook(name))
    answers(network, inputs, 0, length)
    return outputs


def documents(subject: Subject) -> Check:
    """Test that a changed token of one document changes nothing in the next."""
    name = "documents do not see each other"
    data = subject.config.data
    if not (data.isolate_documents or data.pack):
        return not_tried(name, "data.isolate_documents and data.pack are off")
    takes = isinstance(subject.network, Decoder) or "segments" in accepted_by(
        subject.network.forward
    )
    if not takes and not has_own_losses(subject.network):
        return not_tried(name, "forward takes no segments")
    inputs = subject.inputs(_ROWS, _LENGTH)
    length = inputs[INPUT].shape[1]
    middle = length // 2
    segments = torch.zeros_like(inputs[INPUT], dtype=torch.int32)
    segments[:, middle:] = 1
    inputs[SEGMENTS] = segments
    changed = _changed(subject, inputs, middle // 2)
    across = _apart(subject, inputs, changed, middle, length)
    within = _apart(subject, inputs, changed, middle // 2, middle)
    return Check(
        name=name,
        holds=across <= ROUNDING * within,
        found=f"another token in one document changes {across:.2g} in the next ({within:.2g} in "
        "its own)",
        remedy="the mask must be causal and within one number of segments; a state that is carried "
        "along must be reset where the number changes",
    )


def labels_count(subject: Subject) -> Check:
    """Test that a model's own loss uses the given labels."""
    name = "the loss takes the labels"
    network = subject.network
    if not has_own_losses(network):
        return Check(name=name, holds=True, found="the runner computes it, from logits and labels")
    inputs = subject.inputs(_ROWS, _LENGTH)
    other = inputs[LABELS].clone()
    counted = other != -100
    other[counted] = (other[counted] + 1) % max(subject.vocab_size, 2)
    length = inputs[INPUT].shape[1]
    moved = _apart(subject, inputs, {**inputs, LABELS: other}, 0, length)
    return Check(
        name=name,
        holds=moved > 0,
        found=f"other labels change the loss by {moved:.2g}",
        remedy='losses(batch) must use batch["labels"], which are shifted already, not input_ids',
    )


def _changes(
    subject: Subject, *, last: bool = False
) -> Iterator[tuple[int, int, Callable[..., float]]]:
    """Change a token at some places: the place, the length, and how far outputs are apart."""
    inputs = subject.inputs(_ROWS, _LENGTH)
    for place in _places(inputs, last):
        changed = _changed(subject, inputs, place)
        yield place, inputs[INPUT].shape[1], partial(_apart, subject, inputs, changed)


def _places(inputs: Inputs, last: bool = False) -> list[int]:
    """Positions to change: early, in the middle, late; also the very last one."""
    length = inputs[INPUT].shape[1]
    places = {1, length // 3, length // 2, max(length - 4, 1)}
    places |= {length - 1, length - 2} if last else set()
    return sorted(place for place in places if 0 < place < length)


def _changed(subject: Subject, inputs: Inputs, place: int) -> Inputs:
    """The inputs with another token at ``place``."""
    tokens = inputs[INPUT].clone()
    most = int(tokens.max()) + 1 if subject.vocab_size < 2 else subject.vocab_size
    tokens[:, place] = (tokens[:, place] + max(1, most // 2)) % most
    return {**inputs, INPUT: tokens}


def _swapped(inputs: Inputs, place: int) -> Inputs | None:
    """The inputs with a token and its successor swapped; None where they are equal."""
    tokens = inputs[INPUT].clone()
    tokens[:, [place, place + 1]] = tokens[:, [place + 1, place]]
    return {**inputs, INPUT: tokens} if not torch.equal(tokens, inputs[INPUT]) else None


@torch.no_grad()
def _apart(
    subject: Subject, one: Inputs, other: Inputs, begin: int, end: int, *, in_training: bool = False
) -> float:
    """The largest difference of outputs at positions ``[begin, end)``; NaN counts as one.

    ``in_training``: each module is in its own mode, with the same dropout.
    """
    if begin >= end:
        return 0.0
    network = subject.copy() if in_training else subject.network
    differences: list[Tensor] = []
    with nullcontext() if in_training else evaluating(network):
        for inputs in (one, other):
            torch.manual_seed(0)
            differences.append(answers(network, inputs, begin, end).double())
    difference = (differences[0] - differences[1]).abs()
    return (
        float(torch.nan_to_num(difference, nan=float("inf")).max()) if difference.numel() else 0.0
    )
