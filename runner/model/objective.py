"""A network and its loss as one module, which engines call: from a batch to sums per sequence.

Owns the way from a batch to losses, for the decoder and for users' networks. Must not know
how it is sharded, or the use of the sums.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import Library
from torch.utils import _pytree as pytree

from runner.model.decoder import Decoder
from runner.model.loss import NOT_COUNTED, HeadLosses, TokenTap, right_tokens, sequence_losses
from runner.system.error import ConfigError

Batch = Mapping[str, Tensor]
# Cross-entropy, the loss to train on, and what is counted: sums over each sample, [B] each.
Metrics = dict[str, tuple[Tensor, Tensor]]
Losses = tuple[Tensor, Tensor, Tensor, Metrics]

INPUT, LABELS, SEGMENTS, REAL = "input_ids", "labels", "segments", "real"
LOGITS = "logits"


class DecoderObjective(nn.Module):
    """The decoder under :func:`runner.model.loss.sequence_losses`."""

    def __init__(self, network: Decoder, *, fp32: bool, z_loss: float) -> None:
        super().__init__()
        self.network = network
        self._fp32 = fp32
        self._z_loss = z_loss
        self._tap: TokenTap | None = None

    def listen(self, tap: TokenTap | None) -> None:
        """Call ``tap`` with the tokens of each batch from now on; None stops it."""
        self._tap = self.network.tap = tap

    def forward(self, batch: Batch) -> Losses:
        """``input_ids`` and ``labels`` int64 ``[B, T]``, ``segments`` int32 ``[B, T]`` or none."""
        labels = batch[LABELS]
        # The labels go along: logits that are too large the network turns into losses itself.
        logits = self.network(batch[INPUT], batch.get(SEGMENTS), labels)
        losses = sequence_losses(
            logits, labels, fp32=self._fp32, z_loss=self._z_loss, tap=self._tap
        )
        counts = (labels != NOT_COUNTED).sum(dim=1)
        return *losses, counts, _accuracy(logits, labels, counts)


class GuestObjective(nn.Module):
    """A user's network: its own ``losses(batch)``, or logits from ``forward(input_ids)``.

    Args:
        head_losses: computes the loss of logits in parts where they are too large.
        dtype: for floating-point tensors of a batch; None leaves them.
        vocab_size: of the data, 0 where it has none.
        units: modules that are gathered one by one.

    Attributes:
        logits_bytes: of the largest logits of a sample that were held whole, FP32, although they
            may be too large.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        head_losses: HeadLosses,
        dtype: torch.dtype | None,
        vocab_size: int = 0,
        units: Sequence[nn.Module] = (),
    ) -> None:
        super().__init__()
        self.network = network
        self.logits_bytes = 0
        self._head_losses = head_losses
        self._dtype = dtype
        head = None if has_own_losses(network) else head_of(network, vocab_size, units)
        if head is not None:
            head.forward = partial(_forward, head, head_losses.is_wanted)  # type: ignore[method-assign]
        self._is_deferred = head is not None
        self._more = self._accepted()
        self._tap: TokenTap | None = None
        if dtype is not None:
            mix_types()
        config = getattr(network, "config", None)
        if getattr(config, "use_cache", None):
            # otherwise transformers keeps keys and values of every layer, for generation
            config.use_cache = False  # type: ignore[union-attr]

    def _accepted(self) -> frozenset[str]:
        return accepted_by(self.network.forward)

    def listen(self, tap: TokenTap | None) -> None:
        """As :class:`DecoderObjective`; a network's own losses have no tokens."""
        self._tap = tap

    def forward(self, batch: Batch) -> Losses:
        """See the class; ``real``, bool ``[B]``, is False for rows that fill the batch up.

        Raises:
            ConfigError: the network's output has a wrong shape.
        """
        given = {name: self._cast(tensor) for name, tensor in batch.items()}
        real = given.pop(REAL, None)
        if real is None and LABELS in given:
            real = (given[LABELS] != NOT_COUNTED).flatten(1).any(dim=1)
        rows = len(next(iter(given.values())))
        # Buffers stay FP32 and would promote activations, which do not fit BF16 weights.
        device = next(iter(given.values())).device.type
        # Not on the meta device, which has no autocast and where FLOPs and memory are counted.
        is_mixed = self._dtype is not None
        with torch.autocast(device, dtype=torch.bfloat16) if is_mixed else nullcontext():
            if has_own_losses(self.network):
                sums, counts, metrics = _own_losses(self.network, given, rows)
            else:
                sums, counts, metrics = self._from_logits(given)
        if real is not None:
            sums = torch.where(real, sums, 0.0)
            counts = torch.where(real, counts, 0)
            metrics = {
                name: (torch.where(real, total, 0), torch.where(real, count, 0))
                for name, (total, count) in metrics.items()
            }
        return sums, sums, counts, metrics

    def _from_logits(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Metrics]:
        if INPUT not in batch or LABELS not in batch:
            raise ConfigError(
                f"model._target_: the batch has {', '.join(batch)}; forward(input_ids) needs "
                "input_ids and labels: give the model a method losses(batch)"
            )
        more = {n: t for n, t in batch.items() if n in self._more and n not in (INPUT, LABELS)}
        output = self.network(batch[INPUT], **more)
        logits = logits_of(output)
        labels = batch[LABELS]
        counts = (labels != NOT_COUNTED).sum(dim=1)
        if isinstance(logits, DeferredLogits):
            parts = logits.parts() if logits.shape[:-1] == labels.shape else None
            if parts is not None:
                hidden, weight, bias = parts
                losses = self._head_losses(hidden, weight, labels, self._tap, bias=bias)
                # No views leave a sharded module.
                return losses[1].clone(), counts, _accuracy(losses, labels, counts)
            logits = logits.whole()
        if not isinstance(logits, Tensor) or logits.shape[:-1] != labels.shape:
            raise ConfigError(
                f"model._target_: forward gives {_shape(logits)}; it must give logits [B, T, V], "
                f"and labels are {list(labels.shape)}; or give the model a method losses(batch)"
            )
        if not self._is_deferred:
            self.logits_bytes = max(self.logits_bytes, 4 * logits[0].numel())
        fp32 = self._head_losses.fp32
        losses, _ = sequence_losses(logits, labels, fp32=fp32, z_loss=0.0, tap=self._tap)
        return losses, counts, _accuracy(logits, labels, counts)

    def _cast(self, tensor: Tensor) -> Tensor:
        is_cast = self._dtype is not None and tensor.is_floating_point()
        return tensor.to(self._dtype) if is_cast else tensor


