"""What a run must know of its network before it exists, and how to build it.

Two kinds: the decoder of this package, and a user's network that the settings name. Owns
what is the same on every engine; must not know how parameters are sharded.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from runner.model.decoder import Decoder, DecoderShape, flops_per_token
from runner.model.loss import HeadLosses
from runner.model.objective import (
    INPUT,
    LABELS,
    DecoderObjective,
    GuestObjective,
    accepted_by,
    embeddings_of,
    has_own_losses,
)
from runner.model.recompute import NONE, SELECTIVE, recompute_units
from runner.model.recorded import Recording, named_tensors, put_tensor, record, record_in_memory
from runner.system.error import ConfigError

# Initial weights are the same bytes on any world size, engine and device. They come from torch's
# CPU generator, whose normals are equal on AVX2 and AVX-512 but may differ in the last bit on
# other CPUs (ARM) or in other torch releases.
BLOCK_ELEMENTS = 2**18

_RESIDUAL_OUTPUTS = ("attention.output.weight", "ffn.down.weight")
_NORMS = ("norm", "attention_norm", "ffn_norm", "query_norm", "key_norm")
_MATRICES = ("embedding", "head", "query", "key", "value", "gate", "up")


def initial_std(name: str, shape: DecoderShape) -> float | None:
    """The deviation of the :class:`Decoder` parameter ``name``, whose mean is 0; None: all ones.

    What writes into the residual stream has ``init_std / sqrt(2 * layers)``, so the stream's
    variance does not grow with depth (Radford et al. 2019, GPT-2, section 2.3). Raises ValueError
    for a name that the decoder does not have.
    """
    if name.endswith(_RESIDUAL_OUTPUTS):
        return shape.init_std / math.sqrt(2 * shape.layers)
    owner, _, kind = name.rpartition(".")
    part = owner.rpartition(".")[2]
    if kind != "weight" or part not in (*_NORMS, *_MATRICES):
        raise ValueError(f"no initial weights are defined for a parameter called {name!r}")
    return None if part in _NORMS else shape.init_std


def initial_range(
    name: str, shape: Sequence[int], std: float | None, *, seed: int, start: int, count: int
) -> Tensor:
    """Elements ``[start, start + count)`` of the flattened parameter: FP32 ``[count]`` on the CPU.

    ``shape`` is the whole parameter's, ``std`` from :func:`initial_std`. Any partition of the flat
    range gives the same bytes; only the blocks touched are generated. Raises ValueError when the
    range leaves the parameter.
    """
    stop = start + count
    if start < 0 or count < 0 or stop > math.prod(shape):
        raise ValueError(f"[{start}, {stop}) leaves {name}, which has {math.prod(shape)} elements")
    if std is None:
        return torch.ones(count, dtype=torch.float32, device="cpu")
    values = torch.empty(count, dtype=torch.float32, device="cpu")
    first_seed = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4], "little")
    for block in range(start // BLOCK_ELEMENTS, -(-stop // BLOCK_ELEMENTS)):
        origin = block * BLOCK_ELEMENTS
        low, high = max(start, origin), min(stop, origin + BLOCK_ELEMENTS)
        normal = _normal_block(first_seed + block)
        values[low - start : high - start] = normal[low - origin : high - origin]
    return values.mul_(std)


def _normal_block(seed: int) -> Tensor:
    # HAZARD: torch's CPU generator keeps the low 32 bits of its seed. A digest per block would
    # make two of the 30,000 blocks of an 8 B model equal in one run of ten; consecutive seeds
    # within a parameter cannot meet there, and hardly ever across parameters.
    # Always the whole block: the values depend on how many are asked for.
    generator = torch.Generator(device="cpu").manual_seed(seed % 2**32)
    return torch.empty(BLOCK_ELEMENTS, dtype=torch.float32, device="cpu").normal_(
        generator=generator
    )


class _Twinned:
    """What both kinds share."""

    @property
    def twin_network(self) -> nn.Module:
        """A copy on the meta device that is never trained."""
        raise NotImplementedError

    def parameters(self) -> dict[str, nn.Parameter]:
        """The twin's parameters by name; a tied one once."""
        return dict(self.twin_network.named_parameters())

    def num_parameters(self) -> int:
        """Learned elements."""
        return sum(parameter.numel() for parameter in self.twin_network.parameters())


