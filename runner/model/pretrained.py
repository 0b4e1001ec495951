"""A Hugging Face model from a local folder: built from its ``config.json``, adapted by PEFT.

Owns what distinguishes such a model from other users' networks (:mod:`runner.model.blueprint`):
its initial weights, and how documents in one window are separated. Nothing is
downloaded and no code in the folder is run. Must not know how weights are stored.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

import torch
from torch import Tensor, nn

from runner.config.mappings import LoraSettings
from runner.model.blueprint import GuestBlueprint
from runner.model.objective import (
    SEGMENTS,
    Batch,
    GuestObjective,
    Losses,
    accepted_by,
    embeddings_of,
)
from runner.model.quantised import Held, digest_of, quantise, quantised_layers
from runner.model.recompute import NONE, SELECTIVE, selective_contexts
from runner.model.recorded import named_tensors, put_tensor
from runner.model.segments import segment_mask
from runner.system.error import ConfigError, imported
from runner.system.files import read_bounded
from runner.system.parsing import parse_json
from runner.system.units import first_few

CONFIG: Final = "config.json"
_CONFIG_BYTES: Final = 4 << 20
_TELLS: Final = ("quant_method", "bits", "load_in_4bit", "load_in_8bit", "quant_type")
# What runner.Guard takes of what transformers loads.
_IN_A_LOOP: Final = {
    "bitsandbytes": "; or load it in a loop of your own with runner.Guard",
    "torchao": "; or, of int8, load it in a loop of your own with runner.Guard",
}
_SHOWN: Final = 5
_WORDS: Final = 500
# How PEFT wraps a layer's name, and the names of its own parameters.
_WRAPPED: Final = (("base_model.model.", ""), (".base_layer.", "."))
_ADAPTER: Final = ".lora_"
_LAYERS: Final = ("Linear", "Conv1D")
# Stored beside the weights by old releases; computed now.
_COMPUTED: Final = (r"rotary_emb\.inv_freq$",)


class Weights(Protocol):
    """Stored weights; see :class:`runner.convert.weights.StoredWeights`."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def signature(self) -> str: ...

    def read(self, name: str, start: int, count: int) -> Tensor: ...


def read_config(folder: Path) -> Any:
    """Read transformers' configuration of the model in a folder.

    Raises:
        ConfigError: there is none, it names no model of transformers, or one that only
            code in the folder can build, or quantised weights.
    """
    transformers = imported("transformers", "model=hf", "hf")
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"model.path={folder}: has no {CONFIG}; give the folder of a model")
    tree = read_tree(folder / CONFIG)
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        has_class = type(config) in transformers.AutoModelForCausalLM._model_mapping
    except Exception as error:  # the library raises errors of many kinds
        raise ConfigError(f"model.path={folder}: {CONFIG} {_message(error)}") from error
    if not has_class:
        raise ConfigError(
            f"model.path={folder}: {CONFIG} is of model_type={config.model_type}, which "
            "transformers has no decoder for (AutoModelForCausalLM); name its code with "
            "model._target_"
        )
    found = tree.get("quantization_config")
    if found is not None:
        raise ConfigError(f"model.path={folder}: {CONFIG} has a {_quantised_by(found)}")
    return config


def _quantised_by(found: Any) -> str:
    """What a ``quantization_config`` says, and what to do instead of training on it."""
    told = found if isinstance(found, dict) else {}
    given = [f"{key}={told[key]}"[:60] for key in _TELLS if told.get(key)]
    loop = _IN_A_LOOP.get(str(told.get("quant_method")), "")
    return (
        f"quantization_config ({', '.join(given) or 'without quant_method'}); quantised weights "
        "cannot be trained, and adapters are trained here on what a run has quantised itself: "
        f"take the model that they were made from, with model.quantize=nf4, fp4 or int8{loop}"
    )


