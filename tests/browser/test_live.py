"""The live page: it follows the files, tells no other host, and writes nothing."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runner.system.error import ConfigError
from runner.tools.report.live_server import ADDRESS, server
from tests.browser.conftest import Watched
from tests.made_run import Made, incident


@contextmanager
def serving(out: Path) -> Iterator[int]:
    """The port of a server for ``out``."""
    made = server(out, 0)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield made.server_address[1]
    finally:
        made.shutdown()
        thread.join(20)
        made.server_close()


def begun(out: Path, steps: int, total: int = 400) -> list[str]:
    """A run that is going on, at this step; the metrics lines that are still to come."""
    Made(steps=total, status=None, bad_at=(50,)).write(out)
    (out / "incarnation").mkdir()
    (out / "incarnation" / "beat").touch()
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(lines[:steps]))
    return lines[steps:]


def append(out: Path, text: str) -> None:
    with (out / "metrics.jsonl").open("a") as file:
        file.write(text)


def answer(port: int, path: str = "/", host: str | None = None, method: str = "GET") -> Any:
    connection = http.client.HTTPConnection(ADDRESS, port, timeout=30)
    connection.putrequest(method, path, skip_host=host is not None)
    if host:
        connection.putheader("Host", host)
    connection.endheaders()
    return connection.getresponse()


def news(port: int, **asked: int) -> dict[str, Any]:
    query = "&".join(f"{name}={value}" for name, value in asked.items())
    told: dict[str, Any] = json.loads(answer(port, f"/news?{query}").read())
    return told


def test_the_page_follows_and_a_torn_line_waits(watched: Watched, tmp_path: Path) -> None:
    coming = begun(tmp_path, 200)
    with serving(tmp_path) as port:
        page = watched.open(f"http://{ADDRESS}:{port}/")
        page.locator("text=Running: step 199 of 400").wait_for()
        page.locator("figure.chart.drawn canvas").first.wait_for()
        line = coming[0]
        append(tmp_path, line[:40])
        attempts = "document.querySelector('figure.chart').chart.data[0].length"
        asked = len(watched.requests)
        page.wait_for_event("response", predicate=lambda one: "/news" in one.url)
        page.wait_for_event("response", predicate=lambda one: "/news" in one.url)
        assert len(watched.requests) > asked
        before = page.evaluate(attempts)
        assert page.locator("text=Running: step 199 of 400").count() == 1
        append(tmp_path, line[40:] + "".join(coming[1:51]))
        page.locator("text=Running: step 250 of 400").wait_for()
        assert page.evaluate(attempts) == before + 51
        last = "document.querySelector('figure.chart').chart.scales.x.max"
        assert page.evaluate(last) == 250, "the whole run stays in view"
    assert all(one.startswith(f"http://{ADDRESS}:{port}/") for one in watched.requests)
    assert not [words for words in watched.complaints if "ERR_CONNECTION" not in words]


def test_a_server_that_hangs_makes_the_state_doubtful(watched: Watched, tmp_path: Path) -> None:
    begun(tmp_path, 200)
    with serving(tmp_path) as port:
        page = watched.open(f"http://{ADDRESS}:{port}/")
        page.locator("text=Running: step 199 of 400").wait_for()
        assert page.title().startswith("running - ")
        page.wait_for_event("response", predicate=lambda one: "/news" in one.url)
        page.route("**/news*", lambda route: None)  # no answer, and no error
        page.evaluate("const was = Date.now; Date.now = () => was() + 20000")
        page.locator(".state.stale >> text=the server of this page does not answer").wait_for()
        page.unroute("**/news*")
        page.reload()
        page.locator(".state.running >> text=Running: step 199 of 400").wait_for()
        assert page.locator(".state.stale").count() == 0


def test_looks_into_the_model_are_followed(watched: Watched, tmp_path: Path) -> None:
    begun(tmp_path, 200)
    made = Made(steps=400, layers=("embedding", "blocks.0"), slow_rank=1)
    made.write(tmp_path / "other")
    with serving(tmp_path) as port:
        page = watched.open(f"http://{ADDRESS}:{port}/")
        page.locator("text=Running: step").wait_for()
        assert page.locator("section.layers").count() == 0
        for name in ("layers.jsonl", "ranks.jsonl", "ring.jsonl"):
            lines = (tmp_path / "other" / name).read_text().splitlines(keepends=True)
            (tmp_path / name).write_text("".join(lines[:20]) + lines[20][:30])
        page.locator("section.layers figure.heat .told").first.wait_for()
        page.locator("section.ranks").wait_for()
        page.locator("section.ring .life").first.wait_for()
        looks = "JSON.parse(document.querySelector('figure.heat').dataset.heat).steps.length"
        assert page.evaluate(looks) == 20
        with (tmp_path / "layers.jsonl").open("a") as file:
            text = (tmp_path / "other" / "layers.jsonl").read_text()
            file.write("".join(text.splitlines(keepends=True)[20:25])[30:])
        page.wait_for_event("response", predicate=lambda one: "/news" in one.url)
        page.wait_for_event("response", predicate=lambda one: "/news" in one.url)
        page.locator("figure.heat .told").first.wait_for()
        assert page.evaluate(looks) == 25
    assert not [words for words in watched.complaints if "ERR_CONNECTION" not in words]


def test_a_zoom_stays_while_steps_come_in(watched: Watched, tmp_path: Path) -> None:
    coming = begun(tmp_path, 200)
    with serving(tmp_path) as port:
        page = watched.open(f"http://{ADDRESS}:{port}/")
        page.locator("#incident-1 summary").first.click()
        page.locator("#incident-1 button.zoom").click()
        span = "(({min, max}) => [min, max])(document.querySelector('figure.chart').chart.scales.x)"
        before = page.evaluate(span)
        append(tmp_path, "".join(coming[:100]))
        page.locator("text=Running: step 299 of 400").wait_for()
        assert page.evaluate(span) == before


def test_it_begins_before_the_first_step_and_sees_the_end(watched: Watched, tmp_path: Path) -> None:
    lines = begun(tmp_path, 0)
    with serving(tmp_path) as port:
        page = watched.open(f"http://{ADDRESS}:{port}/")
        page.locator("text=Starting: step 0").wait_for()
        append(tmp_path, "".join(lines))
        page.locator("figure.chart.drawn canvas").first.wait_for()
        ended = {"status": "done", "steps": 400, "incarnation": 1, "time": {"productive": 1.0}}
        (tmp_path / "summary.json").write_text(json.dumps(ended))
        page.locator("text=Done: step 400 of 400").wait_for()
        page.locator("text=a run that is not in progress").wait_for()


def test_a_restart_that_cuts_the_file_is_followed(tmp_path: Path) -> None:
    begun(tmp_path, 200)
    with serving(tmp_path) as port:
        first = news(port, after=-1, generation=-1)
        assert first["whole"] and first["run"]["attempts"] == 200
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / "fresh").write_text("".join(lines[:150]))
        (tmp_path / "fresh").rename(tmp_path / "metrics.jsonl")
        limit = threading.Event()
        for _ in range(200):
            told = news(port, after=199, generation=first["run"]["generation"])
            if told["whole"]:
                break
            limit.wait(0.05)
        assert told["whole"] and told["run"]["attempts"] == 150
        assert told["run"]["generation"] == 1


def test_only_what_is_new_is_told(tmp_path: Path) -> None:
    coming = begun(tmp_path, 200)
    with serving(tmp_path) as port:
        append(tmp_path, "".join(coming[:5]))
        told = news(port, after=-1, generation=0)
        again = json.loads(
            answer(
                port,
                f"/news?after={told['run']['attempts'] - 1}&generation=0&known={told['known']}",
            ).read()
        )
        assert not again["whole"] and again["run"]["rows"]["step"] == []
        assert set(again["parts"]) <= {"head", "time", "ring"}, "only what tells an age"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_a_wrong_host_is_refused(tmp_path: Path, host: str) -> None:
    begun(tmp_path, 10)
    with serving(tmp_path) as port:
        assert answer(port, host=host or "[::2]").status == 403
        assert answer(port, path="/news", host=host or "x").status == 403
        assert answer(port, host="localhost:9999").status == 200, "a tunnel's other end"
        assert answer(port, method="POST").status == 501
        assert answer(port, path="/../journal.jsonl").status == 404


def test_it_writes_nothing(tmp_path: Path) -> None:
    begun(tmp_path, 50)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with serving(tmp_path) as port:
        assert answer(port).status == 200
        news(port, after=-1, generation=0)
        assert b"\nholdfast_step 49\n" in answer(port, "/metrics").read()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    begun(tmp_path, 5)
    with serving(tmp_path) as port, pytest.raises(ConfigError, match=f"port {port}"):
        server(tmp_path, port)


def test_hostile_names_stay_text_when_they_come_late(watched: Watched, tmp_path: Path) -> None:
    begun(tmp_path, 60)
    with serving(tmp_path) as port:
        page = watched.open(f"http://{ADDRESS}:{port}/")
        page.locator("text=Running: step").wait_for()
        bad = incident("halt", 60, reason="<img src=x onerror=alert(1)>", sample_ids=["<b>x"])
        with (tmp_path / "journal.jsonl").open("a") as file:
            file.write(json.dumps(bad) + "\n")
        page.locator("li.incident", has_text="onerror").wait_for()
        page.locator(".state", has_text="onerror").wait_for()
        assert page.locator("img").count() == 0 and page.locator("li b").count() == 0
    assert not [words for words in watched.complaints if "ERR_CONNECTION" not in words]
