"""A real S3 server for drills: it can die in the middle of an upload and come back."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import boto3
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import BaseWSGIServer, make_server

BUCKET = "runs"
TROUBLES = {
    "slow down": "503 SlowDown, as where too many ask; nothing is done",
    "late": "carried out, and answered after LATE_SECONDS",
    "cut": "the connection ends in the middle of what is sent; nothing is done",
    "lost": "carried out, and the connection ends before the answer",
    "short": "the connection ends in the middle of the answer",
    "refused": "403 for ever, as of an object in an archive",
}
LATE_SECONDS = 2.0
_ERROR = "<?xml version='1.0' encoding='UTF-8'?><Error><Code>{}</Code><Message>{}</Message></Error>"


def once(trouble: str, *methods: str) -> Callable[[Mapping[str, Any]], str]:
    """The trouble of each request of these methods, of any without, when it is made first."""
    met = set[tuple[str, ...]]()

    def ask(environ: Mapping[str, Any]) -> str:
        method, path, query = (
            environ[key] for key in ("REQUEST_METHOD", "PATH_INFO", "QUERY_STRING")
        )
        if (methods and method not in methods) or (method, path, query) in met:
            return ""
        met.add((method, path, query))
        return trouble

    return ask


class Store:
    """A server whose contents outlive :meth:`stop`, like a store's disks.

    ``puts`` has the keys that were written, in order; ``dies_at`` the number of the write
    (from 1) that brings the server down half way. ``trouble`` is asked before each request is
    carried out, and chooses one of :data:`TROUBLES` or nothing. With ``ignores_conditions``
    conditional writes are like any other, as in stores that do not know them.
    """

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.puts: list[str] = []
        self.dies_at: int | None = None
        self.trouble: Callable[[Mapping[str, Any]], str] = lambda environ: ""
        self.met: Counter[str] = Counter()
        self._completed = set[str]()
        self.ignores_conditions = False
        self.died = threading.Event()
        self._app = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        self._conditional = threading.Lock()
        self._server: BaseWSGIServer | None = None
        self.port = 0
        self.start()
        self.client.create_bucket(Bucket=BUCKET)

    @property
    def env(self) -> dict[str, str]:
        """The environment with which a run reaches it; the run's settings do not contain it."""
        return {
            "AWS_ACCESS_KEY_ID": "an-access-key",
            "AWS_SECRET_ACCESS_KEY": "a-very-secret-key",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_MAX_ATTEMPTS": "1",
        }

    @property
    def client(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            region_name="us-east-1",
            aws_access_key_id="an-access-key",
            aws_secret_access_key="a-very-secret-key",
        )

    def start(self) -> None:
        """Listen, at the same port as before."""
        with self._listening() as listening:
            self.port = listening.getsockname()[1]
            fd = listening.fileno()  # werkzeug ends the process where a port is taken
            self._server = make_server("127.0.0.1", self.port, self._answer, threaded=True, fd=fd)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def is_down(self) -> bool:
        return self._server is None

    def _listening(self) -> socket.socket:
        limit = time.monotonic() + 60
        while True:
            try:
                return socket.create_server(("127.0.0.1", self.port))
            except OSError:  # a connection of another test goes out from it, for a moment
                if time.monotonic() > limit:
                    raise
                time.sleep(0.1)

    def comes_back(self) -> threading.Thread:
        """Start again once it has died, however long that takes."""
        back = threading.Thread(target=lambda: (self.died.wait(), self.start()), daemon=True)
        back.start()
        return back

    def stop(self) -> None:
        """Refuse connections from now on."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def _answer(self, environ: dict[str, Any], begin: Callable[..., Any]) -> Iterable[bytes]:
        dies = False
        with self._lock:  # what is in puts is carried out, also beside the one that ends the server
            is_down = self._server is None  # a connection kept alive must not outlive the server
            if environ["REQUEST_METHOD"] == "PUT" and not is_down:
                dies = len(self.puts) + 1 == self.dies_at
                self.dies_at = None if dies else self.dies_at
                if not dies:
                    self.puts.append(environ["PATH_INFO"].removeprefix(f"/{BUCKET}/"))
        if dies:
            self.stop()
            self.died.set()
        if dies or is_down:
            self._hang_up(environ)
        trouble = self.trouble(environ)
        self.met[trouble] += 1
        num_bytes = int(environ.get("CONTENT_LENGTH") or 0)
        if trouble == "slow down":
            environ["wsgi.input"].read(num_bytes)
            return _refused(begin, "503 Slow Down", "SlowDown", "Please reduce your request rate.")
        if trouble == "refused":
            return _refused(begin, "403 Forbidden", "InvalidObjectState", "It is archived.")
        if trouble == "cut":
            environ["wsgi.input"].read(num_bytes // 2)
            self._hang_up(environ)
        answer = self._carried_out(environ, begin)
        if trouble == "late":
            time.sleep(LATE_SECONDS)
        if trouble == "lost":
            self._hang_up(environ)
        return self._half(environ, answer) if trouble == "short" else answer

    def _carried_out(self, environ: dict[str, Any], begin: Callable[..., Any]) -> Iterable[bytes]:
        query = environ["QUERY_STRING"]
        if environ["REQUEST_METHOD"] == "POST" and "uploadId=" in query:
            # moto takes a second completion for the first one; not every store does.
            if query in self._completed:
                return _refused(begin, "404 Not Found", "NoSuchUpload", "There is no such upload.")
            self._completed.add(query)
        if self.ignores_conditions:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        # moto looks and writes in two steps; S3 takes one of all that come at once.
        with self._conditional if "HTTP_IF_NONE_MATCH" in environ else contextlib.nullcontext():
            return self._app(environ, begin)

    def _half(self, environ: dict[str, Any], answer: Iterable[bytes]) -> Iterator[bytes]:
        whole = b"".join(answer)
        yield whole[: len(whole) // 2]
        self._hang_up(environ)

    def _hang_up(self, environ: dict[str, Any]) -> NoReturn:
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        raise ConnectionAbortedError("the connection has ended")

    def held(self, prefix: str) -> dict[str, bytes]:
        """Every object under a prefix."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        keys = [item["Key"] for page in pages for item in page.get("Contents", [])]
        return {key: self.get(key) for key in keys}

    def get(self, key: str) -> bytes:
        return self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=data)


def _refused(begin: Callable[..., Any], status: str, code: str, message: str) -> Iterable[bytes]:
    begin(status, [("Content-Type", "application/xml")])
    return [_ERROR.format(code, message).encode()]
