"""A local server that speaks as the clouds' metadata services do; it can be slow, broken or lie."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "a-token"


class Cloud:
    """What the service says now.

    Attributes:
        event: None; ``spot``, ``rebalance``, ``maintenance``, ``other`` (of another machine).
        seconds: until the machine is gone.
        fault: None; ``slow``, ``garbage``, ``error``, ``redirect``, ``endless``, ``once`` (says
            an event every other time).
        asked: paths, in order.
    """

    def __init__(self) -> None:
        self.event: str | None = None
        self.seconds = 120.0
        self.fault: str | None = None
        self.asked: list[str] = []
        self.expired = 0  # tokens that are refused

    def answer(self, method: str, path: str, headers: Any) -> tuple[int, str]:
        self.asked.append(path)
        event = None if self.fault == "once" and len(self.asked) % 4 else self.event
        if path == "/latest/api/token":
            has_ttl = method == "PUT" and headers["X-aws-ec2-metadata-token-ttl-seconds"]
            return (200, TOKEN) if has_ttl else (405, "")
        for prefix, service in (
            ("/latest/meta-data/", self._aws),
            ("/computeMetadata/v1/instance/", self._gcp),
            ("/metadata/", self._azure),
        ):
            if path.startswith(prefix):
                return service(path, headers, event)
        said = {"seconds": self.seconds, "reason": "the queue wants this node"}
        return (200, json.dumps(said)) if event and path == "/own" else (404, "")

    def _at(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=self.seconds)

    def _aws(self, path: str, headers: Any, event: str | None) -> tuple[int, str]:
        if headers["X-aws-ec2-metadata-token"] != TOKEN or self.expired:
            self.expired = max(0, self.expired - 1)
            return 401, ""
        if path.endswith("spot/instance-action") and event == "spot":
            at = self._at().strftime("%Y-%m-%dT%H:%M:%SZ")
            return 200, json.dumps({"action": "terminate", "time": at})
        if path.endswith("recommendations/rebalance") and event == "rebalance":
            return 200, json.dumps({"noticeTime": "2026-11-25T08:22:00Z"})
        return 404, "<?xml ..."

    def _gcp(self, path: str, headers: Any, event: str | None) -> tuple[int, str]:
        if headers["Metadata-Flavor"] != "Google":
            return 403, ""
        if path.endswith("/preempted"):
            return 200, "TRUE" if event == "spot" else "FALSE"
        return 200, "TERMINATE_ON_HOST_MAINTENANCE" if event == "maintenance" else "NONE"

    def _azure(self, path: str, headers: Any, event: str | None) -> tuple[int, str]:
        if headers["Metadata"] != "true":
            return 400, ""
        if path.startswith("/metadata/instance/compute/name"):
            return 200, "node-3"
        name = "node-4" if event == "other" else "node-3"
        at = format_datetime(self._at(), usegmt=True) if self.seconds else ""
        found = {"EventType": "Preempt", "Resources": [name], "NotBefore": at}
        freeze = {"EventType": "Freeze", "Resources": ["node-3"], "NotBefore": at}
        return 200, json.dumps({"Events": [freeze, *([found] if event else [])]})


@contextmanager
def served() -> Iterator[tuple[Cloud, str]]:
    """The service, and its address."""
    cloud = Cloud()

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            status, body = cloud.answer(self.command, self.path, self.headers)
            if cloud.fault == "slow":
                time.sleep(30)
            if cloud.fault == "error":
                status, body = 503, ""
            if cloud.fault == "garbage":
                status, body = 200, "<html>Please log in</html>"
            self.send_response(302 if cloud.fault == "redirect" else status)
            if cloud.fault == "redirect":
                self.send_header("Location", "/elsewhere")
            self.end_headers()
            self.wfile.write(body.encode())
            while cloud.fault == "endless":
                self.wfile.write(b"x" * 100)
                self.wfile.flush()
                time.sleep(0.05)

        do_GET = do_PUT = _handle

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield cloud, f"http://127.0.0.1:{server.server_port}"
    finally:
        cloud.fault = None
        server.shutdown()
        server.server_close()
