"""The protocols and values through which the ring knows other rooms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from runner.policy.retention.records import Record, State, Tier
from runner.system.error import CheckpointError

if TYPE_CHECKING:
    import torch


class SavedShard(Protocol):
    """See ``runner.engine.protocol.Shard``."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def start(self) -> int: ...
    @property
    def local(self) -> torch.Tensor: ...


class ShardedState(Protocol):
    """The state to save, in shards: the part of an engine that the ring needs."""

    @property
    def replica(self) -> tuple[int, int]: ...
    def shards(self) -> Sequence[SavedShard]: ...
    def update_counts(self) -> dict[str, int]: ...
    def complete_copies(self) -> None:
        """Collective: of each shard every copy has filled its part; all get the whole."""
        ...

    def finish_load(self, update_counts: Mapping[str, int]) -> None:
        """Collective: called after every rank has filled its shards."""
        ...


def check_counts(sharded: ShardedState, counts: Mapping[str, int], source: Path) -> None:
    """Check the argument of :meth:`ShardedState.finish_load`, while a rank may still fail alone.

    Raises:
        CheckpointError: ``source`` lacks the update count of a tensor.
    """
    missing = sorted(set(sharded.update_counts()) - set(counts))
    if missing:
        raise CheckpointError(f"{source}: has no update count of {missing[0]!r}")


class RingRanks(Protocol):
    """See ``runner.distributed.agreement.Ranks``."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def sum(self, numbers: list[float]) -> list[float]: ...
    def gather(self, value: Any) -> list[Any]: ...
    def from_first(self, value: Any) -> Any: ...
    def all_or_none(self, what: str, work: Callable[[], Any]) -> Any: ...
    def all_or_none_patiently(self, what: str, work: Callable[[], Any]) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a checkpoint belongs to."""

    config_digest: str
    data_fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMetadata:
    """What a checkpoint holds besides its tensors: the run's own state; JSON values only.

    ``metrics_bytes`` and ``journal_lines`` are the lengths of rank 0's files.
    """

    step: int
    cursor: int
    train_state: Mapping[str, Any]
    metrics_bytes: int
    journal_lines: int

    def metadata(self) -> dict[str, Any]:
        """These five fields by name, without those that a subclass adds."""
        return {known.name: getattr(self, known.name) for known in fields(CheckpointMetadata)}

    def record(self, serial: int, tier: Tier = Tier.disk) -> Record:
        """The ring's record of a committed checkpoint with this metadata."""
        return Record(
            serial=serial, step=self.step, cursor=self.cursor, state=State.committed, tier=tier
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCheckpoint:
    """A checkpoint that is being saved; ``counts`` are the optimizer's steps.

    ``disk`` False: a snapshot in memory only.
    """

    serial: int
    metadata: CheckpointMetadata
    counts: Mapping[str, int]
    disk: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored(CheckpointMetadata):
    """What was loaded, and from where."""

    serial: int
    tier: Tier
