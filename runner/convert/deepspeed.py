"""Reads a DeepSpeed checkpoint directory: FP32 masters and moments, assembled from all ranks.

ZeRO-1 and 2 cut each group's flattened parameters into one range a rank; ``param_slice_mappings``
say which part of which parameter a rank holds. ZeRO-3 cuts each parameter into equal parts, the
last one padded. Without optimizer files there are only the module's weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from runner.convert.stored import Moments, Source, Stored, held, inside
from runner.convert.unpickle import Shell, as_mapping, read_tensor_file
from runner.system.error import ConfigError

_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_00_model_states\.pt")
_LINKED, _SLICED = "single_partition_of_fp32_groups", "fp32_flat_groups"
_KINDS = ("param", "exp_avg", "exp_avg_sq")


def is_deepspeed(folder: Path) -> bool:
    """Whether DeepSpeed's save_checkpoint wrote it, or a tag's directory within."""
    return (folder / "latest").is_file() or any(folder.glob("*_model_states.pt"))


def open_deepspeed(place: Path) -> Source:
    """Read every rank's file (mapped) and locate each parameter.

    Raises:
        ConfigError: damaged, refused, incomplete, or of an unknown layout.
    """
    folder = _tag_folder(place)
    try:
        return _open(folder)
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, RuntimeError) as error:
        raise ConfigError(
            f"{folder}: no DeepSpeed checkpoint of a known layout ({type(error).__name__}: {error})"
        ) from None


def _tag_folder(place: Path) -> Path:
    latest = place / "latest"
    if not latest.is_file():
        return place
    try:
        tag = latest.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{latest}: {error}") from None
    folder = place / tag
    if not tag or Path(tag).name != tag or tag == ".." or not folder.is_dir():
        raise ConfigError(f"{latest}: names {tag!r}, which is no directory beside it")
    if not folder.resolve().is_relative_to(place.resolve()):
        raise ConfigError(f"{latest}: {tag!r} leads out of the directory")
    return folder


def _open(folder: Path) -> Source:
    for path in folder.glob("*.pt"):
        if re.search(r"mp_rank_(?!00)\d+|^layer_|expert", path.name):
            raise ConfigError(f"{path}: tensor, pipeline and expert parallel are not supported")
    models = [as_mapping(read_tensor_file(p), "it", p) for p in _files(folder, _MODEL_FILE)]
    optimizers = [as_mapping(read_tensor_file(p), "it", p) for p in _files(folder, _OPTIMIZER_FILE)]
    if not models:
        raise ConfigError(f"{folder}: holds no *_model_states.pt")
    states = [as_mapping(tree["optimizer_state_dict"], "it", folder) for tree in optimizers]
    if states and _LINKED in states[0]:
        located, stage = _linked(folder, models, states), "ZeRO-1/2, FP32 masters"
    elif states and _SLICED in states[0]:
        located, stage = _sliced(folder, models, states), "ZeRO-3, FP32 masters"
    elif states:
        raise ConfigError(f"{folder}: optimizer files without {_LINKED} or {_SLICED}")
    else:
        located, stage = _module(folder, models[0]), "module weights"
    return _with_shared(folder, f"DeepSpeed directory ({stage})", located, models[0])


_Located = tuple[dict[str, Stored], dict[str, Moments]]


def _files(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    paths: dict[int, Path] = {}
    for path in folder.iterdir():
        if match := pattern.fullmatch(path.name):
            number = int(match[1] or 0)
            if number in paths:
                raise ConfigError(f"{path} and {paths[number].name}: two files of one rank")
            paths[number] = inside(folder, path.name, folder)
    if sorted(paths) != list(range(len(paths))):
        raise ConfigError(f"{folder}: files of ranks {sorted(paths)}: some are missing")
    return [paths[number] for number in sorted(paths)]


def _with_shared(folder: Path, kind: str, located: _Located, model: Mapping[Any, Any]) -> Source:
    weights, moments = located
    for name, owner in as_mapping(
        model.get("shared_params") or {}, "shared_params", folder
    ).items():
        if owner in weights:
            weights.setdefault(name, weights[owner])
    return Source(kind=kind, weights=weights, moments=moments)


def _module(folder: Path, model: Mapping[Any, Any]) -> _Located:
    buffers = set(model.get("buffer_names") or ())
    module = as_mapping(model["module"], "module", folder)
    weights = {
        str(name): held(tensor, f"{folder}: {name!r}")
        for name, tensor in module.items()
        if name not in buffers
    }
    return weights, {}


def _check_world(folder: Path, states: Sequence[Mapping[Any, Any]]) -> None:
    count = states[0]["partition_count"]
    expected = max(count) if isinstance(count, list | tuple) else count
    if len(states) != expected:
        raise ConfigError(
            f"{folder}: optimizer files of {len(states)} ranks; it was saved by {expected}"
        )


def _linked(
    folder: Path, models: Sequence[Mapping[Any, Any]], states: Sequence[Mapping[Any, Any]]
) -> _Located:
    _check_world(folder, states)
    if any("param_slice_mappings" not in state for state in states):
        raise ConfigError(
            f"{folder}: has no param_slice_mappings (an old DeepSpeed); load and save it once "
            "with DeepSpeed 0.19"
        )
    flats = [_flats(folder, state, state[_LINKED], "base_optimizer_state") for state in states]
    weights: dict[str, Stored] = {}
    moments: dict[str, Moments] = {}
    for group, shapes in enumerate(models[0]["param_shapes"]):
        updates = _updates(states[0]["base_optimizer_state"], group, models[0])
        for name, shape in shapes.items():
            places = [
                (rank, *_range(state["param_slice_mappings"][group][name]))
                for rank, state in enumerate(states)
                if name in state["param_slice_mappings"][group]
            ]
            located = _joined(f"{folder}: {name!r}", shape, places, flats, group)
            _add(weights, moments, str(name), located, updates)
    for name, part in (models[0].get("frozen_param_fragments") or {}).items():
        weights[str(name)] = held(part, f"{folder}: {name!r}")
    return weights, moments


def _range(address: Shell) -> tuple[int, int]:
    """(first, count) within the rank's flat tensor."""
    state = address.state
    values = state if isinstance(state, dict) else dict(zip(("numel", "start"), state, strict=True))
    return int(values["start"]), int(values["numel"])


