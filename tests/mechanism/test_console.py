"""What a person sees: plain lines in a log, one line that stays in place on a terminal."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import rich.console

from runner.command.bar import Bar
from runner.observe.console import Console, Progress, Working
from runner.policy.decision.history import Incident
from runner.system import log
from runner.system.units import duration
from tests import golden

PROGRESS = Progress(
    step=1,
    total=20,
    loss=2.34567,
    grad_norm=0.5,
    lr=3e-3,
    speed=12345.6,
    mfu=None,
    eta_seconds=187.0,
    num_clean=2,
    num_discarded=3,
    num_rollbacks=1,
    goodput=0.914,
    eval_loss=None,
    is_evaluated=False,
)
INCIDENT = Incident(
    kind="discard",
    step=17,
    decision="discard",
    reason="loss 9.10 above 3.20",
    ranks=(1, 3),
    samples=(400, 432),
    sample_ids=("a.py bytes 0-9", "b.py [bold]", "c.py"),
)


@pytest.fixture(autouse=True)
def said_as_text() -> None:
    log.begin(as_json=False, rank=0)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0s"),
        (0.999, "0s"),
        (4.2, "4s"),
        (59.9, "59s"),
        (60.0, "1m00s"),
        (187.0, "3m07s"),
        (3599.9, "59m59s"),
        (3600.0, "1h00m"),
        (7500.0, "2h05m"),
        (359_999.0, "99h59m"),
        (360_000.0, "4d04h"),
        (95_841_480.0, "1109d06h"),
    ],
)
def test_duration(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_the_line_has_every_number_and_leaves_out_what_is_zero() -> None:
    golden.same(PROGRESS.text())
    golden.same(replace(PROGRESS, mfu=0.4123, eval_loss=1.5).text())
    judged = replace(PROGRESS, eval_loss=1.5, judged=("eval_accuracy", 0.912345)).text()
    assert judged.endswith("held-out 1.5000  eval_accuracy 0.91234"), judged
    calm = replace(PROGRESS, num_clean=0, num_discarded=0, num_rollbacks=0).text()
    assert not re.search("clean|discarded|rollbacks", calm)


def test_on_80_columns_the_line_keeps_what_went_wrong_and_the_held_out_loss() -> None:
    long = replace(PROGRESS, step=123_456, total=1_000_000, mfu=0.4123, eval_loss=1.5)
    assert len(long.text()) > 100
    shown = long.text(79)
    assert len(shown) <= 79
    for words in ("step 123456/1000000", "loss 2.3457", "discarded 3", "rollbacks 1", "held-out"):
        assert words in shown


def test_help_breaks_at_words() -> None:
    path = "x" * 100
    text = log.at_words(f"  --key K   for each of {'two ranks ' * 10}{path}\n\nend", 40)
    lines = text.split("\n")
    assert [line for line in lines if len(line) > 40] == [f"      {path}"]
    assert lines[0].startswith("  --key K") and lines[-2:] == ["", "end"]
    assert " ".join(text.split()) == f"--key K for each of {'two ranks ' * 10}{path} end"


# A log


def shown_steps(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"^step (\d+)/20 ", text, re.MULTILINE)]


@pytest.mark.parametrize(
    ("every", "shown"), [(1, list(range(1, 21))), (6, [1, 6, 8, 12, 18, 20]), (1000, [1, 8, 20])]
)
def test_a_log_gets_lines_when_due(
    every: int, shown: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(silent=False, every=every)
    for step in range(1, 21):
        # The newest held-out loss is shown on; that of step 8 is news.
        eval_loss = 1.5 if step >= 8 else None
        console.progress(replace(PROGRESS, step=step, eval_loss=eval_loss, is_evaluated=step == 8))
    console.close()
    text = capsys.readouterr().out
    assert shown_steps(text) == shown
    assert "\x1b" not in text


def test_long_lines_are_not_broken_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(silent=False, every=1)
    console.say("word " * 60)
    console.progress(replace(PROGRESS, mfu=0.5, eval_loss=1.5))
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_an_incident_says_where_and_what(capsys: pytest.CaptureFixture[str]) -> None:
    Console(silent=False, every=1).incident(INCIDENT)
    assert capsys.readouterr().out == (
        "! step 17 discard ranks 1 and 3 samples 400-431 (a.py bytes 0-9; b.py [bold]): "
        "loss 9.10 above 3.20 -> discard\n"
    )


@pytest.mark.parametrize(
    ("samples", "ids", "words"),
    [
        ((8, 9), ("batch 8",), "batch 8:"),
        ((8, 10), ("batch 8", "batch 9"), "batches 8-9:"),
        ((8, 9), ("a.py",), "sample 8 (a.py):"),
    ],
)
def test_what_it_took_is_named_once(
    samples: tuple[int, int], ids: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one = replace(INCIDENT, ranks=(), samples=samples, sample_ids=ids)
    Console(silent=False, every=1).incident(one)
    assert capsys.readouterr().out.startswith(f"! step 17 discard {words}")


@pytest.mark.parametrize("word", ["[bold]x", "[/nothing]", "runs/[a]/b", "x" * 200, "[link=a]"])
def test_words_are_shown_as_they_are(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No markup is read into a path or an error, and nothing of it is cut off."""
    console = Console(silent=False, every=1)
    console.say(word)
    console.table(f"halted: {word}", [("out", word), ("[name]", "b")])
    text = capsys.readouterr().out
    assert text.startswith(f"{word}\n")
    letters = re.sub(r"[\s│┌┐└┘─┬┴]", "", text)
    assert letters.count(word) == 3 and "[name]" in letters


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(silent=True, every=1)
    console.say("hello")
    console.incident(INCIDENT)
    console.progress(PROGRESS)
    console.table("done", [("a", "b")])
    console.close()
    assert capsys.readouterr() == ("", "")


