"""Where a script writes while it is under test: never where the user's own results lie."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from runner.system.error import ConfigError
from runner.system.listing import marks
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
