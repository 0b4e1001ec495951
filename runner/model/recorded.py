"""Builds a network on the meta device, and makes each of its tensors later, one at a time.

Owns the record of what a constructor did to each tensor, and its replay on the CPU under a
seed of the tensor's own. So initial weights are the constructor's, need the
memory of one tensor, and do not depend on ranks, sharding or other tensors. Must not know
what the network is for.

``reset_parameters`` does not replace it: of 128 tensors of eight models in ``tests/guests.py`` 84
would begin with other values, and 19 of their modules (Llama's, GPT-2's) have no such method.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from runner.system.generators import kept_generators

_CPU = torch.device("cpu")
_META = torch.device("meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """Refers to a meta tensor, without holding it: ``nn.Module.to`` forbids other users."""

    storage: torch.UntypedStorage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _Window:
        return cls(
            storage=tensor.untyped_storage(),
            offset=int(tensor.storage_offset()),
            size=tuple(tensor.size()),
            stride=tuple(tensor.stride()),
            dtype=tensor.dtype,
        )

    @property
    def owner(self) -> int:
        """The id of the memory."""
        return int(self.storage._cdata)

    def is_whole(self) -> bool:
        """Whether it covers its whole memory."""
        return math.prod(self.size) * self.dtype.itemsize == self.storage.nbytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operation:
    """One call that made or changed meta tensors."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[_Window, ...]
    written: tuple[_Window, ...]

    def touched(self) -> set[int]:
        """Memory that it makes, views or writes."""
        return {window.owner for window in (*self.outputs, *self.written)}

    def taken(self) -> set[int]:
        """Memory that it takes as input."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return {leaf.owner for leaf in leaves if isinstance(leaf, _Window)}


@dataclass(slots=True)
class Recording:
    """What the constructor of ``network`` did; its tensors are on the meta device.

    Values from elsewhere (numpy, a file) are stored as they were. ``why``: why it had to be made
    whole in memory, if so.
    """

    network: nn.Module
    _operations: list[_Operation] = field(default_factory=list)
    _origins: dict[int, Tensor] = field(default_factory=dict)
    why: str = ""

    def made(self, tensor: Tensor, seed: str) -> Tensor:
        """Make a tensor of the network as its constructor would have, on the CPU.

        Args:
            tensor: a parameter, a buffer or any other tensor that the constructor made.
            seed: of random numbers, for this tensor alone.
        """
        origin = self._origins[id(tensor)]
        if not _is_fake(origin):
            return origin
        storages: dict[int, torch.UntypedStorage] = {}
        window = _Window.of(origin)
        with fixed_seeds(seed), torch.no_grad():
            for operation in _without_dead(self._behind({window.owner}), window):
                _repeat(operation, storages)
            return _real(window, storages)

    def signature(self) -> str:
        """A digest of all that decides the weights; equal for two builds of one network."""
        digest = hashlib.sha256()
        origins = [origin for origin in self._origins.values() if _is_fake(origin)]
        # Without what a library does only at its first call, unrelated to the network.
        for operation in self._behind({_Window.of(origin).owner for origin in origins}):
            arguments = pytree.tree_map(_outline, (operation.args, operation.kwargs))
            # Not the repr of a Python function: its address differs in each process.
            name = getattr(operation.function, "__qualname__", str(operation.function))
            digest.update(f"{name} {arguments}\n".encode())
        for name, tensor in named_tensors(self.network):
            digest.update(f"{name} {_outline(self._origins[id(tensor)])}\n".encode())
        return digest.hexdigest()

    def _behind(self, owners: set[int]) -> list[_Operation]:
        """The operations that made or wrote these memories, in order, and their inputs'."""
        needed = []
        for operation in reversed(self._operations):
            if not owners.isdisjoint(operation.touched()):
                needed.append(operation)
                owners |= operation.taken()
        return needed[::-1]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what happens to meta tensors."""

    def __init__(self, operations: list[_Operation]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations = operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if isinstance((kwargs or {}).get("generator"), torch.Generator):
            # Meta tensors draw nothing, so what the next one gets from it is not known.
            raise NotImplementedError("it draws from a generator of its own")
        noted = pytree.tree_map(_kept, (args, dict(kwargs or {})))
        result = func(*args, **(kwargs or {}))
        outputs = _windows(result)
        written = _windows(_written(func, args, kwargs or {}))
        if outputs or written:
            operation = _Operation(
                function=func, args=noted[0], kwargs=noted[1], outputs=outputs, written=written
            )
            self._operations.append(operation)
        return result


def record(make: Callable[[], nn.Module]) -> Recording:
    """Call a constructor with meta tensors, and record what it does.

    The tensors pretend to be on the CPU: torch and transformers skip the initial values of
    tensors that are known to be on the meta device.

    Raises:
        Exception: any error of the constructor; some need the values of their tensors.
    """
    operations: list[_Operation] = []
    modes = FakeTensorMode(allow_non_fake_inputs=True), _Recorder(operations)
    with fixed_seeds("record"), _quiet(), _without_values(operations), modes[0], modes[1]:
        network = make()
    return Recording(network, operations, _to_meta(network))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's trace of each operation that needs values: the caller handles the error."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


@contextlib.contextmanager
def _without_values(operations: list[_Operation]) -> Iterator[None]:
    """Patch two functions of torch that would read values or change the identity of tensors."""

    def draw(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # It draws until values fit, so it is recorded as a whole.
        if not _is_fake(tensor):
            return drawn(tensor, *args, **kwargs)  # type: ignore[no-any-return]
        window = _Window.of(tensor)
        operations.append(
            _Operation(
                function=drawn, args=(window, *args), kwargs=kwargs, outputs=(), written=(window,)
            )
        )
        return tensor

    def swap(left: Tensor, right: Tensor) -> None:
        # ``nn.Module.to`` does so with meta tensors even where nothing changes (PEFT calls it).
        if not _is_fake(left):
            swapped(left, right)  # type: ignore[no-untyped-call]
        elif _Window.of(left) != _Window.of(right):  # a parameter of another dtype
            left.data = right.data

    name = "_no_grad_trunc_normal_"
    drawn, swapped = getattr(nn.init, name), torch.utils.swap_tensors
    setattr(nn.init, name, draw)
    torch.utils.swap_tensors = swap
    try:
        yield
    finally:
        setattr(nn.init, name, drawn)
        torch.utils.swap_tensors = swapped


def record_in_memory(make: Callable[[], nn.Module], seed: str) -> Recording:
    """Record a constructor that needs values: makes the whole network on the CPU."""
    with fixed_seeds(seed):
        network = make()
    return Recording(network, [], _to_meta(network))


def _to_meta(network: nn.Module) -> dict[int, Tensor]:
    """Replace the network's tensors by meta tensors; returns the originals by new id.

    What is tied stays tied.
    """
    metas: dict[int, Tensor] = {}
    origins: dict[int, Tensor] = {}
    for module in network.modules():
        for name, tensor in own_tensors(module):
            if id(tensor) not in metas:
                meta = _meta(tensor)
                metas[id(tensor)], origins[id(meta)] = meta, tensor
            put_tensor(module, name, metas[id(tensor)])
    return origins


def own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters, buffers and plain attributes of one module, without its children's."""
    places = (module._parameters, module._buffers, vars(module))
    return [(n, t) for place in places for n, t in place.items() if isinstance(t, Tensor)]


