"""An owner file beside a cache entry: which process is making it, and its progress.

It saves work, and correctness does not depend on it: results are published by a rename, so two
processes that make the same entry only waste time. It is no system lock: over NFS
those are unreliable. An owner is known to be alive by its beat, which moves with its work,
and on its own machine by its process; clocks of two machines are never compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from runner.system.files import read_bounded

Process = Mapping[str, str | int]

# NFS may show an old file for a minute.
STALE_SECONDS: Final = 120.0
_BEAT_SECONDS: Final = 1.0
_CLAIM_BYTES: Final = 1 << 16
_TOKEN: Final = re.compile(r"[0-9a-f]{16}")


class Overtaken(Exception):
    """Another process took this owner for dead and makes the entry itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owners:
    """How processes of this machine are told apart: see ``runner.system.process``."""

    own: Process
    is_alive: Callable[[Process], bool | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimState:
    """The contents of an owner file."""

    token: str
    process: Process
    beat: int
    done: int
    total: int


class CacheClaim:
    """The owner file at ``path``; ``token`` names this owner and its drafts."""

    def __init__(
        self, path: Path, owners: Owners | None, *, stale_seconds: float = STALE_SECONDS
    ) -> None:
        self.path = path
        self.token = secrets.token_hex(8)
        self._owners = owners
        self._stale_seconds = stale_seconds
        self._beat = 0
        self._beaten = 0.0
        self._seen: tuple[str, int] | None = None
        self._moved = 0.0

    def take(self) -> bool:
        """Become the owner; False if there already is one.

        Raises:
            OSError: the directory cannot be written.
        """
        temporary = self._write(0, 0)
        try:
            os.link(temporary, self.path)  # fails where the name is taken, over NFS too
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        return True

    def beat(self, done: int, total: int) -> None:
        """Show that work proceeds, once a second at most.

        Raises:
            Overtaken: the file now belongs to another process.
        """
        now = time.monotonic()
        if now < self._beaten + _BEAT_SECONDS:
            return
        self._beaten = now
        self._beat += 1
        state = self.look()
        if state is None or state.token != self.token:
            raise Overtaken
        with contextlib.suppress(OSError):  # on a full disk the work itself fails, with a message
            os.replace(self._write(done, total), self.path)

    def release(self) -> None:
        """Remove the owner file: the work has ended, successfully or not."""
        state = self.look()
        if state is not None and state.token == self.token:
            self.path.unlink(missing_ok=True)

    def look(self) -> ClaimState | None:
        """Read the owner file; None if there is none. A damaged file has no owner."""
        try:
            tree = json.loads(read_bounded(self.path, _CLAIM_BYTES))
            token, process = str(tree["token"]), _process(tree["process"])
            numbers = [int(tree[name]) for name in ("beat", "done", "total")]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return ClaimState(token="", process={}, beat=0, done=0, total=0)
        return ClaimState(
            token=token, process=process, beat=numbers[0], done=numbers[1], total=numbers[2]
        )

    def is_dead(self, state: ClaimState) -> bool:
        """Whether the owner has ended, or made no progress for too long. Call it repeatedly."""
        now = time.monotonic()
        if (state.token, state.beat) != self._seen:
            self._seen, self._moved = (state.token, state.beat), now
        owners = self._owners
        if state.process and owners is not None and owners.is_alive(state.process) is False:
            return True
        return now > self._moved + self._stale_seconds

    def clear(self, state: ClaimState) -> str | None:
        """Remove a dead owner's file; returns its token, if drafts of that name may be removed."""
        self.path.unlink(missing_ok=True)
        return state.token if _TOKEN.fullmatch(state.token) else None

    def _write(self, done: int, total: int) -> Path:
        claim: dict[str, Any] = {
            "token": self.token,
            "process": dict(self._owners.own) if self._owners is not None else {},
            "beat": self._beat,
            "done": done,
            "total": total,
        }
        temporary = self.path.with_name(f"{self.path.name}.{self.token}")
        temporary.write_text(json.dumps(claim))
        return temporary


def _process(value: Any) -> Process:
    """
    Raises:
        TypeError, ValueError, KeyError: it is not a valid process.
    """
    if not value:
        return {}
    words: dict[str, str | int] = {name: str(value[name]) for name in ("host", "boot", "started")}
    return words | {"pid": int(value["pid"])}
