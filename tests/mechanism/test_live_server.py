"""Who may look at the live page, and what clients that misbehave get; no browser is needed."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from runner.tools.report import live_state
from runner.tools.report.live_server import ADDRESS, server
from runner.tools.report.run_reader import RunReader
from tests.made_run import Made
from tests.waiting import until


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """Of a server whose token is "secret"."""
    made = server(Made(steps=20).write(tmp_path / "run"), 0, "secret")
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield made.server_address[1]
    made.shutdown()
    thread.join(20)
    made.server_close()


def answer(port: int, path: str, **headers: str) -> tuple[int, str]:
    """Status and cookie."""
    with closing(http.client.HTTPConnection(ADDRESS, port, timeout=30)) as connection:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        response.read(10)
        return response.status, response.getheader("Set-Cookie") or ""


def test_only_who_has_the_token_may_look(port: int) -> None:
    paths = ("/", "/?token=wrong", "/?token=", "/events", "/metrics", "/?token=s%C3%A9")
    assert {answer(port, path) for path in paths} == {(403, "")}
    code, cookie = answer(port, "/?token=secret")
    assert code == 200 and "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert answer(port, "/events", Cookie=f"a=b; {cookie.partition(';')[0]}")[0] == 200
    assert answer(port, "/metrics", Authorization="Bearer secret")[0] == 200
    assert answer(port, "/events", Cookie=f"holdfast-{port}=wrong")[0] == 403


def test_an_address_that_is_none_is_refused_without_a_traceback(
    port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection((ADDRESS, port), timeout=30) as raw:
        raw.sendall(f"GET http://[/ HTTP/1.1\r\nHost: {ADDRESS}:{port}\r\n\r\n".encode())
        assert raw.recv(100).startswith(b"HTTP/1.1 400 ")
    assert "Traceback" not in capsys.readouterr().err


def test_more_than_32_connections_are_closed_and_free_again_afterwards(port: int) -> None:
    idle = [socket.create_connection((ADDRESS, port), timeout=30) for _ in range(32)]
    with socket.create_connection((ADDRESS, port), timeout=30) as further:
        assert further.recv(1) == b""
    for one in idle:
        one.close()
    codes = []
    while 200 not in codes and len(codes) < 1000:
        try:
            codes.append(answer(port, "/?token=secret")[0])
        except (OSError, http.client.HTTPException):
            codes.append(0)
    assert codes[-1] == 200


def test_nothing_is_rendered_while_nothing_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_state, "_LOOK_SECONDS", 0.01)
    looks, made = [], []
    parts = live_state.parts_of
    monkeypatch.setattr(live_state, "parts_of", lambda *words: made.append(0) or parts(*words))
    live = live_state.LiveRun(RunReader(Made(steps=20).write(tmp_path / "run")))
    read = live.read
    monkeypatch.setattr(live, "read", lambda: looks.append(0) or read())
    events = live.follow("")
    until(lambda: "parts" in next(events))
    before = len(made)
    until(lambda: len(looks) > 50)
    live.close()
    assert len(made) <= before + 1, "at most once in ten seconds, for what tells an age"


def test_a_page_that_somebody_follows_stays_open(tmp_path: Path) -> None:
    """With more of them than are kept: each would be read from its beginning again and again."""
    for number in range(18):
        Made(steps=2).write(tmp_path / f"{number}")
    live = live_state.LiveRuns(tmp_path)
    live.read()
    followed = []
    for number in range(17):
        page = live.find(f"/runs/{number}")
        assert page is not None
        followed.append((page, page.follow("")))
        assert "parts" in next(followed[-1][1])
    assert [live.find(f"/runs/{number}") for number in range(17)] == [page for page, _ in followed]
    gone: Any = followed[3][1]
    gone.close()
    live.find("/runs/17")
    pages = [live.find(f"/runs/{number}") for number in range(17)]
    assert [page is one for (page, _), one in zip(followed, pages, strict=True)].count(False) == 1
    live.close()
