"""The live page: it follows the files, tells no other host, and writes nothing."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runner.system.error import ConfigError
from runner.tools.report import live_state
from runner.tools.report.live_server import ADDRESS, server
from runner.tools.report.run_reader import RunReader
from tests.browser.conftest import Watched
from tests.made_run import Made, incident
from tests.waiting import until


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


def told(port: int, after: str = "", path: str = "/") -> Iterator[dict[str, Any]]:
    """The events after one, each with its identity as ``id``."""
    last = ""
    for line in answer(port, f"{path}events?after={after}"):
        name, _, text = line.decode().strip().partition(": ")
        last = text if name == "id" else last
        if name == "data":
            yield json.loads(text) | {"id": last}


def news(port: int, after: str = "", path: str = "/") -> dict[str, Any]:
    """The first event that tells more than that the server lives."""
    return next(one for one in told(port, after, path) if "parts" in one)


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
        live = page.locator(".live", has_text="1 s ago")
        live.wait_for()
        assert len(watched.requests) == asked, "one connection for all events"
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
        page.route("**/events*", lambda route: None)  # no answer, and no error
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # connects anew
        page.evaluate("const was = Date.now; Date.now = () => was() + 20000")
        page.locator(".state.stale >> text=the server of this page does not answer").wait_for()
        page.unroute("**/events*")
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        page.locator(".state.running:not(.stale) >> text=Running: step 199 of 400").wait_for()


def test_a_disk_that_hangs_is_told_and_holds_up_nobody(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(tmp_path, 200)
    is_away = threading.Event()
    plain = RunReader.iter_update

    def hangs(run: RunReader) -> Iterator[Any]:
        if is_away.is_set():
            raise OSError("the disk is away")
        yield from plain(run)

    monkeypatch.setattr(RunReader, "iter_update", hangs)
    with serving(tmp_path) as port:
        page = watched.open(f"http://{ADDRESS}:{port}/")
        page.locator("text=Running: step 199 of 400").wait_for()
        is_away.set()
        for one in told(port):
            if one.get("trouble"):
                break
        assert one["trouble"] == "cannot be read: the disk is away"
        assert answer(port).status == 200, "a page that says so"
        assert b"the disk is away" in answer(port).read()
        page.evaluate("const was = Date.now; Date.now = () => was() + 20000")
        page.locator(".state.stale >> text=the disk is away").wait_for()
        is_away.clear()
        page.locator(".state.running:not(.stale) >> text=Running: step 199 of 400").wait_for()


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
        until(lambda: page.evaluate(looks) == 25)
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


def test_what_is_open_stays_so_while_incidents_come_in(watched: Watched, tmp_path: Path) -> None:
    begun(tmp_path, 200)
    kinds = ["discard", "crash"] * 15

    def journal(kinds: list[str], at: int) -> None:
        with (tmp_path / "journal.jsonl").open("a") as file:
            lines = (incident(kind, at + 60 * place) for place, kind in enumerate(kinds))
            file.writelines(json.dumps(line) + "\n" for line in lines)

    journal(kinds, 300)
    with serving(tmp_path) as port:
        page = watched.open(f"http://{ADDRESS}:{port}/")
        page.locator(".older summary", has_text="19 older").click()
        page.locator("#incident-2 summary").first.click()
        journal(["crash"], 9000)
        page.locator(".older summary", has_text="20 older").wait_for()
        assert page.locator("#incident-2 dl").is_visible(), "also what is inside what is open"
        page.locator(".filter select").select_option("crash")
        journal(["discard"], 9900)
        page.locator("#incident-33").wait_for(state="attached")
        assert page.locator("#incident-32").is_visible()
        assert not page.locator("#incident-33").is_visible(), "a kind that was chosen stays so"


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
        first = news(port)
        assert first["whole"] and first["run"]["attempts"] == 200
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / "fresh").write_text("".join(lines[:150]))
        (tmp_path / "fresh").rename(tmp_path / "metrics.jsonl")
        told = news(port, first["id"])
        assert told["whole"] and told["run"]["attempts"] == 150
        assert told["run"]["generation"] == 1


def test_only_what_is_new_is_told(tmp_path: Path) -> None:
    coming = begun(tmp_path, 200)
    with serving(tmp_path) as port:
        first = news(port)
        append(tmp_path, "".join(coming[:5]))
        fresh = news(port, first["id"])
        assert not fresh["whole"] and fresh["run"]["attempts"] == 205
        assert len(fresh["run"]["rows"]["step"]) == 5
        assert set(fresh["parts"]) <= {"head", "time", "ring", "stream"}
        again = news(port, fresh["id"])
        assert again["run"] is None and set(again["parts"]) <= {"head", "time", "ring"}, "ages"
        assert news(port, "of-another-7")["whole"], "a server's earlier life"


def test_viewers_of_one_page_share_one_rendered_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coming = begun(tmp_path, 200)
    made = []
    plain = live_state.data_of
    monkeypatch.setattr(live_state, "data_of", lambda *words: made.append(words) or plain(*words))
    with serving(tmp_path) as port:
        first = news(port)["id"]
        made.clear()
        append(tmp_path, "".join(coming[:5]))
        viewers = [told(port, first) for _ in range(8)]
        found = [next(event for event in one if event.get("run")) for one in viewers]
        assert all(one == found[0] for one in found) and len(made) == 1


def test_a_long_run_says_how_far_it_is_read(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(tmp_path, 200)
    goes_on = threading.Event()
    plain = RunReader.iter_update

    def slowly(run: RunReader) -> Iterator[Any]:
        for count, row in enumerate(plain(run)):
            yield row
            if count == 99:
                goes_on.wait(60)

    monkeypatch.setattr(RunReader, "iter_update", slowly)
    with serving(tmp_path) as port:
        page = watched.open(f"http://{ADDRESS}:{port}/")
        assert re.fullmatch(r"reading [1-9]\d%", page.locator("p[role=status]").inner_text())
        goes_on.set()
        page.locator("text=Running: step 199 of 400").wait_for()


# -- a folder of runs ----------------------------------------------------------------------------


def test_a_folder_is_a_list_of_runs_with_their_pages(watched: Watched, tmp_path: Path) -> None:
    with serving(tmp_path) as port:
        page = watched.open(f"http://{ADDRESS}:{port}/")
        page.locator("text=No run yet").wait_for()
        Made(steps=50).write(tmp_path / "deep" / "a <b>#?%")
        coming = begun(tmp_path / "b", 200)
        row = page.locator("tr", has_text="deep/a <b>#?%")
        row.locator("text=done").wait_for()
        assert "50 of 50" in row.inner_text()
        other = page.locator("tr", has=page.locator("a >> text=/^b$/"))
        other.locator("text=running").wait_for()
        assert "discard, step 50" in other.inner_text() and "%" in other.inner_text()
        append(tmp_path / "b", "".join(coming[:51]))
        other.locator("text=250 of 400").wait_for()
        (tmp_path / "b" / "journal.jsonl").rename(tmp_path / "kept")
        (tmp_path / "b" / "journal.jsonl").mkdir()
        page.locator("text=/Cannot be read: .*b/").wait_for()
        (tmp_path / "b" / "journal.jsonl").rmdir()
        (tmp_path / "kept").rename(tmp_path / "b" / "journal.jsonl")
        row.locator("a").click()
        page.locator("text=Done: step 50 of 50").wait_for()
        page.locator("figure.chart.drawn canvas").first.wait_for()
        page.locator("a >> text=all runs").click()
        other.locator("a").click()
        page.locator("text=Running: step 250 of 400").wait_for()
        append(tmp_path / "b", "".join(coming[51:60]))
        page.locator("text=Running: step 259 of 400").wait_for()
        shutil.rmtree(tmp_path / "b")
        assert next(one for one in told(port, path="/runs/b/") if one.get("trouble"))[
            "trouble"
        ].endswith("this is how it was")
        page.locator("a >> text=all runs").click()
        row.wait_for()
        other.wait_for(state="detached")
    assert not [words for words in watched.complaints if "ERR_" not in words]


def test_metrics_of_a_folder_are_labelled_by_run(tmp_path: Path) -> None:
    Made(steps=50).write(tmp_path / "a")
    Made(steps=60, status="halted").write(tmp_path / "deep" / "b")
    with serving(tmp_path) as port:
        text = answer(port, "/metrics").read().decode()
        assert 'holdfast_step{run="a"} 50\n' in text
        assert 'holdfast_status{run="deep/b",status="halted"} 1\n' in text
        assert text.count("# TYPE holdfast_step gauge") == 1
        one = answer(port, "/runs/deep/b/metrics").read().decode()
        assert 'holdfast_step{run="deep/b"} 60\n' in one and "holdfast_seconds_total" in one
        for path in ("/runs/c/", "/runs/../a/", "/a/", "/runs/a", "/runs/deep/"):
            assert answer(port, path).status == 404, path


# -- who may look --------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_a_wrong_host_is_refused(tmp_path: Path, host: str) -> None:
    begun(tmp_path, 10)
    with serving(tmp_path) as port:
        assert answer(port, host=host or "[::2]").status == 403
        assert answer(port, path="/events", host=host or "x").status == 403
        assert answer(port, host="localhost:9999").status == 200, "a tunnel's other end"
        assert answer(port, method="POST").status == 501
        assert answer(port, path="/../journal.jsonl").status == 404


def test_it_writes_nothing(tmp_path: Path) -> None:
    begun(tmp_path, 50)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with serving(tmp_path) as port:
        assert answer(port).status == 200
        news(port)
        assert b"holdfast_step{" in answer(port, "/metrics").read()
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
