"""The ring of checkpoints for any training script, without the guard."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from runner.checkpoint.protocol import CheckpointMetadata
from runner.checkpoint.state_digest import state_digest
from runner.distributed.agreement import Ranks
from runner.embed.exits import Holder, journal_errors
from runner.embed.opening import joined, open_run, ring_config
from runner.embed.state.codec import dtype_of, inline, outline, pack, unpack
from runner.embed.state.geometry import Geometry, local, replicated, row
from runner.embed.state.staged_state import EXPERTS, StagedState, differing_norms, home_of, norm_of
from runner.embed.state.stages import Pipeline, Stages
from runner.model.quantised import quantised_weights
from runner.policy.decision.history import Incident
from runner.policy.retention.records import State, Tier, resume_order
from runner.system.error import CheckpointError, ConfigError
from runner.system.parsing import json_text
from runner.system.units import counted

# The state of any objects with ``state_dict`` and ``load_state_dict`` as shards of the ring.

_OWN = "rank"  # stored for a tensor that differs between ranks
_NOTHING = "(no tensor)"
_TOLERANCE = 1e-6  # of the norms of copies
_SMALL = 1 << 20  # bytes up to which tensors are compared between ranks at every save


class Stateful(Protocol):
    """An object with state, in torch's sense: a module, optimizer, scheduler or loader."""

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state_dict: Any) -> Any: ...


