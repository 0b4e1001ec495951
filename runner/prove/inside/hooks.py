"""Hooks into torch: the modules that a script calls, the loss, the optimizer's step.

``Module.__call__`` is replaced only outside of a module and of a backward pass: inner modules, and
what ``torch.compile`` traces, run torch's own. Each process of a rank appends to a file of its own
and stands still where ``prove-resume`` wants to kill it.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import process as multiprocessing_process
from typing import Any, cast

import torch

from . import Mark, marks
from .digests import Digests, tensors_in
from .state import Roots, StepState, random_states

_POLL_SECONDS = 0.01


class Recorder:
    """Records the steps of this process.

    Args:
        folder: takes the record; ``control.json`` in it says at which step to stand still.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._supervisor = int(os.environ["HOLDFAST_PROVE_PID"])
        self._digests = Digests()
        self._roots = Roots()
        # By optimizer and its first parameter: DeepSpeed steps one group at a time.
        self._steps: dict[tuple[int, int], StepState] = {}
        self._file: Any = None
        self._pid = 0
        self._count = 0  # steps of the first optimizer
        self._control: dict[str, Any] | None = None
        self._files: dict[str, Mark] | None = None
        self._broken = False
        self._line: dict[str, Any] | None = None
        self._random: dict[str, str] = {}  # after the last step
        self._has_learned = False  # whether there was a backward pass
        self._begin_step()

    def _begin_step(self) -> None:
        self._reads_next = True  # whether what a module is called with is a batch
        self._evaluates = False  # whether the batch that was noted last may be an evaluation's
        self._calls: list[dict[str, Any]] = []
        self._later: list[dict[str, Any]] = []
        self._losses: list[torch.Tensor] = []

    @torch.no_grad()
    def note_call(self, module: Any, args: Any, kwargs: Any) -> None:
        """A module is called with gradients: note its batch, and the state before it.

        The batch is that of the first call since the last backward pass; one in evaluation mode
        counts if none in training mode follows. Before the first backward pass of a process a
        module may be called in vain, so that the later calls are noted as well.
        """
        if not any(module.training or p.requires_grad for p in module.parameters()):
            return  # an augmentation, a loss, a teacher
        self._roots.add(module)
        if self._evaluates and module.training:
            self._calls.pop()
            self._reads_next = True
        if not self._reads_next and self._has_learned:
            return
        call: dict[str, Any] = {"rows": self._digests.rows(list(tensors_in([args, kwargs])))}
        if not self._calls or not self._has_learned:
            buffers = self._digests.named(dict(self._roots.named("buffers")))
            call |= {"random": random_states(), "buffers": buffers}
        (self._calls if self._reads_next else self._later).append(call)
        if self._reads_next:
            self._evaluates = not module.training
        self._reads_next = False

    def note_loss(self, loss: torch.Tensor) -> None:
        """A backward pass begins."""
        self._reads_next = self._has_learned = True
        self._evaluates = False
        self._losses.append(loss.detach().clone())

    @torch.no_grad()
    def before_step(self, optimizer: Any) -> None:
        """Take what the step begins with."""
        self._line = None
        if self._is_idle(optimizer):
            return
        key = _key(optimizer)
        if key not in self._steps:
            self._steps[key] = StepState(optimizer, self._digests, len(self._steps))
        state = self._steps[key]
        self._line = {"written": self._look_for_files(), **state.begin(self._roots)}

    @torch.no_grad()
    def after_step(self, optimizer: Any) -> None:
        """Write the step's line, and stand still where that is wanted."""
        if self._line is None:
            return
        key = _key(optimizer)
        state, number = self._steps[key], list(self._steps).index(key)
        if state.was_rehearsal(self._line):
            self._begin_step()
            return
        self._count += number == 0
        line: dict[str, Any] = {"step": self._count, "optimizer": number, **self._line}
        calls = [_plain(call) for call in self._calls]
        line["batches"] = [call["batch"] for call in calls if call["batch"]]
        line["random"] = calls[0]["random"] if calls else random_states()
        moved = line["random"].items() - self._random.items()
        line["between"] = [name for name, _ in moved if name in self._random]
        line["buffers"] = calls[0]["buffers"] if calls else {}
        line["later"] = [_plain(call) for call in self._later]
        line["losses"] = [float(loss.float()) for loss in self._losses]
        line["gradients"] = state.gradients()
        if state.is_first:
            line |= state.about(self._roots) | {
                "workers": len(multiprocessing_process._children),  # type: ignore[attr-defined]
                "pid": os.getpid(),
                **_place(),
            }
        self._write(line)
        self._begin_step()
        self._random = random_states()
        if number == 0:
            self._obey()

    def _is_idle(self, optimizer: Any) -> bool:
        """Whether it makes its empty state only, as for torch.distributed.checkpoint's loading."""
        is_at_rest = all(not group.get("lr", 1) for group in optimizer.param_groups)
        return is_at_rest and not self._calls and not self._losses

    def end_line(self) -> None:
        """Write the state after the last step."""
        for number, state in enumerate(self._steps.values()):
            line = state.before()
            self._write({"step": self._count + 1, "optimizer": number, "end": True, **line})

    def _obey(self) -> None:
        self._end_if_alone()
        path = os.path.join(self._folder, "control.json")
        while self._control is None:
            if os.path.exists(path):
                with open(path) as file:
                    self._control = json.load(file)
            else:
                self._end_if_alone()
                time.sleep(_POLL_SECONDS)
        if self._count != self._control["stop"]:
            return
        if self._control["signal"] != signal.SIGKILL:
            os.kill(os.getpid(), self._control["signal"])
            return
        if self._control["ends"]:
            self.end_line()
        self._write({"stopped": self._count})
        while True:  # until it is killed, with all other ranks
            self._end_if_alone()
            time.sleep(_POLL_SECONDS)

    def _end_if_alone(self) -> None:
        """End at once when the process that wants the record is gone."""
        try:
            os.kill(self._supervisor, 0)
        except ProcessLookupError:
            os._exit(1)
        except PermissionError:
            pass

    def _look_for_files(self) -> list[list[Any]]:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return []
        folder = os.environ["HOLDFAST_PROVE_OUT"]
        found = {os.path.relpath(path, folder): mark for path, mark in marks(folder)}
        before, self._files = self._files, found
        return [] if before is None else written(before, found)

    def _write(self, line: dict[str, Any]) -> None:
        if self._pid != os.getpid():
            self._pid = os.getpid()
            path = os.path.join(self._folder, f"steps-{self._pid}.jsonl")
            self._file = open(path, "a")  # noqa: SIM115
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._file.flush()

    def safely(self, work: Callable[..., Any], *args: Any) -> None:
        """Do ``work``; after an error no more is recorded, and the script goes on."""
        if self._broken or torch.compiler.is_compiling() or _is_capturing():
            return
        try:
            work(*args)
        except Exception:
            self._broken = True
            with open(os.path.join(self._folder, f"error-{os.getpid()}.txt"), "a") as file:
                file.write(traceback.format_exc())


