"""Tracks lines that wait in memory while their files cannot be written, and limits the time.

Rank 0 writes the files, so it alone has lines to keep; the step's agreement tells the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from runner.system.json_lines import KeptLines, LineFile

_MOST_BYTES = 64 << 20  # some hundred thousand lines


@dataclass(eq=False)
class Backlog:
    """The files of one run; empty on ranks that write none.

    Args:
        patience_seconds: how long lines are kept before the run is asked to stop.
        ask_to_stop: takes the reason.
        from_first: collective; rank 0's JSON value, on every rank.
        say: prints one line for a person.
    """

    patience_seconds: float
    ask_to_stop: Callable[[str], None]
    from_first: Callable[[str], str]
    say: Callable[[str], None]
    _files: list[LineFile] = field(default_factory=list)
    _has_asked: bool = False
    _message: str = ""

    def add(self, file: LineFile | None) -> None:
        """Track this file as well."""
        if file is not None:
            self._files.append(file)

    def look(self) -> bool:
        """Whether this rank keeps lines in memory. Called once a step."""
        for file in self._files:
            file.retry()
        waiting = [kept for _, kept in self._kept()]
        if not waiting:
            return False
        self._message = "; ".join(kept.error for kept in waiting)
        seconds = max(kept.seconds for kept in waiting)
        is_full = sum(kept.num_bytes for kept in waiting) > _MOST_BYTES
        if (seconds > self.patience_seconds or is_full) and not self._has_asked:
            self._has_asked = True
            self.ask_to_stop(
                f"lines are kept in memory for {seconds:.0f} s "
                f"(track.unwritten_seconds={self.patience_seconds:g}): {self._message}"
            )
        return True

    def message(self) -> str:
        """The system's last error on rank 0. Collective."""
        return self.from_first(self._message)

    def standing(self) -> str:
        """That error if rank 0 keeps lines now; else empty. Collective."""
        return self.from_first(self._message if self.look() else "")

    def require_written(self) -> None:
        """Check that all lines are written: a checkpoint must not be published without them.

        Raises:
            OSError: some are kept in memory only.
        """
        for file, one in self._kept():
            raise OSError(
                f"{one.num_lines} lines of {file.path} are kept in memory only ({one.error})"
            )

    def finish(self) -> None:
        """Try once more, and report what is lost."""
        for file in self._files:
            file.sync()
        for file, one in self._kept():
            self.say(f"warning: {one.num_lines} lines of {file.path} are lost: {one.error}")

    def _kept(self) -> list[tuple[LineFile, KeptLines]]:
        return [(file, kept) for file in self._files if (kept := file.kept) is not None]