def read_tree(path: Path) -> dict[str, Any]:
    """Read a ``config.json``.

    Raises:
        ConfigError: it is not valid.
    """
    try:
        tree = parse_json(read_bounded(path, _CONFIG_BYTES, follow=True))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model.path: {path}: no readable JSON ({_message(error)})") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"model.path: {path}: a JSON {type(tree).__name__}, no object with keys")
    return tree


def build(
    config: Any, lora: LoraSettings | None, *, recompute: str, quantize: str | None = None
) -> nn.Module:
    """Build the network with fresh weights, in FP32 and trainable.

    Args:
        quantize: whether frozen linear layers but the head wait for weights in fewer bits, and of
            which kind.
        recompute: none, blocks or selective, see :mod:`runner.model.recompute`.

    Raises:
        ConfigError: it cannot be built, or has none of the layers to adapt.
    """
    transformers = imported("transformers", "model=hf", "hf")
    try:
        network: nn.Module = transformers.AutoModelForCausalLM.from_config(
            copy.deepcopy(config), trust_remote_code=False, dtype=torch.float32
        )
    except ValueError as error:
        raise ConfigError(f"model.path: the model cannot be built: {_message(error)}") from error
    network.train()
    if recompute != NONE:
        contexts = {"context_fn": selective_contexts} if recompute == SELECTIVE else {}
        network.activation_checkpointing_enable(  # type: ignore[operator]
            {"use_reentrant": False, **contexts}
        )
    if lora is not None:
        network = _adapted(network, lora)
    if quantize is not None:
        head = embeddings_of(base_network(network), "output")
        quantise(network, quantize, skip=(head,))
    return network


