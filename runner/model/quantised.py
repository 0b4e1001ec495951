"""Weights that a library has quantised: found, taken apart, and held by a digest.

They are bitsandbytes' 4-bit and 8-bit weights, tensors that are made of others (torchao), and the
integers that layers of GPTQ and AWQ keep in buffers. No step changes them, so no checkpoint holds
them. Imports no such library.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from runner.system.error import ConfigError, imported
from runner.system.units import counted

NO_BASE: Final = "none"  # the digest of no quantised weight
_BITSANDBYTES: Final = ("Params4bit", "Int8Params")
_PACKED: Final = "qweight"  # of GPTQ and AWQ


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """One weight as the module holds it: another object, or another version, is a change.

    Of buffers another object alone: DDP writes them anew on each rank.
    """

    module: nn.Module
    key: str
    tensor: Tensor
    version: int

    @property
    def is_unchanged(self) -> bool:
        """Whether it is the same tensor, and nothing wrote into it."""
        if self.key in self.module._buffers:
            return self.module._buffers[self.key] is self.tensor
        return self.module._parameters[self.key] is self.tensor and (
            self.tensor._version == self.version
        )

    def digest(self, name: str) -> str:
        """XXH3-128 over all that decides its values. Waits for the device."""
        return digest_tensors(_parts(self.module, self.key, name))


def quantised_weights(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, QuantisedWeight]:
    """The quantised weights by name; one that several modules share has its first name.

    Args:
        modules: by name.

    Raises:
        ConfigError: one is to be trained, is cut into shards, or was not quantised yet.
    """
    found: dict[str, QuantisedWeight] = {}
    seen: set[int] = set()
    for prefix, module in modules:
        packed = {_PACKED: module._buffers[_PACKED]} if is_packed(module) else {}
        for key, tensor in {**module._parameters, **packed}.items():
            if tensor is None or id(tensor) in seen or not _is_quantised(module, tensor):
                continue
            seen.add(id(tensor))
            name = f"{prefix}.{key}" if prefix else key
            _check(name, tensor)
            found[name] = QuantisedWeight(module, key, tensor, tensor._version)
    return found


def is_packed(module: nn.Module) -> bool:
    """Whether a layer has its quantised weight in buffers, with scales and zeros beside it."""
    packed = module._buffers.get(_PACKED)
    return packed is not None and not packed.is_floating_point()


def digest_tensors(parts: Iterable[tuple[str, Tensor]]) -> str:
    """XXH3-128 over the tensors' names, types, shapes and bytes. Waits for the device."""
    hashed = xxhash.xxh3_128()
    for name, value in parts:
        flat = value.detach().cpu().contiguous()
        hashed.update(f"{name} {flat.dtype} {list(flat.shape)}\n".encode())
        hashed.update(flat.reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()


def digest_of(digests: Mapping[str, str]) -> str:
    """One digest of the weights' digests by name."""
    lines = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return xxhash.xxh3_128_hexdigest(lines.encode())


def require_same_base(there: str, here: str) -> None:
    """
    Raises:
        ConfigError: the digests of a checkpoint's quantised weights and of the present ones differ.
    """
    if there != here:
        raise ConfigError(
            f"the run in out was trained on another base: its quantised weights have digest "
            f"{there}, those of this model {here}. Load the model that the run began with, "
            "quantised with the same settings and the same version of the library, or choose "
            "another out"
        )


def require_one_base(by_rank: Sequence[str], ranks: Sequence[int]) -> None:
    """
    Raises:
        ConfigError: these ranks have quantised weights of different digests.
    """
    first = ranks[0]
    for rank in ranks:
        if by_rank[rank] != by_rank[first]:
            raise ConfigError(
                f"the quantised weights have digest {by_rank[first]} on rank {first}, "
                f"{by_rank[rank]} on rank {rank}; load the same files on all ranks, quantised "
                "with the same settings and library"
            )


def keep_layout(weights: Iterable[QuantisedWeight]) -> None:
    """Keep bitsandbytes from packing 4-bit weights anew on CPUs with AVX512-BF16.

    It does so in the first evaluation, for good; training computes otherwise from then on, and no
    gradient passes.
    """
    for weight in weights:
        module: Any = weight.module
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def said_of(number: int) -> str:
    """What a start says of its quantised weights."""
    return (
        f"the base has {counted(number, 'quantised weight')}: a step is the same bit for bit on "
        "the same kind of device with the same version of their library alone, elsewhere but for "
        "rounding"
    )


def inexact(weights: Mapping[str, QuantisedWeight]) -> list[str]:
    """What of these weights cannot be computed exactly, a sentence each."""
    if not weights:
        return []
    mixed = [
        name
        for name, weight in weights.items()
        if getattr(getattr(weight.module, "state", None), "threshold", 0.0) > 0.0
        and weight.tensor.device.type != "cpu"
    ]
    if not mixed:
        return [said_of(len(weights))]
    return [
        said_of(len(weights)),
        f"{len(mixed)} weights ({mixed[0]}, ...) are 8-bit with llm_int8_threshold > 0: which "
        "columns are computed in FP16 depends on all samples of a micro-batch, so on another "
        "number of ranks, or with another micro-batch size, a step is not the same but for "
        "rounding; on the same ranks a resume is exact. llm_int8_threshold=0.0 avoids it",
    ]


def _is_quantised(module: nn.Module, tensor: Tensor) -> bool:
    if type(tensor).__name__ in _BITSANDBYTES:
        return not getattr(tensor, "has_fp16_weights", False)
    inner = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if hasattr(inner, "__tensor_flatten__"):
        return True
    is_of_library = type(module).__module__.startswith("bitsandbytes.") or is_packed(module)
    return is_of_library and not inner.is_floating_point()


def _check(name: str, tensor: Tensor) -> None:
    if isinstance(tensor, DTensor):
        raise ConfigError(
            f"{name!r} is a quantised weight that is cut into shards, whose blocks and scales do "
            "not end where the shards do: hold the quantised base whole on every rank "
            "(DistributedDataParallel, or fully_shard(..., ignored_params=its weights))"
        )
    if tensor.requires_grad:
        raise ConfigError(
            f"{name!r} is a quantised weight with requires_grad=True, and a checkpoint cannot hold "
            "its updates: freeze it (requires_grad_(False)) and train adapters (peft's LoRA), or "
            "train the model that it was made from"
        )
    made = tensor if type(tensor).__name__ in _BITSANDBYTES else None
    if made is not None and made.is_floating_point() and not _is_made(made):
        raise ConfigError(
            f"{name!r} is not quantised yet; bitsandbytes does that when the model is moved to its "
            'device: model.to("cpu") or model.to("cuda"), before the guard is made'
        )


def _is_made(tensor: Any) -> bool:
    """``quant_storage`` of 4-bit weights may be a floating type."""
    return bool(getattr(tensor, "bnb_quantized", False))


def _parts(module: nn.Module, key: str, name: str) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors of a weight, in a fixed order."""
    tensor: Any = module._parameters.get(key)
    if hasattr(tensor, "__tensor_flatten__"):
        yield from _flattened(key, tensor)
        return
    try:
        # As the library stores them: the weight, and its scales beside it.
        stored = module.state_dict()
    except NotImplementedError:
        raise ConfigError(
            f"{name!r} is of a {type(module).__name__}, whose library cannot store it; keep this "
            "layer as it was before it was quantised (llm_int8_skip_modules)"
        ) from None
    trained = set(module._parameters) - {key}
    yield from ((part, stored[part]) for part in sorted(stored) if part not in trained)


def _flattened(name: str, tensor: Any) -> Iterator[tuple[str, Tensor]]:
    if not hasattr(tensor, "__tensor_flatten__"):
        yield name, tensor
        return
    attributes, context = tensor.__tensor_flatten__()
    yield f"{name} {type(tensor).__name__} {_plain(context)}", torch.empty(0)
    for attribute in attributes:
        yield from _flattened(f"{name}.{attribute}", getattr(tensor, attribute))


def _plain(context: Any) -> str:
    """A context as text, without what differs between processes."""
    if isinstance(context, Mapping):
        return str({key: _plain(context[key]) for key in sorted(context, key=str)})
    if isinstance(context, Sequence) and not isinstance(context, str):
        return str([_plain(one) for one in context])
    text = repr(context)
    return type(context).__name__ if " at 0x" in text else text


# The frozen linear layers of a model, held in 4 or 8 bits by bitsandbytes (``model.quantize``).
#
# The weights are no parameters: engines neither shard, save nor reduce them. Every rank holds them
# whole, and makes each one wide while it is used.

INT8: Final = "int8"
_BLOCK: Final = 64  # elements of one scale, QLoRA's
_BLOCKS_OF_A_SCALE: Final = 256  # whose scales are of 8 bits, and have one of 32 together


@dataclass(frozen=True, slots=True)
class Held:
    """One weight; ``state``: scales of its rows (INT8), or bitsandbytes' state of its blocks."""

    data: Tensor
    state: Any

    @classmethod
    def of(cls, weight: Tensor, kind: str) -> Held:
        """Of a weight [out, in] FP32, on the device where it lies."""
        functional = _functional(kind)
        if kind == INT8:
            data, scales, _ = functional.int8_vectorwise_quant(weight.half())
            return cls(data, scales)
        made = functional.quantize_4bit(
            weight, blocksize=_BLOCK, compress_statistics=True, quant_type=kind
        )
        return cls(*made)

    def wide(self, dtype: torch.dtype) -> Tensor:
        """The weight [out, in]."""
        functional = _functional(INT8)
        if isinstance(self.state, Tensor):
            made: Tensor = functional.int8_vectorwise_dequant(self.data, self.state)
        else:
            made = functional.dequantize_4bit(self.data, self.state)
        return made.to(dtype)

    def digest(self) -> str:
        """XXH3-128 of what decides the weight. Waits for the device."""
        is_rows = isinstance(self.state, Tensor)
        parts = {"scales": self.state} if is_rows else self.state.as_dict(packed=True)
        return digest_tensors([("data", self.data), *sorted(parts.items())])


def _functional(kind: str) -> Any:
    return imported("bitsandbytes.functional", f"model.quantize={kind}", "quantised")


class QuantisedLinear(nn.Module):
    """In place of a frozen ``nn.Linear``, whose bias it keeps.

    Attributes:
        kind: of its bits, as ``model.quantize`` names it.
        held: its weight; None: nothing yet, on the meta device.
    """

    def __init__(self, linear: nn.Linear, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.held: Held | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight."""
        return self.out_features, self.in_features

    @property
    def num_bytes(self) -> int:
        """Of its weight as it is held, but for tables of codes (below 2 KiB)."""
        rows, size = self.out_features, self.out_features * self.in_features
        if self.kind == INT8:
            return size + 4 * rows
        blocks = -(-size // _BLOCK)
        return -(-size // 2) + blocks + 4 * -(-blocks // _BLOCKS_OF_A_SCALE)

    def wide(self, like: Tensor) -> Tensor:
        """The weight in the type of ``like``."""
        if self.held is None:
            assert like.is_meta, "the weight was not given"
            return like.new_empty(self.shape)
        return self.held.wide(like.dtype)

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias


class _Product(torch.autograd.Function):
    """``x @ weight.T``; the wide weight is made again in backward, not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantisedLinear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.wide(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.layer.wide(grad), None


def quantise(network: nn.Module, kind: str, *, skip: tuple[nn.Module | None, ...]) -> None:
    """Replace the frozen linear layers.

    Args:
        kind: as ``model.quantize`` names it.
        skip: layers to leave, such as the output head.

    Raises:
        ConfigError: there is none.
    """
    found = [
        (name, module)
        for name, module in network.named_modules()
        if type(module) is nn.Linear and not module.weight.requires_grad and module not in skip
    ]
    for name, module in found:
        owner, _, own = name.rpartition(".")
        setattr(network.get_submodule(owner), own, QuantisedLinear(module, kind))
    if not found:
        raise ConfigError(
            f"model.quantize={kind}: the model has no frozen nn.Linear to quantise; leave the "
            "setting out"
        )


def quantised_layers(network: nn.Module) -> Iterator[tuple[str, QuantisedLinear]]:
    """The layers by name."""
    for name, module in network.named_modules():
        if isinstance(module, QuantisedLinear):
            yield name, module