class TreeState(StagedState):
    """The ``state_dict`` of each part: tensors as shards, everything else as JSON.

    A DTensor is saved by the ranks that hold it. A plain tensor is saved once if it is the same on
    all ranks; if it differs (a random generator, running statistics), each rank's is saved.

    Args:
        parts: by name; a checkpoint must have the same names.
        stages: of the pipeline of which they are one stage; None: there is none.
    """

    def __init__(
        self,
        parts: Mapping[str, Stateful],
        ranks: Ranks,
        device: torch.device,
        stages: Stages | None = None,
    ) -> None:
        super().__init__(ranks, device, stages)
        self._parts = dict(parts)
        # Of a tensor's name: the state of an optimizer numbers its parameters on each stage anew.
        self._prefix = f"stage{self.stages.number}/" if self.stages.count > 1 else ""
        self._live: dict[str, torch.Tensor] = {}
        self._differing: set[str] = set()  # names of tensors that differ between ranks
        self._compared: set[str] = set()
        is_read = False
        with contextlib.suppress(Exception):  # a save says what is wrong, on all ranks
            is_read = bool(self._read())
        if all(ranks.gather(is_read)):
            self._meshes.learn(tensor for _, tensor in sorted(self._live.items()))

    # -- saving ---------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Take the current state for :meth:`shards`; returns everything else as JSON. Collective.

        Raises:
            ConfigError: something cannot be saved, or is missing on a rank.
        """
        own_parts = self._ranks.all_or_none("reading state_dict()", self._read)
        if not any(self._ranks.gather(bool(self._live))):
            self._live[_NOTHING] = torch.zeros(1)  # the ring cannot save no tensor at all
        self._agree()
        likes: dict[Any, str] = {}
        for name in sorted(self._live, key=self._modules_first):
            tensor, like = self._live[name], None
            if isinstance(tensor, DTensor):
                sharding = tuple(tensor.shape), tuple(tensor.placements), tensor.device_mesh
                like = likes.setdefault(sharding, name)
            where, home = self.geometry_of(tensor, name), home_of(tensor)
            if name in self._differing:
                own = self.stages.index, len(self.stages.own.ranks)
                where, home = row(tensor.shape, *own), _OWN
            self._take(name, partial(local, tensor), where, like, home)
        entries = self._end_capture()
        by_rank = self._ranks.gather(own_parts)
        if self.stages.count > 1:
            by_stage = [[by_rank[rank] for rank in ranks] for ranks in self.stages.members]
            return {"tensors": entries, "parts": by_stage}
        if all(parts == by_rank[0] for parts in by_rank):
            by_rank = by_rank[:1]
        return {"tensors": entries, "parts": by_rank}

    def _read(self) -> dict[str, Any]:
        """Every part's state as JSON; fills :attr:`_live` with its tensors."""
        self._live = {}
        return {
            name: pack(part.state_dict(), name, self._take_tensor)
            for name, part in self._parts.items()
        }

    def _take_tensor(self, tensor: torch.Tensor, name: str) -> Any:
        if not tensor.numel():  # the ring cannot hold an empty tensor
            return inline(tensor, name)
        name = self._prefix + name
        while name in self._live:  # {"a.b": x} and {"a": {"b": y}}
            name += "'"
        self._live[name] = tensor
        return name

    def _modules_first(self, name: str) -> tuple[bool, str]:
        """A sort key: modules first, because an optimizer's state is sharded like a parameter."""
        path = name.removeprefix(self._prefix)
        part = max((p for p in self._parts if path.startswith(p)), key=len, default="")
        return not isinstance(self._parts.get(part), nn.Module), name

    # -- agreeing -------------------------------------------------------------------------

    def _agree(self) -> None:
        """Check that a stage's ranks hold the same names; find tensors that differ. Collective.

        Raises:
            ConfigError: a tensor is missing on a rank, or has another shape or dtype; or ranks
                that are taken to hold the same part of a DTensor hold others.
        """
        ranks = self._ranks
        if ranks.world_size == 1:
            return
        own = {
            name: [str(t.dtype), list(t.shape), isinstance(t, DTensor)]
            for name, t in sorted(self._live.items())
        }
        differing = self._stages_that_differ(ranks.gather(_digest_of(own)))
        if differing:
            by_rank = ranks.gather(own)
            raise ConfigError(_describe_difference([by_rank[rank] for rank in differing[0]]))
        norms = self._norms_of_copies()
        digests = dict(self._digests())
        self._compared |= set(own)
        by_rank = ranks.gather([_digest_of(digests), norms])
        if differ := differing_norms([norms for _, norms in by_rank], _TOLERANCE):
            raise ConfigError(
                "Ring: ranks that are taken to hold the same parts of tensors hold others (their "
                f"norms: {differ}), which would be lost. {EXPERTS}"
            )
        if self._stages_that_differ([digest for digest, _ in by_rank]):
            gathered = ranks.gather(digests)
            alike = [gathered[rank] for rank in self.stages.own.ranks]
            self._differing |= {name for name in digests if len({own[name] for own in alike}) > 1}
        self._differing &= set(self._live)

    def _stages_that_differ(self, by_rank: Sequence[str]) -> list[tuple[int, ...]]:
        """The ranks of each stage on which a value is not the same."""
        return [ranks for ranks in self.stages.members if len({by_rank[r] for r in ranks}) > 1]

    def _norms_of_copies(self) -> dict[str, float]:
        """Of the DTensors that were never compared, by the ranks that hold the same parts."""
        norms: dict[str, float] = defaultdict(float)
        for name, tensor in self._live.items():
            if isinstance(tensor, DTensor) and name not in self._compared:
                norms[str(hash(self.holders_of(tensor)))] += float(norm_of(local(tensor)))
        return norms

    def _digests(self) -> Iterator[tuple[str, str]]:
        """Digests of plain tensors: all the first time, later only small ones."""
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

    def _is_own(self, name: str) -> bool:
        return name.startswith(self._prefix) or name == _NOTHING

    def _geometry_for(
        self, name: str, shape: Sequence[int], like: str | None, home: str
    ) -> Geometry:
        if home == _OWN:
            return row(shape[1:], self.stages.index % shape[0], shape[0])
        cut = self._sharded_like(name, shape, like)
        if cut is not None:
            return self.geometry_of(cut, name)
        return replicated(shape, self.stages.own, self._ranks.rank)

    def _sharded_like(self, name: str, shape: Sequence[int], like: str | None) -> DTensor | None:
        """The live DTensor whose sharding a tensor has; None if it is not sharded."""
        for key in (name, like):
            live = None if key is None else self._live.get(key)
            if live is not None and list(live.shape) == list(shape):
                return live if isinstance(live, DTensor) else None
        return None

    def load_json(self, stored: Mapping[str, Any]) -> None:
        """Load the state of every part. Collective.

        Raises:
            CheckpointError: the checkpoint holds other parts, or a part refuses its state.
        """
        by_rank = stored.get("parts")
        if not isinstance(by_rank, list) or not by_rank:
            raise CheckpointError("the checkpoint was not made by runner.Ring; choose another out")
        num_stages = len(by_rank) if isinstance(by_rank[0], list) else 1
        if num_stages != self.stages.count:
            raise CheckpointError(
                f"the checkpoint is of a pipeline of {counted(num_stages, 'stage')}, this ring has "
                f"{self.stages.count}: Ring loads it on as many only. runner.Guard loads weights "
                "and optimizers on any number"
            )
        by_rank = by_rank[self.stages.number] if num_stages > 1 else by_rank
        own = by_rank[self.stages.index % len(by_rank)]
        if set(own) != set(self._parts):
            raise CheckpointError(
                f"the checkpoint holds {sorted(own)}, but the ring was given {sorted(self._parts)}"
            )
        self._ranks.all_or_none("loading the state", lambda: self._load_parts(own))
        self._loading = {}

    def _load_parts(self, stored: Mapping[str, Any]) -> None:
        for name, part in self._parts.items():
            try:
                part.load_state_dict(unpack(stored[name], self._tensor))
            except Exception as error:  # the user's code may raise anything
                cause = f"{type(error).__name__}: {error}"[:500]
                raise CheckpointError(
                    f"{name!r} refuses its state from the checkpoint ({cause})"
                ) from error
        self._require_types()

    def _require_types(self) -> None:
        """What was loaded has its own type: modules and torch's optimizers cast without a word."""
        self._read()
        for name, tensor in self._live.items():
            stored = self._stored_tensors.get(name)
            if stored is not None and dtype_of(stored[0]) != tensor.dtype:
                raise CheckpointError(
                    f"{name!r} is {stored[0]} in the checkpoint and became {tensor.dtype} when it "
                    "was loaded, which changes its values; build it with the same type "
                    "(torch.optim casts an optimizer's state to the type of the weights: override "
                    "load_state_dict there), or choose another out"
                )

    def _tensor(self, name: Any) -> torch.Tensor:
        if not isinstance(name, str):
            return outline(name)
        _, shape, like, home = self._stored_tensors[name]
        if home != _OWN:
            return self._loaded(name, self._sharded_like(name, shape, like))
        live = self._live.get(name)
        tensor = self._loading[name].loaded().view(tuple(shape[1:]))
        return tensor if live is None else tensor.to(live.device)

    # -- digest ---------------------------------------------------------------------------

    def _live_tensors(self) -> Mapping[str, torch.Tensor]:
        self._read()
        return self._live


