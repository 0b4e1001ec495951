"""``holdfast top``: by its own pilot, and in a real terminal (tmux) with real keys."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.__main__ import main
from tests.made_run import Made, incident
from tests.waiting import until

TROUBLED = Made(
    steps=300, bad_at=(100, 101), reason="loss nan \x1b[2J[bold]x[/bold]", status=None,
    redo_at=(200,), slow_rank=1, reading="a longer warm-up",
)  # fmt: skip
SIZES = [(80, 24), (200, 50)]


def test_top_shows_one_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    out = TROUBLED.write(tmp_path / "run")
    assert main(["top", str(out), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "No heartbeat" in shown and "step 300 of 300" in shown
    assert "discard" in shown and "productive" in shown and "clean" in shown
    assert "plateau" in shown and "Bad data at step 200" in shown and "Slowest: rank 1" in shown
    assert "\x1b" not in shown and "\\x1b[2J[bold]x" in shown
    assert "█" in shown


def test_top_of_a_run_that_has_not_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "journal.jsonl").write_text(json.dumps(incident("start", 0)) + "\n")
    assert main(["top", str(tmp_path)]) == 0
    assert "step 0" in capsys.readouterr().out


def of_a_folder(folder: Path) -> Path:
    """Three runs: done, halted, and one in trouble that is silent."""
    Made(steps=50).write(folder / "a")
    halted = Made(steps=60, status="halted").write(folder / "deep" / "b")
    line = incident("halt", 60, reason="5 rollbacks", time=1_700_000_060.0)
    with (halted / "journal.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    TROUBLED.write(folder / "c")
    return folder


def test_a_folder_is_a_line_for_each_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["top", str(of_a_folder(tmp_path)), "--once"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    by_name = {row[0]: " ".join(row[1:]) for row in rows if row}
    assert by_name["a"].startswith("done 50 of 50 3.")
    assert "halted 60 of 60" in by_name["deep/b"] and "halt, step 60" in by_name["deep/b"]
    assert by_name["c"].startswith("silent 300 of 300")


def test_without_the_extra_there_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Made(steps=20).write(tmp_path)
    monkeypatch.setattr("runner.command.show.Console.is_terminal", True)
    monkeypatch.setattr("runner.command.show.is_installed", lambda extra: False)
    assert main(["top", str(out)]) == 2
    told = capsys.readouterr().err
    assert "needs the package textual" in told and "pip install" in told
    assert "--once" in told and told.count("\n") == 1


# -- by the pilot ------------------------------------------------------------------------------


Steps = Callable[[Any, Any], Awaitable[None]]


def piloted(out: Path, steps: Steps, size: tuple[int, int] = (80, 24)) -> None:
    """Run ``steps(application, pilot)`` on a terminal of a size."""
    screen = pytest.importorskip("runner.tools.report.screen", reason="textual is not installed")

    async def run() -> None:
        application = screen.Top(out, 0.1)
        async with application.run_test(size=size) as pilot:
            await steps(application, pilot)

    asyncio.run(run())


async def comes(application: Any, pilot: Any, words: str) -> None:
    """Wait until the screen has these words."""
    for _ in range(200):
        await pilot.pause(0.05)
        if words in shown(application):
            return
    raise AssertionError(f"{words!r} is not in\n{shown(application)}")


def shown(application: Any) -> str:
    """The screen's text."""
    strips = application.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip) for strip in strips)


@pytest.mark.parametrize("size", SIZES)
def test_tabs_scroll_and_an_incident_opens(tmp_path: Path, size: tuple[int, int]) -> None:
    out = TROUBLED.write(tmp_path / "run")

    async def steps(application: Any, pilot: Any) -> None:
        await comes(application, pilot, "No heartbeat")
        await comes(application, pilot, "nats per token")
        assert all(len(line) == size[0] for line in shown(application).splitlines())
        await pilot.press("1", "end")
        await comes(application, pilot, "productive")
        await pilot.press("2")
        await comes(application, pilot, "2 steps")
        await pilot.press("down", "enter")
        await comes(application, pilot, "Recovered: clean since")
        assert "\\x1b[2J[bold]x" in shown(application), "as text"
        await pilot.press("escape", "3")
        await comes(application, pilot, "rank 1")
        await pilot.press("4")
        await comes(application, pilot, "clean")
        await pilot.press("5")
        await comes(application, pilot, "plateau")
        await pilot.press("question_mark")
        await comes(application, pilot, "Ctrl-C")
        await pilot.press("escape", "q")
        await pilot.pause(0.1)
        assert not application.is_running

    piloted(out, steps, size)


