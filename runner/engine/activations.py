"""Measures inside one forward pass: residual stream, attention logits, log Z, loss by position.

Owns the hooks, which are there only in a step that is measured. They compute beside the step,
without gradients, and change nothing of it. Must not know how the model is sharded: nothing here
reads a parameter, which may be gathered in its own module's forward alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from runner.engine.protocol import Engine

MOST_STRETCHES = 64  # of a sequence, for the loss by position
_MOST_QUERIES = 64  # positions of the sequence that are measured
_NOT_COUNTED = -100
# Names of the query and key projections (or the norms after them), in our decoder and in most
# Hugging Face models.
_QUERIES, _KEYS = (
    ("query_norm", "q_norm", "query", "q_proj"),
    ("key_norm", "k_norm", "key", "k_proj"),
)


class Hooked:
    """Hooks of one forward pass. An error in one of them waits, and takes all of them away."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._error: Exception | None = None

    def _safe(self, look: Callable[..., None]) -> Callable[..., None]:
        """The same, except that an error there waits for :meth:`_require_sound`."""

        def safe(*inputs: Any) -> None:
            try:
                look(*inputs)
            except Exception as error:
                self._error = error
                self._unhook()

        return safe

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _require_sound(self) -> None:
        """
        Raises:
            Exception: what measuring raised in the middle of the forward or backward pass.
        """
        if self._error is not None:
            raise self._error


