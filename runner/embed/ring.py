"""The ring of checkpoints for any training script, without the guard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from runner.checkpoint.protocol import CheckpointMetadata
from runner.checkpoint.state_digest import state_digest
from runner.embed.exits import Holder, journal_errors
from runner.embed.opening import joined, open_run
from runner.embed.settings import ring_config
from runner.embed.state.object_state import Stateful, TreeState
from runner.embed.state.stages import Pipeline, Stages
from runner.model.quantised import quantised_weights
from runner.policy.decision.history import Incident
from runner.policy.retention.records import State, Tier, resume_order
from runner.system.error import CheckpointError, ConfigError


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
