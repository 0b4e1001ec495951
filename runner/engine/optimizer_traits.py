"""Traits of a user's optimizer, found by trial updates of small parameters.

Three questions decide how it can work on shards. Does an element's update depend on that element
alone? Does a parameter's update depend on that parameter alone? Which numbers in ``param_groups``
does a step change?

torch's optimizers on DTensors do not replace it: Adafactor and 8-bit states raise errors there
(torch 2.13), and a list of elementwise ones would not know a user's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.system.error import ConfigError

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
