"""Hooks into torch: the first module that is called, the loss, the optimizer's step.

``Module.__call__`` is replaced only until a module is called: inner modules, and what
``torch.compile`` traces, run torch's own. Each process of a rank appends to a file of its own and
stands still where ``prove-resume`` wants to kill it.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
import traceback
import weakref
from collections.abc import Callable
from multiprocessing import process as multiprocessing_process
from typing import Any

import torch

from .digests import Digests, tensors_in
from .state import StepState, Written, random_states

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
        self._roots: list[Any] = []  # weak references to modules that were called first
        self._steps: dict[int, StepState] = {}  # by the optimizer's id
        self._order: list[int] = []
        self._file: Any = None
        self._pid = 0
        self._count = 0  # steps of the first optimizer
        self._control: dict[str, Any] | None = None
        self._written: Written | None = None
        self._broken = False
        self._begin_step()

    def _begin_step(self) -> None:
        self._batches: list[Any] = []
        self._losses: list[torch.Tensor] = []
        self._random: dict[str, str] | None = None
        self._buffers: dict[str, Any] = {}

    def roots(self) -> list[Any]:
        """The modules that were called first, as far as they live."""
        return [module for ref in self._roots if (module := ref()) is not None]

    @torch.no_grad()
    def note_call(self, module: Any, args: Any, kwargs: Any) -> None:
        """A module is called for training: note its batch, and the state before it."""
        if all(root is not module for root in self.roots()):
            self._roots.append(weakref.ref(module))
        if self._random is None:
            self._random = random_states()
            buffers = {name: b for root in self.roots() for name, b in root.named_buffers()}
            self._buffers = dict(zip(buffers, self._digests.of(list(buffers.values()))))  # noqa: B905
        self._batches.append(self._digests.rows(list(tensors_in([args, kwargs]))))

    def note_loss(self, loss: torch.Tensor) -> None:
        """A backward pass begins."""
        self._losses.append(loss.detach().clone())

    @torch.no_grad()
    def before_step(self, optimizer: Any) -> None:
        """Take what the step begins with."""
        if id(optimizer) not in self._steps:
            self._steps[id(optimizer)] = StepState(optimizer, self._digests)
            self._order.append(id(optimizer))
        if self._written is None:
            self._written = Written(self._output_folder())
        state = self._steps[id(optimizer)]
        self._line = {"written": self._written.look(), **state.before(self.roots())}

    @torch.no_grad()
    def after_step(self, optimizer: Any) -> None:
        """Write the step's line, and stand still where that is wanted."""
        state, number = self._steps[id(optimizer)], self._order.index(id(optimizer))
        self._count += number == 0
        line: dict[str, Any] = {"step": self._count, "optimizer": number, **self._line}
        batches = [rows for rows in self._batches if rows is not None]
        line["batches"] = [[f"{row & (1 << 64) - 1:x}" for row in b.tolist()] for b in batches]
        line["losses"] = [float(loss.float()) for loss in self._losses]
        line["gradients"] = state.gradients()
        line["random"] = self._random or random_states()
        line["buffers"] = self._buffers
        if self._count == 1:
            line.update(self._about(state))
        self._write(line)
        self._begin_step()
        if number == 0:
            self._obey()

    def _about(self, state: StepState) -> dict[str, Any]:
        from .state import named_parameters

        return {
            "names": named_parameters(state.optimizer, self.roots()),
            "frozen": state.frozen(self.roots()),
            "num_bytes": state.num_bytes(),
            "kind": type(state.optimizer).__name__,
            "workers": len(multiprocessing_process._children),  # type: ignore[attr-defined]
            "rank": rank(),
            "world_size": world_size(),
            "pid": os.getpid(),
        }

    def end_line(self) -> None:
        """Write the state after the last step."""
        for number, key in enumerate(self._order):
            line = self._steps[key].before(self.roots())
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

    def _output_folder(self) -> str:
        is_first = os.environ.get("LOCAL_RANK", "0") == "0"
        return os.environ.get("HOLDFAST_PROVE_OUT", "") if is_first else ""

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


def rank() -> int:
    """This process's rank; 0 without a launcher or a group."""
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """How many ranks there are."""
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized():
        return int(dist.get_world_size())
    return int(os.environ.get("WORLD_SIZE", "1"))


def _is_capturing() -> bool:
    cuda = torch.cuda
    return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())  # type: ignore[no-untyped-call]


class _Calls:
    """Replaces ``Module.__call__`` and ``Tensor.backward``."""

    def __init__(self, recorder: Recorder) -> None:
        self._module = torch.nn.Module
        plain_call: Any = torch.nn.Module.__call__
        plain_backward: Any = torch.Tensor.backward
        depth = 0

        def watched_call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return plain_call(module, *args, **kwargs)
            self._module.__call__ = plain_call  # type: ignore[method-assign]
            is_training = module.training and torch.is_grad_enabled()
            if is_training:
                recorder.safely(recorder.note_call, module, args, kwargs)
            try:
                return plain_call(module, *args, **kwargs)
            finally:
                if not is_training:
                    self.watch()

        def watched_backward(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if depth == 0 and tensor.numel() == 1:
                recorder.safely(recorder.note_loss, tensor)
            depth += 1
            try:
                return plain_backward(tensor, *args, **kwargs)
            finally:
                depth -= 1
                if depth == 0:
                    self.watch()

        self._watched = watched_call
        torch.Tensor.backward = watched_backward  # type: ignore[method-assign, assignment]

    def watch(self) -> None:
        """Note the next module that is called for training."""
        self._module.__call__ = self._watched  # type: ignore[method-assign]


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
    calls = _Calls(recorder)

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder.safely(recorder.before_step, optimizer)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder.safely(recorder.after_step, optimizer)
        calls.watch()

    _announce_saves()
    calls.watch()
    optimizers = sys.modules["torch.optim.optimizer"]
    optimizers.register_optimizer_step_pre_hook(before)
    optimizers.register_optimizer_step_post_hook(after)
