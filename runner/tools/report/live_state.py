"""What live pages show: the files are read in one thread a page, and rendered once for all viewers.

A viewer gets a whole page, and then server-sent events with what is new. The thread reads while
somebody looks. A disk that hangs holds up this thread alone: viewers are told how old it all is.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from runner.system.parsing import json_text
from runner.system.units import counted
from runner.tools.report import sections
from runner.tools.report.attempts import AttemptRow
from runner.tools.report.drawing import data_of
from runner.tools.report.markup import Html, join, note, section, table, tag
from runner.tools.report.metrics_text import metrics_text, samples_of, samples_of_glance
from runner.tools.report.page import document, page, parts_of, title_of
from runner.tools.report.run_reader import RunReader
from runner.tools.report.vitals import RUN_HEADS, Glance, Runs

_LOOK_SECONDS = 1.5
_AGES_SECONDS = 10.0  # what tells only an age is rendered this often
STILL_SECONDS = 5.0  # a viewer hears at least this often
_AWAKE_SECONDS = 60.0  # after the last request
_WAIT_SECONDS = 1.0  # for a page; then there is one that says what it waits for
_MOST_EVENTS = 64
_MOST_OPEN = 16  # runs whose curves are kept in memory, but for those that somebody follows
_PROGRESS_ROWS = 4096

PAGE, METRICS, _WHOLE = "page", "metrics", "whole"
Parts = Mapping[str, tuple[str, Callable[[], Html | str]]]


class _Made(NamedTuple):
    look: int
    number: int
    text: str


class Live:
    """One page for any number of viewers; thread-safe."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._poked = threading.Event()
        self._life = secrets.token_hex(4)  # of this server: another one counts from 0 as well
        self._number = self._looks = 0  # of the newest event, and of looks at the files
        self._events: deque[tuple[int, str]] = deque(maxlen=_MOST_EVENTS)
        self._wanted: set[str] = set()
        self._made: dict[str, _Made] = {}
        self._told: dict[str, str] = {}  # keys of the parts that viewers have
        self._key: object = None
        self._aged_at = self._asked_at = 0.0
        self._read_at = clock()
        self._trouble = ""
        self._is_awake = self._is_closed = False
        self.viewers: set[object] = set()  # who follow it

    # -- for viewers ------------------------------------------------------------------------

    def made(self, kind: str) -> tuple[int, str] | None:
        """A page, or metrics, of the files as they are now; None if that takes too long."""
        with self._changed:
            asked_at = self._looks
            self._wanted.add(kind)
            self._wake()
            self._poked.set()
            self._changed.wait_for(lambda: self._has(kind, asked_at), _WAIT_SECONDS)
            found = self._made[kind] if self._has(kind, asked_at) else None
        return found and (found.number, found.text)

    def _has(self, kind: str, asked_at: int) -> bool:
        return kind in self._made and self._made[kind].look > asked_at

    def follow(self, after: str) -> Iterator[str]:
        """Server-sent events after the one with this identity, for ever; empty: all there is."""
        life, _, text = after.partition("-")
        known = int(text) if life == self._life and text.isdigit() and len(text) < 18 else -1
        viewer = object()
        self.viewers.add(viewer)
        try:
            yield from self._follow(known)
        finally:
            self.viewers.discard(viewer)

    def _follow(self, known: int) -> Iterator[str]:
        while not self._is_closed:
            with self._changed:
                self._wake()
                if known == self._number:
                    self._changed.wait(STILL_SECONDS)
                oldest = self._number - len(self._events)
                frames = [frame for number, frame in self._events if number > known]
                is_lost, newest = not oldest <= known <= self._number, self._number
            if is_lost:
                if (whole := self.made(_WHOLE)) is not None:
                    known = whole[0]
                    yield whole[1]
            elif frames:
                known = newest
                yield "".join(frames)
            yield self._still()

    def _still(self) -> str:
        """That the server lives, and how old what it has shown is."""
        age = max(0.0, self._clock() - self._read_at - 2 * _LOOK_SECONDS)
        return f"data: {json_text({'age': round(age, 1), 'trouble': self._trouble})}\n\n"

    def waits_for(self) -> str:
        """Why there is no page yet."""
        return self._trouble or self.progress()

    def close(self) -> None:
        """End all that follow."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._poked.set()

    # -- the thread -------------------------------------------------------------------------

    def _wake(self) -> None:
        """Have the files read for a while: somebody looks. The lock is held."""
        self._asked_at = self._clock()
        if not self._is_awake:
            self._is_awake, self._read_at = True, self._asked_at
            threading.Thread(target=self._read_on, name="live", daemon=True).start()

    def _read_on(self) -> None:
        while True:
            with self._changed:
                if self._is_closed or self._clock() > self._asked_at + _AWAKE_SECONDS:
                    self._is_awake = False
                    return
            self._poked.clear()
            try:
                self.read()
                self._tell()
                self._trouble, self._read_at = "", self._clock()
            except Exception as error:  # whatever the files hold: the next look may do
                self._trouble = f"cannot be read: {error}"
                self._told.clear()  # viewers were told that nothing is known
            self._poked.wait(_LOOK_SECONDS)

    def _tell(self) -> None:
        """Render what has changed, and what was asked for."""
        key, now = self.key(), self._clock()
        frame = ""
        if key != self._key or now >= self._aged_at + _AGES_SECONDS or not self._told:
            frame = self._frame(
                self._number + 1, self.told(is_changed=key != self._key, is_whole=False)
            )
            self._key, self._aged_at = key, now
        with self._changed:
            wanted, self._wanted = self._wanted, set()
            if frame:
                self._number += 1
                self._events.append((self._number, frame))
        for kind in wanted:
            last = self._made.get(kind)
            text = last.text if last and last.number == self._number else self._render(kind)
            self._made[kind] = _Made(self._looks + 1, self._number, text)
        with self._changed:
            self._looks += 1
            self._changed.notify_all()

    def _render(self, kind: str) -> str:
        if kind == _WHOLE:
            return self._frame(self._number, self.told(is_changed=True, is_whole=True))
        return self.metrics() if kind == METRICS else self.page(f"{self._life}-{self._number}")

    def _frame(self, number: int, told: Mapping[str, Any]) -> str:
        return f"id: {self._life}-{number}\ndata: {json_text(told)}\n\n"

    def changed(self, parts: Parts) -> Parts:
        """The parts whose key has changed since the last call."""
        before, self._told = self._told, {name: key for name, (key, _) in parts.items()}
        return {name: one for name, one in parts.items() if before.get(name) != one[0]}

    # -- what is shown ----------------------------------------------------------------------

    def read(self) -> None:
        """Read what is new in the files.

        Raises:
            OSError, ConfigError: they cannot be read; all stays as it was.
        """
        raise NotImplementedError

    def progress(self) -> str:
        """How far the first reading is."""
        return "reading"

    def key(self) -> object:
        """Another one when there is news that is not only an age."""
        raise NotImplementedError

    def told(self, *, is_changed: bool, is_whole: bool) -> dict[str, Any]:
        """What is new since the last call, or all for a viewer who knows nothing.

        Args:
            is_changed: whether the key is another one.
        """
        raise NotImplementedError

    def page(self, version: str) -> str:
        """The whole document."""
        raise NotImplementedError

    def metrics(self) -> str:
        """The state in Prometheus' text format."""
        raise NotImplementedError

    def find(self, path: str) -> Live | None:
        """The page at this path below this one; empty for itself."""
        return None if path else self


