"""Any objects with ``state_dict`` and ``load_state_dict`` as the ring's shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from runner.distributed.agreement import Ranks
from runner.embed.codec import inline, outline, pack, unpack
from runner.embed.geometry import Geometry, local
from runner.embed.lanes import decode, encode
from runner.embed.places import Place, StagedState, home_of, place_of
from runner.system.error import CheckpointError, ConfigError
from runner.system.parsing import json_text

_OWN = "rank"  # the home of a tensor that each rank has its own of
_SMALL = 1 << 20  # bytes up to which tensors are compared between ranks at every save


class Stateful(Protocol):
    """A module, an optimizer, a scheduler, a loader: what torch calls stateful."""

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state_dict: Any) -> Any: ...


class TreeState(StagedState):
    """What the ``state_dict`` of each part holds: tensors as shards, everything else as JSON.

    A DTensor is saved by the ranks that hold it. A plain tensor is the same on all ranks and saved
    by each in part; where the ranks turn out to differ (a random generator, running statistics),
    each rank's is saved.

    Args:
        parts: by name. Those of a checkpoint must be the same.
    """

    def __init__(self, parts: Mapping[str, Stateful], ranks: Ranks, device: torch.device) -> None:
        super().__init__(ranks, device)
        self._parts = dict(parts)
        self._live: dict[str, torch.Tensor] = {}
        self._differing: set[str] = set()  # names of those that each rank has its own of
        self._compared: set[str] = set()

    # -- saving ---------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Take the state as it is, for :meth:`shards`; what is no tensor is returned. Collective.

        Raises:
            ConfigError: something in it cannot be saved, or is not there on all ranks.
        """
        own = self._ranks.all_or_none("reading state_dict()", self._read)
        self._agree()
        places: dict[str, Place] = {}
        lines: dict[str, Any] = {}
        likes: dict[Any, str] = {}
        for name in sorted(self._live, key=self._modules_first):
            tensor = self._live[name]
            like = likes.setdefault(_cut(tensor), name) if isinstance(tensor, DTensor) else None
            places[name] = self._place(name, tensor)
            home = _OWN if name in self._differing else home_of(tensor)
            lines[name] = [str(tensor.dtype), list(places[name].geometry.shape), like, home]
        self._hold(places)
        by_rank = self._ranks.gather(own)
        if all(one == by_rank[0] for one in by_rank):
            by_rank = by_rank[:1]
        return {"tensors": dict(sorted(lines.items())), "parts": by_rank}

    def _read(self) -> dict[str, Any]:
        """Every part's state as JSON; its tensors are :attr:`_live`."""
        self._live = {}
        return {name: pack(one.state_dict(), name, self._note) for name, one in self._parts.items()}

    def _note(self, tensor: torch.Tensor, name: str) -> Any:
        if not tensor.numel():  # the ring holds no tensor without elements
            return inline(tensor, name)
        while name in self._live:  # {"a.b": x} and {"a": {"b": y}}
            name += "'"
        self._live[name] = tensor
        return name

    def _modules_first(self, name: str) -> tuple[bool, str]:
        """What an optimizer's state is like is a parameter: that is there before its state is."""
        part = max((p for p in self._parts if name.startswith(p)), key=len, default="")
        return not isinstance(self._parts.get(part), nn.Module), name

    def _place(self, name: str, tensor: torch.Tensor) -> Place:
        if name in self._differing:
            where = self._row(tensor.shape, self._ranks.rank, self._ranks.world_size)
        else:
            where = self.geometry_of(tensor, name)
        place = place_of(name, tensor.dtype, where)
        place.read = lambda: local(tensor)
        return place

    def _row(self, shape: Sequence[int], row: int, rows: int) -> Geometry:
        """Of a tensor that each rank has its own of: one after the other."""
        count = torch.Size(shape).numel()
        return Geometry(
            shape=(rows, *shape), start=row * count, count=count, index=0, copies=1, group=None
        )

    # -- agreeing -------------------------------------------------------------------------

    def _agree(self) -> None:
        """All ranks hold the same tensors; find those that are not equal. Collective.

        Raises:
            ConfigError: a tensor is not there on all ranks, or is of another shape or type.
        """
        ranks = self._ranks
        if ranks.world_size == 1:
            return
        own = {
            name: [str(t.dtype), list(t.shape), isinstance(t, DTensor)]
            for name, t in sorted(self._live.items())
        }
        if len(set(ranks.gather(_digest_of(own)))) > 1:
            raise ConfigError(_words(ranks.gather(own)))
        digests = dict(self._digests())
        self._compared |= set(digests)
        if len(set(ranks.gather(_digest_of(digests)))) > 1:
            by_rank = ranks.gather(digests)
            self._differing |= {name for name in digests if len({one[name] for one in by_rank}) > 1}
        self._differing &= set(self._live)

    def _digests(self) -> Iterator[tuple[str, str]]:
        """Of plain tensors: all the first time, then the small ones."""
        for name, tensor in sorted(self._live.items()):
            size = tensor.numel() * tensor.dtype.itemsize
            if isinstance(tensor, DTensor) or (size > _SMALL and name in self._compared):
                continue
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            yield name, xxhash.xxh3_64_hexdigest(flat.numpy().data)

    # -- loading --------------------------------------------------------------------------

    def expect(self, tensors: Mapping[str, Any]) -> None:
        self._read()
        super().expect(tensors)

    def _room(self, name: str, shape: Sequence[int], like: str | None, home: str) -> Geometry:
        if home == _OWN:
            return self._row(shape[1:], self._ranks.rank % shape[0], shape[0])
        cut = self._cut_as(name, shape, like)
        return self._replicated(shape) if cut is None else self.geometry_of(cut, name)

    def _cut_as(self, name: str, shape: Sequence[int], like: str | None) -> DTensor | None:
        """A live tensor as which this one is to be cut; None: it is not cut."""
        for key in (name, like):
            live = None if key is None else self._live.get(key)
            if live is not None and list(live.shape) == list(shape):
                return live if isinstance(live, DTensor) else None
        return None

    def load_json(self, stored: Mapping[str, Any]) -> None:
        """Give every part what was loaded. Collective.

        Raises:
            CheckpointError: the checkpoint holds other parts, or one does not take its own.
        """
        by_rank = stored.get("parts")
        if not isinstance(by_rank, list) or not by_rank:
            raise CheckpointError("the checkpoint is not one of runner.Ring; choose another out")
        own = by_rank[self._ranks.rank % len(by_rank)]
        if set(own) != set(self._parts):
            raise CheckpointError(
                f"the checkpoint holds {sorted(own)}, but the ring was given {sorted(self._parts)}"
            )
        self._ranks.all_or_none("loading the state", lambda: self._give(own))
        self._loading = {}

    def _give(self, stored: Mapping[str, Any]) -> None:
        for name, part in self._parts.items():
            try:
                part.load_state_dict(unpack(stored[name], self._tensor))
            except Exception as error:  # theirs: of any kind
                words = f"{type(error).__name__}: {error}"[:500]
                raise CheckpointError(
                    f"{name!r} does not take its state of the checkpoint ({words})"
                ) from error

    def _tensor(self, name: Any) -> torch.Tensor:
        if not isinstance(name, str):
            return outline(name)
        _, shape, like, home = self._lines[name]
        if home != _OWN:
            return self._loaded(name, self._cut_as(name, shape, like))
        staged, live = self._loading[name].staged, self._live.get(name)
        assert staged is not None
        made = decode(staged, self._loading[name].dtype).view(tuple(shape[1:]))
        return made if live is None else made.to(live.device)

    # -- digest ---------------------------------------------------------------------------

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor as lanes on the CPU) of all tensors. Collective.

        Of those that each rank has its own of, the first rank's.
        """
        self._read()
        for name in sorted(self._live):
            tensor = self._live[name].detach()
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            yield name, encode(whole.cpu())


def _cut(tensor: DTensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tuple(tensor.placements), tensor.device_mesh


def _digest_of(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json_text(value).encode())


def _words(by_rank: Sequence[Mapping[str, Any]]) -> str:
    """Which tensor is not the same on all ranks."""
    names = sorted({name for one in by_rank for name in one})
    for name in names:
        values = [one.get(name) for one in by_rank]
        if any(one != values[0] for one in values):
            seen = ["none" if one is None else f"{one[0]} {one[1]}" for one in values]
            return (
                f"Ring: tensor {name!r} differs between ranks: {seen}; all ranks must hold the "
                "same names, shapes and types"
            )
    return "Ring: ranks hold other tensors"
