"""A user's optimizer (``optim._target_``) over this rank's shards.

If each element's update depends on that element alone, the optimizer works on the shards. If it
needs a whole parameter (Adafactor's factors, blocks of 8-bit states), each rank gathers one
parameter after the other with its state of the same shape, updates it, and keeps its own rows;
state of another shape is whole on every rank. So the result does not depend on the number of ranks.

State has the types and shapes that the optimizer chose. It is created in the first update, as in
any other training loop, so state that starts from the parameter's values is correct.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.engine.builtin_optimizer import Whole, restored, set_gate
from runner.system.error import ConfigError

_GROUP = "group"


@dataclass(slots=True, kw_only=True)
class _Unit:
    """One optimizer and its parameters.

    Args:
        groups: torch's, of which it was made.
        params: the tensors that it updates, by parameter name.
    """

    optimizer: Optimizer
    groups: list[dict[str, Any]]
    params: dict[str, Tensor]


class UserOptimizer:
    """See the module's docstring.

    Args:
        groups: torch parameter groups with ``names`` and ``rate`` added.

    The other arguments, and what is raised, are those of
    :class:`runner.engine.optimizer.ShardOptimizer`.
    """

    def __init__(
        self,
        shards: Mapping[str, Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        groups: Sequence[dict[str, Any]],
        *,
        make: Make,
        name: str,
        whole: Whole,
        is_cut: bool,
    ) -> None:
        self._shards = shards
        self._shapes = shapes
        self._whole = whole
        self._key = f"optim._target_={name}"
        traits = probe_traits(make, frozenset(map(len, shapes.values())), name)
        if is_cut and not traits.is_separable:
            raise ConfigError(
                f"{self._key}: updates a parameter from others as well (a norm or an estimate over "
                "all of them), and each rank has only a part of them; use parallel=ddp, or one rank"
            )
        self._make = make
        self._numbers = traits.numbers
        # The same on one rank as on many, so that the state has the same names.
        self.is_apart = traits.is_separable and not traits.is_elementwise
        self._units = self._make_units(groups)
        self._of = {name: unit for unit in self._units for name in unit.params}
        self._is_begun = False
        self._expected: dict[str, dict[str, Any]] = {}  # the expected state, until the first update
        self._rows: dict[str, Tensor] = {}  # row-shaped state, if parameters are updated one by one
        self._staged: dict[str, Tensor] = {}  # numbers to save or just loaded
        self._cut: dict[str, tuple[str, Path]] = {}
        self._uncut: dict[str, tuple[str, Path]] = {}
        for unit in self._units:
            self._learn_state(unit)

    def _make_units(self, groups: Sequence[dict[str, Any]]) -> list[_Unit]:
        units = []
        for parts in self._split_groups(groups):
            params = {
                name: param
                for group in parts
                for name, param in zip(group["names"], group["params"], strict=True)
            }
            units.append(_Unit(optimizer=self._made(parts), groups=parts, params=params))
        return units

    def _made(self, groups: Sequence[dict[str, Any]]) -> Optimizer:
        # It writes into what it is given.
        optimizer = self._make([dict(group) for group in groups])
        begin_training(optimizer)
        return optimizer

    def _split_groups(self, groups: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
        if not self.is_apart:
            yield [dict(group) for group in groups]
            return
        for group in groups:
            for name, shard in zip(group["names"], group["params"], strict=True):
                yield [group | {"params": [_empty_like(shard)], "names": [name]}]

    # -- state -----------------------------------------------------------------------------

    @torch.no_grad()
    def _learn_state(self, unit: _Unit) -> None:
        """Learn the state's layout from a step on zeros, of an optimizer for this alone."""
        gradients = {name: param.grad for name, param in unit.params.items()}
        for name, param in unit.params.items():
            if self.is_apart:
                param.data = torch.zeros(self._shapes[name], device=param.device)
            param.grad = torch.zeros_like(param)
        before = {name: param.clone() for name, param in unit.params.items()}
        for param in unit.params.values():
            param.zero_()  # weights that are loaded later are uninitialised here
        trial = self._made(unit.groups)
        trial.step()
        for name, param in unit.params.items():
            state = self._expected[name] = dict(trial.state[param])
            if COUNT in state:  # a checkpoint of step 0 is of no update
                state[COUNT] = state[COUNT] * 0
            for path, value in leaves(state, self._key):
                self._note_leaf(name, path, value, param)
            param.grad = gradients[name]  # DeepSpeed has buffers there
            if self.is_apart:
                param.data = _empty_like(param)
            else:
                param.copy_(before[name])

    def _note_leaf(self, name: str, path: Path, value: Any, param: Tensor) -> None:
        label = f"{'.'.join(path)}/{name}"
        if isinstance(value, Tensor) and value.shape == param.shape:
            self._cut[label] = (name, path)
            if self.is_apart:
                self._rows[label] = torch.zeros_like(self._shards[name], dtype=value.dtype)
                set_leaf(self._expected[name], path, value.new_empty(0))
        else:
            self._uncut[label] = (name, path)

    def _state(self, name: str) -> dict[str, Any]:
        unit = self._of[name]
        state: dict[str, Any] | None = unit.optimizer.state.get(unit.params[name])
        # Before the first update it may have some, of weights that were not loaded yet.
        return state if state and self._is_begun else self._expected[name]

    def tensors(self) -> dict[str, Tensor]:
        """This rank's rows of the state that is sharded like its parameter, by "kind/name"."""
        if self.is_apart:
            return dict(self._rows)
        return {label: leaf(self._state(name), path) for label, (name, path) in self._cut.items()}

    def uncut(self, *, is_loaded: bool = False) -> dict[str, Tensor]:
        """State that every rank has whole, by "kind/name"; numbers in FP64.

        A load overwrites these tensors before :meth:`finish_load`.

        Args:
            is_loaded: they were overwritten; numbers are the loaded ones.
        """
        tensors = {label: leaf(self._state(n), path) for label, (n, path) in self._uncut.items()}
        for label, owner, key in self._python_numbers():
            tensors[label] = self._staged.setdefault(label, torch.zeros((), dtype=torch.float64))
            if not is_loaded:
                tensors[label].fill_(owner[key])
        return tensors

    def _python_numbers(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """Of each the label, and the dictionary and key under which the optimizer has it."""
        for label, (name, path) in self._uncut.items():
            state = self._state(name)
            if not isinstance(leaf(state, path), Tensor):
                yield label, state, path[0]
        for number, unit in enumerate(self._units):
            for at, group in enumerate(unit.optimizer.param_groups):
                owner = group["names"][0] if self.is_apart else str(at + number)
                for key in self._numbers:
                    yield f"{_GROUP}.{key}/{owner}", group, key

    def counts(self, default: Tensor) -> list[Any]:
        """Update counts, one for each parameter; ``default`` if the optimizer does not count."""
        return [self._state(name).get(COUNT, default) for name in self._shards]

    def finish_load(self, counts: Mapping[str, int]) -> None:
        """Adopt what a load wrote into the results of :meth:`tensors` and :meth:`uncut`."""
        for label, owner, key in self._python_numbers():
            owner[key] = _like(owner[key], self._staged[label])
        states = {name: self._state(name) for name in self._shards}
        for name, state in states.items():
            if isinstance(state.get(COUNT), Tensor):
                state[COUNT].fill_(float(counts[name]))
            elif COUNT in state:
                state[COUNT] = counts[name]
        self._is_begun = any(counts[name] for name in self._shards)
        for unit in self._units:
            if not self._is_begun:
                unit.optimizer = self._made(unit.groups)
            for name, param in unit.params.items():
                if self._is_begun:
                    unit.optimizer.state[param] = states[name]
                else:
                    self._expected[name] = states[name]

    # -- a step ----------------------------------------------------------------------------

    @property
    def is_gated(self) -> bool:
        """Whether the optimizer itself honours ``found_inf`` and ``grad_scale``."""
        return not self.is_apart and all(
            getattr(unit.optimizer, "_step_supports_amp_scaling", False) for unit in self._units
        )

    @torch.no_grad()
    def step(self, *, skip: Tensor, grad_scale: Tensor, learning_rate: float) -> None:
        """See :meth:`runner.engine.optimizer.ShardOptimizer.step`."""
        if not self.is_gated:
            if skip.item():
                return
            grads = [shard.grad for shard in self._shards.values() if shard.grad is not None]
            for grad in grads:
                grad.div_(grad_scale)
        if not self._is_begun:
            self._begin()
        for unit in self._units:
            for group in unit.optimizer.param_groups:
                _set_rate(group, learning_rate * group["rate"])
            if self.is_apart:
                self._step_apart(unit)
            else:
                self._step_shards(unit, skip, grad_scale)
        for name in list(self._expected):
            unit = self._of[name]
            if unit.optimizer.state.get(unit.params[name]):
                del self._expected[name]  # the optimizer has its real state now

    def _step_shards(self, unit: _Unit, skip: Tensor, grad_scale: Tensor) -> None:
        for param in unit.params.values():
            if param.grad is None and not param.numel():
                param.grad = torch.zeros_like(param)  # ranks without rows count updates, too
        if self.is_gated:
            set_gate(unit.optimizer, skip=skip, grad_scale=grad_scale)
        unit.optimizer.step()

    def _begin(self) -> None:
        """Anew: some make their state when they are made (Adagrad), before weights are loaded."""
        self._is_begun = True
        for unit in self._units:
            unit.optimizer = self._made(unit.groups)

    def _step_apart(self, unit: _Unit) -> None:
        """Update one parameter, gathered for the duration. Collective."""
        ((name, param),) = unit.params.items()
        shard = self._shards[name]
        if shard.grad is None:
            return
        param.data, first = self._whole(name, shard)
        # Without sharding, the gathered tensor is the shard itself, and the optimizer may write to
        # both.
        param.grad = self._whole(name, shard.grad)[0]
        own_rows = slice(first, first + len(shard)) if shard.dim() else ...
        state: dict[str, Any] = unit.optimizer.state.get(param) or {}
        paths = {t: path for t, (of, path) in self._cut.items() if of == name}
        for label, path in paths.items() if state else ():
            set_leaf(state, path, self._whole(name, self._rows[label])[0])
        unit.optimizer.step()
        state = unit.optimizer.state[param]
        shard.copy_(param.data[own_rows])
        for label, path in paths.items():
            moved = leaf(state, path)
            self._rows[label].copy_(moved[own_rows])
            set_leaf(state, path, moved.new_empty(0))
        param.grad = None
        param.data = _empty_like(param)

    @contextmanager
    def evaluated(self) -> Iterator[bool]:
        """Hold the optimizer's evaluation weights in the shards, if it has any."""
        optimizers = [unit.optimizer for unit in self._units if evaluates(unit.optimizer)]
        if self.is_apart or not optimizers or not self._is_begun:
            yield False
            return
        with restored(self._shards):
            for optimizer in optimizers:
                optimizer.eval()  # type: ignore[attr-defined]
            try:
                yield True
            finally:
                for optimizer in optimizers:
                    begin_training(optimizer)


def _empty_like(like: Tensor) -> Tensor:
    """An empty tensor with as many dimensions."""
    return like.new_empty((0,) * like.dim())


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _like(value: Any, stored: Tensor) -> bool | int | float:
    """Convert a number from a checkpoint back to the type of ``value``."""
    number = float(stored.item())
    if isinstance(value, bool):
        return bool(number)
    return int(number) if isinstance(value, int) and number.is_integer() else number


# Traits of an optimizer are found by trial updates of small parameters: does an element's update
# depend on that element alone? Does a parameter's depend on that parameter alone? Which numbers in
# ``param_groups`` does a step change? torch's optimizers on DTensors do not replace it: Adafactor
# and 8-bit states raise errors there (torch 2.13), and a list of elementwise ones would not know a
# user's own.
COUNT: Final = "step"  # torch's name for the update count
_STEPS: Final = 3
# By number of dimensions. The larger shapes have 4,096 elements in blocks of 256, from which on
# 8-bit optimizers quantise their state.
_SHAPES: Final = {
    1: ((6,), (8192,)),
    2: ((6, 3), (128, 64)),
    3: ((6, 3, 3), (32, 16, 16)),
    4: ((6, 3, 3, 3), (16, 8, 8, 8)),
}
_FIXED: Final = ("params", "names", "rate", "lr")
Make = Callable[[list[dict[str, Any]]], Optimizer]
Path = tuple[str, ...]  # a key of the state, then the parts of a composite tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """
    Args:
        is_elementwise: an element's update and state depend on that element alone.
        is_separable: a parameter's update and state depend on that parameter alone.
        numbers: names in ``param_groups`` that a step changes.
    """

    is_elementwise: bool
    is_separable: bool
    numbers: tuple[str, ...]


@functools.cache
def probe_traits(make: Make, dims: frozenset[int], name: str) -> Traits:
    """
    Args:
        dims: all numbers of dimensions among the parameters.
        name: the user's name for the optimizer.

    Raises:
        ConfigError: it cannot train such parameters, or has state that a checkpoint cannot hold.
    """
    key = f"optim._target_={name}"
    shapes = [shape for num in sorted(dims) for shape in _shapes(num)]
    try:
        changed = {number for shape in shapes for number in _changed_numbers(make, shape, key)}
        return Traits(
            is_elementwise=all(_is_elementwise(make, shape) for shape in shapes),
            is_separable=all(_is_separable(make, shape) for shape in shapes),
            numbers=tuple(sorted(changed)),
        )
    except ConfigError:
        raise
    except Exception as error:  # third-party code may raise anything
        raise ConfigError(
            f"{key}: cannot train parameters of {', '.join(map(str, sorted(dims)))} dimensions: "
            f"{type(error).__name__}: {error}"
        ) from error


def _shapes(num_dims: int) -> tuple[tuple[int, ...], ...]:
    if num_dims == 0:
        return ()  # a scalar cannot be split
    return _SHAPES.get(num_dims, ((6, *(2,) * (num_dims - 1)),))


def leaves(state: Mapping[str, Any], key: str) -> Iterator[tuple[Path, Any]]:
    """Yield the tensors and numbers in a parameter's state, except the update count.

    A composite tensor (torch's ``__tensor_flatten__``: quantised states) yields its parts. None and
    text are assumed constant.

    Raises:
        ConfigError: the state has anything else; ``key`` names the setting.
    """
    for name, value in state.items():
        if name == COUNT or value is None or isinstance(value, str):
            continue
        if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
            attributes, _ = value.__tensor_flatten__()
            for attribute in attributes:
                part = getattr(value, attribute)
                _require_plain(part, f"{name}.{attribute}", key)
                yield (name, attribute), part
            continue
        if not isinstance(value, bool | int | float):
            _require_plain(value, name, key)
        yield (name,), value


def _require_plain(value: object, name: str, key: str) -> None:
    if not isinstance(value, Tensor) or hasattr(value, "__tensor_flatten__"):
        raise ConfigError(
            f"{key}: keeps {name!r} for a parameter, which is {type(value).__name__}; a checkpoint "
            "holds tensors and numbers"
        )


def leaf(state: Mapping[str, Any], path: Path) -> Any:
    """Return the leaf that :func:`leaves` yields under ``path``."""
    value = state[path[0]]
    return value if len(path) == 1 else getattr(value, path[1])


def set_leaf(state: dict[str, Any], path: Path, value: Any) -> None:
    """Replace the leaf under ``path``."""
    if len(path) == 1:
        state[path[0]] = value
    else:
        setattr(state[path[0]], path[1], value)


def begin_training(optimizer: Optimizer) -> None:
    """Put a schedule-free optimizer into training mode."""
    if evaluates(optimizer):
        optimizer.train()  # type: ignore[attr-defined]


def evaluates(optimizer: Optimizer) -> bool:
    """Whether the optimizer has separate evaluation weights, which its ``eval()`` swaps in."""
    return all(callable(getattr(optimizer, name, None)) for name in ("eval", "train"))


def _trial(
    make: Make, params: Sequence[Tensor], grads: Iterable[Sequence[Tensor]]
) -> tuple[list[Tensor], Optimizer]:
    """What parameters become, and the optimizer that has updated them by each of ``grads``."""
    trained = [param.clone() for param in params]
    names = [f"trial.{number}" for number in range(len(trained))]
    optimizer = make([{"params": trained, "names": names, "rate": 1.0}])
    begin_training(optimizer)
    for of_step in grads:
        for param, grad in zip(trained, of_step, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    return trained, optimizer


def _is_close(left: Tensor, right: Tensor) -> bool:
    return torch.allclose(left, right, rtol=1e-5, atol=1e-7)


def _draw(shape: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    """Draw a parameter and its gradients for some steps; always the same."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(_STEPS + 1, *shape, generator=generator)
    return drawn[0], list(drawn[1:])


def _changed_numbers(make: Make, shape: tuple[int, ...], key: str) -> list[str]:
    param, grads = _draw(shape)
    before = _options(_trial(make, [param], [])[1])
    [param], optimizer = _trial(make, [param], [[grad] for grad in grads])
    changed = [name for name, value in _options(optimizer).items() if before.get(name) != value]
    group = optimizer.param_groups[0]
    odd = [name for name in changed if not isinstance(group[name], bool | int | float)]
    odd += [str(key) for key in optimizer.state if key is not param]
    if odd:
        raise ConfigError(
            f"{key}: keeps {', '.join(odd)} for all parameters together and changes it in a step; "
            "a checkpoint holds what belongs to a parameter, and numbers in param_groups"
        )
    for _ in leaves(optimizer.state[param], key):
        pass
    return changed


def _options(optimizer: Optimizer) -> dict[str, str]:
    group = optimizer.param_groups[0]
    return {name: repr(value) for name, value in group.items() if name not in _FIXED}


def _is_elementwise(make: Make, shape: tuple[int, ...]) -> bool:
    """Whether two unequal parts of a parameter end as they do in the whole, with matching state."""
    rows = [shape[0] // 4 + 1, shape[0] - shape[0] // 4 - 1]
    param, grads = _draw(shape)
    [whole], together = _trial(make, [param], [[grad] for grad in grads])
    parts, apart = _trial(
        make, torch.split(param, rows), [torch.split(grad, rows) for grad in grads]
    )
    if not _is_close(whole, torch.cat(parts)):
        return False
    states = [dict(leaves(together.state[whole], ""))]
    states += [dict(leaves(apart.state[part], "")) for part in parts]
    paths = {path for state in states for path in state}
    return all(_follows_parts(states, [whole, *parts], path) for path in paths)


def is_same_when_flat(make: Make, dims: frozenset[int]) -> bool:
    """Whether parameters of so many dimensions end the same, laid out in one dimension."""
    for shape in (shape for num in sorted(dims) for shape in _shapes(num)):
        param, grads = _draw(shape)
        [shaped], one = _trial(make, [param], [[grad] for grad in grads])
        [flat], other = _trial(make, [param.view(-1)], [[grad.view(-1)] for grad in grads])
        kept = [
            {path for path, _ in leaves(o.state[p], "")} for o, p in ((one, shaped), (other, flat))
        ]
        if not _is_close(shaped.view(-1), flat) or kept[0] != kept[1]:
            return False
    return True


def _follows_parts(states: list[dict[Path, Any]], params: list[Tensor], path: Path) -> bool:
    """Whether a leaf is sharded like its parameter, or is the same number in all parts."""
    if not all(path in of_one for of_one in states):
        return False
    values = [of_one[path] for of_one in states]
    if len({str(getattr(value, "dtype", type(value))) for value in values}) > 1:
        return False
    shapes = [tuple(value.shape) if isinstance(value, Tensor) else () for value in values]
    if shapes == [tuple(param.shape) for param in params]:
        return len(path) == 1  # parts of a composite tensor need not have the parameter's rows
    if any(shapes):
        return False
    numbers = {repr(v.item() if isinstance(v, Tensor) else v) for v in values}
    return len(numbers) == 1


def _is_separable(make: Make, shape: tuple[int, ...]) -> bool:
    """Whether two parameters end as each does with its own optimizer."""
    param, grads = _draw(shape)
    pair = [param, param.flip(0) * 3]
    both = [[grad, grad.flip(0) * 5] for grad in grads]
    together, _ = _trial(make, pair, both)
    alone = [_trial(make, [pair[n]], [[of_step[n]] for of_step in both])[0][0] for n in (0, 1)]
    return all(map(_is_close, together, alone))