class LiveRun(Live):
    """The page of one run.

    Args:
        name: in Prometheus' labels.
        is_one_of_many: whether there is a list of runs to go back to.
    """

    def __init__(self, run: RunReader, *, name: str = "", is_one_of_many: bool = False) -> None:
        super().__init__()
        self._run, self._is_one_of_many = run, is_one_of_many
        self._name = name or run.run_dir.out.resolve().name
        self._rows: list[AttemptRow] = []
        self._generation = -1  # that viewers have

    def read(self) -> None:
        if not self._run.run_dir.out.is_dir():
            raise FileNotFoundError("the folder is gone; this is how it was")
        for count, row in enumerate(self._run.iter_update()):
            if self._generation == self._run.generation:  # else viewers get all that is kept
                self._rows.append(row)
            if count % _PROGRESS_ROWS == 0 and self._is_closed:
                break

    def progress(self) -> str:
        done, size = self._run.read_bytes
        return f"reading {done / max(1, size):.0%}"

    def key(self) -> object:
        run, fold = self._run, self._run.fold
        count = len(fold.attempts), len(fold.lines), fold.num_side_lines, run.num_damaged
        return run.generation, count, run.status()

    def told(self, *, is_changed: bool, is_whole: bool) -> dict[str, Any]:
        run, rows = self._run, None
        parts: Parts = parts_of(run, 0)
        if not is_whole:
            parts = self.changed(parts)
            rows = self._rows if self._generation == run.generation else None
            self._rows, self._generation = [], run.generation
        return {
            "alive": run.is_alive(),
            "title": title_of([run]),
            "whole": rows is None,
            "parts": {name: make() for name, (_, make) in parts.items()},
            "run": data_of(run, rows) if is_changed else None,
        }

    def page(self, version: str) -> str:
        return page([self._run], version=version, has_list=self._is_one_of_many)

    def metrics(self) -> str:
        return metrics_text({self._name: samples_of(self._run)})


