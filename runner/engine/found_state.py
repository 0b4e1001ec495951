"""What an optimizer from elsewhere keeps and how it works, found out by trying it on small ones.

Three questions decide how it goes with shards. Does an element's update depend on that element
alone? Does a parameter's update depend on that parameter alone? Which numbers beside the
parameters (``param_groups``) does a step change?
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.system.error import ConfigError

COUNT: Final = "step"  # torch's name of the number of updates
_STEPS: Final = 3
# By number of dimensions. The larger ones are of a size that 8-bit optimizers find worth while
# (4,096 elements, in blocks of 256), which what they keep of smaller ones does not show.
_SHAPES: Final = {
    1: ((6,), (8192,)),
    2: ((6, 3), (128, 64)),
    3: ((6, 3, 3), (32, 16, 16)),
    4: ((6, 3, 3, 3), (16, 8, 8, 8)),
}
_FIXED: Final = ("params", "names", "rate", "lr")
Make = Callable[[list[dict[str, Any]]], Optimizer]
Path = tuple[str, ...]  # a key of a parameter's state, and the part of a tensor made of parts


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
def found_traits(make: Make, dims: frozenset[int], name: str) -> Traits:
    """
    Args:
        dims: the numbers of dimensions that parameters have.
        name: of the optimizer, as the user gave it.

    Raises:
        ConfigError: it cannot train such parameters, or keeps what a checkpoint has no place for.
    """
    key = f"optim._target_={name}"
    shapes = [shape for num in sorted(dims) for shape in _shapes(num)]
    try:
        changed = {one for shape in shapes for one in _changed(make, shape, key)}
        return Traits(
            is_elementwise=all(_is_elementwise(make, shape) for shape in shapes),
            is_separable=all(_is_separable(make, shape) for shape in shapes),
            numbers=tuple(sorted(changed)),
        )
    except ConfigError:
        raise
    except Exception as error:  # of somebody else's code
        raise ConfigError(
            f"{key}: cannot train parameters of {', '.join(map(str, sorted(dims)))} dimensions: "
            f"{type(error).__name__}: {error}"
        ) from error


def _shapes(num_dims: int) -> tuple[tuple[int, ...], ...]:
    if num_dims == 0:
        return ()  # nothing of it can be cut
    return _SHAPES.get(num_dims, ((6, *(2,) * (num_dims - 1)),))


def leaves(state: Mapping[str, Any], key: str) -> Iterator[tuple[Path, Any]]:
    """Tensors and numbers in a parameter's state, but for the count of updates.

    A tensor that is made of others (torch's ``__tensor_flatten__``: quantised states) is taken
    apart. None and text are taken to stay as they begin.

    Raises:
        ConfigError: there is something else; ``key`` says of what.
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
    """What :func:`leaves` gave under ``path``."""
    value = state[path[0]]
    return value if len(path) == 1 else getattr(value, path[1])


def set_leaf(state: dict[str, Any], path: Path, value: Any) -> None:
    """Put it in the other's place."""
    if len(path) == 1:
        state[path[0]] = value
    else:
        setattr(state[path[0]], path[1], value)


def begin_training(optimizer: Optimizer) -> None:
    """Schedule-free optimizers say whether parameters are those to train or to evaluate."""
    if evaluates(optimizer):
        optimizer.train()  # type: ignore[attr-defined]


def evaluates(optimizer: Optimizer) -> bool:
    """Whether it has other weights for evaluation: its ``eval()`` puts them in."""
    return all(callable(getattr(optimizer, name, None)) for name in ("eval", "train"))


def made_over(make: Make, params: Iterable[Tensor]) -> Optimizer:
    """For a trial."""
    listed = list(params)
    names = [f"trial.{number}" for number in range(len(listed))]
    optimizer = make([{"params": listed, "names": names, "rate": 1.0}])
    begin_training(optimizer)
    return optimizer


def _steps(optimizer: Optimizer, params: list[Tensor], grads: list[list[Tensor]]) -> None:
    for of_step in grads:
        for param, grad in zip(params, of_step, strict=True):
            param.grad = grad.clone()
        optimizer.step()


def _drawn(shape: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    """A parameter, and its gradients of some steps; the same each time."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(_STEPS + 1, *shape, generator=generator)
    return drawn[0], list(drawn[1:])


def _changed(make: Make, shape: tuple[int, ...], key: str) -> list[str]:
    param, grads = _drawn(shape)
    optimizer = made_over(make, [param])
    before = _options(optimizer)
    _steps(optimizer, [param], [[grad] for grad in grads])
    changed = [name for name, value in _options(optimizer).items() if before.get(name) != value]
    group = optimizer.param_groups[0]
    odd = [name for name in changed if not isinstance(group[name], bool | int | float)]
    odd += [str(one) for one in optimizer.state if one is not param]
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
    """Whether two unequal parts of it end as they do in the whole, and keep the like."""
    rows = [shape[0] // 4 + 1, shape[0] - shape[0] // 4 - 1]
    param, grads = _drawn(shape)
    whole, parts = param.clone(), _cut(param, rows)
    together, apart = made_over(make, [whole]), made_over(make, parts)
    _steps(together, [whole], [[grad] for grad in grads])
    _steps(apart, parts, [_cut(grad, rows) for grad in grads])
    if not torch.allclose(whole, torch.cat(parts), rtol=1e-5, atol=1e-7):
        return False
    kept = [
        dict(leaves(together.state[whole], "")),
        *(dict(leaves(apart.state[p], "")) for p in parts),
    ]
    paths = {path for of_one in kept for path in of_one}
    return all(_goes_with_parts(kept, [whole, *parts], path) for path in paths)


def is_same_when_flat(make: Make, dims: frozenset[int]) -> bool:
    """Whether parameters of so many dimensions end the same, laid out in one dimension."""
    shapes = [shape for num in sorted(dims) for shape in _shapes(num)]
    for shape in shapes:
        param, grads = _drawn(shape)
        shaped, flat = param.clone(), param.clone().view(-1)
        optimizers = made_over(make, [shaped]), made_over(make, [flat])
        _steps(optimizers[0], [shaped], [[grad] for grad in grads])
        _steps(optimizers[1], [flat], [[grad.view(-1)] for grad in grads])
        if not torch.allclose(shaped.view(-1), flat, rtol=1e-5, atol=1e-7):
            return False
        kept = [
            set(dict(leaves(o.state[p], "")))
            for o, p in zip(optimizers, (shaped, flat), strict=True)
        ]
        if kept[0] != kept[1]:
            return False
    return True


def _cut(tensor: Tensor, rows: list[int]) -> list[Tensor]:
    return [part.clone() for part in torch.split(tensor, rows)]


def _goes_with_parts(kept: list[dict[Path, Any]], params: list[Tensor], path: Path) -> bool:
    """Whether a leaf is cut like its parameter, or the same number for all."""
    if not all(path in of_one for of_one in kept):
        return False
    values = [of_one[path] for of_one in kept]
    if len({str(getattr(value, "dtype", type(value))) for value in values}) > 1:
        return False
    shapes = [tuple(value.shape) if isinstance(value, Tensor) else () for value in values]
    if shapes == [tuple(param.shape) for param in params]:
        return len(path) == 1  # a tensor of parts has more of them than go with the rows
    if any(shapes):
        return False
    numbers = {repr(v.item() if isinstance(v, Tensor) else v) for v in values}
    return len(numbers) == 1


def _is_separable(make: Make, shape: tuple[int, ...]) -> bool:
    """Whether two parameters end as each does with an optimizer of its own."""
    param, grads = _drawn(shape)
    pair = [param.clone(), param.flip(0).clone() * 3]
    lone = [one.clone() for one in pair]
    both = [[grad, grad.flip(0) * 5] for grad in grads]
    _steps(made_over(make, pair), pair, both)
    for number, one in enumerate(lone):
        _steps(made_over(make, [one]), [one], [[of_step[number]] for of_step in both])
    return all(
        torch.allclose(mine, theirs, rtol=1e-5, atol=1e-7)
        for mine, theirs in zip(pair, lone, strict=True)
    )
