"""What happened to each host, in ``cluster.nodes``: a folder that several jobs share.

One small file an event, which is made whole under a name of its own and never changed: two jobs
that write at once lose nothing, and NFS needs no more than a rename to be safe. A database would
need locks, which NFS may not keep. The name is made from the contents, so that the supervisors of
several nodes, who all tell of one crash, tell of it once.

Nothing that this folder does may stop a run: what cannot be read is as if nothing were known, what
cannot be written is tried again later, and a disk that does not answer is not waited for.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from runner.launch.crash_evidence import short_name
from runner.policy.nodes import KINDS, NodeEvent, Standing, standing
from runner.system.files import make_folder, write_durably
from runner.system.json_lines import read_object
from runner.system.parsing import json_text
from runner.system.process import in_thread

T = TypeVar("T")

_KEPT_DAYS = 365.0
_WAIT_SECONDS = 10.0
_MOST_BYTES = 1 << 13  # of an event
_MOST_REASON = 300
_NOT_IN_NAME = re.compile(r"[^A-Za-z0-9_.]")


class NodeFolder:
    """The files.

    Raises:
        OSError: the folder cannot be read or written.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder

    def add(self, event: NodeEvent) -> None:
        """Add an event, and remove those of its host that are too old to count."""
        make_folder(self.path)
        data = json_text(asdict(event), sort_keys=True).encode() + b"\n"
        name = f"{_begin(event.host)}{hashlib.sha256(data).hexdigest()[:24]}.json"
        ending = f".{secrets.token_hex(8)}"  # another may write the same event now
        try:
            write_durably(self.path / name, data, ending=ending)
        finally:
            (self.path / f"{name}{ending}").unlink(missing_ok=True)
        oldest = time.time() - _KEPT_DAYS * 86400
        for path, one in self._files([event.host]):
            if one is not None and one.time < oldest:
                path.unlink(missing_ok=True)

    def events(self, hosts: Collection[str] | None = None) -> Sequence[NodeEvent]:
        """Those of ``hosts``; None: of all. A file that is torn or not ours is passed over."""
        return [one for _, one in self._files(hosts) if one is not None]

    def clear(self, host: str) -> int:
        """Forget a host, torn files of it as well; returns how many events it had."""
        found = list(self._files([host]))
        for path, _ in found:
            path.unlink(missing_ok=True)
        return len(found)

    def _files(self, hosts: Collection[str] | None) -> Iterator[tuple[Path, NodeEvent | None]]:
        names = sorted(os.listdir(self.path)) if self.path.exists() else []
        begins = None if hosts is None else tuple(map(_begin, hosts))
        for name in names:
            if name.endswith(".json") and (begins is None or name.startswith(begins)):
                event = _parsed(read_object(self.path / name, _MOST_BYTES))
                if hosts is None or event is None or event.host in hosts:
                    yield self.path / name, event


def _begin(host: str) -> str:
    return f"{_NOT_IN_NAME.sub('_', host)[:64]}-"


def _parsed(tree: dict[str, Any]) -> NodeEvent | None:
    try:
        event = NodeEvent(**tree)
        is_one = math.isfinite(event.time) and event.kind in KINDS
    except TypeError:
        return None
    texts = (event.host, event.reason, event.run)
    return event if is_one and all(isinstance(text, str) for text in texts) else None


class NodeMemory:
    """The folder as a supervisor uses it: no call raises, or takes longer than some seconds.

    Args:
        days: how long a fault counts.
        run: names the run in the events.
        say: prints one line for a person.
    """

    def __init__(self, folder: Path, days: float, *, run: str, say: Callable[[str], None]) -> None:
        self.folder, self.run = folder, run
        self._files = NodeFolder(folder)
        self._days = days
        self._say = say
        self._unwritten: list[NodeEvent] = []
        self._busy: Future[Any] | None = None
        self._has_said = False

    def note(self, host: str, kind: str, reason: str, when: float | None = None) -> None:
        """Tell what happened to a host; it is written later if it cannot be now.

        Args:
            when: in seconds since the epoch; None: now.
        """
        when = round(time.time() if when is None else when, 3)
        host, reason = short_name(host), reason[:_MOST_REASON]
        event = NodeEvent(host=host, kind=kind, time=when, reason=reason, run=self.run)
        self._unwritten.append(event)
        self.ask(self._write)

    def standing(self, host: str) -> Standing:
        """The standing of one host; that of a trusted one if nothing is known."""
        return self.standings([host])[host]

    def standings(self, hosts: Collection[str]) -> dict[str, Standing]:
        """The standing of each host."""
        short = {host: short_name(host) for host in hosts}
        events, now = self.ask(lambda: self._files.events(short.values())), time.time()
        by_host = {
            name: [one for one in events or () if one.host == name] for name in short.values()
        }
        known = {name: standing(of, now=now, days=self._days) for name, of in by_host.items()}
        return {host: known[name] for host, name in short.items()}

    def _write(self) -> None:
        while self._unwritten:
            self._files.add(self._unwritten[0])
            del self._unwritten[0]

    def ask(self, work: Callable[[], T]) -> T | None:
        """What ``work`` returns; None if the disk fails, or does not answer in time."""
        what: object = ""
        if self._busy is None or self._busy.done():
            self._busy = asked = in_thread(work, "nodes")
            try:
                return asked.result(_WAIT_SECONDS)
            except TimeoutError:
                what = f"no answer within {_WAIT_SECONDS:g} s"
            except OSError as error:
                what = error
        if what and not self._has_said:
            self._has_said = True
            self._say(f"cluster.nodes={self.folder}: {what}; the run goes on without")
        return None
