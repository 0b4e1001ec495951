"""Where a script writes while it is under test, and one start of it, ended at the wanted step."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from runner.launch.attempt import Ended, Job, Stop, run_once
from runner.prove.inside import marks
from runner.prove.record import StartRecord, Undecided
from runner.system.error import ConfigError
from runner.system.files import make_folder, write_json
from runner.system.units import format_bytes

COPY_BYTES = 64 << 20  # an entry of the working directory that has more is linked, not copied
_NEVER_WRITTEN = (".git", ".hg", "__pycache__", "node_modules")  # linked, and no doubt about them


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one start of the script runs.

    Args:
        folder: its working directory.
        watched: the folder whose files are looked at.
        out: where the script writes, which may be the same.
        command: with the output directory in it replaced.
    """

    folder: Path
    watched: Path
    out: Path
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """Makes places in a folder of its own.

    Args:
        root: the folder.
        command: as the user wrote it.
        home: the user's working directory.
        out_argument: the argument of the command that names the output directory, or "".
        out: the output directory that the script chooses itself, below ``home``, or "".
    """

    root: Path
    command: tuple[str, ...]
    home: Path
    out_argument: str = ""
    out: str = ""

    def check(self) -> None:
        """
        Raises:
            ConfigError: it is not certain that the user's own files stay as they are.
        """
        if self.out_argument and self.out:
            raise ConfigError("--out and --out-arg: one of them says where the script writes")
        if self.out_argument:
            _found(self.command, self.out_argument)
            return
        if self.out:
            below = os.path.relpath(self.home / self.out, self.home)
            if below == "." or below.startswith(".."):
                raise ConfigError(
                    f"--out {self.out}: is not below the working directory {self.home}, of which "
                    "the script gets a copy. Use --out-arg NAME if an argument names it, or start "
                    "prove-resume in the folder above it"
                )
            return
        large = [entry.name for entry in _entries(self.home) if self._is_doubtful(entry)]
        if large:
            raise ConfigError(
                f"It is not certain where the script writes, and {', '.join(large[:3])} in "
                f"{self.home} cannot be copied (a link, or more than {format_bytes(COPY_BYTES)}). "
                "Say it: --out-arg NAME for the argument of the command that names the output "
                "directory, or --out DIR for one that the script chooses itself"
            )

    def _is_doubtful(self, entry: Path) -> bool:
        if entry.name in _NEVER_WRITTEN or (entry / "pyvenv.cfg").exists():
            return False
        is_link = entry.is_symlink() and entry.is_dir()
        return is_link or is_large(entry)

    def untouched(self) -> list[Path]:
        """The user's own output, which the script must not even read."""
        out = self.out
        if self.out_argument:
            _, out = _found(self.command, self.out_argument)
        path = (self.home / out).resolve()
        # Where it is the working directory, or above it, the script itself lies in it.
        return [] if not out or self.home.resolve().is_relative_to(path) else [path]

    def place(self, name: str) -> Place:
        """A new place with a copy of the working directory.

        Raises:
            ConfigError: it cannot be made.
        """
        try:
            return self._place(self.root / name)
        except OSError as error:
            raise ConfigError(
                f"{error.filename or self.root}: cannot be written ({error.strerror}); choose "
                "another folder with --scratch DIR"
            ) from None

    def _place(self, root: Path) -> Place:
        folder = root / "work"
        folder.mkdir(parents=True)
        left_out = Path(os.path.relpath(self.home / self.out, self.home)) if self.out else None
        self._copy(self.home, folder, left_out)
        if not self.out_argument:
            out = folder / left_out if left_out else folder
            return Place(folder=folder, watched=out, out=out, command=self.command)
        place, value = _found(self.command, self.out_argument)
        out = root / "out" / (Path(value).name or "out")  # it may be a file
        out.parent.mkdir()
        command = list(self.command)
        command[place] = command[place][: len(command[place]) - len(value)] + str(out)
        return Place(folder=folder, watched=out.parent, out=out, command=tuple(command))

    def _copy(self, source: Path, target: Path, left_out: Path | None) -> None:
        for entry in _entries(source):
            if left_out and left_out.parts[0] == entry.name:
                if len(left_out.parts) > 1 and entry.is_dir():
                    (target / entry.name).mkdir()
                    self._copy(entry, target / entry.name, Path(*left_out.parts[1:]))
                continue
            if self.root.resolve().is_relative_to(entry.resolve()):
                continue
            linked = entry.is_symlink() or entry.name in _NEVER_WRITTEN
            if linked or is_large(entry):
                (target / entry.name).symlink_to(entry.resolve())
            elif entry.is_dir():
                shutil.copytree(entry, target / entry.name, symlinks=True)
            else:
                shutil.copy2(entry, target / entry.name)


def _entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() or path.is_file())


def is_large(path: Path) -> bool:
    """Whether a file, or the files below a folder, have more than :data:`COPY_BYTES`."""
    if not path.is_dir():
        return path.stat().st_size > COPY_BYTES
    return any(total > COPY_BYTES for total in accumulate(mark[0] for _, mark in marks(path)))


def _found(command: Sequence[str], name: str) -> tuple[int, str]:
    """The place of the word that ends with the argument's value, and the value.

    Raises:
        ConfigError: the command has no such argument, or several.
    """
    plain = name.lstrip("-+").replace("-", "_")
    places = []
    for place, word in enumerate(command):
        key, separator, value = word.partition("=")
        if key.lstrip("-+").replace("-", "_") != plain:
            continue
        if separator and value:
            places.append((place, value))
        elif word.startswith("-") and place + 1 < len(command):
            places.append((place + 1, command[place + 1]))
    if len(places) != 1:
        raise ConfigError(
            f"--out-arg {name}: the command has {len(places) or 'no'} arguments of this name; it "
            f"needs one, such as --{name.lstrip('-')} DIR or {name.lstrip('-')}=DIR"
        )
    return places[0]


def on_other_ranks(command: Sequence[str], count: int) -> tuple[str, ...]:
    """The command with another number of processes a node.

    Raises:
        ConfigError: it has no argument for that.
    """
    for name in ("nproc-per-node", "num-processes"):
        try:
            place, value = _found(command, name)
        except ConfigError:
            continue
        changed = list(command)
        changed[place] = changed[place][: len(changed[place]) - len(value)] + str(count)
        return tuple(changed)
    raise ConfigError(
        "--other-ranks: the command has no --nproc-per-node or --num_processes to change"
    )


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
class Ending:
    """Where a start is to end.

    Args:
        stop: after how many steps of this start; takes the recording once all ranks have done
            their first step.
        number: the signal that ends it there.
        ends: whether the state after the last step is wanted.
    """

    stop: Callable[[StartRecord], int]
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
    goal: Ending
    say: Callable[[str], None] = lambda text: None
    recorded: StartRecord = field(init=False)
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
        self.recorded = StartRecord(self.folder)
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