def test_a_run_that_dies_a_torn_line_and_a_folder_that_goes_do_not_end_it(tmp_path: Path) -> None:
    out = Made(steps=100, status=None).write(tmp_path / "run")
    (out / "incarnation").mkdir()
    beat = out / "incarnation" / "beat"
    beat.touch()
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(lines[:40]) + lines[40][:30])

    async def steps(application: Any, pilot: Any) -> None:
        await comes(application, pilot, "Running: step 40 of 100")
        with (out / "metrics.jsonl").open("a") as file:
            file.write(lines[40][30:] + lines[41])
        await comes(application, pilot, "Running: step 42 of 100")
        beat.unlink()
        await comes(application, pilot, "No heartbeat: step 42")
        shutil.rmtree(out)
        await comes(application, pilot, "The folder is gone")
        await pilot.press("2", "1")
        await comes(application, pilot, "nats per token")
        Made(steps=30).write(out)
        await comes(application, pilot, "Done: step 30")

    piloted(out, steps)


def test_the_cursor_stays_on_its_incident_while_others_come(tmp_path: Path) -> None:
    out = TROUBLED.write(tmp_path / "run")

    async def steps(application: Any, pilot: Any) -> None:
        await comes(application, pilot, "No heartbeat")
        await pilot.press("2", "down")
        table = application.screen.query_one("#incidents _Rows")
        before = table.selected().key
        with (out / "journal.jsonl").open("a") as file:
            file.write(json.dumps(incident("halt", 300, reason="enough")) + "\n")
        await comes(application, pilot, "halted")
        assert table.selected().key == before and table.cursor_row == 2

    piloted(out, steps)


def test_a_run_of_the_list_opens_and_closes_and_a_new_one_appears(tmp_path: Path) -> None:
    of_a_folder(tmp_path)

    async def steps(application: Any, pilot: Any) -> None:
        await comes(application, pilot, "halt, step 60")
        Made(steps=70).write(tmp_path / "d")
        await comes(application, pilot, "70 of 70")
        await pilot.press("down", "down", "down", "enter")
        await comes(application, pilot, "b: Halted")
        await pilot.press("escape")
        await comes(application, pilot, "4 runs")
        shutil.rmtree(tmp_path / "a")
        await comes(application, pilot, "3 runs")
        shutil.rmtree(tmp_path)
        await comes(application, pilot, "cannot be read")

    piloted(tmp_path, steps)


def test_a_folder_without_runs_waits_for_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", str(tmp_path), "--once"]) == 0
    assert "last incident" in capsys.readouterr().out

    async def steps(application: Any, pilot: Any) -> None:
        await comes(application, pilot, "no run yet")
        Made(steps=20).write(tmp_path / "a")
        await comes(application, pilot, "20 of 20")
        await comes(application, pilot, "1 run,")

    piloted(tmp_path, steps)


def test_every_column_of_incidents_is_seen_in_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = TROUBLED.write(tmp_path / "run")
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["top", str(out), "--once"]) == 0
    told = capsys.readouterr().out
    assert "recovered" in told and re.search(r"since step \d+", told)
    assert all(len(line) <= 80 for line in told.splitlines())

    async def steps(application: Any, pilot: Any) -> None:
        await comes(application, pilot, "No heartbeat")
        await pilot.press("2")
        await comes(application, pilot, "recovered")
        assert re.search(r"since step \d+", shown(application))
        await pilot.resize_terminal(200, 50)
        await comes(application, pilot, "2 steps discarded")

    piloted(out, steps)


# -- in a terminal -------------------------------------------------------------------------------


@pytest.fixture
def tmux(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Call tmux on a server of its own."""
    if shutil.which("tmux") is None:
        pytest.skip("no tmux: apt-get install tmux")
    socket = tmp_path_factory.mktemp("tmux") / "socket"

    def call(*words: str) -> str:
        ran = subprocess.run(
            ["tmux", "-S", str(socket), *words], capture_output=True, text=True, timeout=30
        )
        return ran.stdout

    yield call
    call("kill-server")


@pytest.mark.parametrize("size", SIZES)
def test_real_keys_in_a_terminal(
    tmp_path: Path, tmux: Callable[..., str], size: tuple[int, int]
) -> None:
    pytest.importorskip("textual", reason="textual is not installed")
    of_a_folder(tmp_path)
    code = tmp_path / "code"
    top = shlex.join([sys.executable, "-m", "runner", "top", str(tmp_path), "--seconds", "0.2"])
    shell = f"cd {shlex.quote(str(Path.cwd()))}; {top}; echo $? > {shlex.quote(str(code))}"
    width, height = map(str, size)
    tmux("new-session", "-d", "-x", width, "-y", height, f"sh -c {shlex.quote(shell)}")

    def press(keys: str, words: str) -> None:
        tmux("send-keys", *keys.split())
        until(lambda: words in tmux("capture-pane", "-p"))
        if keys == "Escape":
            time.sleep(0.5)  # a terminal takes Escape and a key soon after for Alt and this key

    until(lambda: "halt, step 60" in tmux("capture-pane", "-p"))
    press("Down Enter", "c: No heartbeat")
    press("2", "2 steps")
    press("Enter", "Done: step computed again")
    press("Escape", "2 steps")
    press("?", "open the incident")
    press("Escape", "2 steps")
    tmux("resize-window", "-x", "60", "-y", "20")
    press("1", "No heartbeat")
    tmux("send-keys", "q")
    until(code.exists)
    until(lambda: code.read_text() == "0\n")
