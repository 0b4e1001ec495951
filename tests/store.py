"""A real S3 server for drills: it can die in the middle of an upload and come back."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import boto3
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import BaseWSGIServer, make_server

BUCKET = "runs"


class Store:
    """A server whose contents outlive :meth:`stop`, like a store's disks.

    ``puts`` has the keys that were written, in order; ``dies_at`` the number of the write
    (from 1) that brings the server down half way. ``loses_answers`` cuts the connection after so
    many conditional writes were carried out; with ``ignores_conditions`` they are like any other,
    as in stores that do not know them.
    """

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.puts: list[str] = []
        self.dies_at: int | None = None
        self.loses_answers = 0
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
        if environ["REQUEST_METHOD"] == "PUT":
            with self._lock:
                dies = len(self.puts) + 1 == self.dies_at
                self.dies_at = None if dies else self.dies_at
                if not dies:
                    self.puts.append(environ["PATH_INFO"].removeprefix(f"/{BUCKET}/"))
        if dies:
            self.stop()
            self.died.set()
        if self._server is None:  # a connection kept alive must not outlive the server
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError("the server is down")
        if self.ignores_conditions:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        if "HTTP_IF_NONE_MATCH" not in environ:
            return self._app(environ, begin)
        # moto looks and writes in two steps; S3 takes one of all that come at once.
        with self._conditional:
            answer = self._app(environ, begin)
            if self.loses_answers:
                self.loses_answers -= 1
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
                raise ConnectionAbortedError("the answer is lost")
            return answer

    def held(self, prefix: str) -> dict[str, bytes]:
        """Every object under a prefix."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        keys = [item["Key"] for page in pages for item in page.get("Contents", [])]
        return {key: self.get(key) for key in keys}

    def get(self, key: str) -> bytes:
        return self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=data)