class Activations(Hooked):
    """Measures one rank's forward passes of one step.

    Residual stream, attention logits and log Z come from up to 64 positions of the first sequence
    of the first micro-batch; the loss by position covers all micro-batches.

    Args:
        objective: computes losses from a batch.
        units: the blocks, in order.
        is_compiled: the blocks are compiled, so nothing inside them is hooked.
    """

    def __init__(
        self, objective: nn.Module, units: Sequence[nn.Module], *, is_compiled: bool
    ) -> None:
        super().__init__()
        self._objective = objective
        self._is_outside = self._has_spread = False
        self._spread: dict[int, Tensor] = {}
        self._residual: dict[int, Tensor] = {}
        self._queries: dict[int, Tensor] = {}
        self._logits: dict[int, Tensor] = {}
        self._log_sums: Tensor | None = None
        self._by_position: Tensor | None = None
        self.num_units = 0 if is_compiled else len(units)
        self.length = 0  # of the sequences whose loss is reported by position
        self._hooks: list[tuple[nn.Module, Callable[..., None]]] = []
        for number, unit in enumerate(units[: self.num_units]):
            self._hooks.append((unit, partial(self._at_unit, number)))
            self._hooks += self._attention_hooks(number, unit)

    def _attention_hooks(
        self, number: int, unit: nn.Module
    ) -> list[tuple[nn.Module, Callable[..., None]]]:
        """Of the first attention of a block, where it is one whose parts are known."""
        for module in unit.modules():
            query, key = _first_submodule(module, _QUERIES), _first_submodule(module, _KEYS)
            width = getattr(module, "head_dim", None)
            if query is not None and key is not None and isinstance(width, int):
                return [
                    (query, partial(self._at_query, number)),
                    (key, partial(self._at_key, number, module, width)),
                ]
        return []

    def begin(self, *, is_inside: bool, has_spread: bool = False) -> None:
        """Measure the step that is computed next; ``is_inside`` False: only its losses."""
        self._residual, self._queries, self._logits, self._spread = {}, {}, {}, {}
        self._has_spread = has_spread
        self._log_sums = self._by_position = None
        self._error = None
        self._is_outside = not is_inside
        self._unhook()
        if is_inside:  # a module with hooks takes longer each time: for one pass alone
            self._handles = [
                self._objective.register_forward_hook(self._at_end),
                *(module.register_forward_hook(self._safe(hook)) for module, hook in self._hooks),
            ]
        _listen(self._objective, self._safe(self._at_tokens))

    @property
    def size(self) -> int:
        """Length of the result of :meth:`end`."""
        return (2 + SPREAD) * self.num_units + 2 + 2 * MOST_STRETCHES

    def stop(self) -> None:
        """Stop measuring."""
        self._unhook()
        _listen(self._objective, None)

    def end(self, device: torch.device) -> Tensor:
        """Stop measuring; returns the results, FP64.

        Mean square of each block's output, largest attention logit of each, log Z (mean,
        largest); then sums and counts of the tokens' losses in each stretch of the sequence, and
        :data:`QUANTILES` and the largest of each block's absolute outputs. NaN where nothing was
        measured; 0 on ranks that do not measure (only one does).

        Raises:
            Exception: what measuring raised in the middle of the forward pass.
        """
        self.stop()
        self._require_sound()
        nothing = torch.full((), 0.0 if self._is_outside else math.nan, device=device)
        units = range(self.num_units)
        inside = [self._residual.get(n, nothing) for n in units]
        inside += [self._logits.get(n, nothing) for n in units]
        log_sums = [nothing, nothing] if self._log_sums is None else self._log_sums.unbind()
        by_position = self._by_position
        if by_position is None:
            by_position = torch.zeros(2 * MOST_STRETCHES, dtype=torch.float64, device=device)
        spreads = [self._spread.get(n, nothing.expand(SPREAD)).double() for n in units]
        return torch.cat([torch.stack([*inside, *log_sums]).double(), by_position, *spreads])

    def _at_end(self, module: nn.Module, inputs: object, output: object) -> None:
        """The first pass alone is measured, and not its recomputation in backward."""
        self._unhook()

    def _at_unit(self, number: int, module: nn.Module, inputs: object, output: Any) -> None:
        first = _first_sequence(output)
        if first is not None:
            rows = _subsample(first).float()
            self._residual[number] = rows.square().mean()
            if self._has_spread:
                sample = rows.flatten()[:: _distance(rows.numel())]
                largest = rows.abs().max().view(1)
                self._spread[number] = torch.cat([_quantiles(sample), largest])

    def _at_query(self, number: int, module: nn.Module, inputs: object, output: Any) -> None:
        first = _first_sequence(output)
        if first is not None:
            self._queries[number] = first

    def _at_key(
        self, number: int, owner: nn.Module, width: int, module: nn.Module, inputs: object,
        output: Any,
    ) -> None:  # fmt: skip
        key = _first_sequence(output)
        query = self._queries.pop(number, None)
        if key is None or query is None or number in self._logits:
            return
        self._logits[number] = _largest_logit(query, key, width, getattr(owner, "rotary", None))

    @torch.no_grad()
    def _at_tokens(
        self, losses: Tensor, targets: Tensor, log_sums: Tensor | None, logits: Tensor | None
    ) -> None:
        length = targets.shape[-1]
        if self._handles:
            if log_sums is None and logits is not None:
                log_sums = torch.logsumexp(_subsample(logits[:length]).float(), dim=-1)
            if log_sums is not None:
                first = log_sums[:length].float()
                self._log_sums = torch.stack([first.mean(), first.max()])
        if self._by_position is None:
            self.length = length
        if length == self.length:
            sums = _by_stretch(losses, targets)
            total = self._by_position
            self._by_position = sums if total is None else total + sums