def _accuracy(logits: Tensor, labels: Tensor, counts: Tensor) -> Metrics:
    """In evaluations: how often the next token is the likeliest one."""
    if torch.is_grad_enabled():
        return {}
    return {"accuracy": (right_tokens(logits, labels).clone(), counts)}


def _own_losses(
    network: nn.Module, batch: dict[str, Tensor], rows: int
) -> tuple[Tensor, Tensor, Metrics]:
    output: Any = network.losses(batch)  # type: ignore[operator]
    pair = tuple(output) if isinstance(output, tuple | list) else (output,)
    given: Any = {}
    if len(pair) == 3 and isinstance(pair[2], Mapping):
        *pair, given = pair  # type: ignore[assignment]
    if len(pair) == 2 and all(_is_by_sample(t, rows) for t in pair):
        return pair[0].float(), pair[1].detach(), _own_metrics(given, rows)
    raise ConfigError(
        "model._target_: losses(batch) must give two tensors, the loss and the count of each "
        f"sample, [{rows}] both (reduction='none', and what each is a sum of), and may give "
        "metrics by name (name: (sum, count)) with them; it gives "
        f"{', '.join(map(_shape, pair))}"
    )


def _own_metrics(given: Mapping[Any, Any], rows: int) -> Metrics:
    """What a network's ``losses`` gives besides, without gradients."""
    metrics: Metrics = {}
    for name, pair in given.items():
        numbers = tuple(pair) if isinstance(pair, tuple | list) else (pair,)
        if len(numbers) != 2 or not all(_is_by_sample(t, rows) for t in numbers):
            raise ConfigError(
                f"model._target_: losses(batch) gives the metric {name!r} as "
                f"{', '.join(map(_shape, numbers))}; give (sum, count), two tensors with a number "
                f"for each sample, [{rows}] both; the metric is sum by count over all samples"
            )
        metrics[name] = numbers[0].detach(), numbers[1].detach()
    return metrics


def _is_by_sample(value: Any, rows: int) -> bool:
    return isinstance(value, Tensor) and value.shape == (rows,) and not value.is_complex()


def has_own_losses(network: nn.Module) -> bool:
    """Whether the network computes its loss itself."""
    return callable(getattr(network, "losses", None))


def accepted_by(function: Callable[..., Any]) -> frozenset[str]:
    """The names of a function's parameters."""
    return frozenset(inspect.signature(function).parameters)


def logits_of(output: Any) -> Any:
    """What forward gives, its ``.logits``, its ``["logits"]``, or the first of several."""
    if isinstance(output, DeferredLogits):
        return output
    if isinstance(output, Mapping) and LOGITS in output:
        return output[LOGITS]
    if hasattr(output, LOGITS):
        return getattr(output, LOGITS)
    return output[0] if isinstance(output, tuple | list) and output else output


