"""The page of a run in progress, served only on this machine's loopback address.

A browser gets the whole page once, and then every second or two what is new. The files are read
incrementally, on request, and never written. A request whose Host header does not name this machine
is refused: otherwise a foreign page in the same browser could read this one through a domain that
resolves to 127.0.0.1 (DNS rebinding). Other users of this machine lack the token, which the address
has once and then a cookie.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from runner.system.error import ConfigError
from runner.system.parsing import json_text
from runner.tools.report.attempts import AttemptRow
from runner.tools.report.drawing import data_of
from runner.tools.report.page import page, parts_of, title_of
from runner.tools.report.run_reader import RunReader, RunStatus
from runner.tools.report.side_files import GPU_QUANTITIES

ADDRESS = "127.0.0.1"
_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
_UPDATE_SECONDS = 0.5  # the files are not read more often, however many requests come
_MOST_RECENT = 5000  # rows kept for incremental requests
_IDLE_SECONDS = 30.0
_MOST_CONNECTIONS = 32
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class LiveRun:
    """One run for any number of browsers; thread-safe."""

    def __init__(self, run: RunReader, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._clock = clock
        self._lock = threading.Lock()
        self._recent: deque[AttemptRow] = deque(maxlen=_MOST_RECENT)
        self._updated_at = -_UPDATE_SECONDS

    def page(self) -> str:
        """The whole document.

        Raises:
            OSError: a file cannot be read.
        """
        with self._lock:
            self._update()
            return page([self._run], is_live=True)

    def metrics(self) -> str:
        """The state in Prometheus' text format.

        Raises:
            OSError: a file cannot be read.
        """
        with self._lock:
            self._update()
            return metrics_text(self._run)

    def news(self, *, after: int, generation: int, known: str) -> dict[str, Any]:
        """What is new since a browser's last request.

        Args:
            after: the newest attempt that the browser has; -1 for none.
            generation: the generation of that attempt; see :attr:`RunReader.generation`.
            known: the field ``known`` of the last answer.

        Raises:
            OSError: a file cannot be read.
        """
        with self._lock:
            self._update()
            run = self._run
            keys = dict(part.split(":", 1) for part in known.split(",") if ":" in part)
            sections = parts_of(run, 0)
            rows = self._rows_after(after) if generation == run.generation else None
            has_news = len(run.fold.attempts) if rows is None else rows or after >= 0
            return {
                "alive": run.is_alive(),
                "title": title_of([run]),
                "whole": rows is None,
                "known": ",".join(f"{name}:{_short(key)}" for name, (key, _) in sections.items()),
                "parts": {
                    name: make()
                    for name, (key, make) in sections.items()
                    if keys.get(name) != _short(key)
                },
                "run": data_of(run, rows) if has_news else None,
            }

    def _update(self) -> None:
        now = self._clock()
        if now < self._updated_at + _UPDATE_SECONDS:
            return
        generation = self._run.generation
        fresh = self._run.update()
        if self._run.generation != generation:
            self._recent.clear()
        self._recent.extend(fresh)
        self._updated_at = self._clock()

    def _rows_after(self, after: int) -> list[AttemptRow] | None:
        """The rows after an attempt; None if some are no longer kept."""
        newest = len(self._run.fold.attempts) - 1
        if after < 0 or after > newest or newest - after > len(self._recent):
            return None
        return [row for row in self._recent if row.attempt > after]


def _short(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:12]


class _Server(ThreadingHTTPServer):
    """At most some connections at a time; a further one is closed at once."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away, or sends nonsense, is no news."""


def server(out: Path, port: int, token: str = "") -> ThreadingHTTPServer:
    """A server that listens; the caller serves and closes it.

    Args:
        token: what a viewer must have; empty for none.

    Raises:
        ConfigError: there is no run in ``out``, or the port is taken.
    """
    live = LiveRun(RunReader(out))

    class Handler(_Handler):
        run = live
        secret = token

    try:
        http_server = _Server((ADDRESS, port), Handler)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"live: port {port} of {ADDRESS}: {error}; choose another with --port N, or any free "
            "one with --port 0"
        ) from None
    return http_server