# A terminal


def screen(sent: str) -> list[str]:
    """The lines a terminal shows after these characters (what rich uses of ECMA-48)."""
    rows, row, column = [""], 0, 0
    for code, letter in re.findall(r"\x1b\[([\d;?]*[A-Za-z])|(.)", sent, re.DOTALL):
        if letter == "\n":
            row += 1
            rows += [""] * (row + 1 - len(rows))
        elif letter == "\r":
            column = 0
        elif letter:
            rows[row] = rows[row].ljust(column)[:column] + letter + rows[row][column + 1 :]
            column += 1
        elif code.endswith("K"):
            rows[row] = "" if code == "2K" else rows[row][:column]
        elif code.endswith("A"):
            row -= int(code[:-1] or 1)
    return [line.rstrip() for line in rows if line.strip()]


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """Runs something with standard output on a terminal 200 columns wide; what was sent."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("LINES", "40")

    def run(work: Callable[[Console], None]) -> str:
        master, slave = pty.openpty()
        with os.fdopen(slave, "w") as terminal, monkeypatch.context() as patch:
            patch.setattr("sys.stdout", terminal)
            work(Console(silent=False, every=1000))
        sent = b""
        # Nobody has the other end open any more: when all is read it is an error (Linux).
        with contextlib.suppress(OSError):
            while part := os.read(master, 1 << 16):
                sent += part
        os.close(master)
        return sent.decode()

    return run


def test_a_terminal_shows_one_line_that_moves_on(on_terminal: Callable[..., str]) -> None:
    def work(console: Console) -> None:
        for step in range(1, 6):
            console.progress(replace(PROGRESS, step=step))

    sent = on_terminal(work)
    assert sent.count("step ") == 5  # every step, whatever `every` says
    (line,) = screen(sent)
    assert line.startswith("step 5/20  loss 2.3457")


def test_an_incident_has_a_colour_on_a_terminal_and_breaks_at_words(
    on_terminal: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    sent = on_terminal(lambda console: console.incident(INCIDENT))
    assert sent.startswith("\x1b[K\x1b[33m! step 17 discard") and sent.rstrip().endswith("\x1b[0m")
    lines = [line.strip() for line in re.sub(r"\x1b\[\d*[mK]", "", sent).splitlines()]
    assert max(map(len, lines)) <= 80 and len(lines) == 2
    assert " ".join(lines).endswith("loss 9.10 above 3.20 -> discard")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "m" not in re.findall(r"\x1b\[\d*(.)", on_terminal(lambda one: one.incident(INCIDENT)))


def test_others_write_over_the_live_line_of_a_process_that_was_killed(
    on_terminal: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(console: Console) -> None:
        terminal = sys.stdout
        console.progress(PROGRESS)
        sys.stdout = terminal  # as the launcher has it
        Console(silent=False, every=1).say("launcher: attempt 2")

    with monkeypatch.context() as patch:
        patch.setattr("sys.stderr", sys.stderr)  # which the live line takes
        sent = on_terminal(work)
    assert screen(sent) == ["launcher: attempt 2"]
    assert sent.rfind("\x1b[?25h") > sent.rfind("\x1b[?25l"), "the cursor is there"


def test_incidents_stay_above_the_live_line(on_terminal: Callable[..., str]) -> None:
    def work(console: Console) -> None:
        console.progress(PROGRESS)
        console.incident(INCIDENT)
        console.progress(replace(PROGRESS, step=2))
        console.say("resumed")
        console.progress(replace(PROGRESS, step=3))

    first, second, live = screen(on_terminal(work))
    assert first.startswith("! step 17 discard ranks 1 and 3 samples 400-431")
    assert second == "resumed"
    assert live.startswith("step 3/20")


def test_the_live_line_is_gone_at_the_end(on_terminal: Callable[..., str]) -> None:
    def work(console: Console) -> None:
        console.progress(PROGRESS)
        console.table("done", [("steps", "60")])
        console.close()

    shown = screen(on_terminal(work))
    assert not [line for line in shown if line.startswith("step ")]
    assert shown[0] == "done" and "60" in shown[2]


def test_long_work_has_a_bar_a_rate_and_an_end() -> None:
    now = [0.0]
    working = Working("tokenising", clock=lambda: now[0], first=1 << 30)
    assert working.text(1 << 30, 4 << 30) == (
        "tokenising [######------------------] 25%  1.00 of 4.00 GiB"
    )
    now[0] = 64.0
    assert working.text(2 << 30, 4 << 30) == (
        "tokenising [############------------] 50%  2.00 of 4.00 GiB  16 MiB/s  ETA 2m08s"
    )
    runs = Working("short runs", lambda: now[0], unit="runs")
    now[0] += 45.0
    assert runs.text(3, 10).endswith("3 of 10 runs  0.067 runs/s  ETA 1m45s")


def test_a_log_gets_a_line_of_long_work_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(Working.__init__, "__defaults__", (lambda: now[0],))
    console, silent = Console(silent=False, every=1), Console(silent=True, every=1)
    for second in range(100):
        now[0] = float(second)
        console.work("tokenising", second, 100)
        silent.work("tokenising", second, 100)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("] ")[1].split(" ")[0] for line in lines] == ["30%", "60%", "90%"]


# A command's own work


def shown_of(*, is_terminal: bool, seconds: float, unit: str = "") -> str:
    """What a hundred equal parts say that take so long in all."""
    file, now = io.StringIO(), [0.0]
    console = rich.console.Console(file=file, force_terminal=is_terminal, width=120)
    with Bar("verifying", 100 << 20, unit=unit, console=console, clock=lambda: now[0]) as bar:
        for _ in range(100):
            now[0] += seconds / 100
            bar.add(1 << 20)
    return file.getvalue()


def test_a_moments_work_says_nothing_and_more_has_a_bar_or_a_line_each_half_minute() -> None:
    assert [shown_of(is_terminal=one, seconds=1.9) for one in (True, False)] == ["", ""]
    text = shown_of(is_terminal=True, seconds=100)
    assert "verifying [############------------] 50%  0.05 of 0.10 GiB  1 MiB/s  ETA 50s" in text
    text = shown_of(is_terminal=True, seconds=100, unit="rows")
    assert "52,428,800 of 104,857,600 rows  1,048,576 rows/s  ETA 50s" in text
    lines = shown_of(is_terminal=False, seconds=100).splitlines()
    assert len(lines) == 3 and all("ETA" in line for line in lines)