@dataclass(frozen=True, kw_only=True)
class DecoderBlueprint(_Twinned):
    """The decoder of this package.

    Args:
        frozen: regular expressions of parameters not to train.
    """

    shape: DecoderShape
    head_losses: HeadLosses
    frozen: Sequence[str]

    @property
    def untrained_loss(self) -> float:
        """The loss of a uniform guess, in nats; 0 if that has no meaning."""
        return math.log(self.shape.vocab_size)

    @cached_property
    def twin_network(self) -> Decoder:
        return self.on_meta()

    def on_meta(self) -> Decoder:
        """The network on the meta device."""
        with torch.device("meta"):
            return self.made()

    def made(self) -> Decoder:
        """The network on torch's default device, with frozen parameters set."""
        network = Decoder(self.shape, self.head_losses)
        freeze(network, self.frozen)
        return network

    def finish(self, network: Any, device: torch.device) -> None:
        """Make buffers and other untrained tensors on ``device``."""
        network.reset_buffers(device)

    def objective(self, network: Any, *, bf16: bool) -> nn.Module:
        """The network under its loss, see :mod:`runner.model.objective`."""
        losses = self.head_losses
        return DecoderObjective(network, fp32=losses.fp32, z_loss=losses.z_loss)

    def units(self, network: Any) -> Sequence[nn.Module]:
        """The modules to shard and compile one by one."""
        return list(network.blocks)

    def probe(self, network: Any) -> nn.Module:
        """The module whose output is the first activation of each sample."""
        embedding: nn.Module = network.embedding
        return embedding

    def initial(self, seed: int, name: str, shape: Sequence[int], start: int, count: int) -> Tensor:
        """Elements ``[start, start + count)`` of a fresh parameter, FP32 on the CPU."""
        std = initial_std(name, self.shape)
        return initial_range(name, shape, std, seed=seed, start=start, count=count)

    def flops_per_token(self) -> float:
        """FLOPs of forward and backward; 0 if unknown."""
        return flops_per_token(self.twin_network)


