"""The run's directory: where each file lies, and whether this command may continue it."""

from __future__ import annotations

import os
import re
import secrets
import stat
from pathlib import Path
from typing import Any

from runner.compose import digest, flat, from_yaml, to_yaml, trajectory
from runner.config import RunConfig
from runner.error import ConfigError
from runner.files import make_folder, read_bounded, write_durably

_CONFIG_BYTES = 4 << 20
_RUN_ID = re.compile(r"[0-9a-f]{32}")
_ID_BYTES = 4096
_NOT_FOR_OTHERS = 0o022


class RunDir:
    """Names of the files a run leaves in ``out``."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.config = out / "config.yaml"
        self.journal = out / "journal.jsonl"
        self.metrics = out / "metrics.jsonl"
        self.summary = out / "summary.json"
        self.ring = out / "ring"
        self.faults = out / "faults"
        self.debug = out / "debug"
        self.tensorboard = out / "tensorboard"
        self.incarnation = out / "incarnation"
        self.incidents = out / "incidents"
        self.run_id = out / "run_id"

    def incident(self, number: int) -> Path:
        """Where the ranks of an incarnation say what went wrong."""
        return self.incidents / f"{number:06d}"

    def fatal(self, number: int, rank: int) -> Path:
        """Where a rank's last words go when a signal ends it; removed at an orderly end."""
        return self.debug / f"fatal-{number:06d}-rank-{rank:05d}.txt"

    def create(self) -> None:
        """Make the directory.

        Raises:
            ConfigError: it cannot be made or written.
        """
        try:
            make_folder(self.ring)
            self.debug.mkdir(exist_ok=True)
            probe = self.out / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(f"out={self.out}: cannot be written ({error})") from None

    def identity(self) -> str:
        """The run's random name, made at its first start: another run in ``out`` has another."""
        name = self.known_identity()
        if name is None:
            name = secrets.token_hex(16)
            write_durably(self.run_id, name.encode() + b"\n")
        return name

    def known_identity(self) -> str | None:
        """The same where it has been made; only reads."""
        try:
            name = read_bounded(self.run_id, _ID_BYTES).decode(errors="replace").strip()
        except FileNotFoundError:
            return None
        return name if _RUN_ID.fullmatch(name) else None

    @property
    def is_open_to_all(self) -> bool:
        """Whether anybody may write in there, and so decide what the next start loads."""
        mode = self.out.stat().st_mode
        return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX

    def settings_changed(self, config: RunConfig) -> dict[str, tuple[Any, Any]]:
        """Keys that decide the trajectory and differ from the stored ones: (was, is)."""
        if not self.config.exists():
            return {}
        return settings_differing(from_yaml(_text(self.config), source=self.config), config)

    def refuse_change(self, changed: dict[str, tuple[Any, Any]], place: str = "") -> None:
        """
        Args:
            place: where the stored settings are; without it, ``out``.

        Raises:
            ConfigError: something changed; every key is named.
        """
        if changed:
            words = "\n".join(
                f"  {key}: was {_shown(was)}, now {_shown(now)}"
                for key, (was, now) in changed.items()
            )
            raise ConfigError(
                f"{place or f'out={self.out}'} holds a run with other settings:\n{words}\n"
                "Give the old values, or another out, or resume.allow_change=true to go on "
                "with the new ones."
            )

    def store_config(self, config: RunConfig) -> None:
        """Write the resolved settings, with their digest on top."""
        text = f"# settings sha256 {digest(flat(config))}\n{to_yaml(config)}"
        write_durably(self.config, text.encode())


def settings_differing(stored: dict[str, Any], config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Keys that decide the trajectory and differ: (was, is). ``stored`` is left changed."""
    stored["schedule.total"] = _stored_total(stored)
    return {
        name: (stored.get(name), value)
        for name, value in trajectory(config).items()
        if stored.get(name) != value
    }


def keep_for_owner() -> None:
    """From now on this process makes nothing that others can write.

    Who may write in a run directory decides what the next start loads. Who may read there is
    left to the user's umask: people look at each other's runs.
    """
    os.umask(os.umask(_NOT_FOR_OTHERS) | _NOT_FOR_OTHERS)


def _shown(value: object) -> str:
    """A stored value on a terminal: not without end, and without control characters."""
    text = str(value)[:200]
    return text if text.isprintable() else repr(text)


def _text(path: Path) -> str:
    try:
        return read_bounded(path, _CONFIG_BYTES, follow=True).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a settings file ({error})") from None


def _stored_total(stored: dict[str, Any]) -> Any:
    """The schedule's length as :func:`runner.compose.trajectory` counts it."""
    if stored.get("schedule.kind") == "constant":
        return None
    return stored.get("schedule.total") or stored.get("steps")