class LiveRuns(Live):
    """A list of the runs in a folder, and their pages."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder, self._runs = folder, Runs([folder])
        self._shown: list[Glance] = []
        self._pages: dict[str, LiveRun] = {}

    def read(self) -> None:
        self._shown = self._runs.update()

    def progress(self) -> str:
        return f"reading {self._runs.reading}"

    def key(self) -> object:
        runs = ((one.name, one.status, one.step, one.num_lines, one.unread) for one in self._shown)
        return list(runs), self._runs.unread

    def told(self, *, is_changed: bool, is_whole: bool) -> dict[str, Any]:
        parts = self._parts() if is_whole else self.changed(self._parts())
        made = {name: make() for name, (_, make) in parts.items()}
        return {"alive": True, "title": self._title(), "parts": made}

    def _title(self) -> str:
        return f"{counted(len(self._shown), 'run')} - holdfast"

    def page(self, version: str) -> str:
        made = [tag("div", make(), data_part=name) for name, (_, make) in self._parts().items()]
        title = tag("h2", self._folder.resolve().name)
        data = {"live": True, "version": version, "runs": []}
        return document(self._title(), [tag("article", title, *made)], data, is_live=True)

    def _parts(self) -> Parts:
        at = time.strftime("As of %Y-%m-%d %H:%M:%S %Z: ", time.localtime())
        counts = Counter(one.status for one in self._shown)
        told = ", ".join(f"{count:,} {status}" for status, count in counts.most_common())
        words = tag("strong", f"\u25b6 {counted(len(self._shown), 'run')}", cls="badge status")
        state = tag("div", tag("p", words, f" {at}", told or "none yet", "."), cls="state plain")
        unread = (note(f"Cannot be read: {one}") for one in self._runs.unread)
        runs = join([state, self._table(), *unread])
        return {"runs": (runs, lambda: runs)}

    def _table(self) -> Html:
        rows = [
            [tag("a", name, href=f"/runs/{quote(name)}/"), sections.badge(status), *cells]
            for name, status, *cells in (one.cells() for one in self._shown)
        ]
        if not rows:
            return note("No run yet; those that begin are shown.")
        return section("runs", f"Runs ({len(rows):,})", table(RUN_HEADS, rows))

    def metrics(self) -> str:
        return metrics_text({one.name: samples_of_glance(one) for one in self._shown})

    def find(self, path: str) -> Live | None:
        if not path:
            return self
        name = path.removeprefix("/runs/")
        outs = {one.name: one.run_dir.out for one in list(self._shown)}
        with self._changed:
            if name not in self._pages and name in outs and name != path:
                unseen = [other for other, one in self._pages.items() if not one.viewers]
                for other in unseen[: max(0, len(self._pages) + 1 - _MOST_OPEN)]:
                    self._pages.pop(other).close()
                run = RunReader(outs[name])
                self._pages[name] = LiveRun(run, name=name, is_one_of_many=True)
            return self._pages.get(name)

    def close(self) -> None:
        for one in [*self._pages.values()]:
            one.close()
        super().close()