@dataclass(frozen=True, kw_only=True)
class GuestBlueprint(_Twinned):
    """A user's network, with the initial values from its constructor.

    Args:
        name: its name in the settings.
        make: calls the constructor.
        seed: of its initial values.
        seq_len, vocab_size: those of the data, 0 if it has none.
        head_losses: computes the loss of its logits.
        recompute: none, blocks or selective, see :mod:`runner.model.recompute`.
    """

    name: str
    make: Callable[[], nn.Module]
    seed: int
    seq_len: int
    vocab_size: int
    frozen: Sequence[str]
    head_losses: HeadLosses
    recompute: str = NONE
    objective_type: ClassVar[type[GuestObjective]] = GuestObjective

    @property
    def setting(self) -> str:
        """The setting that names it, for messages."""
        return f"model._target_={self.name}"

    def signature(self) -> str:
        """A digest of all that decides the initial weights; equal on all ranks."""
        return self.twin.signature()

    def again(self) -> Recording:
        """Build it on the meta device, like the twin."""
        try:
            recording = record(self._checked)
        except Exception as error:  # from the user's constructor; any other error comes again
            cause = error.__cause__ or error
            recording = record_in_memory(self._checked, f"{self.seed}/{self.name}")
            recording.why = f"{type(cause).__name__}: {' '.join(str(cause).split())[:200]}"
        self._settle(recording.network)
        return recording

    @cached_property
    def twin(self) -> Recording:
        """A copy that is never trained, and knows the initial value of each tensor."""
        return self.again()

    @property
    def twin_network(self) -> nn.Module:
        return self.twin.network

    def _checked(self) -> nn.Module:
        network = self.make()
        if not isinstance(network, nn.Module):
            raise ConfigError(
                f"{self.setting}: gives {type(network).__name__}; it must give a torch.nn.Module"
            )
        for name, module in network.named_modules():
            if any(is_lazy(parameter) for parameter in module._parameters.values()):
                raise ConfigError(
                    f"{self.setting}: {name} is a {type(module).__name__}, whose weights have no "
                    "shape before the first batch, and they are cut into shards before that: give "
                    "its sizes (nn.Linear in place of nn.LazyLinear)"
                )
            if getattr(module, "sparse", False) is True:
                raise ConfigError(
                    f"{self.setting}: {name} is a {type(module).__name__} with sparse=True; sparse "
                    "gradients cannot be reduced over ranks, or gated: give sparse=False"
                )
        return network

    def _settle(self, network: nn.Module) -> None:
        parameters = dict(network.named_parameters())
        if not parameters:
            raise ConfigError(f"{self.setting}: has no parameters to train")
        for name, parameter in parameters.items():
            if not parameter.is_floating_point():
                raise ConfigError(
                    f"{self.setting}: the parameter {name} is {parameter.dtype}; only "
                    "floating-point ones are trained: make it a buffer"
                )
            if not parameter.numel():
                raise ConfigError(
                    f"{self.setting}: the parameter {name} of shape {list(parameter.shape)} has no "
                    "elements, so there is nothing to cut into shards: leave it out, or make it a "
                    "buffer"
                )
        freeze(network, self.frozen)
        if not any(parameter.requires_grad for parameter in parameters.values()):
            raise ConfigError(f"{self.setting}: no parameter requires a gradient")

    @property
    def untrained_loss(self) -> float:
        has_logits = self.vocab_size > 1 and not has_own_losses(self.twin_network)
        return math.log(self.vocab_size) if has_logits else 0.0

    def on_meta(self) -> nn.Module:
        network = self.again().network
        for parameter in network.parameters():
            # Masters are FP32 and contiguous whatever the constructor made of them.
            parameter.data = parameter.data.float().contiguous()
        return self._recomputing(network)

    def made(self) -> nn.Module:
        network = self._checked()
        freeze(network, self.frozen)
        for parameter in network.parameters():
            if not parameter.is_contiguous():  # DeepSpeed takes views of them
                parameter.data = parameter.data.contiguous()
        return self._recomputing(network)

    def _recomputing(self, network: nn.Module) -> nn.Module:
        """
        Raises:
            ConfigError: the network has no blocks to recompute.
        """
        if self.recompute == NONE:
            return network
        units = self.units(network)
        if not units:
            raise ConfigError(
                f"compute.recompute={self.recompute}: {self.setting} has no blocks; give it a "
                "method blocks() or a ModuleList of them, or leave the setting out"
            )
        recompute_units(units, selective=self.recompute == SELECTIVE)
        return network

    def finish(self, network: nn.Module, device: torch.device) -> None:
        """Make buffers and plain attributes as the constructor does."""
        for name, tensor in named_tensors(self.twin.network):
            if not isinstance(tensor, nn.Parameter):
                owner, _, own = name.rpartition(".")
                value = self.twin.made(tensor, f"{self.seed}/{name}").to(device)
                put_tensor(network.get_submodule(owner), own, value)

    def objective(self, network: nn.Module, *, bf16: bool) -> nn.Module:
        return self.objective_type(
            network,
            head_losses=self.head_losses,
            dtype=torch.bfloat16 if bf16 else None,
            vocab_size=self.vocab_size,
            units=self.units(network),
        )

    def units(self, network: nn.Module) -> Sequence[nn.Module]:
        method = getattr(network, "blocks", None)
        if callable(method) and not isinstance(method, nn.Module):
            units = list(method())
            _check_units(self.setting, network, units)
        else:
            lists = [list(m) for n, m in network.named_modules() if _is_list_of_blocks(n, m)]
            units = max(lists, key=_size, default=[])
        return [] if _shares(network, units) else units

    def probe(self, network: nn.Module) -> nn.Module:
        method = getattr(network, "probe", None)
        if callable(method) and not isinstance(method, nn.Module):
            module = method()
            if isinstance(module, nn.Module):
                return module
            raise ConfigError(
                f"{self.setting}: probe() gives {type(module).__name__}; it must give a module"
            )
        leaves = [m for m in network.modules() if any(True for _ in m.parameters(recurse=False))]
        embeddings = [module for module in leaves if isinstance(module, nn.Embedding)]
        return embeddings_of(network, "input") or next(iter(embeddings), leaves[0])

    def initial(self, seed: int, name: str, shape: Sequence[int], start: int, count: int) -> Tensor:
        whole = self.twin.made(self.parameters()[name], f"{seed}/{name}")
        return whole.detach().float().reshape(-1)[start : start + count]

    def flops_per_token(self) -> float:
        network = self.twin_network
        if has_own_losses(network) or not self.seq_len:
            return 0.0
        tokens = torch.zeros((1, self.seq_len), dtype=torch.int64, device="meta")
        try:
            with torch.no_grad(), AnswersYes(), FlopCounterMode(display=False) as counter:
                self.objective(network, bf16=False)({INPUT: tokens, LABELS: tokens})
        except Exception:  # it reads values; the run then has no MFU
            return 0.0
        return 3.0 * float(counter.get_total_flops()) / self.seq_len

    def takes_segments(self) -> bool:
        """Whether it accepts document segments."""
        network = self.twin_network
        return has_own_losses(network) or "segments" in accepted_by(network.forward)


