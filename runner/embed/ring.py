"""The ring of checkpoints for anybody's training script, without the guard."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.checkpoint.digest import state_digest
from runner.checkpoint.memory.tier import NO_MEMORY
from runner.checkpoint.protocol import CheckpointMetadata
from runner.embed.exits import closed_at_exit, errors_journalled
from runner.embed.opening import join, memory_for, open_run, ranks_at_hand
from runner.embed.settings import ring_config
from runner.embed.tree import Stateful, TreeState
from runner.policy.decision.history import Incident
from runner.policy.retention.records import State, Tier, resume_order
from runner.startup.shared_memory import memory_every
from runner.system.error import CheckpointError, ConfigError


class Ring:
    """Saves, proves and restores the state of a training script, and resumes it at a restart.

    A checkpoint is committed whole on all ranks or not at all: a process that is killed in the
    midst of a save leaves the one before. Every byte has a digest, which is checked before the byte
    is used. One is *clean* once it was read back, found finite, and training went on past it;
    the last clean one is never deleted.

    Args:
        out: directory of the run; with the same one again, the newest checkpoint is loaded.
        state: what is saved, by name: anything with ``state_dict`` and ``load_state_dict``.
            Tensors, DTensors (FSDP2, HSDP), NumPy arrays, plain values and containers of
            them are taken; nothing is pickled.
        keep: clean checkpoints on disk.
        memory: also keep the newest ones in shared memory, where they outlive the process.
        settings: ``keep_every``, ``clean_after``, ``memory_slots``, ``memory_limit_gib``,
            ``write_mib_per_second``, ``take_over``; see docs/configuration.md, ``checkpoint.*``.

    Raises:
        ConfigError: a setting that cannot be, or ``out`` is in use or holds another run.
        CheckpointError: there are checkpoints, and none can be loaded.

    Every rank makes one, after ``init_process_group`` where there are several. A plain tensor is
    saved once for all ranks, or of each rank where they differ; so a run goes on with more or fewer
    ranks. All methods are collective.

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
        **settings: Any,
    ) -> None:
        _check(state)
        config = ring_config(out, memory=memory, given={"keep": keep, **settings})
        ranks, device, rank_env = ranks_at_hand("Ring")
        group = join(config, ranks, device, rank_env)
        self._tree = TreeState(state, ranks, device)
        try:
            self._opened = open_run(config, group, self._tree, self._tree, command="runner.Ring")
        except BaseException:
            group.monitor.end()
            raise
        self._tree.before_change = self._layout_changes
        self._has_memory = self._opened.memory.memory is not None
        self._wants_memory = memory_every(config.checkpoint) > 0
        self._step = self._since = self._opened.resumed.step
        self._finalizer = weakref.finalize(self, closed_at_exit, self._opened)
        atexit.register(self._finalizer)

    # -- what the loop calls --------------------------------------------------------------

    def save(self, step: int, *, disk: bool = True, wait: bool = True) -> None:
        """Save the state as that of ``step``. Checkpoints of earlier steps are proven.

        Args:
            step: at least that of the last save, or of the checkpoint restored since.
            disk: False takes a snapshot in memory only.
            wait: until it is committed. False returns once the state is copied; the rest is done
                while training goes on, and :meth:`poll` or the next call commits it.

        Raises:
            ConfigError: ``step`` goes back, or the state holds what cannot be saved.
            CheckpointError: it could not be saved, and no earlier checkpoint stands.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < self._step:
            raise ConfigError(f"Ring.save({step!r}): must be a whole number from {self._step} on")
        opened, ring = self._opened, self._opened.ring
        with errors_journalled(opened):
            opened.state.updates = opened.state.cursor = step
            train_state = opened.state.to_json()
            self._make_memory(train_state["loop"]["tensors"])
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
        """Commit what is written by now; whether anything is still under way. Waits for nothing."""
        ring, ranks = self._opened.ring, self._opened.group.ranks
        progress = ring.progress()
        with errors_journalled(self._opened):
            ring.apply_progress(ranks.sum([*progress.counts]), progress.jobs)
        return ring.is_saving

    def prove(self) -> list[str]:
        """Read the newest checkpoint on disk back, whatever followed it.

        Returns:
            Why it is not clean; nothing if it is.

        Raises:
            ConfigError: there is none.
        """
        ring = self._opened.ring
        ring.drain()
        if ring.newest() is None:
            raise ConfigError("Ring.prove(): nothing was saved to disk yet")
        with errors_journalled(self._opened):
            return ring.prove_last()

    def restore(self) -> int:
        """Go back to the newest clean checkpoint; those after it are not used again.

        Returns:
            Its step.

        Raises:
            CheckpointError: none is clean.
        """
        opened, ring = self._opened, self._opened.ring
        with errors_journalled(opened):
            ring.drain()
            clean = [r for r in resume_order(ring.records) if r.state is State.clean]
            if not clean:
                raise CheckpointError(
                    f"Ring.restore(): no checkpoint in {opened.group.run_dir.ring} is clean yet; "
                    "one is once a later one is saved, or after Ring.prove()"
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
        """Finish what is being written, and let go of the directory."""
        if not self._finalizer.alive:
            return
        with errors_journalled(self._opened):
            self._opened.ring.drain()
        self._finalizer()
        atexit.unregister(self._finalizer)

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """:meth:`close`; after an error nothing waits for other ranks."""
        if kind is None:
            self.close()

    # -- what it tells --------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Of the last save, or of what was loaded; 0 at the beginning."""
        return self._step

    @property
    def saved(self) -> list[tuple[int, str, str]]:
        """(step, ``clean`` or ``committed``, ``disk`` or ``memory``) of each, oldest first."""
        return [
            (record.step, record.state.value, record.tier.value)
            for record in sorted(self._opened.ring.records, key=lambda one: one.serial)
            if record.state is not State.tainted
        ]

    @property
    def is_from_memory(self) -> bool:
        """Whether this start went on from a snapshot in memory."""
        resumed = self._opened.resumed
        return not resumed.is_fresh and resumed.tier is Tier.memory

    def digest(self) -> str:
        """SHA-256 over the tensors of the state as it is, by name; however they are sharded."""
        return state_digest(self._tree.tensors(), {})

    # -- memory ---------------------------------------------------------------------------

    def _make_memory(self, tensors: Mapping[str, Any]) -> None:
        """Slots for what is saved, once that is known. Collective."""
        opened = self._opened
        if self._has_memory or not self._wants_memory:
            return
        self._has_memory = True
        found = memory_for(opened.lease, opened.group, self._tree)
        if found.memory is not None:
            opened.ring.drain()
            opened.loads.in_memory = tensors
            opened.ring.replace_memory(found)

    def _layout_changes(self) -> None:
        """Other tensors than before are to be saved: slots are made anew. Collective."""
        self._opened.ring.drain()
        self._opened.ring.replace_memory(NO_MEMORY)
        self._has_memory = False


def _check(state: Mapping[str, Stateful]) -> None:
    if not isinstance(state, Mapping) or not state:
        raise ConfigError(
            f"Ring: state is {type(state).__name__}; give a mapping of names to what is saved, "
            "{'model': model, 'optimizer': optimizer}"
        )
    for name, part in state.items():
        if not isinstance(name, str) or not name:
            raise ConfigError(f"Ring: state has the key {name!r}; names are words")
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise ConfigError(
                f"Ring: state[{name!r}] is a {type(part).__name__}; needs state_dict() and "
                "load_state_dict(state)"
            )
        if type(part).__module__.partition(".")[0] == "deepspeed":
            raise ConfigError(
                f"Ring: state[{name!r}] is DeepSpeed's, whose engine keeps the state itself; use "
                "python -m runner parallel=zero1|zero2|zero3, or FSDP2 (fully_shard)"
            )
