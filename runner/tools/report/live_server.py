"""The pages of runs in progress, served only on this machine's loopback address.

A browser gets a whole page once, and then by server-sent events what is new. A request whose Host
header does not name this machine is refused: otherwise a foreign page in the same browser could
read this one through a domain that resolves to 127.0.0.1 (DNS rebinding). Other users of this
machine lack the token, which the address has once and then a cookie.
"""

from __future__ import annotations

import hmac
import re
import threading
from collections.abc import Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from runner.system.error import ConfigError
from runner.tools.report.live_state import METRICS, PAGE, Live, LiveRun, LiveRuns
from runner.tools.report.metrics_text import CONTENT_TYPE
from runner.tools.report.page import waiting
from runner.tools.report.run_reader import RunReader
from runner.tools.report.vitals import is_run

ADDRESS = "127.0.0.1"
_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
_IDLE_SECONDS = 30.0
_MOST_CONNECTIONS = 32
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class _Server(ThreadingHTTPServer):
    """At most some connections at a time; a further one is closed at once."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[_Handler]) -> None:
        self._root = handler.root
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        super().__init__(address, handler)

    def server_close(self) -> None:
        super().server_close()
        self._root.close()

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
        out: a run's directory, or a folder of runs.
        token: what a viewer must have; empty for none.

    Raises:
        ConfigError: there is no such folder, or the port is taken.
    """
    is_folder = out.is_dir() and not is_run(out)
    live = LiveRuns(out) if is_folder else LiveRun(RunReader(out))

    class Handler(_Handler):
        root = live
        secret = token

    try:
        return _Server((ADDRESS, port), Handler)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"live: port {port} of {ADDRESS}: {error}; choose another with --port N, or any free "
            "one with --port 0"
        ) from None


class _Handler(BaseHTTPRequestHandler):
    """Answers GET requests only."""

    root: Live
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
            self._answer(url.path, parse_qs(url.query[:4096]))
        except ConfigError as error:
            self._send(503, "text/plain", f"{error}\n")
        except OSError as error:
            if not isinstance(error, ConnectionError | TimeoutError):
                self._send(503, "text/plain", f"{error}\n")

    def _answer(self, path: str, query: Mapping[str, list[str]]) -> None:
        place, _, what = path.rpartition("/")
        live = self.root.find(unquote(place))
        if live is None or what not in ("", "events", "metrics"):
            self._send(404, "text/plain", "not found: only pages, and their metrics, are served\n")
        elif what == "events":
            after = self.headers.get("Last-Event-ID") or query.get("after", [""])[0]
            self._send_events(live.follow(after))
        elif what == "metrics":
            made = live.made(METRICS)
            self._send(*((200, CONTENT_TYPE, made[1]) if made else (503, "text/plain", "reading")))
        else:
            made = live.made(PAGE)
            self._send(200, "text/html", made[1] if made else waiting(live.waits_for()))

    def _send_events(self, events: Iterable[str]) -> None:
        self.close_connection = True
        self._begin(200, "text/event-stream")
        self.end_headers()
        for text in events:
            self.wfile.write(text.encode())

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

    def _send(self, code: int, kind: str, text: str) -> None:
        body = text.encode()
        self._begin(code, kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _begin(self, code: int, kind: str) -> None:
        self.send_response(code)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if code == 200 and self.secret:
            words = f"{self._cookie}={self.secret}; HttpOnly; SameSite=Strict; Path=/"
            self.send_header("Set-Cookie", words)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


def _is_own(hosts: list[str]) -> bool:
    """Whether the Host header names this machine; any port, because a tunnel may have another."""
    return len(hosts) == 1 and re.sub(r":\d+$", "", hosts[0].lower()) in _HOSTS
