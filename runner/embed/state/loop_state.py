"""The state of a user's loop as shards of the ring: weights, buffers, optimizers.

A checkpoint can be loaded into an optimizer that has no state yet; a checkpoint from before the
first step removes the state again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from runner.distributed.agreement import Ranks
from runner.embed.state.codec import dtype_of, inline, outline, pack, unpack
from runner.embed.state.geometry import Geometry, local, replicated, row
from runner.embed.state.modules import BaseWeights, Buffers, ExtraState, Modes
from runner.embed.state.staged_state import StagedState, home_of
from runner.embed.state.stages import Stages, merged
from runner.engine.modes import reshard
from runner.system.error import CheckpointError, ConfigError

# Prefixes that wrappers add to a parameter's name.
_WRAPPERS = (
    "_orig_mod.",  # torch.compile
    "_checkpoint_wrapped_module.",
    "_fsdp_wrapped_module.",
    "_forward_module.",  # Lightning Fabric
)


def plain_name(name: str) -> str:
    """A parameter's name without the prefixes of wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


class LoopState(StagedState):
    """Models and optimizers, as :class:`runner.checkpoint.ring.CheckpointRing` saves them.

    Args:
        models: their parameters and changing buffers are saved.
        optimizers: their state and options.
        stages: of the pipeline of which the models are one stage; None: there is none.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        ranks: Ranks,
        device: torch.device,
        stages: Stages | None = None,
    ) -> None:
        super().__init__(ranks, device, stages)
        self.optimizers, self._models = list(optimizers), list(models)
        self._reshard()  # otherwise the parameters are those gathered by an earlier evaluation
        named = [
            (plain_name(f"{_joined(prefix, name)}.").rstrip("."), module)
            for prefix, model in _prefixed(models)
            for name, module in model.named_modules()
            if self.stages.count == 1 or not _is_placeholder(module)
        ]
        self._base = BaseWeights(named, ranks, self.stages)
        base = {id(tensor) for tensor in self._base.tensors.values()}
        parameters = self._named_parameters(models)
        new = self.stages.distinct(parameters)
        known = {new[name]: parameter for name, parameter in parameters.items()}
        self.parameters = {name: p for name, p in known.items() if id(p) not in base}
        # An optimizer may have been given frozen ones.
        self._known, self._names = known, {id(p): name for name, p in known.items()}
        self._meshes.learn(self.parameters.values())
        new = self.stages.distinct(name for name, _ in named)
        plain = [(new[name], module) for name, module in named]
        sizes = self.stages.gather(sum(p.numel() for p in self.parameters.values()))
        self.num_elements = sum(sizes)  # of the parameters of all stages
        buffers = [_joined(name, key) for name, module in plain for key in module._buffers]
        names = self.stages.gather([*self.parameters, *buffers])
        # By the name of a parameter or buffer: whether this rank's stage has it.
        self._owned = {name: n == self.stages.number for n, of in enumerate(names) for name in of}
        self.modes = Modes(plain, self.parameters)
        self.buffers, self.extra = Buffers(plain), ExtraState(plain)
        # The groups with which the script began. Where a checkpoint's script began with the same,
        # the groups become those of the checkpoint; else the script itself has changed.
        self._first_groups = [self._members(optimizer) for optimizer in optimizers]

    @property
    def compute_device(self) -> torch.device:
        """Of one process without a group that of its parameters, of ranks that of their group."""
        if dist.is_available() and dist.is_initialized():
            return self.device
        return next((p.device for p in self.parameters.values() if p.is_cuda), self.device)

    def _reshard(self) -> None:
        for model in self._models:
            reshard(model)

    def _named_parameters(self, models: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
        parameters: dict[str, torch.Tensor] = {}
        for prefix, model in _prefixed(models):
            own = {_joined(prefix, plain_name(name)): p for name, p in model.named_parameters()}
            parameters.update(own)
        seen = {id(parameter) for parameter in parameters.values()}
        for number, group, index, parameter in self._optimized():
            if id(parameter) not in seen:  # trained, but in none of the models
                parameters[f"optimizer{number}.{group}.{index}"] = parameter
        return parameters

    def _optimized(self) -> Iterator[tuple[int, int, int, torch.Tensor]]:
        for number, optimizer in enumerate(self.optimizers):
            for group_number, group in enumerate(optimizer.param_groups):
                for index, parameter in enumerate(group["params"]):
                    yield number, group_number, index, parameter

    def trained(self) -> list[torch.Tensor]:
        """The parameters that the optimizers update, in the models' order.

        Raises:
            ConfigError: an optimizer was given a parameter that the guard does not know.
        """
        for optimizer in self.optimizers:
            self._members(optimizer)
        optimized = {id(parameter) for *_, parameter in self._optimized()}
        return [p for p in self.parameters.values() if id(p) in optimized]

    def _members(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """Names of the parameters of each group of an optimizer.

        Raises:
            ConfigError: a parameter has no name.
        """
        try:
            return [
                [self._names[id(parameter)] for parameter in group["params"]]
                for group in optimizer.param_groups
            ]
        except KeyError:
            raise ConfigError(
                f"{type(optimizer).__name__} was given a parameter after Guard(...) that is in "
                "none of the guard's models, so that it would not be saved; create its module "
                "before, and give it to Guard(model=...)"
            ) from None

    # -- discarding -----------------------------------------------------------------------

    def before_batch(self, *, keep_older: bool) -> None:
        """Remember what a forward pass may change; see :meth:`Buffers.capture`."""
        self.buffers.capture(keep_older=keep_older)
        self.extra.capture()

    def undo_batch(self, *, older: bool = False) -> None:
        """Undo forward passes since the last :meth:`before_batch`, or the one before."""
        self.buffers.restore(older=older)
        self.extra.restore(older=older)

    # -- saving ---------------------------------------------------------------------------

    def capture(self) -> dict[str, Any]:
        """Take the current state for :meth:`shards`; returns everything else as JSON. Collective.

        Raises:
            ConfigError: something in the optimizers' state cannot be saved.
        """
        self._reshard()
        self._base.require_unchanged()
        for name, parameter in self.parameters.items():
            if parameter.numel():  # the ring cannot hold an empty tensor
                self._add(f"param/{name}", parameter, name)
        for name in self._changing_buffers():
            shape = self.buffers.live(name).shape
            where = row(shape, self.stages.index, len(self.stages.own.ranks))
            self._take(f"buffer/{name}", partial(self.buffers.live, name), where, None, "buffer")
        own = {
            "optimizers": [self._pack_optimizer(n) for n in range(len(self.optimizers))],
            "world_size": self._ranks.world_size,
            "modes": self.modes.to_json(),
            "modules": self.extra.to_json(),
        }
        of_all = merged(self.stages.gather(own)) if self.stages.count > 1 else own
        return {**of_all, "base": self._base.to_json(), "tensors": self._end_capture()}

    def _add(self, name: str, tensor: torch.Tensor, like: str | None = None) -> str:
        where = self.geometry_of(tensor, name, like)
        return self._take(name, lambda: local(tensor), where, like, home_of(tensor))

    def _add_option(self, tensor: torch.Tensor, name: str) -> str:
        where = replicated(tensor.shape, self.stages.everybody, self._ranks.rank)
        return self._take(name, lambda: local(tensor), where, None, home_of(tensor))

    def _changing_buffers(self) -> list[str]:
        """Names of the buffers that change on any rank; the same list on all ranks."""
        by_rank = self._ranks.gather(self.buffers.changing())
        names = sorted({name for rank in self.stages.own.ranks for name in by_rank[rank]})
        for name in names:
            self.buffers.mark(name)
        return names

    def _stateful(self, number: int) -> Iterator[tuple[str, torch.Tensor, Any]]:
        """Name, parameter and state, where optimizer ``number`` has a state."""
        optimizer = self.optimizers[number]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in optimizer.state:
                    yield self._names[id(parameter)], parameter, optimizer.state[parameter]

    def _pack_optimizer(self, number: int) -> dict[str, Any]:
        optimizer, groups = self.optimizers[number], []
        states = {
            name: pack(state, f"optim/{number}/{name}", partial(self._add_state, name, parameter))
            for name, parameter, state in self._stateful(number)
        }
        for n, group in enumerate(optimizer.param_groups):
            options = {key: value for key, value in group.items() if key != "params"}
            where = f"optim/{number}/group/{n}"
            groups.append(pack(options, where, self._add_option))
        return {
            "states": states,
            "groups": groups,
            "members": self._members(optimizer),
            "first": self._first_groups[number],
        }

    def _add_state(
        self, name: str, parameter: torch.Tensor, value: torch.Tensor, where: str
    ) -> Any:
        if not value.numel():
            return inline(value, where)
        is_like = value.shape == parameter.shape and (
            isinstance(value, DTensor) == isinstance(parameter, DTensor)
        )
        return self._add(where, value, name if is_like else None)

    # -- loading --------------------------------------------------------------------------

    def require_fit(self, stored: Mapping[str, Any]) -> None:
        self._base.require_same(stored.get("base", {}))

    def expect(self, tensors: Mapping[str, Any]) -> None:
        for name, (dtype, shape, _, home, *_) in tensors.items():
            if home == "buffer" and self._is_own(name):
                self.buffers.give(name.removeprefix("buffer/"), shape[1:], dtype_of(dtype))
        super().expect(tensors)
        needed = {f"param/{name}" for name, p in self.parameters.items() if p.numel()}
        missing = sorted(needed - set(self._loading))
        if missing:
            raise CheckpointError(
                f"the checkpoint is of another model: it has no {missing[0]!r}"
                f"{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}"
            )

    def _is_own(self, name: str) -> bool:
        if self.stages.count == 1:
            return True
        kind, _, rest = name.partition("/")
        if kind == "optim":  # optim/NUMBER/PARAMETER.KEY
            rest = rest.partition("/")[2]
        known = [p for p in accumulate(rest.split("."), "{}.{}".format) if p in self._owned]
        return not known or self._owned[known[-1]]

    def _geometry_for(
        self, name: str, shape: Sequence[int], like: str | None, home: str
    ) -> Geometry:
        if home == "buffer":
            key = name.removeprefix("buffer/")
            if key not in self.buffers or list(self.buffers.live(key).shape) != list(shape[1:]):
                raise CheckpointError(f"the checkpoint is of another model: buffer {key!r}")
            return row(shape[1:], self.stages.index % shape[0], shape[0])
        if like is None:
            is_option = name.split("/")[2:3] == ["group"]
            holders = self.stages.everybody if is_option else self.stages.own
            return replicated(shape, holders, self._ranks.rank)
        parameter = self.parameters.get(like)
        where = None if parameter is None else self.geometry_of(parameter, like, like)
        if where is None or list(where.shape) != list(shape):
            has = "none" if where is None else list(where.shape)
            raise CheckpointError(
                f"the checkpoint is of another model: {like!r} is {list(shape)} there, {has} here"
            )
        return where

    def apply(self, stored: Mapping[str, Any]) -> None:
        """Put the loaded values in place. ``stored`` is what :meth:`capture` returned.

        Raises:
            CheckpointError: :meth:`capture` did not make it, or the optimizer is another.
        """
        self.require_fit(stored)
        self._reshard()  # the next forward pass is to gather what is loaded
        try:
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    if parameter.numel():
                        self._fill(parameter, f"param/{name}")
                    parameter.grad = None
                self._apply_buffers()
                self.extra.load_json(stored["modules"])
                self.apply_options(stored)
                for number, optimizer in enumerate(self.optimizers):
                    self._apply_states(optimizer, stored["optimizers"][number]["states"])
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            cause = f"{type(error).__name__}: {error}"[:300]
            raise CheckpointError(f"cannot load the optimizer's state ({cause})") from None
        finally:
            self._loading = {}

    def apply_options(self, stored: Mapping[str, Any]) -> None:
        """Load only the optimizers' options, such as the learning rate, and modes of modules."""
        self.modes.load_json(stored["modes"])
        for number, optimizer in enumerate(self.optimizers):
            own = stored["optimizers"][number]
            self._regroup(optimizer, self._first_groups[number], own)
            for group, options in zip(optimizer.param_groups, own["groups"], strict=True):
                for key, value in options.items():
                    group[key] = unpack(value, partial(self._option_tensor, group.get(key)))

    def _regroup(
        self, optimizer: torch.optim.Optimizer, first: list[list[str]], stored: Mapping[str, Any]
    ) -> None:
        """
        Raises:
            CheckpointError: the script began with other groups than the one that saved.
        """
        members, stored_first = self._own_of(stored["members"]), self._own_of(stored["first"])
        if _alike(members, self._members(optimizer)):
            return
        if not _alike(stored_first, first):
            raise CheckpointError(
                f"{type(optimizer).__name__} began with other groups of parameters "
                f"({_sizes(stored_first)} parameters, now {_sizes(first)}); make them as "
                "before, or choose another out"
            )
        groups = optimizer.param_groups
        del groups[len(members) :]
        groups.extend({} for _ in range(len(members) - len(groups)))
        for group, names in zip(groups, members, strict=True):
            group["params"] = [self._known[name] for name in names]

    def _own_of(self, groups: Sequence[Sequence[str]]) -> list[list[str]]:
        """Groups of parameters' names without those of other stages."""
        return [[name for name in group if self._is_own(f"param/{name}")] for group in groups]

    def _option_tensor(self, live: Any, name: str) -> torch.Tensor:
        if not isinstance(live, torch.Tensor):
            return self._loaded(name, None)
        if name in self._loading:
            self._fill(live, name)
        return live

    def _apply_buffers(self) -> None:
        saved = {name.removeprefix("buffer/") for name in self._loading}
        self.buffers.drop_all_but(saved)
        self.buffers.put_back_original(saved)
        for name in self._loading:
            if name.startswith("buffer/"):
                key = name.removeprefix("buffer/")
                self.buffers.mark(key)
                self._fill(self.buffers.live(key), name)
        self.buffers.capture()

    def _apply_states(self, optimizer: torch.optim.Optimizer, stored: Mapping[str, Any]) -> None:
        grouped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        in_groups = {id(parameter) for parameter in grouped}
        for parameter in self.parameters.values():
            if id(parameter) not in in_groups:  # of a group that was added after the checkpoint
                optimizer.state.pop(parameter, None)
        for parameter in grouped:
            name, live = self._names[id(parameter)], optimizer.state.pop(parameter, {})
            if name in stored:
                unpacked = unpack(stored[name], partial(self._state_tensor, parameter, live))
                optimizer.state[parameter] = unpacked

    def _state_tensor(self, parameter: torch.Tensor, live: Mapping[str, Any], name: Any) -> Any:
        """A tensor of an optimizer's state; ``live``: the present state, whose tensors stay."""
        if not isinstance(name, str):
            return outline(name)
        existing, slice_ = live.get(name.rpartition(".")[2]), self._loading[name]
        if (
            isinstance(existing, torch.Tensor)
            and existing.dtype == slice_.dtype
            and local(existing).numel() == slice_.geometry.count
        ):
            self._fill(existing, name)
            return existing
        is_like = self._stored_tensors[name][2] is not None
        return self._loaded(name, parameter if is_like else None)

    # -- digest ---------------------------------------------------------------------------

    def _live_tensors(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {f"param/{n}": p for n, p in self.parameters.items()}
        for name in self.buffers.changing():
            tensors[f"buffer/{name}"] = self.buffers.live(name)

        def collect(value: torch.Tensor, where: str) -> str:
            tensors[where] = value
            return where

        for number in range(len(self.optimizers)):
            for name, _, state in self._stateful(number):
                pack(state, f"optim/{number}/{name}", collect)
        return tensors


def _prefixed(models: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    if len(models) == 1:
        return [("", models[0])]
    return [(f"model{number}", model) for number, model in enumerate(models)]


def _is_placeholder(module: nn.Module) -> bool:
    """Whether it has no state, and so may stand for another stage's layer of the same name."""
    return type(module) is nn.Identity and not module._buffers


def _joined(prefix: str, name: str) -> str:
    return ".".join(part for part in (prefix, name) if part)


def _alike(a: Sequence[Sequence[str]], b: Sequence[Sequence[str]]) -> bool:
    return [sorted(names) for names in a] == [sorted(names) for names in b]


def _sizes(groups: Sequence[Sequence[str]]) -> str:
    return " + ".join(str(len(names)) for names in groups)