def _digest_of(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json_text(value).encode())


def _describe_difference(by_rank: Sequence[Mapping[str, Any]]) -> str:
    """A message about the first tensor that differs between ranks."""
    for name in sorted({name for tensors in by_rank for name in tensors}):
        values = [tensors.get(name) for tensors in by_rank]
        if any(value != values[0] for value in values):
            break
    seen = ["none" if value is None else f"{value[0]} {value[1]}" for value in values]
    return (
        f"Ring: tensor {name!r} differs between ranks: {seen}; all ranks must hold the "
        "same names, shapes and types"
    )


class Ring(Holder):
    """Saves, proves and restores the state of a training script, and resumes it at a restart.

    A checkpoint is committed on all ranks or not at all: if a process is killed during a save, the
    previous checkpoint remains. Every byte has a digest, which is checked before use. A checkpoint
    is *clean* once it was read back, found finite, and training has continued past it; the last
    clean one is never deleted.

    Args:
        out: directory of the run; a restart with the same directory loads the newest checkpoint.
        state: what is saved, by name: anything with ``state_dict`` and ``load_state_dict``.
            Tensors, DTensors (FSDP2, HSDP), NumPy arrays, plain values and containers of
            them are taken; nothing is pickled.
        keep: clean checkpoints on disk.
        memory: also keep the newest checkpoints in shared memory, where they outlive the process.
        pipeline: where the state is that of one stage of a pipeline: the mesh of one dimension
            (``mesh["pp"]``), or the group, of the ranks that a sample passes.
        settings: ``keep_every``, ``clean_after``, ``memory_slots``, ``memory_limit_gib``,
            ``write_mib_per_second``, ``take_over``; see docs/configuration.md, ``checkpoint.*``.

    Raises:
        ConfigError: an invalid setting, or ``out`` is in use or holds another run.
        CheckpointError: there are checkpoints, but none can be loaded.

    Every rank creates one, after ``init_process_group`` if there are several ranks. A plain tensor
    is saved once if it is the same on all ranks, else for each rank; so a run can resume with more
    or fewer ranks. All methods are collective.

    >>> import tempfile, torch
    >>> from runner import Ring
    >>> out = tempfile.TemporaryDirectory()
    >>> def build():
    ...     model = torch.nn.Linear(4, 1)
    ...     return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    >>> state = build()
    >>> with Ring(out.name, state) as ring:
    ...     for step in range(ring.step, 10):
    ...         _ = state["model"](torch.ones(2, 4)).sum().backward()
    ...         state["optimizer"].step()
    ...         if (step + 1) % 5 == 0:
    ...             ring.save(step + 1)
    ...     digest = ring.digest()
    >>> with Ring(out.name, build()) as again:
    ...     again.step, again.digest() == digest
    (10, True)
    >>> out.cleanup()
    """

    def __init__(
        self,
        out: str | Path,
        state: Mapping[str, Stateful],
        *,
        keep: int = 3,
        memory: bool = True,
        pipeline: Pipeline | None = None,
        **settings: Any,
    ) -> None:
        _check(state)
        config = ring_config(out, memory=memory, given={"keep": keep, **settings})
        self._release_former(out)
        with joined(config, "Ring") as group:
            stages = Stages(group.ranks, pipeline)
            self._tree = TreeState(state, group.ranks, group.device, stages)
            run = open_run(config, group, self._tree, self._tree, command="runner.Ring")
        self._hold(run)
        self._tree.before_change = run.drop_memory
        self._step = self._since = run.resumed.step

    # -- for the loop ---------------------------------------------------------------------

    def save(self, step: int, *, disk: bool = True, wait: bool = True) -> None:
        """Save the state as that of ``step``, and prove checkpoints of earlier steps.

        Args:
            step: not below that of the last save or restored checkpoint.
            disk: False takes a snapshot in memory only.
            wait: until it is committed. False returns once the state is copied; the rest is done
                while training goes on, and :meth:`poll` or the next call commits it.

        Raises:
            ConfigError: ``step`` goes back, or the state holds something that cannot be saved.
            CheckpointError: it could not be saved, and there is no earlier checkpoint.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < self._step:
            raise ConfigError(f"Ring.save({step!r}): must be an integer of at least {self._step}")
        opened, ring = self._run, self._run.ring
        with journal_errors(opened):
            opened.state.updates = opened.state.cursor = step
            train_state = opened.state.to_json()
            opened.make_memory(lambda: train_state["loop"]["tensors"])
            ring.after_step(step, step - self._since)
            ring.save(
                CheckpointMetadata(
                    step=step,
                    cursor=step,
                    train_state=train_state,
                    metrics_bytes=0,
                    journal_lines=opened.written.journal.num_lines,
                ),
                disk=disk,
            )
            self._step = step
            if wait:
                ring.drain()

    def poll(self) -> bool:
        """Commit what is written by now, without waiting; whether a save is still in progress."""
        ring, ranks = self._run.ring, self._run.group.ranks
        progress = ring.progress()
        with journal_errors(self._run):
            ring.apply_progress(ranks.sum([*progress.counts]), progress.jobs)
        return ring.is_saving

    def prove(self) -> list[str]:
        """Read the newest checkpoint on disk back now, and mark it clean if it is.

        Returns:
            The reasons why it is not clean; empty if it is.

        Raises:
            ConfigError: there is no checkpoint on disk.
        """
        ring = self._run.ring
        ring.drain()
        if ring.newest() is None:
            raise ConfigError("Ring.prove(): nothing was saved to disk yet")
        with journal_errors(self._run):
            return ring.prove_last()

    def restore(self) -> int:
        """Go back to the newest clean checkpoint; later ones are not used again.

        Returns:
            Its step.

        Raises:
            CheckpointError: no checkpoint is clean.
        """
        opened, ring = self._run, self._run.ring
        with journal_errors(opened):
            ring.drain()
            clean = [r for r in resume_order(ring.records) if r.state is State.clean]
            if not clean:
                raise CheckpointError(
                    f"Ring.restore(): no checkpoint in {opened.group.run_dir.ring} is clean yet; "
                    "a checkpoint becomes clean once a later one is saved, or by Ring.prove()"
                )
            restored = ring.restore(clean)
            opened.state.load_json(restored.train_state)
            ring.abandon_after(restored.serial)
            opened.written.report(
                Incident(
                    kind="restored",
                    step=self._step,
                    decision=f"back to step {restored.step} ({restored.tier.value})",
                    reason="the script asked for it",
                    detail={"serial": restored.serial, "to_step": restored.step},
                )
            )
            ring.drain()
        self._step = self._since = restored.step
        return restored.step

    def close(self) -> None:
        """Finish the save in progress, and release the directory."""
        if self._is_closed:
            return
        with journal_errors(self._run):
            self._run.ring.drain()
        self._release()

    # -- state ----------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The step of the last save or loaded checkpoint; 0 for a new run."""
        return self._step

    @property
    def saved(self) -> list[tuple[int, str, str]]:
        """(step, ``clean`` or ``committed``, ``disk`` or ``memory``) of each checkpoint, by age."""
        return [
            (record.step, record.state.value, record.tier.value)
            for record in sorted(self._run.ring.records, key=lambda record: record.serial)
            if record.state is not State.tainted
        ]

    @property
    def is_from_memory(self) -> bool:
        """Whether this start resumed from a snapshot in memory."""
        resumed = self._run.resumed
        return not resumed.is_fresh and resumed.tier is Tier.memory

    def digest(self) -> str:
        """SHA-256 over the current tensors by name; independent of their sharding."""
        return state_digest(self._tree.tensors(), {})


def _check(state: Mapping[str, Stateful]) -> None:
    if not isinstance(state, Mapping) or not state:
        raise ConfigError(
            f"Ring: state is {type(state).__name__}; give a mapping from names to objects, "
            "{'model': model, 'optimizer': optimizer}"
        )
    for name, part in state.items():
        is_stateful = hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
        if not (isinstance(name, str) and name and is_stateful):
            raise ConfigError(
                f"Ring: state[{name!r}] is a {type(part).__name__}; needs a string as its name, "
                "state_dict() and load_state_dict(state)"
            )
        if isinstance(part, nn.Module) and quantised_weights(part.named_modules()):
            raise ConfigError(
                f"Ring: state[{name!r}] has quantised weights, which their library does not load "
                "back; give what is trained alone, an object whose state_dict() is peft's "
                "get_peft_model_state_dict(model), or use runner.Guard"
            )
        if type(part).__module__.partition(".")[0] == "deepspeed":
            raise ConfigError(
                f"Ring: state[{name!r}] is a DeepSpeed object, whose engine keeps its own state; "
                "use python -m runner parallel=zero1|zero2|zero3, or FSDP2 (fully_shard)"
            )
