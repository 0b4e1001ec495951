"""Users' trackers, for tests: one that records everything, and some that fail."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Recorder:
    """Writes every call as a JSON line."""

    def __init__(self, path: str, run_id: str, digest: str, config: Mapping[str, Any]) -> None:
        self._path = Path(path)
        self._add("made", {"run_id": run_id, "digest": digest, "steps": config["steps"]})

    def _add(self, kind: str, value: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([kind, value]) + "\n")

    def numbers(self, attempt: int, numbers: Mapping[str, float]) -> None:
        self._add("numbers", {"attempt": attempt, **numbers})

    def incident(self, attempt: int, line: Mapping[str, Any]) -> None:
        self._add("incident", {"attempt": attempt, **line})

    def summary(self, summary: Mapping[str, Any]) -> None:
        self._add("summary", dict(summary))

    def close(self) -> None:
        self._add("closed", None)


class Broken(Recorder):
    """Its server is gone."""

    def numbers(self, attempt: int, numbers: Mapping[str, float]) -> None:
        raise ConnectionError("no server")


class Hanging(Recorder):
    """Its server stops answering."""

    def numbers(self, attempt: int, numbers: Mapping[str, float]) -> None:
        threading.Event().wait()


class Slow(Recorder):
    """It takes its time to be imported and to connect."""

    def __init__(self, seconds: float, path: str, **facts: Any) -> None:
        time.sleep(seconds)
        super().__init__(path, **facts)


def hanging() -> Recorder:
    """Its server does not answer."""
    threading.Event().wait()
    raise AssertionError
