"""How transformers keeps a model on disk, where that differs from the model in memory.

Parameters are renamed, and experts that are one tensor in memory are stored one by one. Owns both
ways between the names; must not know files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from runner.system.error import ConfigError

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


def parts_of(
    name: str, shape: Sequence[int], layout: StoredLayout, stored: Mapping[str, str]
) -> list[str] | None:
    """The stored tensors that make a parameter; None where it is not put together, or lacks one.

    Args:
        name, shape: of the parameter.
        stored: stored names by their name in the model's words.
    """
    fusion = layout.fusion_of(name)
    if fusion is None or not shape:
        return None
    names = [stored.get(part) for part in fusion.names(name, shape[0])]
    return None if None in names else [known for known in names if known is not None]


def part_shape(shape: Sequence[int], parts: int) -> tuple[int, ...]:
    """The shape that each of the parts must have."""
    per_expert = parts // shape[0]
    return (shape[1] // per_expert, *shape[2:])


def _is_fusion(transform: Any, sources: Sequence[str], targets: Sequence[str]) -> bool:
    steps = [(type(step).__name__, getattr(step, "dim", None)) for step in transform.operations]
    is_simple = len(targets) == 1 and all(source.count(_NUMBER) == 1 for source in sources)
    one_each, several = [(_MERGE, 0)], [(_MERGE, 0), (_CONCATENATE, 1)]
    return is_simple and (steps == several or (steps == one_each and len(sources) == 1))
