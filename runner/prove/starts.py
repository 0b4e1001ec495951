"""One start of the script: runs it to the wanted step, and ends it there."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runner.launch.attempt import Ended, Job, Stop, run_once
from runner.prove.record import Recorded, Undecided
from runner.prove.scratch import Place, Scratch
from runner.system.files import make_folder, write_json

# What a script says that gets no terminal, or no GPU; in small letters.
_ASKS = ("eoferror", "not a tty", "inappropriate ioctl")
_NO_GPU = ("busy or unavailable", "cuda out of memory", "devices are busy")
_ON_PATH = Path(__file__).parent / "on_path"
_TAIL = 12  # lines of the script's output that a message quotes
_SAY_SECONDS = 10.0  # between two lines that say how far it is
_GRACE_SECONDS = 60.0  # from a signal that asks to the SIGKILL
# So that nothing of a test leaves this machine, and no file appears beside the user's modules.
_QUIET = {"WANDB_MODE": "offline", "PYTHONDONTWRITEBYTECODE": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Where a start is to end.

    Args:
        stop: after how many steps of this start; takes the recording once all ranks have done
            their first step.
        number: the signal that ends it there.
        ends: whether the state after the last step is wanted.
    """

    stop: Callable[[Recorded], int]
    number: int = signal.SIGKILL
    ends: bool = False


@dataclass(eq=False, kw_only=True)
class Start:
    """A start of the script in a place.

    Args:
        folder: takes the record and the output.
        scratch: knows what it must not touch.
        limit_seconds: how long it may take for a step.
    """

    place: Place
    folder: Path
    environment: Mapping[str, str]
    scratch: Scratch
    limit_seconds: float
    goal: Goal
    say: Callable[[str], None] = lambda text: None
    recorded: Recorded = field(init=False)
    ended: Ended = field(init=False)
    _moved: float = field(default_factory=time.monotonic, init=False)
    _said: float = field(default=0.0, init=False)
    _done: int = field(default=0, init=False)
    _stop: int = field(default=0, init=False)  # 0 until it is known

    def run(self) -> None:
        """Run it until it has reached its goal or ended; no process is left.

        Raises:
            Undecided: it failed, hung, or trained nothing that can be seen.
        """
        make_folder(self.folder)
        self.recorded = Recorded(self.folder)
        self._moved = time.monotonic()
        inherited = self.environment.get("PYTHONPATH")
        variables = {
            **_QUIET,
            **self.environment,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(_ON_PATH), inherited])),
            "HOLDFAST_PROVE_DIR": str(self.folder),
            "HOLDFAST_PROVE_PID": str(os.getpid()),
            "HOLDFAST_PROVE_OUT": str(self.place.watched),
            "HOLDFAST_PROVE_ROOT": str(self.scratch.root.resolve()),
            "HOLDFAST_PROVE_HOME": str(self.scratch.home.resolve()),
            "HOLDFAST_PROVE_KEPT": os.pathsep.join(map(str, self.scratch.untouched())),
        }
        # No terminal: a script that asks is to fail, not to wait.
        shell = ["sh", "-c", 'cd "$0" && exec "$@" < /dev/null', str(self.place.folder)]
        with (self.folder / "output.txt").open("wb") as output:
            job = Job(
                command=[*shell, *self.place.command],
                environment=variables,
                output=output.fileno(),
                late=self._late,
            )
            self.ended = run_once(job, Stop())
        self.recorded.poll()
        self._check()

    @property
    def has_stopped(self) -> bool:
        """Whether it was ended where it was to be; else it ended by itself."""
        return self.recorded.have_stopped or self._is_asked

    @property
    def _is_asked(self) -> bool:
        """Whether it has got the signal, if that asks it to end."""
        is_kill = self.goal.number == signal.SIGKILL
        return not is_kill and bool(self._stop) and self.recorded.done >= self._stop

    def _late(self, _: str) -> str:
        self.recorded.poll()
        if next(self.folder.glob("kept-*.txt"), None):
            return "touched"
        now, done = time.monotonic(), sum(process.done for process in self.recorded.ranks)
        if done > self._done:
            self._done, self._moved = done, now
            if now - self._said > _SAY_SECONDS:
                self._said = now
                self.say(f"step {self.recorded.done}")
        if not self._stop and self.recorded.are_all_there:
            self._stop = max(1, self.goal.stop(self.recorded))
            control = {"stop": self._stop, "signal": self.goal.number, "ends": self.goal.ends}
            write_json(self.folder / "control.json", control)
        if self.recorded.have_stopped:
            return "stopped"
        limit = min(_GRACE_SECONDS, self.limit_seconds) if self._is_asked else self.limit_seconds
        if now - self._moved > limit:
            return "asked" if self._is_asked else "hung"
        return ""

    def _check(self) -> None:
        kept = sorted(self.folder.glob("kept-*.txt"))
        if kept:
            raise Undecided(
                f"The script touches {kept[0].read_text().strip()}, which is yours, although it "
                "was started elsewhere: nothing in it was changed. If an argument names the "
                "directory, use --out-arg NAME"
            )
        if error := self.recorded.error():
            raise Undecided(f"The recording failed, the script did not: {error.strip()}")
        if self.ended.reason == "hung":
            raise Undecided(
                f"The script has done no step for {self.limit_seconds:g} s (--timeout), after step "
                f"{self.recorded.done}: it hangs, or it never ends without steps.{self._tail()}"
            )
        if not self.recorded.ranks:
            raise Undecided(self._without_steps())
        if self.ended.reason or self.has_stopped:
            return
        if not self.ended.code:
            if not self.goal.ends:
                raise Undecided(
                    f"The script ended by itself after {self.recorded.done} steps of this start, "
                    "before it could be killed"
                )
            return
        what = self._of_gpu() or f"The command failed with {self.ended.code}"
        raise Undecided(f"{what} after step {self.recorded.done}.{self._tail()}")

    def _without_steps(self) -> str:
        if self.ended.code and self._says(_ASKS):
            return f"The script asks for a terminal; it has none here.{self._tail()}"
        if self.ended.code:
            what = self._of_gpu() or f"The command failed at once, with {self.ended.code}"
            return f"{what}.{self._tail()}"
        return (
            "The command ended without an optimizer step that could be seen: it trains nothing, or "
            "not with torch.optim, or its Python ignores PYTHONPATH (-I, -E, -S, a container), or "
            "the step itself is compiled"
        )

    def _of_gpu(self) -> str:
        return self._says(_NO_GPU) and (
            "The script cannot have the GPU, or not enough of its memory: another process holds it "
            "(no start of this proof runs beside another). Free it, or set CUDA_VISIBLE_DEVICES; "
            "it failed"
        )

    def _says(self, words: Sequence[str]) -> str:
        text = self._output().lower()
        return next((word for word in words if word in text), "")

    def _output(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")

    def _tail(self) -> str:
        lines = [line for line in self._output().splitlines() if line.strip()][-_TAIL:]
        return "".join(f"\n    {line[:300]}" for line in lines)
