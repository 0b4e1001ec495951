"""Weights that a library has quantised: found, taken apart, and held by a digest.

They are bitsandbytes' 4-bit and 8-bit weights, and tensors that are made of others (torchao).
No step changes them, so no checkpoint holds them. Imports neither library.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from runner.system.error import ConfigError

NO_BASE: Final = "none"  # the digest of no quantised weight
_BITSANDBYTES: Final = ("Params4bit", "Int8Params")


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """One weight as the module holds it: another object, or another version, is a change."""

    module: nn.Module
    key: str
    tensor: Tensor
    version: int

    @property
    def is_unchanged(self) -> bool:
        """Whether it is the same tensor, and nothing wrote into it."""
        return self.module._parameters[self.key] is self.tensor and (
            self.tensor._version == self.version
        )

    def digest(self, name: str) -> str:
        """XXH3-128 over all that decides its values. Waits for the device."""
        return digest_tensors(_parts(self.module, self.key, name))


def quantised_weights(
    modules: Iterable[tuple[str, nn.Module]],
) -> dict[str, QuantisedWeight]:
    """The quantised weights by name; one that several modules share has its first name.

    Args:
        modules: by name.

    Raises:
        ConfigError: one is to be trained, is cut into shards, or was not quantised yet.
    """
    found: dict[str, QuantisedWeight] = {}
    seen: set[int] = set()
    for prefix, module in modules:
        for key, tensor in module._parameters.items():
            if tensor is None or id(tensor) in seen or not _is_quantised(module, tensor):
                continue
            seen.add(id(tensor))
            name = f"{prefix}.{key}" if prefix else key
            _check(name, tensor)
            found[name] = QuantisedWeight(module, key, tensor, tensor._version)
    return found


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


def inexact(weights: Mapping[str, QuantisedWeight]) -> list[str]:
    """What of these weights cannot be computed exactly, a sentence each."""
    mixed = [
        name
        for name, weight in weights.items()
        if getattr(getattr(weight.module, "state", None), "threshold", 0.0) > 0.0
        and weight.tensor.device.type != "cpu"
    ]
    if not mixed:
        return []
    return [
        f"{len(mixed)} weights ({mixed[0]}, ...) are 8-bit with llm_int8_threshold > 0: which "
        "columns are computed in FP16 depends on all samples of a micro-batch, so on another "
        "number of ranks, or with another micro-batch size, a step is not the same but for "
        "rounding; on the same ranks a resume is exact. llm_int8_threshold=0.0 avoids it"
    ]


def _is_quantised(module: nn.Module, tensor: Tensor) -> bool:
    if type(tensor).__name__ in _BITSANDBYTES:
        return not getattr(tensor, "has_fp16_weights", False)
    inner = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if hasattr(inner, "__tensor_flatten__"):
        return True
    is_of_library = type(module).__module__.startswith("bitsandbytes.")
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
    tensor: Any = module._parameters[key]
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