def put_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Set a tensor that :func:`own_tensors` lists under this name."""
    if name in module._parameters and type(module).__setattr__ is not nn.Module.__setattr__:
        setattr(module, name, tensor)  # nn.GRU also keeps a list of them
        return
    places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
    next(place for place in places if name in place)[name] = tensor


def _meta(tensor: Tensor) -> Tensor:
    meta = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_META)
    return nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta


@contextlib.contextmanager
def fixed_seeds(seed: str) -> Iterator[None]:
    """Seed all common generators inside, and restore them afterwards."""
    with kept_generators():
        torch.manual_seed(_number(seed))
        np.random.seed(_number(seed) % 2**32)
        random.seed(_number(seed))
        yield


def named_tensors(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a network with plain attributes of its modules, in a fixed order."""
    for prefix, module in network.named_modules():
        for name, tensor in own_tensors(module):
            yield f"{prefix}.{name}" if prefix else name, tensor


def _number(seed: str) -> int:
    # HAZARD: torch's CPU generator keeps the low 32 bits of its seed.
    return int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "little")


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _is_fake(value: Any) -> bool:
    return isinstance(value, FakeTensor)


def _windows(tree: Any) -> tuple[_Window, ...]:
    return tuple(_Window.of(tensor) for tensor in _tensors(tree) if _is_fake(tensor))


def _kept(value: Any) -> Any:
    """An argument for the record: real tensors are copied, since they may change later."""
    if not isinstance(value, Tensor):
        return value
    if _is_fake(value):
        return _Window.of(value)
    # With the modes on, a clone would be a meta tensor too.
    with torch.utils._python_dispatch._disable_current_modes():
        return value.detach().clone()


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    """The arguments that the operation changes, by its schema."""
    tensors: list[Tensor] = []
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            tensors += _tensors(value)
    return tuple(tensors)


_DRAWS = ("normal_", "uniform_", "zero_", "fill_")


def _without_dead(operations: list[_Operation], window: _Window) -> list[_Operation]:
    """Drop writes that are overwritten unread: ``nn.Linear`` draws, then its owner again."""
    if any(operation.taken() - {window.owner} for operation in operations):
        return operations
    draws = [at for at, operation in enumerate(operations) if _overwrites(operation, window)]
    last = draws[-1] if draws else 0
    making = [operation for operation in operations[:last] if not operation.taken()]
    return [*making, *operations[last:]]


def _overwrites(operation: _Operation, window: _Window) -> bool:
    schema = getattr(operation.function, "_schema", None)
    name = schema.name if schema else ""
    if name.removeprefix("aten::") not in _DRAWS or not operation.written:
        return False
    return operation.written[0].owner == window.owner and operation.written[0].is_whole()


def _repeat(operation: _Operation, storages: dict[int, torch.UntypedStorage]) -> None:
    def real(value: Any) -> Any:
        if isinstance(value, _Window):
            return _real(value, storages)
        return value.clone() if isinstance(value, Tensor) else value

    args, kwargs = pytree.tree_map(real, (operation.args, operation.kwargs))
    result = operation.function(*args, **kwargs)
    for window, tensor in zip(operation.outputs, _tensors(result), strict=False):
        storages.setdefault(window.owner, tensor.untyped_storage())


def _real(window: _Window, storages: dict[int, torch.UntypedStorage]) -> Tensor:
    """The same view of the real memory."""
    empty = torch.empty(0, dtype=window.dtype, device=_CPU)
    return empty.set_(storages[window.owner], window.offset, window.size, window.stride)


def _outline(value: Any) -> Any:
    if isinstance(value, _Window):
        return f"{value.size} {value.dtype}"
    if not isinstance(value, Tensor):
        return value
    outline = f"{tuple(value.shape)} {value.dtype}"
    if _is_fake(value):
        return outline
    data = value.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{outline} {hashlib.sha256(data).hexdigest()}"
