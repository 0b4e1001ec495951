"""The page of a run that goes on, served on this machine's loopback address only.

A browser gets the whole page once and then, every second or two, what came since. The files are
followed from where the last look ended and are only read, by whoever asks first. A request that
names another host than this one is refused: a page of somebody else's, open in the same browser,
must not get here by a name of its own that leads to 127.0.0.1.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from runner.report.curve import data_of, news_of
from runner.report.page import page, parts_of
from runner.report.rows import Row
from runner.report.run import RunReader
from runner.system.error import ConfigError
from runner.system.parsing import json_text

ADDRESS = "127.0.0.1"
_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
_LOOK_SECONDS = 0.5  # the files are not looked at more often, whoever asks
_MOST_RECENT = 5000  # rows kept for those who ask for what came since
_IDLE_SECONDS = 30.0
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class LiveRun:
    """One run for any number of browsers. Any thread may call."""

    def __init__(self, run: RunReader, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._clock = clock
        self._lock = threading.Lock()
        self._recent: deque[Row] = deque(maxlen=_MOST_RECENT)
        self._looked = -_LOOK_SECONDS

    def page(self) -> str:
        """The whole document.

        Raises:
            OSError: a file cannot be read.
        """
        with self._lock:
            self._look()
            return page([self._run], is_live=True)

    def news(self, *, after: int, generation: int, known: str) -> dict[str, Any]:
        """What came since.

        Args:
            after: the newest attempt that is known; -1 for all.
            generation: which file that was of; see :attr:`RunReader.generation`.
            known: ``known`` of the last answer.

        Raises:
            OSError: a file cannot be read.
        """
        with self._lock:
            self._look()
            run = self._run
            keys = dict(part.split(":", 1) for part in known.split(",") if ":" in part)
            made = {name: (key, markup) for name, key, markup in parts_of(run, 0)}
            rows = self._rows_after(after) if generation == run.generation else None
            told = None
            if rows is None:
                told = data_of(run) if len(run.fold.places) else None
            elif rows or after >= 0:
                told = news_of(run, rows)
            return {
                "alive": run.is_alive(),
                "whole": rows is None,
                "known": ",".join(f"{name}:{_short(key)}" for name, (key, _) in made.items()),
                "parts": {
                    name: markup()
                    for name, (key, markup) in made.items()
                    if keys.get(name) != _short(key)
                },
                "run": told,
            }

    def _look(self) -> None:
        now = self._clock()
        if now < self._looked + _LOOK_SECONDS:
            return
        generation = self._run.generation
        fresh = self._run.update()
        if self._run.generation != generation:
            self._recent.clear()
        self._recent.extend(fresh)
        self._looked = self._clock()

    def _rows_after(self, after: int) -> list[Row] | None:
        """None where too many came since."""
        newest = len(self._run.fold.places) - 1
        if after < 0 or after > newest or newest - after > len(self._recent):
            return None
        return [row for row in self._recent if row.attempt > after]


def _short(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:12]


def server(out: Path, port: int) -> ThreadingHTTPServer:
    """A server that listens; its caller serves and closes.

    Raises:
        ConfigError: there is no run in ``out``, or the port is taken.
    """
    live = LiveRun(RunReader(out))

    class Handler(_Handler):
        run = live

    try:
        made = ThreadingHTTPServer((ADDRESS, port), Handler)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"live: port {port} of {ADDRESS}: {error}; --port N names another, --port 0 takes any"
        ) from None
    made.daemon_threads = True
    return made


class _Handler(BaseHTTPRequestHandler):
    """Answers GET, and nothing else."""

    run: LiveRun
    protocol_version = "HTTP/1.1"
    server_version = "holdfast"
    sys_version = ""
    timeout = _IDLE_SECONDS

    def do_GET(self) -> None:
        if not _is_own(self.headers.get_all("Host") or []):
            self._send(403, "text/plain", "this page is for this machine's own browser only\n")
            return
        asked = urlsplit(self.path)
        try:
            if asked.path == "/":
                self._send(200, "text/html", self.run.page())
            elif asked.path == "/news":
                self._send(200, "application/json", json_text(self._news(asked.query)))
            else:
                self._send(404, "text/plain", "there is / and nothing else\n")
        except OSError as error:
            if not isinstance(error, ConnectionError | TimeoutError):
                self._send(503, "text/plain", f"{error}\n")

    def _news(self, query: str) -> dict[str, Any]:
        told = parse_qs(query[:4096])
        return self.run.news(
            after=_number(told, "after"),
            generation=_number(told, "generation"),
            known=told.get("known", [""])[0],
        )

    def _send(self, code: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is said of requests."""


def _is_own(told: list[str]) -> bool:
    """Whether the request names this machine; a tunnel's other end may have another port."""
    if len(told) != 1:
        return False
    name, colon, port = told[0].rpartition(":")
    if colon and port.isdigit():
        return name.lower() in _HOSTS
    return told[0].lower() in _HOSTS


def _number(told: dict[str, list[str]], name: str) -> int:
    text = told.get(name, ["-1"])[0]
    return int(text) if text.isascii() and text.isdigit() and len(text) < 18 else -1