def stretches(length: int) -> int:
    """Number of stretches that a sequence of ``length`` tokens is cut into."""
    return -(-length // _stretch(length)) if length else 0


def _stretch(length: int) -> int:
    """Number of tokens in a stretch."""
    return max(1, -(-length // MOST_STRETCHES))


def _by_stretch(losses: Tensor, targets: Tensor) -> Tensor:
    """Summed loss and number of tokens by stretch, FP64 ``[2 * MOST_STRETCHES]``."""
    length = targets.shape[-1]
    counted = targets != _NOT_COUNTED
    sums = torch.where(counted, losses.view_as(targets), 0.0).sum(dim=0, dtype=torch.float64)
    both = torch.stack([sums, counted.sum(dim=0).double()])
    padded = both.new_zeros(2, MOST_STRETCHES * _stretch(length))
    padded[:, :length] = both
    return padded.view(2, MOST_STRETCHES, -1).sum(dim=-1).flatten()


@torch.no_grad()
def _largest_logit(query: Tensor, key: Tensor, width: int, rotary: Any) -> Tensor:
    """Largest attention logit of one sequence, over all heads, up to 64 queries and their keys.

    If the rotary embedding is unknown, returns the upper bound over all rotations: the product of
    the longest query and the longest key.

    Args:
        query, key: ``[T, heads * width]``, or ``[heads, T, width]`` or ``[T, heads, width]``
            behind a norm.
        rotary: the decoder's :class:`runner.model.decoder.Rotary`, or None.
    """
    scale = width**-0.5
    if rotary is None:
        q, k = (x.float().reshape(-1, width).norm(dim=-1).max() for x in (query, key))
        bound: Tensor = q * k * scale
        return bound
    heads = [_heads(x, width) for x in (query, key)]
    length, num = heads[0].shape[1], len(heads[0])
    both = _rotated(torch.cat(heads).float(), rotary.first(length))
    q, k = both[:num].index_select(1, _sample_positions(length, both.device)), both[num:]
    if len(k) != num:
        k = k.repeat_interleave(num // len(k), dim=0)
    logits = torch.bmm(q, k.transpose(1, 2))
    largest: Tensor = logits.masked_fill_(_later(length, q.device), -torch.inf).max() * scale
    return largest


def _heads(x: Tensor, width: int) -> Tensor:
    """Heads first: ``[heads, T, width]``."""
    return x if x.dim() == 3 else x.view(len(x), -1, width).transpose(0, 1)


def _rotated(x: Tensor, rotary: Any) -> Tensor:
    """``[heads, T, width]``, rotated as the decoder does it."""
    left, right = x.chunk(2, dim=-1)
    cos, sin = rotary.cos, rotary.sin
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def _subsample(rows: Tensor) -> Tensor:
    """At most 64 of the rows, evenly spaced."""
    length = len(rows)
    return rows if length <= _MOST_QUERIES else rows[_sample_positions(length, rows.device)]


@lru_cache(maxsize=8)
def _sample_positions(length: int, device: torch.device) -> Tensor:
    """Return the last index of each of up to 64 equal parts."""
    num = min(length, _MOST_QUERIES)
    return (torch.arange(1, num + 1, device=device) * length) // num - 1


@lru_cache(maxsize=8)
def _later(length: int, device: torch.device) -> Tensor:
    """Whether a key is of a later position than the query, bool ``[queries, length]``."""
    return torch.arange(length, device=device) > _sample_positions(length, device).unsqueeze(1)


def _first_sequence(output: Any) -> Tensor | None:
    """Return the first sequence's output; None if the output is not a batch of sequences."""
    first = output[0] if isinstance(output, tuple) else output
    if not isinstance(first, Tensor) or first.dim() < 3 or not first.is_floating_point():
        return None
    return first[0].detach()


def _first_submodule(module: nn.Module, names: Sequence[str]) -> nn.Module | None:
    parts = (getattr(module, name, None) for name in names)
    return next((part for part in parts if isinstance(part, nn.Module)), None)


def _listen(objective: nn.Module, tap: Any) -> None:
    listen = getattr(objective, "listen", None)
    if callable(listen):
        listen(tap)


# Measures one update of each tensor: gradient and weight norms, size of the update, g^2 / v.
#
# The sums cover this rank's shards, on its device; added over all ranks they cover the whole
# tensors. Nothing waits for the device, and the state is not changed.

KINDS = ("grad", "weight", "moved", "held", "ratio", "count")
# Elements of each shard, to tell how far it moved: a copy of all weights would not fit everywhere.
_SAMPLED = 512
# A histogram in nine numbers: these quantiles of the absolute values, and the largest of all.
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)
SPREAD = len(QUANTILES) + 1
_CHUNK = 1 << 22  # elements that one norm on a CPU takes in


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """What is kept of a step until its update is made.

    ``squares`` are the squared norms of gradients, FP64 [names]; ``weights`` and ``gradients`` a
    sample of each shard, FP32 [names, ``_SAMPLED``], padded with zeros; ``gradients`` None where
    moments are not measured; ``spreads`` and ``largest`` of the gradients of each group.
    """

    squares: Tensor
    weights: Tensor
    gradients: Tensor | None
    spreads: Tensor
    largest: Tensor


class LayerSums:
    """Measures one step.

    The samples of all shards lie in one matrix, a row each, so that the arithmetic takes a handful
    of calls however many tensors there are: on small tensors a call costs more than what it does.

    Args:
        names: trained parameters, the same on all ranks; sets the order of the sums.
        groups: numbers of the names of which histograms are made together.

    Attributes:
        largest: of the last result: the largest absolute weight of each group, then the largest
            gradient, FP64 [2 * groups]; to be maximised over the ranks. 0 where not measured.
    """

    def __init__(
        self, engine: Engine, names: Sequence[str], groups: Sequence[Sequence[int]]
    ) -> None:
        self._groups = groups
        self._engine = engine
        self.largest = torch.zeros(2 * len(groups), dtype=torch.float64, device=engine.device)
        self._names = tuple(names)
        self._weights: list[Tensor] = []  # this rank's shards, 1-D
        self._steps: list[int] = []  # between the sampled elements of each
        # Views of memory that does not move; making them anew would cost more than all the sums.
        self._sampled_weights: list[Tensor] = []
        self._sampled_seconds: list[Tensor] = []
        # By kind: FP32 [names, _SAMPLED], the rest of a row zero; and the filled part of each row.
        self._matrices: dict[str, tuple[Tensor, list[Tensor]]] = {}

    @property
    def size(self) -> int:
        """Length of the result of :meth:`after`."""
        return len(KINDS) * len(self._names) + 2 * SPREAD * len(self._groups)

    @torch.no_grad()
    def before(self, *, has_moments: bool) -> Before:
        """Measure behind the backward pass, before the update.

        Args:
            has_moments: measure g^2 / v as well.
        """
        self._open()
        gradients = self._engine.gradients()
        own = [
            gradients[name].reshape(-1) if name in gradients else weight.new_empty(0)
            for name, weight in zip(self._names, self._weights, strict=True)
        ]
        sampled = self._filled("gradients", self._sampled(own)) if has_moments else None
        spreads, largest = self._spreads("gradients", own, has_moments=has_moments)
        return Before(
            squares=self._squares(own),
            weights=self._filled("before", self._sampled_weights),
            gradients=sampled,
            spreads=spreads,
            largest=largest,
        )

    @torch.no_grad()
    def after(self, before: Before) -> Tensor:
        """Measure behind the update: FP64, each of :data:`KINDS` of all ``names`` in turn.

        Squared norms of gradients (of the summed loss) and of weights; then of up to
        ``_SAMPLED`` elements a shard: squares of what they moved, and of what they are; the sum of
        g^2 / v, and how many of these there are: 0 where moments are not measured. Then, where they
        are, of each group's weights, and then of its gradients, :data:`QUANTILES` times the number
        of elements, and that number.
        """
        now = self._filled("now", self._sampled_weights)
        sampled = [now - before.weights, now]
        sums = [torch.linalg.vector_norm(sample, dim=1).double().square_() for sample in sampled]
        if before.gradients is None:
            sums += [torch.zeros_like(sums[0])] * 2
        else:
            seconds = self._filled("seconds", self._sampled_seconds)
            ratios = torch.where(seconds > 0, before.gradients.square() / seconds, 0.0)
            sums += [values.sum(dim=1, dtype=torch.float64) for values in (ratios, ratios > 0)]
        sums = [column.to(self._engine.device) for column in sums]
        # Copies of a shard have equal sums: each gives its part.
        squares = self._squares(self._weights)
        has_moments = before.gradients is not None
        spreads, largest = self._spreads("now", self._weights, has_moments=has_moments)
        self.largest = torch.cat([largest, before.largest])
        copies = self._engine.replica[1]
        return torch.cat(
            [torch.cat([before.squares, squares, *sums]) / copies, spreads, before.spreads]
        )

    def _spreads(
        self, kind: str, tensors: Sequence[Tensor], *, has_moments: bool
    ) -> tuple[Tensor, Tensor]:
        """Of the elements of this kind: see :meth:`after` and :attr:`largest`, for one kind."""
        device = self._engine.device
        spreads = torch.zeros(len(self._groups), SPREAD, dtype=torch.float64, device=device)
        largest = spreads.new_zeros(len(self._groups))
        for number, group in enumerate(self._groups if has_moments else ()):
            own = [at for at in group if tensors[at].numel()]
            if not own:
                continue
            values = torch.cat([self._matrices[kind][1][at] for at in own])
            spreads[number, :-1] = len(values) * _quantiles(values)
            spreads[number, -1] = len(values)
            norms = torch._foreach_norm([tensors[at] for at in own], math.inf)
            largest[number] = torch.stack(norms).max()
        return spreads.flatten(), largest

    def _open(self) -> None:
        if self._weights:
            return
        held: dict[str, dict[str, Tensor]] = {"param": {}, "exp_avg_sq": {}}
        for shard in self._engine.shards():
            kind, _, name = shard.name.partition("/")
            if kind in held:
                held[kind][name] = shard.local.detach()
        self._weights = [held["param"][name] for name in self._names]
        self._steps = [_distance(weight.numel()) for weight in self._weights]
        self._sampled_weights = self._sampled(self._weights)
        # Of some there is no second moment, or it is kept in another form.
        seconds = held["exp_avg_sq"]
        self._sampled_seconds = self._sampled(
            [_like(seconds.get(n), w) for n, w in zip(self._names, self._weights, strict=True)]
        )

    def _sampled(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Evenly spaced elements of each."""
        return [
            tensor[::step] if step > 1 else tensor
            for tensor, step in zip(tensors, self._steps, strict=True)
        ]

    def _filled(self, kind: str, few: Sequence[Tensor]) -> Tensor:
        """The matrix of this kind, which is used again at each look: to make it takes longer."""
        if kind not in self._matrices:
            device = self._weights[0].device if self._weights else None
            matrix = torch.zeros(len(few), _SAMPLED, device=device)
            parts = zip(matrix.unbind(), self._sampled_weights, strict=True)
            self._matrices[kind] = matrix, [row[: part.numel()] for row, part in parts]
        matrix, rows = self._matrices[kind]
        both = [(row, part) for row, part in zip(rows, few, strict=True) if part.numel()]
        if len(both) < len(rows):
            matrix.zero_()  # a gradient that was there at another look may be missing
        if both:
            torch._foreach_copy_([row for row, _ in both], [part for _, part in both])
        return matrix

    def _squares(self, tensors: Sequence[Tensor]) -> Tensor:
        """Sum of squares of each tensor, FP64."""
        if not tensors:
            return torch.zeros(0, dtype=torch.float64, device=self._engine.device)
        if not any(tensor.numel() > _CHUNK and not tensor.is_cuda for tensor in tensors):
            return self._stacked(torch._foreach_norm(list(tensors), 2)).square()
        # One long FP32 sum on a CPU loses small terms.
        squares = [
            torch.stack(torch._foreach_norm(list(torch.split(tensor, _CHUNK)), 2)).double().square()
            if tensor.numel()
            else torch.zeros(1, dtype=torch.float64)
            for tensor in tensors
        ]
        return self._stacked([parts.sum() for parts in squares])

    def _stacked(self, numbers: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(numbers)).to(self._engine.device).double()


def _quantiles(values: Tensor) -> Tensor:
    """:data:`QUANTILES` of the absolute values, FP32."""
    ordered = values.abs().sort().values
    return ordered[_quantile_places(len(ordered), ordered.device)]


@lru_cache(maxsize=64)
def _quantile_places(count: int, device: torch.device) -> Tensor:
    return torch.tensor([round(share * (count - 1)) for share in QUANTILES], device=device)


def _like(second: Tensor | None, weight: Tensor) -> Tensor:
    fits = second is not None and second.numel() == weight.numel() and second.is_floating_point()
    return second if second is not None and fits else weight.new_empty(0)


def _distance(size: int) -> int:
    """Between sampled elements; odd, so that they are not all of one column."""
    return max(1, -(-size // _SAMPLED)) | 1