def written(before: dict[str, Mark], now: dict[str, Mark]) -> list[list[Any]]:
    """[path, bytes, former path or ""] of each file that is new, or has changed."""
    gone = {mark: path for path, mark in before.items() if path not in now}
    changed = [(path, mark) for path, mark in now.items() if before.get(path) != mark]
    return [[path, mark[0], gone.get(mark, "")] for path, mark in changed]


def _plain(call: dict[str, Any]) -> dict[str, Any]:
    """A call with a number for each sample."""
    rows = call.pop("rows")
    numbers = [] if rows is None else rows.tolist()
    return {**call, "batch": [f"{row & (1 << 64) - 1:x}" for row in numbers]}


def _key(optimizer: Any) -> tuple[int, int]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return id(optimizer), id(parameters[0]) if parameters else 0


def _place() -> dict[str, int]:
    """This process's rank, and how many there are; without a group as the launcher says."""
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized():
        return {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    told = {"rank": os.environ.get("RANK", "0"), "world_size": os.environ.get("WORLD_SIZE", "1")}
    return {name: int(value) for name, value in told.items()}


def _is_capturing() -> bool:
    cuda = torch.cuda
    return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())  # type: ignore[no-untyped-call]


def _watch_calls(recorder: Recorder) -> None:
    """Replace ``Module.__call__`` and ``Tensor.backward``."""
    modules: Any = torch.nn.Module
    plain_call, plain_backward = modules.__call__, cast("Any", torch.Tensor.backward)
    depth = 0

    def watched_call(module: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return plain_call(module, *args, **kwargs)
        modules.__call__ = plain_call
        if torch.is_grad_enabled():
            recorder.safely(recorder.note_call, module, args, kwargs)
        try:
            return plain_call(module, *args, **kwargs)
        finally:
            modules.__call__ = watched_call

    def watched_backward(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        if depth == 0:
            modules.__call__ = plain_call
            if tensor.numel() == 1:
                recorder.safely(recorder.note_loss, tensor)
        depth += 1
        try:
            return plain_backward(tensor, *args, **kwargs)
        finally:
            depth -= 1
            if depth == 0:
                modules.__call__ = watched_call

    modules.__call__ = watched_call
    torch.Tensor.backward = watched_backward  # type: ignore[method-assign, assignment]


def _announce_saves() -> None:
    """Let ``torch.save`` say what it writes: torch opens files where Python does not see it."""
    plain_save: Any = torch.save

    @functools.wraps(plain_save)
    def watched_save(value: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, (str, os.PathLike)):
            sys.audit("open", os.fspath(file), "w", os.O_WRONLY)
        return plain_save(value, file, *args, **kwargs)

    torch.save = watched_save  # type: ignore[assignment]


def install(folder: str) -> None:
    """Record what this process trains into ``folder``."""
    recorder = Recorder(folder)

    _announce_saves()
    _watch_calls(recorder)
    optimizers = sys.modules["torch.optim.optimizer"]
    safely = recorder.safely
    optimizers.register_optimizer_step_pre_hook(lambda o, *_: safely(recorder.before_step, o))
    optimizers.register_optimizer_step_post_hook(lambda o, *_: safely(recorder.after_step, o))
