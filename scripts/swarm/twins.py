"""The undisturbed runs that cases are compared with."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from scripts.swarm.case import Case
from scripts.swarm.command import layout_of, overrides, told
from scripts.swarm.play import Counter, Played, play


class Leg(NamedTuple):
    """What a twin does with the settings of one start of the case.

    Args:
        stop: the step from which the next leg goes on.
        reached: the step that this one gets to; what it saved behind ``stop`` is deleted.
    """

    start: int
    stop: int
    reached: int


class Twins:
    """Undisturbed runs, each made once for all cases with its settings."""

    def __init__(self, folder: Path, shared: Path, counter: Counter) -> None:
        self._folder, self._shared, self._counter = folder, shared, counter
        self._known: dict[str, Played] = {}
        self._makers: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._lock = threading.Lock()

    def of(self, case: Case, legs: Sequence[Leg], skipped: Sequence[Any]) -> Played:
        starts = [leg.start for leg in legs]
        key = json.dumps(
            [(overrides(case, self._shared, start), layout_of(case, start)) for start in starts]
        )
        key = hashlib.sha256(f"{key}{legs}{skipped}".encode()).hexdigest()[:16]
        with self._lock:
            maker = self._makers[key]
        with maker:  # another case may need it at the same time
            if key not in self._known:
                self._known[key] = self._make(case, legs, skipped, self._folder / key)
            return self._known[key]

    def _make(self, case: Case, legs: Sequence[Leg], skipped: Sequence[Any], out: Path) -> Played:
        played: Played | None = None
        for start, stop, reached in legs:
            engine, ranks = layout_of(case, start)
            before = tuple(replace(one, engine="", ranks=0) for one in case.breaks[:start])
            one = replace(case, engine=engine, ranks=ranks, breaks=before)
            for steps in sorted({stop, reached}):
                words = [*told(skipped), f"steps={steps}", "resume.allow=[data.sources]"]
                words.append(f"data.cache={self._folder / 'cache'}")
                shutil.rmtree(out.parent / f"{out.name}-memory", ignore_errors=True)
                played = _play_once(one, out, self._shared, self._counter, start, words)
            for folder in (out / "ring").glob("*-step-*"):
                if int(folder.name.rpartition("-")[2]) > stop:
                    shutil.rmtree(folder)
        assert played is not None
        return played


def _play_once(
    case: Case, out: Path, shared: Path, counter: Counter, start: int, words: list[str]
) -> Played:
    """One start with the settings of start number ``start``, which nothing ends from outside."""
    settings = [*overrides(case, shared, start), *words]
    alone = replace(case, breaks=())
    return play(alone, out, shared, counter, lambda _: settings)
