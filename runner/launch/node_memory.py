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
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from runner.launch.crash_evidence import short_name
from runner.policy.nodes import KINDS, NodeEvent, NodeRules, Standing, standing
from runner.system.files import make_folder, naming, sync_directory
from runner.system.json_lines import read_object
from runner.system.parsing import json_text

T = TypeVar("T")

_KEPT_DAYS = 365.0
_WAIT_SECONDS = 10.0
_MOST_BYTES = 1 << 13  # of an event
_MOST_REASON = 300
_MOST_READ = 20_000  # events
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
        draft = self.path / f".{secrets.token_hex(8)}"  # another may write the same event now
        try:
            with naming(draft), draft.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            draft.rename(self.path / name)
        finally:
            draft.unlink(missing_ok=True)
        sync_directory(self.path)
        oldest = time.time() - _KEPT_DAYS * 86400
        for path, one in self._files(event.host):
            if one is not None and one.time < oldest:
                path.unlink(missing_ok=True)

    def events(self, hosts: Collection[str] | None = None) -> list[NodeEvent]:
        """Those of ``hosts``; None: of all. A file that is torn or not ours is passed over."""
        if not self.path.is_dir():
            return []
        found = [pair for host in hosts or [""] for pair in self._files(host)]
        return [one for _, one in found if one is not None]

    def clear(self, host: str) -> int:
        """Forget a host, torn files of it as well; returns how many events it had."""
        found = list(self._files(host))
        for path, _ in found:
            path.unlink(missing_ok=True)
        return len(found)

    def _files(self, host: str) -> Iterable[tuple[Path, NodeEvent | None]]:
        pattern = f"{_begin(host)}*.json" if host else "*.json"
        for path in sorted(self.path.glob(pattern))[:_MOST_READ]:
            event = _parsed(read_object(path, _MOST_BYTES))
            if not host or event is None or event.host == host:
                yield path, event


def _begin(host: str) -> str:
    return f"{_NOT_IN_NAME.sub('_', host)[:64]}-"


def _parsed(tree: Mapping[str, Any]) -> NodeEvent | None:
    texts = [tree.get(name) for name in ("host", "kind", "reason", "run")]
    when = tree.get("time")
    if not all(isinstance(text, str) for text in texts) or texts[1] not in KINDS:
        return None
    if not isinstance(when, int | float) or not math.isfinite(when):
        return None
    host, kind, reason, run = map(str, texts)
    return NodeEvent(host=host, kind=kind, time=float(when), reason=reason, run=run)


class NodeMemory:
    """The folder as a supervisor uses it: no call raises, or takes longer than some seconds.

    Args:
        run: names the run in the events.
        say: prints one line for a person.
    """

    def __init__(
        self, folder: Path, rules: NodeRules, *, run: str, say: Callable[[str], None]
    ) -> None:
        self._folder = NodeFolder(folder)
        self._rules = rules
        self._run = run
        self._say = say
        self._unwritten: list[NodeEvent] = []
        self._busy: threading.Thread | None = None
        self._has_said = False

    def note(self, host: str, kind: str, reason: str, when: float | None = None) -> None:
        """Tell what happened to a host; it is written later if it cannot be now.

        Args:
            when: in seconds since the epoch; None: now.
        """
        self._unwritten.append(
            NodeEvent(
                host=short_name(host),
                kind=kind,
                time=round(time.time() if when is None else when, 3),
                reason=reason[:_MOST_REASON],
                run=self._run,
            )
        )
        self._within(self._write, None)

    def standings(self, hosts: Collection[str]) -> dict[str, Standing]:
        """The standing of each host; empty where the folder cannot be read."""
        names = {host: short_name(host) for host in hosts}

        def read() -> dict[str, Standing]:
            events, now = self._folder.events(set(names.values())), time.time()
            return {
                host: standing(
                    [one for one in events if one.host == name], now=now, rules=self._rules
                )
                for host, name in names.items()
            }

        return self._within(read, {})

    def standing(self, host: str) -> Standing:
        """The standing of one host; that of a trusted one if nothing is known."""
        return self.standings([host]).get(host, Standing())

    def _write(self) -> None:
        while self._unwritten:
            self._folder.add(self._unwritten[0])
            del self._unwritten[0]

    def _within(self, work: Callable[[], T], otherwise: T) -> T:
        """What ``work`` returns, in a thread: a disk that is gone may block for ever."""
        results: list[T] = []
        errors: list[OSError] = []

        def run() -> None:
            try:
                results.append(work())
            except OSError as error:
                errors.append(error)

        if self._busy is None or not self._busy.is_alive():
            self._busy = threading.Thread(target=run, name="nodes", daemon=True)
            self._busy.start()
            self._busy.join(_WAIT_SECONDS)
        if results:
            return results[0]
        if not self._has_said:
            self._has_said = True
            what = errors[0] if errors else f"no answer within {_WAIT_SECONDS:g} s"
            self._say(f"cluster.nodes={self._folder.path}: {what}; the run goes on without")
        return otherwise