Blueprint = DecoderBlueprint | GuestBlueprint
Places = list[list[tuple[str, str]]]


def parameter_places(network: nn.Module) -> Places:
    """The places of each parameter that modules share, as (module name, parameter name)."""
    by_id: dict[int, list[tuple[str, str]]] = {}
    for prefix, module in network.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                by_id.setdefault(id(parameter), []).append((prefix, name))
    return [places for places in by_id.values() if len(places) > 1]


def retie(network: nn.Module, places: Places) -> None:
    """Tie the places of each parameter again, after ``to_empty`` gave each its own memory."""
    for (owner, owned), *others in places:
        parameter = network.get_submodule(owner)._parameters[owned]
        for prefix, name in others:
            setattr(network.get_submodule(prefix), name, parameter)


def _size(modules: Sequence[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def _is_list_of_blocks(name: str, module: nn.Module) -> bool:
    """Whether each forward pass calls all modules of a list: experts are called by some tokens."""
    if not isinstance(module, nn.ModuleList) or "expert" in name.rpartition(".")[2].lower():
        return False
    # A list of lists is called by nobody; those inside are looked at by themselves.
    return all(type(child).forward is not nn.Module.forward for child in module)


def _shares(network: nn.Module, units: Sequence[nn.Module]) -> bool:
    """Whether a parameter belongs to two units, or to a unit and to modules outside all units.

    Each unit gathers its own; such a network is gathered as a whole.
    """
    owners: dict[int, set[int]] = {}
    inside = [set(unit.modules()) for unit in units]
    for module in network.modules():
        own = [at for at, modules in enumerate(inside) if module in modules] or [-1]
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).update(own)
    return any(len(units_of) > 1 for units_of in owners.values())


def _check_units(name: str, network: nn.Module, units: Sequence[Any]) -> None:
    known = set(network.modules())
    for unit in units:
        if not isinstance(unit, nn.Module) or unit not in known or unit is network:
            raise ConfigError(
                f"{name}: blocks() must give modules of the model, without itself; "
                f"it gives {type(unit).__name__}"
            )


class AnswersYes(TorchFunctionMode):
    """While it is entered, a tensor without values is true in a condition.

    Models test whether nothing is padded or packed (transformers: a mask's ``all()``), which is
    true of the usual batch.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.__bool__ and args[0].is_meta:
            return True
        return func(*args, **(kwargs or {}))


def frozen_names(names: Collection[str], patterns: Sequence[str]) -> set[str]:
    """The names that match one of the regular expressions (``re.search``).

    Raises:
        ConfigError: a pattern is invalid or matches no name, or nothing is left to train.
    """
    frozen: set[str] = set()
    for pattern in patterns:
        try:
            matching = {name for name in names if re.search(pattern, name)}
        except re.error as error:
            raise ConfigError(
                f"compute.frozen: {pattern!r} is no regular expression: {error}"
            ) from None
        if not matching:
            raise ConfigError(
                f"compute.frozen: {pattern!r} is found in no parameter's name. There are: "
                + ", ".join(sorted(names))
            )
        frozen |= matching
    if frozen and len(frozen) == len(names):
        raise ConfigError(
            f"compute.frozen={list(patterns)}: freezes all {len(names)} parameters; leave some to "
            "train"
        )
    return frozen


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Switch off gradients of the parameters from :func:`frozen_names`; raises as it does."""
    parameters = dict(model.named_parameters())
    for name in frozen_names(parameters, patterns):
        parameters[name].requires_grad_(False)