def _shape(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return str(list(value.shape)) if value.dim() else "one number"


# ---- one type for an operation under autocast


_KEY: Final = "AutocastCPU"
_OPERATIONS: Final = (
    *("layer_norm", "group_norm", "batch_norm", "instance_norm", "rms_norm"),
    *("addcdiv", "addcmul", "bilinear", "cross", "dot", "scatter_add", "index_add"),
)


@cache
def mix_types() -> Library:
    """Have these operations compute in the widest type of their arguments, under CPU autocast.

    Where all have one type nothing changes. Once for each process; the library must be kept.
    """
    library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in _OPERATIONS:
        packet = getattr(torch.ops.aten, name)
        call = partial(_in_one_type, packet)
        library.impl(name, call, _KEY)  # type: ignore[no-untyped-call]
    return library


def _in_one_type(operation: Callable[..., Any], *args: Any, **more: Any) -> Any:
    types = {leaf.dtype for leaf in pytree.tree_leaves((args, more)) if _is_float(leaf)}
    if len(types) > 1:
        widest = torch.float64 if torch.float64 in types else torch.float32
        args, more = pytree.tree_map(
            lambda leaf: leaf.to(widest) if _is_float(leaf) else leaf, (args, more)
        )
    with torch.autocast("cpu", enabled=False):
        return operation(*args, **more)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


# ---- logits of a network from elsewhere that need not be held whole


class DeferredLogits:
    """Stands for the output of an ``nn.Linear``, which is computed at the first other use.

    Args:
        hidden: the layer's input, ``[B, T, dim]``.
    """

    def __init__(self, hidden: Tensor, head: nn.Linear) -> None:
        self._hidden = hidden
        self._head = head
        self._whole: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return torch.Size([*self._hidden.shape[:-1], self._head.out_features])

    def parts(self) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Input, weight and bias of the layer, of one dtype; None if the tensor exists already."""
        weight, bias = self._head.weight, self._head.bias
        # As autocast does with the layer.
        return None if self._whole is not None else (self._hidden.to(weight.dtype), weight, bias)

    def whole(self) -> Tensor:
        """The logits ``[B, T, V]``."""
        if self._whole is None:
            self._whole = F.linear(self._hidden, self._head.weight, self._head.bias)
        return self._whole

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = torch.utils._pytree.tree_map(_real, (args, dict(kwargs or {})))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole(), name)


def _real(value: Any) -> Any:
    return value.whole() if isinstance(value, DeferredLogits) else value


def _through(name: str) -> Callable[..., Any]:
    def call(self: DeferredLogits, *args: Any) -> Any:
        return getattr(self.whole(), name)(*map(_real, args))

    return call


for _name in (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "matmul"),
    *("rmatmul", "neg", "getitem", "setitem", "len", "iter", "bool", "eq", "ne", "lt", "le", "gt"),
    *("ge", "iadd", "isub", "imul", "itruediv", "abs", "float", "array"),
):
    setattr(DeferredLogits, f"__{_name}__", _through(f"__{_name}__"))


def _forward(head: nn.Linear, is_wanted: Callable[[Tensor, Tensor], bool], hidden: Tensor) -> Any:
    """A head's: :class:`DeferredLogits` where ``is_wanted(hidden, weight)``."""
    if hidden.dim() == 3 and is_wanted(hidden, head.weight):
        return DeferredLogits(hidden, head)
    return F.linear(hidden, head.weight, head.bias)


def embeddings_of(network: nn.Module, side: str) -> nn.Module | None:
    """What transformers' ``get_input_embeddings()`` or ``get_output_embeddings()`` gives."""
    method = getattr(network, f"get_{side}_embeddings", None)
    try:
        module = method() if callable(method) else None
    except (NotImplementedError, AttributeError):  # transformers: a model without any
        return None
    return module if isinstance(module, nn.Module) else None


def head_of(
    network: nn.Module, vocab_size: int, units: Sequence[nn.Module] = ()
) -> nn.Linear | None:
    """The layer that makes logits, if it is known and is a plain ``nn.Linear``.

    What ``get_output_embeddings()`` gives, or else the only layer with ``vocab_size`` outputs. Not
    one inside of a unit that is gathered by itself, whose weights are gone when it has returned.
    """
    module = embeddings_of(network, "output")
    if module is None:
        linear = [m for m in network.modules() if isinstance(m, nn.Linear)]
        heads = [layer for layer in linear if layer.out_features == vocab_size]
        module = heads[0] if len(heads) == 1 else None
    is_inside = any(module is inner for unit in units for inner in unit.modules())
    if type(module) is not nn.Linear or "forward" in vars(module) or is_inside:
        return None
    # DeepSpeed's stage 3 frees the weight when the layer has returned.
    is_freed = any(hasattr(parameter, "ds_id") for parameter in module.parameters())
    return None if is_freed else module
