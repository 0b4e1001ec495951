"""``holdfast replay OUT --incident N -- SETTINGS``: the probes once more, in another process.

Runs in one process, if necessary on a CPU. A copy of the run resumes from the newest checkpoint
before the incident, with the journal as it was then, and trains up to the bad step. A cause in
weights or samples occurs again; a fault of a device does not. The run itself is only read.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runner.checkpoint.disk.directory import CheckpointDirectory, Entry, again_while_retired
from runner.config.compose import compose
from runner.distributed.env import place_from
from runner.policy.retention.records import State
from runner.run_dir.paths import RunDir
from runner.session.group import join
from runner.session.session import open_run
from runner.system.error import ConfigError, RetiredCheckpoint
from runner.train.run import EngineRun

# Overrides after the user's settings: one process, all explanations, almost no output.
_ALONE = (
    *("parallel=single", "resume.allow_change=true", "explain=full", "guard.remedy=verdict"),
    *("checkpoint.every=1000000000", "eval.every=0", "track.read=false", "checkpoint.remote=null"),
)


def replay_again(
    run_dir: RunDir, number: int, evidence: Mapping[str, Any], settings: Sequence[str], copy: Path
) -> tuple[int, Mapping[str, Any] | None]:
    """Compute the steps up to an incident again, and explain it.

    Args:
        evidence: the incident.json of incident ``number``, see :mod:`runner.explain.bundle`.
        settings: of the run, as on its command line; stored ones are never instantiated.
        copy: an empty folder.

    Returns:
        The step of the checkpoint, and the cause that was found; None: the step is good here. With
        it ``operation``: the first one that made a NaN.

    Raises:
        ConfigError: no checkpoint from before the incident is left, or the settings do not fit.
    """
    try:
        step, start = int(evidence["step"]), int(evidence["samples"][0])
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"incident {number}: its evidence has no step and samples ({type(error).__name__}: "
            f"{error}); it is not one of a run, or was changed"
        ) from None
    entry = again_while_retired(lambda: _take_checkpoint(run_dir, number, step, start, copy))
    _copy(run_dir, number, copy)
    config = compose([*settings, *_ALONE, f"out={copy}"])
    with join(config, place_from({})) as group:
        run = open_run(group, config)
        try:
            cause = _find_cause(run, step)
        finally:
            run.ring.close(wait=False, forget=True)
            run.feed.close()
            run.reporter.close()
    return entry.record.step, cause


def _find_cause(run: EngineRun, step: int) -> Mapping[str, Any] | None:
    """Train up to the bad step; returns the cause in its first journal line."""
    history = run.history
    num_known = len(history.incidents)
    run.loop.begin()
    while run.state.updates < step:
        watch = NanWatch() if run.state.updates == step - 1 else contextlib.nullcontext()
        with watch:
            run.loop.step()
        causes = [
            cause
            for line in history.incidents[num_known:]
            if line.step == step and isinstance(cause := line.detail.get("cause"), Mapping)
        ]
        if causes:
            return {**causes[0], "operation": getattr(watch, "operation", "")}
    return None


class NanWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at what every operation computes, forward and backward.

    Attributes:
        operation: the first one with a NaN in its result and none in its arguments, and where it
            was called; "" while there is none.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operation = ""
        self._made_infinite = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        had = [] if self.operation else list(_floats((args, kwargs)))
        had_nan, had_inf = _any(had, torch.isnan), _any(had, torch.isinf)
        result = func(*args, **(kwargs or {}))
        if self.operation or had_nan:
            return result
        given = list(_floats(result))
        if _any(given, torch.isnan) and not _is_meant(func, (args, kwargs)):
            after = f", of an infinite argument; {self._made_infinite}" if had_inf else ""
            self.operation = f"{_called(func)}{after}"
        elif not (had_inf or self._made_infinite) and _any(given, torch.isinf):
            self._made_infinite = f"the first infinite number is from {_called(func)}"
        return result


def _floats(tree: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(tree):
        local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
        if isinstance(local, Tensor) and local.is_floating_point() and not local.is_meta:
            yield local


def _any(tensors: list[Tensor], test: Callable[[Tensor], Tensor]) -> bool:
    return any(bool(test(tensor).any()) for tensor in tensors)


def _is_meant(func: Any, arguments: Any) -> bool:
    """Whether the result is memory as it was found, or was told to be NaN."""
    told = any(isinstance(leaf, float) and math.isnan(leaf) for leaf in tree_leaves(arguments))
    return told or "empty" in str(func)


def _called(func: Any) -> str:
    """The operation and its place: in the backward pass the node, else the line outside torch."""
    node = torch._C._current_autograd_node()
    if node is not None:
        return f"{func} in the backward pass ({node.name()})"
    own = (Path(torch.__file__).parent, Path(__file__))
    for frame in reversed(traceback.extract_stack()):
        if not any(Path(frame.filename).is_relative_to(folder) for folder in own):
            return f"{func} in {frame.name}, {frame.filename}:{frame.lineno}"
    return str(func)


def _checkpoint_before(run_dir: RunDir, number: int, step: int, start: int) -> Entry:
    entries, _ = CheckpointDirectory(run_dir.ring).entries()
    usable = [
        entry
        for entry in entries
        if entry.record.state is not State.tainted
        and entry.record.step < step
        and entry.record.cursor <= start
        # One that was saved again after a rollback is later than the incident.
        and entry.manifest.journal_lines <= number
    ]
    if not usable:
        known = ", ".join(str(entry.record.step) for entry in entries) or "none"
        raise ConfigError(
            f"{run_dir.ring}: no checkpoint from before step {step} is left (there are those of "
            f"steps {known}); checkpoint.keep and checkpoint.keep_every keep more"
        )
    return max(usable, key=lambda entry: entry.record.serial)


def _take_checkpoint(run_dir: RunDir, number: int, step: int, start: int, copy: Path) -> Entry:
    """Copy the newest checkpoint from before the incident into the ring of ``copy``.

    Raises:
        RetiredCheckpoint: the run is living, and removed it meanwhile.
    """
    entry = _checkpoint_before(run_dir, number, step, start)
    target = RunDir(copy).ring / entry.folder.name
    try:
        shutil.copytree(entry.folder, target)
    except OSError:
        if entry.is_committed():
            raise
    if not entry.is_committed():
        shutil.rmtree(target, ignore_errors=True)
        raise RetiredCheckpoint(f"{entry.folder}: its run removed it while it was being copied")
    return entry


def _copy(run_dir: RunDir, number: int, copy: Path) -> None:
    """Copy the run as it was at the incident, without the lease of its current owner."""
    target = RunDir(copy)
    shutil.copyfile(run_dir.config, target.config)
    if run_dir.metrics.exists():
        shutil.copyfile(run_dir.metrics, target.metrics)
    if run_dir.faults.exists():
        shutil.copytree(run_dir.faults, target.faults)
    with run_dir.journal.open("rb") as lines, target.journal.open("wb") as target_journal:
        for _ in range(number):
            target_journal.write(lines.readline())
        target_journal.flush()
        os.fsync(target_journal.fileno())
