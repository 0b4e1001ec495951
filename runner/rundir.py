"""The run's directory: where each file lies, and whether this command may continue it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runner.compose import digest, flat, from_yaml, to_yaml, trajectory
from runner.config import RunConfig
from runner.error import ConfigError
from runner.files import write_durably


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
            self.ring.mkdir(parents=True, exist_ok=True)
            self.debug.mkdir(exist_ok=True)
            probe = self.out / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(f"out={self.out}: cannot be written ({error})") from None

    def settings_changed(self, config: RunConfig) -> dict[str, tuple[Any, Any]]:
        """Keys that decide the trajectory and differ from the stored ones: (was, is)."""
        if not self.config.exists():
            return {}
        stored = from_yaml(self.config.read_text(), source=self.config)
        stored["schedule.total"] = _stored_total(stored)
        return {
            name: (stored.get(name), value)
            for name, value in trajectory(config).items()
            if stored.get(name) != value
        }

    def refuse_change(self, changed: dict[str, tuple[Any, Any]]) -> None:
        """
        Raises:
            ConfigError: something changed; every key is named.
        """
        if changed:
            words = "\n".join(
                f"  {key}: was {was}, now {now}" for key, (was, now) in changed.items()
            )
            raise ConfigError(
                f"out={self.out} holds a run with other settings:\n{words}\n"
                "Give the old values, or another out, or resume.allow_change=true to go on "
                "with the new ones."
            )

    def store_config(self, config: RunConfig) -> None:
        """Write the resolved settings, with their digest on top."""
        text = f"# settings sha256 {digest(flat(config))}\n{to_yaml(config)}"
        write_durably(self.config, text.encode())


def _stored_total(stored: dict[str, Any]) -> Any:
    """The schedule's length as :func:`runner.compose.trajectory` counts it."""
    if stored.get("schedule.kind") == "constant":
        return None
    return stored.get("schedule.total") or stored.get("steps")