def _sliced(
    folder: Path, models: Sequence[Mapping[Any, Any]], states: Sequence[Mapping[Any, Any]]
) -> _Located:
    _check_world(folder, states)
    world = len(states)
    flats = [_flats(folder, state, state[_SLICED], "optimizer_state_dict") for state in states]
    weights: dict[str, Stored] = {}
    moments: dict[str, Moments] = {}
    # Sub-groups follow each other: one parameter may begin in one and end in the next.
    joined = [{kind: [_Chain(flat[kind])] for kind in flat} for flat in flats]
    at = 0
    updates = _updates(states[0]["optimizer_state_dict"], 0, models[0])
    for shapes in models[0]["param_shapes"]:
        for name, shape in shapes.items():
            size = -(-math.prod(shape) // world)
            places = [(rank, at, size) for rank in range(world)]
            located = _joined(f"{folder}: {name!r}", shape, places, joined, 0, padded=True)
            _add(weights, moments, str(name), located, updates)
            at += size
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        parts = [model["frozen_param_fragments"][name] for model in models]
        whole = torch.cat([part.flatten() for part in parts])[: math.prod(shape)].view(shape)
        weights[str(name)] = held(whole, f"{folder}: {name!r}")
    return weights, moments


class _Chain:
    """Consecutive flat tensors as one."""

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self._parts = parts

    def numel(self) -> int:
        return sum(part.numel() for part in self._parts)

    def __getitem__(self, span: slice) -> torch.Tensor:
        parts, at = [], 0
        for part in self._parts:
            first, stop = max(span.start - at, 0), min(span.stop - at, part.numel())
            if first < stop:
                parts.append(part[first:stop])
            at += part.numel()
        return torch.cat(parts) if parts else torch.empty(0)


def _flats(
    folder: Path, state: Mapping[Any, Any], masters: Sequence[Any], key: str
) -> dict[str, list[Any]]:
    """A rank's flat tensors by group, without kinds that some group lacks."""
    base = state.get(key)
    per_group = base.get("state") if isinstance(base, Mapping) else None
    flats: dict[str, list[Any]] = {"param": list(masters)}
    for kind in ("exp_avg", "exp_avg_sq"):
        if isinstance(per_group, Mapping) and all(
            kind in (per_group.get(group) or {}) for group in range(len(masters))
        ):
            flats[kind] = [per_group[group][kind] for group in range(len(masters))]
    for kind, tensors in flats.items():
        for group, tensor in enumerate(tensors):
            what = f"{folder}: {kind} of group {group}"
            if len(held(tensor, what).shape) != 1 or tensor.numel() != masters[group].numel():
                raise ConfigError(f"{what}: has another shape than the masters")
    return flats


def _updates(base: Any, group: int, model: Mapping[Any, Any]) -> int:
    """Applied updates, from the optimizer's state, its group, or the engine's count."""
    value: Any = None
    if isinstance(base, Mapping):
        value = ((base.get("state") or {}).get(group) or {}).get("step")
        groups = base.get("param_groups") or []
        if value is None and group < len(groups):
            value = groups[group].get("step")
    if value is None:
        value = int(model.get("global_steps") or 0) - int(model.get("skipped_steps") or 0)
    count = float(value)
    if not count.is_integer() or count < 0:
        raise ValueError(f"step count {count}")
    return int(count)


def _joined(
    what: str,
    shape: Sequence[int],
    places: Sequence[tuple[int, int, int]],
    flats: Sequence[Mapping[str, Sequence[Any]]],
    group: int,
    *,
    padded: bool = False,
) -> dict[str, Stored]:
    """Join each kind of a parameter from (rank, first, count), in rank order."""
    sizes = tuple(int(size) for size in shape)
    numel = math.prod(sizes)
    total = sum(count for _, _, count in places)
    if total < numel or (total > numel and not padded):
        raise ConfigError(f"{what}: the ranks hold {total} of {numel} elements")
    for rank, first, count in places:
        if first < 0 or count < 0 or first + count > flats[rank]["param"][group].numel():
            raise ConfigError(f"{what}: lies outside of the tensors of rank {rank}")

    def reader(kind: str) -> Callable[[], torch.Tensor]:
        def read() -> torch.Tensor:
            parts = [flats[rank][kind][group][at : at + count] for rank, at, count in places]
            return torch.cat(parts)[:numel].view(sizes)

        return read

    kinds = [kind for kind in _KINDS if all(kind in flat for flat in flats)]
    return {kind: Stored(shape=sizes, read=reader(kind)) for kind in kinds}


def _add(
    weights: dict[str, Stored],
    moments: dict[str, Moments],
    name: str,
    tensors: Mapping[str, Stored],
    updates: int,
) -> None:
    weights[name] = tensors["param"]
    if len(tensors) == len(_KINDS):
        moments[name] = Moments(
            exp_avg=tensors["exp_avg"], exp_avg_sq=tensors["exp_avg_sq"], updates=updates
        )