def _adapted(network: nn.Module, lora: LoraSettings) -> nn.Module:
    peft = imported("peft", "model.lora", "hf")
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    settings = peft.LoraConfig(
        r=lora.r,
        target_modules=targets,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        bias="none",
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            # PEFT uses deprecated names of transformers, and warns of layers it transposes itself.
            warnings.simplefilter("ignore")
            # All parameters in one dtype: DeepSpeed's stage 3 needs that.
            adapted: nn.Module = peft.get_peft_model(
                network, settings, autocast_adapter_dtype=False
            )
    except ValueError as error:
        linear = {
            n.rpartition(".")[2] for n, m in network.named_modules() if type(m).__name__ in _LAYERS
        }
        raise ConfigError(
            f"model.lora: PEFT refuses it: {_message(error)}; layers that can be adapted end with "
            f"{', '.join(sorted(linear))}"
        ) from error
    return adapted


def _message(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:_WORDS]


def base_network(network: nn.Module) -> nn.Module:
    """transformers' own model, below PEFT's wrapper where there is one."""
    method = getattr(network, "get_base_model", None)
    inner: nn.Module = method() if callable(method) else network
    return inner


def base_name(name: str) -> str:
    """A parameter's name without PEFT's wrapper."""
    for wrapped, plain in _WRAPPED:
        name = name.replace(wrapped, plain)
    return name


def is_adapter(name: str) -> bool:
    """Whether PEFT added the parameter."""
    return _ADAPTER in name


def layout_on_disk(network: nn.Module) -> StoredLayout:
    """How files of such a model name and cut its tensors; raises as :func:`stored_layout`."""
    try:
        from transformers import conversion_mapping
    except ImportError:  # a release that has none
        return StoredLayout(renames=(), fusions=())
    base: Any = base_network(network)
    return stored_layout(
        conversion_mapping.get_model_conversion_mapping(base), base.config.model_type
    )


class PretrainedObjective(GuestObjective):
    """Like its base, with transformers' interface for documents in one window.

    ``segments`` (int32 ``[B, T]``, the document of each token) becomes an ``attention_mask`` bool
    ``[B, 1, T, T]`` and ``position_ids`` int64 ``[B, T]`` that begin anew in each.
    """

    def _accepted(self) -> frozenset[str]:
        return accepted_by(base_network(self.network).forward)  # PEFT's own hides them

    def forward(self, batch: Batch) -> Losses:
        given = dict(batch)
        segments = given.pop(SEGMENTS, None)
        if segments is not None:
            given["attention_mask"] = segment_mask(segments)
            given["position_ids"] = positions_within(segments)
        return super().forward(given)


def positions_within(segments: Tensor) -> Tensor:
    """Positions of tokens within their documents, int64 ``[B, T]``; ``segments`` as in a batch."""
    places = torch.arange(segments.shape[1], device=segments.device).expand(segments.shape)
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return places - torch.where(begins, places, 0).cummax(dim=1).values


@dataclass(frozen=True, kw_only=True)
class PretrainedBlueprint(GuestBlueprint):
    """A Hugging Face model, and the weights that it begins with.

    Args:
        path: of the folder, for messages.
        open_weights: opens the initial weights; None: fresh ones. Not called by a run that resumes
            from a checkpoint, but for those to be quantised.
    """

    path: str
    open_weights: Callable[[], Weights] | None
    objective_type: ClassVar[type[GuestObjective]] = PretrainedObjective

    @property
    def setting(self) -> str:
        return f"model.path={self.path}"

    @cached_property
    def _weights(self) -> Weights | None:
        return None if self.open_weights is None else self.open_weights()

    @cached_property
    def _stored_names(self) -> Mapping[str, Sequence[str]]:
        """The names of the stored tensors that make each parameter, in the order of its memory."""
        weights = self._weights
        return {} if weights is None else match(self.twin.network, weights.shapes, self.setting)

    def signature(self) -> str:
        """A digest of what decides the weights; raises as :func:`match`."""
        digest = super().signature()
        if self._weights is None:
            return digest
        return f"{digest} {self._weights.signature()} {len(self._stored_names)}"

    def initial(self, seed: int, name: str, shape: Sequence[int], start: int, count: int) -> Tensor:
        stored = self._stored_names.get(name)
        if stored is None or self._weights is None:
            return super().initial(seed, name, shape, start, count)
        return _read_parts(self._weights, stored, start, count)

    @cached_property
    def _held(self) -> dict[tuple[str, torch.device], Held]:
        return {}

    def held(self, device: torch.device) -> Mapping[str, Held]:
        """The quantised weights by layer; reads and makes them once.

        Raises:
            ConfigError: they cannot be read.
        """
        held: dict[str, Held] = {}
        for name, layer in quantised_layers(self.twin.network):
            assert self._weights is not None
            if (name, device) not in self._held:
                stored, size = self._stored_names[f"{name}.weight"], math.prod(layer.shape)
                values = _read_parts(self._weights, stored, 0, size).view(layer.shape)
                self._held[name, device] = Held.of(values.to(device), layer.kind)
            held[name] = self._held[name, device]
        return held

    def base_digest(self, device: torch.device) -> str:
        """A digest of the quantised weights, which no checkpoint holds; raises as :meth:`held`."""
        return digest_of({name: one.digest() for name, one in self.held(device).items()})

    def finish(self, network: nn.Module, device: torch.device) -> None:
        super().finish(network, device)
        held = self.held(device)
        for name, layer in quantised_layers(network):
            layer.held = held[name]
        for name, tensor in kept_buffers(self.twin.network).items():
            weights = self._weights
            if weights is None or base_name(name) not in weights.shapes:
                continue
            values = weights.read(base_name(name), 0, tensor.numel())
            owner, _, own = name.rpartition(".")
            value = values.view(tensor.shape).to(device=device, dtype=tensor.dtype)
            put_tensor(network.get_submodule(owner), own, value)

    def takes_segments(self) -> bool:
        """Whether attention can stay within documents: the model takes masks, has none itself."""
        base = base_network(self.twin.network)
        config: Any = base.config
        window = getattr(config, "sliding_window", None)
        is_hidden = window is not None and window < self.seq_len
        takes = {"attention_mask", "position_ids"} <= accepted_by(base.forward)
        return takes and config._attn_implementation == "sdpa" and not is_hidden


def _read_parts(weights: Weights, names: Sequence[str], start: int, count: int) -> Tensor:
    """Elements ``[start, start + count)`` of several tensors one after another."""
    parts, before = [], 0
    for name in names:
        size = math.prod(weights.shapes[name])
        first, last = max(start - before, 0), min(start + count - before, size)
        if first < last:
            parts.append(weights.read(name, first, last - first))
        before += size
    return parts[0] if len(parts) == 1 else torch.cat([torch.empty(0), *parts])


def kept_buffers(network: nn.Module) -> dict[str, Tensor]:
    """Buffers that belong to the weights; most models have none."""
    state = network.state_dict(keep_vars=True)
    parameters = {id(parameter) for parameter in network.parameters()}
    return {
        name: tensor
        for name, tensor in named_tensors(network)
        if name in state and id(tensor) not in parameters
    }


def match(
    network: nn.Module, stored: Mapping[str, tuple[int, ...]], model_name: str
) -> Mapping[str, Sequence[str]]:
    """Match each parameter of the network with its stored tensors; adapters have none.

    One each, but for experts that are one parameter in memory.

    Names must be the network's, or lack (or have) the prefix of its inner model, as files of that
    alone do.

    Raises:
        ConfigError: tensors are missing, unexpected or of another shape; names them.
    """
    base = base_network(network)
    prefix = f"{getattr(base, 'base_model_prefix', '')}."
    places = _places(network)
    known = {base_name(name) for name in network.state_dict() if not is_adapter(name)}
    layout = layout_on_disk(network)
    known |= {base_name(f"{name}.weight") for name, _ in quantised_layers(network)}
    known |= {
        part
        for own, (aliases, shape) in places.items()
        if (fusion := layout.fusion_of(aliases[0])) and shape
        for part in fusion.names(aliases[0], shape[0])
    }
    names = _named(known, stored.keys(), prefix, layout)
    matched: dict[str, Sequence[str]] = {}
    missing, misshapen = [], []
    for own, (aliases, shape) in places.items():
        name = next((names[alias] for alias in aliases if alias in names), None)
        parts = [name] if name else _parts(aliases[0], shape, layout, names)
        if not parts:
            missing.append(aliases[0])
            continue
        needed = shape if name else part_shape(shape, len(parts))
        wrong = [part for part in parts if stored[part] != needed]
        misshapen += [f"{part} {list(stored[part])}, needed {list(needed)}" for part in wrong]
        matched[own] = parts
    ignored = [*_COMPUTED, *(getattr(base, "_keys_to_ignore_on_load_unexpected", None) or ())]
    unexpected = [
        name
        for name in stored.keys() - set(names.values())
        if not any(re.search(pattern, name) for pattern in ignored)
    ]
    kinds = (
        ("missing", missing),
        ("unexpected", sorted(unexpected)),
        ("of another shape", misshapen),
    )
    lines = [
        f"  {kind}: {first_few(names, _SHOWN, between='; ')}" for kind, names in kinds if names
    ]
    if lines:
        raise ConfigError(
            f"{model_name}: the weights do not fit the model of its {CONFIG}:\n"
            + "\n".join(lines)
            + "\nBoth must be of one model; model.init=random begins from fresh weights"
        )
    return matched


def _places(network: nn.Module) -> dict[str, tuple[list[str], tuple[int, ...]]]:
    """The names and shape of each parameter that is not an adapter; tied ones have several."""
    owners: dict[int, str] = {}
    places: dict[str, tuple[list[str], tuple[int, ...]]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        if is_adapter(name):
            continue
        own = owners.setdefault(id(parameter), name)
        places.setdefault(own, ([], tuple(parameter.shape)))[0].append(base_name(name))
    for name, layer in quantised_layers(network):
        places[f"{name}.weight"] = ([base_name(f"{name}.weight")], layer.shape)
    return places


def _named(
    known: set[str], stored: Iterable[str], prefix: str, layout: StoredLayout
) -> dict[str, str]:
    """Map the network's names to those in the files, as far as they exist."""
    names = {}
    for name in stored:
        renamed = layout.renamed(name)
        for candidate in (name, f"{prefix}{name}", name.removeprefix(prefix), renamed):
            if candidate in known:
                names[candidate] = name
                break
    return names


# ---- how transformers keeps a model on disk, where that differs from the model in memory


_MERGE, _CONCATENATE = "MergeModulelist", "Concatenate"
_NUMBER: Final = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """Parameters whose name ends with ``target`` hold the experts of all ``sources``.

    ``[E, n * I, H]`` from E experts with n matrices ``[I, H]`` each, stored as ``sources`` with
    the expert's number for ``*``. So in flat memory come the matrices of expert 0, of expert 1,
    and so on.
    """

    target: str
    sources: tuple[str, ...]

    def names(self, name: str, experts: int) -> list[str]:
        """The stored names of a parameter's parts, in the order of its memory."""
        prefix = name.removesuffix(self.target)
        numbers = range(experts)
        return [f"{prefix}{s.replace(_NUMBER, str(n))}" for n in numbers for s in self.sources]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLayout:
    """``renames``: regular expressions of stored names, and what they become in memory."""

    renames: Sequence[tuple[str, str]]
    fusions: Sequence[Fusion]

    def fusion_of(self, name: str) -> Fusion | None:
        """The fusion that a parameter of the model comes from."""
        return next((fusion for fusion in self.fusions if name.endswith(fusion.target)), None)

    def renamed(self, name: str) -> str:
        """A stored name, in the model's words."""
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name

    def stored(self, name: str) -> str:
        """A name in the model's words, as it is stored, where the renaming can be undone."""
        for pattern, replacement in reversed(self.renames):
            is_plain = not re.search(r"[\\^$*+?{}\[\]|()]", pattern + replacement)
            name = name.replace(replacement, pattern) if is_plain else name
        return name


def stored_layout(transforms: Iterable[Any], model_type: str) -> StoredLayout:
    """Read transformers' conversions of a model.

    Raises:
        ConfigError: one of them does more than to rename tensors and to put experts together.
    """
    renames: list[tuple[str, str]] = []
    fusions: list[Fusion] = []
    for transform in transforms:
        sources, targets = list(transform.source_patterns), list(transform.target_patterns)
        if type(transform).__name__ == "WeightRenaming":
            renames += [(source, targets[0]) for source in sources]
        elif _is_fusion(transform, sources, targets):
            fusions.append(Fusion(target=targets[0], sources=tuple(sources)))
        else:
            raise ConfigError(
                f"model.path: transformers keeps weights of model_type={model_type} in another "
                "layout on disk than in memory, which is neither read nor written here; "
                "model.init=random and an export without --format work"
            )
    return StoredLayout(renames=renames, fusions=fusions)


def _parts(
    name: str, shape: Sequence[int], layout: StoredLayout, stored: Mapping[str, str]
) -> list[str]:
    """The stored tensors that make a parameter; none where it is not put together, or lacks one.

    Args:
        name, shape: of the parameter.
        stored: stored names by their name in the model's words.
    """
    fusion = layout.fusion_of(name)
    names = fusion.names(name, shape[0]) if fusion is not None and shape else []
    return [stored[part] for part in names] if stored.keys() >= set(names) else []


def part_shape(shape: Sequence[int], parts: int) -> tuple[int, ...]:
    """The shape that each of the parts must have."""
    per_expert = parts // shape[0]
    return (shape[1] // per_expert, *shape[2:])


def _is_fusion(transform: Any, sources: Sequence[str], targets: Sequence[str]) -> bool:
    steps = [(type(step).__name__, getattr(step, "dim", None)) for step in transform.operations]
    is_simple = len(targets) == 1 and all(source.count(_NUMBER) == 1 for source in sources)
    one_each, several = [(_MERGE, 0)], [(_MERGE, 0), (_CONCATENATE, 1)]
    return is_simple and (steps == several or (steps == one_each and len(sources) == 1))
