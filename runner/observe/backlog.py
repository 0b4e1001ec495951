"""Tracks lines that wait in memory while their files cannot be written, and limits the time.

Rank 0 writes the files, so it alone has lines to keep; the step's agreement tells the others.
"""

from __future__ import annotations

from collections.abc import Callable

from runner.system.json_lines import Kept, LineFile

_MOST_BYTES = 64 << 20  # some hundred thousand lines


class Backlog:
    """The files of one run; empty on ranks that write none.

    Args:
        patience_seconds: how long lines are kept before the run is asked to stop.
        ask_to_stop: takes the reason.
        from_first: collective; rank 0's JSON value, on every rank.
        say: prints one line for a person.
    """

    def __init__(
        self,
        *,
        patience_seconds: float,
        ask_to_stop: Callable[[str], None],
        from_first: Callable[[str], str],
        say: Callable[[str], None],
    ) -> None:
        self._patience_seconds = patience_seconds
        self._ask_to_stop = ask_to_stop
        self._from_first = from_first
        self._say = say
        self._files: list[LineFile] = []
        self._has_asked = False
        self._message = ""

    def add(self, file: LineFile | None) -> None:
        """Track this file as well."""
        if file is not None:
            self._files.append(file)

    def look(self) -> bool:
        """Whether this rank keeps lines in memory. Called once a step."""
        for file in self._files:
            file.retry()
        waiting = self._kept()
        if not waiting:
            return False
        self._message = "; ".join(one.error for _, one in waiting)
        seconds = max(one.seconds for _, one in waiting)
        is_full = sum(one.num_bytes for _, one in waiting) > _MOST_BYTES
        if (seconds > self._patience_seconds or is_full) and not self._has_asked:
            self._has_asked = True
            self._ask_to_stop(
                f"lines are kept in memory for {seconds:.0f} s "
                f"(track.unwritten_seconds={self._patience_seconds:g}): {self._message}"
            )
        return True

    def message(self) -> str:
        """The system's last error on rank 0. Collective."""
        return self._from_first(self._message)

    def standing(self) -> str:
        """That error if rank 0 keeps lines now; else empty. Collective."""
        return self._from_first(self._message if self.look() else "")

    @property
    def patience_seconds(self) -> float:
        return self._patience_seconds

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
            self._say(f"warning: {one.num_lines} lines of {file.path} are lost: {one.error}")

    def _kept(self) -> list[tuple[LineFile, Kept]]:
        return [(file, kept) for file in self._files if (kept := file.kept) is not None]