class _Handler(BaseHTTPRequestHandler):
    """Answers GET requests only."""

    run: LiveRun
    secret: str
    protocol_version = "HTTP/1.1"
    server_version = "holdfast"
    sys_version = ""
    timeout = _IDLE_SECONDS

    def do_GET(self) -> None:
        if not _is_own(self.headers.get_all("Host") or []):
            self._send(403, "text/plain", "this page is only for a browser on this machine\n")
            return
        try:
            url = urlsplit(self.path)
        except ValueError:
            self._send(400, "text/plain", "this is no address\n")
            return
        if not self._has_token(url.query):
            self._send(403, "text/plain", "open the address that holdfast live printed\n")
            return
        try:
            if url.path == "/":
                self._send(200, "text/html", self.run.page())
            elif url.path == "/metrics":
                self._send(200, CONTENT_TYPE, self.run.metrics())
            elif url.path == "/news":
                self._send(200, "application/json", json_text(self._news(url.query)))
            else:
                self._send(404, "text/plain", "not found: only / and /metrics are served\n")
        except OSError as error:
            if not isinstance(error, ConnectionError | TimeoutError):
                self._send(503, "text/plain", f"{error}\n")

    @property
    def _cookie(self) -> str:
        """Its name: browsers share the cookies of all ports."""
        return f"holdfast-{self.connection.getsockname()[1]}"

    def _has_token(self, query: str) -> bool:
        """Whether the address, a cookie or an Authorization header has the token."""
        cookie = re.search(rf"(?:^|; ){self._cookie}=([^;]*)", self.headers.get("Cookie") or "")
        bearer = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        given = [*parse_qs(query[:4096]).get("token", [])[:1], cookie[1] if cookie else "", bearer]
        secret = self.secret.encode()
        return not secret or any(hmac.compare_digest(one.encode(), secret) for one in given)

    def _news(self, query: str) -> dict[str, Any]:
        query_fields = parse_qs(query[:4096])
        return self.run.news(
            after=_number(query_fields, "after"),
            generation=_number(query_fields, "generation"),
            known=query_fields.get("known", [""])[0],
        )

    def _send(self, code: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if code == 200 and self.secret:
            words = f"{self._cookie}={self.secret}; HttpOnly; SameSite=Strict; Path=/"
            self.send_header("Set-Cookie", words)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


def _is_own(hosts: list[str]) -> bool:
    """Whether the Host header names this machine; any port, because a tunnel may have another."""
    return len(hosts) == 1 and re.sub(r":\d+$", "", hosts[0].lower()) in _HOSTS


def _number(query_fields: dict[str, list[str]], name: str) -> int:
    text = query_fields.get(name, ["-1"])[0]
    return int(text) if text.isascii() and text.isdigit() and len(text) < 18 else -1


# A run's state in Prometheus' text format, for ``/metrics`` of the live page.
#
# prometheus.io/docs/instrumenting/exposition_formats


CONTENT_TYPE = "text/plain; version=0.0.4"
_STATUSES = ("starting", "running", "silent", "done", "halted", "preempted", "failed")
_GAUGE, _COUNTER = "gauge", "counter"


def metrics_text(run: RunReader) -> str:
    """All samples; one whose value is not known is left out."""
    return "".join(f"{line}\n" for line in _lines(run))


def _lines(run: RunReader) -> Iterator[str]:
    now, fold = RunStatus(run), run.fold
    last = fold.thinned.last
    proven_age = None if now.proven_step is None else now.as_of - now.proven_at
    for name, kind, words, value in (
        ("step", _GAUGE, "applied updates", now.step),
        ("steps", _GAUGE, "updates at which the run is done", now.total),
        ("loss", _GAUGE, "training loss of the last applied step, nats per token", now.loss),
        ("eval_loss", _GAUGE, "held-out loss, nats per token", now.eval_loss),
        ("grad_norm", _GAUGE, "gradient norm of the last attempt", last and last.grad_norm),
        ("step_seconds", _GAUGE, "of an attempted step", fold.attempts.pace()),
        ("tokens_per_second", _GAUGE, "of the last attempt", now.tokens_per_second),
        ("goodput_ratio", _GAUGE, "share of the wall time that counts", now.goodput),
        ("heartbeat_age_seconds", _GAUGE, "since the owner's last sign", now.silent_seconds),
        ("checkpoint_proven_step", _GAUGE, "of the newest proven checkpoint", now.proven_step),
        ("checkpoint_age_seconds", _GAUGE, "of the newest proven checkpoint", proven_age),
        ("lost_steps", _GAUGE, "to be computed again after a crash now", now.lost_steps),
        ("discards_total", _COUNTER, "steps whose update was not applied", now.discards),
        ("rollbacks_total", _COUNTER, "returns to a checkpoint", now.rollbacks),
        ("restarts_total", _COUNTER, "starts after the first", now.restarts),
    ):
        yield from _sample(name, kind, words, {"": value})
    is_now = {f'status="{one}"': float(one == now.status) for one in _STATUSES}
    yield from _sample("status", _GAUGE, "1 for the state that the run is in", is_now)
    spent = {f'kind="{kind}"': seconds for kind, seconds in run.time_spent().items()}
    yield from _sample("seconds_total", _COUNTER, "wall time by kind", spent)
    kinds = Counter(line.kind for line in fold.lines)
    lines = {f'kind="{_escaped(kind)}"': count for kind, count in sorted(kinds.items())}
    yield from _sample("journal_lines_total", _COUNTER, "lines of the journal by kind", lines)
    for name, (what, unit) in GPU_QUANTITIES.items():
        ranks = fold.ranks.newest.get(name, {})
        values = {f'rank="{rank.split()[1]}"': value for rank, value in ranks.items()}
        yield from _sample(name, _GAUGE, f"{what} of each rank's GPU, {unit}", values)
    causes = Counter(str(line.detail.get("cause")) for line in fold.lines if line.kind == "crash")
    crashes = {f'cause="{_escaped(cause)}"': count for cause, count in sorted(causes.items())}
    yield from _sample("crashes_total", _COUNTER, "by cause", crashes)


def _sample(name: str, kind: str, words: str, values: Mapping[str, float | None]) -> Iterator[str]:
    known = {labels: value for labels, value in values.items() if value is not None}
    known = {labels: value for labels, value in known.items() if value == value}
    if not known:
        return
    yield f"# HELP holdfast_{name} {words}"
    yield f"# TYPE holdfast_{name} {kind}"
    for labels, value in known.items():
        yield f"holdfast_{name}{f'{{{labels}}}' if labels else ''} {value:.10g}"


def _escaped(text: str) -> str:
    plain = text[:60].replace("\\", "\\\\").replace('"', '\\"')
    return plain.replace("\n", "\\n")
