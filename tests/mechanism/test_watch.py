"""holdfast watch: runs that live and die in files, a watcher that is started anew at each look."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from runner.__main__ import main
from runner.command.help import help_text
from runner.tools.watch import QuietHours, Rules, Watch
from tests import warm
from tests.made_run import BEGAN, incident
from tests.waiting import until


class Run:
    """The files of a run, a step a second.

    ``clock`` is how much that of the present owner's host is ahead, in seconds.
    """

    def __init__(self, out: Path) -> None:
        self.out, self.step, self.starts, self.clock = out, 0, 0, 0.0

    def begins(self, now: float) -> None:
        self.starts += 1
        (self.out / "incarnation").mkdir(parents=True, exist_ok=True)
        # Each start puts journal and metrics in place anew, the metrics cut back.
        for name, cut in (("journal.jsonl", 0), ("metrics.jsonl", 1)):
            path = self.out / name
            lines = path.read_text().splitlines(keepends=True) if path.exists() else []
            path.with_suffix(".new").write_text("".join(lines[: len(lines) - cut]))
            path.with_suffix(".new").rename(path)
        self.tells("start", now, detail={"incarnation": self.starts})

    def tells(self, kind: str, now: float, **more: Any) -> None:
        line = incident(kind, self.step, time=now + self.clock, **more)
        with (self.out / "journal.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def trains(self, now: float, steps: int = 1) -> None:
        self.step += steps
        line = {"step": self.step, "time": now + self.clock, "action": "apply", "loss": 2.0}
        with (self.out / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line | {"seconds": 1.0}) + "\n")
        self.beats(now)

    def beats(self, now: float) -> None:
        beat = self.out / "incarnation" / "beat"
        beat.write_text(f"{self.starts} {now}\n")
        os.utime(beat, (now - 5000, now - 5000))  # the clock of its file server is slow

    def ends(self, status: str) -> None:
        if status == "preempted":
            self.tells("preempted", 0)
        summary = {"status": status, "incarnation": self.starts, "steps": self.step}
        (self.out / "summary.json").write_text(json.dumps(summary))


class Watcher:
    """A watcher that ends after each look, and what it told."""

    def __init__(self, *paths: Path, **rules: Any) -> None:
        self.paths, self.state, self.told, self.now = paths, {}, [], BEGAN
        self.rules = Rules(**{"every_seconds": 0.0, **rules})
        self.is_down = False

    def looks(self, *, after: float = 10.0) -> list[str]:
        """The kinds of the messages of one look."""
        self.now += after
        before = len(self.told)
        kept: list[Mapping[str, Any]] = []
        watch = Watch(
            self.paths, [self._send], self.rules, state=self.state, keep=kept.append,
            clock=lambda: self.now,
        )  # fmt: skip
        watch.poll()
        self.state = json.loads(json.dumps(kept[-1]))
        return [one["kind"] for one in self.told[before:]]

    def _send(self, message: Mapping[str, Any]) -> None:
        if self.is_down:
            raise OSError("no network")
        self.told.append(message)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "runs" / "a")


@pytest.fixture
def watcher(run: Run) -> Watcher:
    watcher = Watcher(run.out.parent)
    assert watcher.looks() == [], "a folder that is not there yet"
    run.begins(watcher.now)
    run.trains(watcher.now)
    assert watcher.looks() == []
    return watcher


def looks_while_training(run: Run, watcher: Watcher, looks: int = 4) -> list[str]:
    """What is told while ten steps come between two looks."""
    kinds = []
    for _ in range(looks):
        run.trains(watcher.now + 5, steps=10)
        kinds += watcher.looks()
    return kinds


def test_of_each_planted_incident_nothing_is_missed_and_nothing_told_twice(
    run: Run, watcher: Watcher
) -> None:
    trains = partial(looks_while_training, run, watcher)
    assert trains() == []
    for kind in ("discard", "discard", "redo", "rollback", "discard"):  # bad data
        run.tells(kind, watcher.now)
    assert [*watcher.looks(), *watcher.looks()] == ["discard"]
    assert trains() == ["recovered"]
    run.tells("crash", watcher.now)  # one rank died, and all are started again
    assert watcher.looks() == ["crash"]
    run.begins(watcher.now)
    assert watcher.looks() == []
    assert trains() == ["recovered"]
    assert [watcher.looks(after=100), watcher.looks(after=100)] == [[], ["silent"]]
    assert watcher.looks(after=9000) == [], "all were killed at once"
    run.begins(watcher.now)
    run.tells("crash", watcher.now)
    assert watcher.looks() == []
    assert trains() == ["recovered"]
    run.tells("straggler", watcher.now)
    assert trains() == ["straggler"]
    run.ends("preempted")
    assert [watcher.looks(), watcher.looks(after=130)] == [[], ["preempted"]]
    run.begins(watcher.now)
    assert trains() == ["recovered"]
    run.tells("halt", watcher.now)
    run.ends("halted")
    assert [*watcher.looks(), *watcher.looks()] == ["halt"]
    run.begins(watcher.now)
    assert trains(looks=6) == ["recovered"]
    run.ends("done")
    assert [*watcher.looks(), *watcher.looks(after=9000)] == ["done"]
    begun = [one["key"] for one in watcher.told if one["event"] == "trigger"]
    over = [one["key"] for one in watcher.told if one["event"] == "resolve"]
    assert begun == over and len(set(begun)) == len(begun) == 5
    assert all(one["out"] == str(run.out) and str(run.out) in one["text"] for one in watcher.told)


@pytest.mark.parametrize("ahead", [0.0, 900.0, -900.0])
def test_of_several_hosts_with_clocks_of_their_own_each_episode_is_one_message(
    run: Run, watcher: Watcher, ahead: float
) -> None:
    trains = partial(looks_while_training, run, watcher, looks=3)
    assert trains() == []
    run.tells("crash", watcher.now, ranks=[1])  # a host died, which a survivor tells
    assert watcher.looks() == ["crash"]
    run.clock = ahead  # another host has the first rank now
    run.begins(watcher.now)
    run.beats(watcher.now)
    assert [*watcher.looks(), *watcher.looks()] == [], "it begins, and has not trained"
    assert trains() == ["recovered"]
    beat = run.out / "incarnation" / "beat"
    beat.unlink()
    beat.mkdir()  # for a look it cannot be read
    assert watcher.looks(after=30) == []
    beat.rmdir()
    assert trains() == []
    with (run.out / "metrics.jsonl").open("a") as held:  # by a host that falls silent
        assert [watcher.looks(after=100), watcher.looks(after=100)] == [[], ["silent"]]
        run.clock = -ahead
        run.begins(watcher.now)
        run.tells("crash", watcher.now)  # a start finds the end of the one before
        run.beats(watcher.now)
        held.write('{"step": 500}\n')  # it wakes: nobody reads that file any more
        held.flush()
        assert [*watcher.looks(), *watcher.looks()] == []
    assert trains() == ["recovered"]
    run.ends("preempted")
    assert [watcher.looks(), watcher.looks(after=130)] == [[], ["preempted"]]
    run.begins(watcher.now)  # requeued
    assert watcher.looks() == [], "the heartbeat is of the start before"
    assert trains() == ["recovered"], "the summary is of the start before"
    run.ends("preempted")  # a node joins: all are asked to stop, and started again
    assert watcher.looks() == []
    run.begins(watcher.now)
    assert trains() == []
    run.ends("done")
    assert [*watcher.looks(), *watcher.looks(after=9000)] == ["done"]
    begun = [one["key"] for one in watcher.told if one["event"] == "trigger"]
    over = [one["key"] for one in watcher.told if one["event"] == "resolve"]
    assert begun == over and len(set(begun)) == 3


def test_a_file_system_that_goes_away_is_one_episode_and_no_silence(
    run: Run, watcher: Watcher
) -> None:
    gone = run.out.parent.with_name("gone")
    run.out.parent.rename(gone)
    assert [watcher.looks(), watcher.looks(after=60), watcher.looks(after=70)] == [
        [], [], ["unreachable"],
    ]  # fmt: skip
    assert watcher.looks(after=5000) == []
    gone.rename(run.out.parent)
    run.trains(watcher.now)
    assert watcher.looks() == ["recovered"]
    assert watcher.looks() == []


def test_what_could_not_be_sent_is_sent_later_in_order_and_once(run: Run, watcher: Watcher) -> None:
    watcher.is_down = True
    run.tells("straggler", watcher.now)
    assert watcher.looks() == []
    run.tells("crash", watcher.now)
    assert watcher.looks() == []
    watcher.is_down = False
    assert watcher.looks() == ["straggler", "crash"]
    assert watcher.looks() == []


def test_in_quiet_hours_only_errors_are_told_at_once(
    run: Run, watcher: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher.rules = Rules(every_seconds=0.0, quiet=QuietHours("00:00-23:59"))
    run.tells("discard", watcher.now)
    run.tells("crash", watcher.now)
    assert watcher.looks() == ["crash"]
    run.trains(watcher.now + 1, steps=60)
    watcher.looks()
    watcher.rules = Rules(every_seconds=0.0)
    assert "recovered" in watcher.looks()
    assert [one["kind"] for one in watcher.told].count("discard") == 0, "it was over by then"


def test_levels(run: Run, watcher: Watcher) -> None:
    watcher.rules = Rules(every_seconds=0.0, level="error")
    run.tells("straggler", watcher.now)
    run.tells("checkpoint_damaged", watcher.now)
    run.ends("done")
    assert watcher.looks() == ["checkpoint_damaged"]


def test_what_was_before_the_watcher_is_not_told_but_how_a_named_run_is(tmp_path: Path) -> None:
    old = Run(tmp_path / "runs" / "old")
    old.begins(BEGAN)
    old.tells("crash", BEGAN)
    old.tells("rollback", BEGAN)
    old.beats(BEGAN)
    folder, named = Watcher(tmp_path / "runs"), Watcher(old.out)
    assert [folder.looks(after=9000), folder.looks(after=9000)] == [[], []]
    assert [named.looks(after=9000), named.looks(after=9000)] == [[], ["silent"]]
    old.begins(folder.now)
    old.trains(folder.now + 1)
    assert [folder.looks(), folder.looks()] == [[], []], "of its death nobody was told"
    assert [folder.looks(after=500), folder.looks()] == [["silent"], []]


def test_a_run_made_anew_in_the_same_place_is_another(run: Run, watcher: Watcher) -> None:
    run.tells("straggler", watcher.now)
    run.tells("checkpoint_damaged", watcher.now)
    assert len(watcher.looks()) == 2
    (run.out / "journal.jsonl").unlink()
    run.begins(watcher.now)
    run.tells("crash", watcher.now)
    assert watcher.looks() == ["crash"]


# The command


def told_by(words: list[str], env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "runner", "watch", *words]
    done = warm.finished(command, timeout=60, env=env)
    return done.returncode, done.stdout, done.stderr


def test_the_command_prints_runs_a_command_and_remembers(tmp_path: Path) -> None:
    run = Run(tmp_path / "a")
    run.begins(BEGAN)
    words = [str(run.out), "--once", "--silent", "1", "--state", str(tmp_path / "state")]
    assert told_by(words) == (0, "", "")
    none = tmp_path / "none"
    told = told_by([str(none), *words[1:-1], str(tmp_path / "nothing")])
    assert told == (0, "", f"watch: {none} is not there yet\n")
    time.sleep(1)
    kept = tmp_path / "told"
    shutil.copy(tmp_path / "state", tmp_path / "other")
    again = [*words[:-1], str(tmp_path / "other")]
    assert told_by([*again, "--command", f"cat >> {shlex.quote(str(kept))}"])[0] == 0
    code, text, _ = told_by(words)
    assert code == 0 and text.startswith(f"trigger error: {run.out}: step 0 silent: no sign of")
    assert told_by(words) == (0, "", "")
    [message] = [json.loads(line) for line in kept.read_text().splitlines()]
    assert message["event"] == "trigger" and message["kind"] == "silent"
    assert {"out", "host", "level", "text", "key", "step", "time"} <= message.keys()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--quiet-hours", "10"], "--quiet-hours 10: '10' is no time of day such as 22:00"),
        (["--silent", "0"], "--silent 0: at least 1"),
        (["--every", "-1"], "--every -1: at least 0"),
        (["--state", "/proc/x/y"], "choose another file"),
        (["--level", "loud"], "invalid choice: 'loud'"),
    ],
)
def test_a_wrong_option_is_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(tmp_path), *words, "--once"]) == 2
    assert message in capsys.readouterr().err


def test_two_watchers_do_not_share_what_was_told(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "runner", "watch", str(tmp_path), "--state", str(tmp_path / "s")]
    with warm.WarmPopen(words) as first:
        while not (tmp_path / "s").exists():
            assert first.poll() is None
        assert "another watcher has it" in told_by([*words[4:], "--once"])[2]
        first.terminate()
        assert first.wait(30) == 0


def begun_by_a_launcher(out: Path, told: Path, *more: str, **env: str) -> warm.WarmPopen:
    """A watcher as ``launch`` begins it, which is this process."""
    words = ["watch", str(out), "--launcher", str(os.getpid()), "--poll", "1", *more]
    words += ["--command", f"cat >> {shlex.quote(str(told))}"]
    return warm.WarmPopen([sys.executable, "-m", "runner", *words], env={**os.environ, **env})


def test_one_of_a_launcher_needs_no_home(run: Run, tmp_path: Path) -> None:
    """Often read-only on a compute node; the ranks tell of nothing, as they rely on it."""
    run.begins(time.time())
    run.ends("halted")
    with begun_by_a_launcher(run.out, tmp_path / "told", XDG_STATE_HOME="/dev/null") as watch:
        until(lambda: (tmp_path / "told").exists() or watch.poll() is not None)
        watch.terminate()
        assert watch.wait(30) == 0
    assert json.loads((tmp_path / "told").read_text())["kind"] == "halt"


def test_one_of_a_launcher_takes_over_from_that_of_the_launch_before(
    run: Run, tmp_path: Path
) -> None:
    """Which goes on to the end of what it has seen, while the next launch begins."""
    run.begins(time.time())
    told, state = tmp_path / "told", ("--state", str(tmp_path / "s"))
    before = warm.WarmPopen([sys.executable, "-m", "runner", "watch", str(run.out), *state])
    until((tmp_path / "s").exists)
    with begun_by_a_launcher(run.out, told, *state) as watch:
        time.sleep(1)
        before.terminate()
        assert before.wait(30) == 0
        run.ends("halted")
        until(lambda: told.exists() or watch.poll() is not None)
        watch.terminate()
        assert watch.wait(30) == 0
    assert json.loads(told.read_text())["kind"] == "halt"


@pytest.fixture
def receiver() -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """A web hook: its port, and what was posted."""
    posted: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1], posted
        server.shutdown()


def test_apprise_brings_it_to_a_web_hook(
    tmp_path: Path, receiver: tuple[int, list[dict[str, Any]]]
) -> None:
    run = Run(tmp_path / "a")
    run.begins(BEGAN)
    port, posted = receiver
    run.ends("halted")
    words = [str(run.out), "--once", "--state", str(tmp_path / "state")]
    code, _, text = told_by([*words, "--notify", f"json://127.0.0.1:{port}/"])
    assert code == 0, text
    [post] = posted
    assert post["title"] == "a: halt" and post["type"] == "failure"
    assert "a restart would not help" in post["message"]
    code, _, text = told_by([*words, "--notify", "nosuch://user:secret@x"])
    assert code == 2 and "--notify nosuch://...: apprise knows no such" in text
    assert "secret" not in text


def test_help_names_every_command() -> None:
    from runner.command import COMMANDS

    text = help_text()
    of_slurm = {"slurm-job", "slurm-node"}  # what slurm's batch script runs
    assert [name for name in COMMANDS if name not in of_slurm and name not in text] == []


@pytest.mark.parametrize(
    ("text", "minute", "level", "holds"),
    [
        ("", 0, "warning", False),
        ("22:00-07:00", 23 * 60, "warning", True),
        ("22:00-07:00", 6 * 60 + 59, "info", True),
        ("22:00-07:00", 7 * 60, "warning", False),
        ("22:00-07:00", 23 * 60, "error", False),
        ("09:00-17:30", 12 * 60, "warning", True),
        ("09:00-17:30", 18 * 60, "warning", False),
    ],
)
def test_quiet_hours(text: str, minute: int, level: str, holds: bool) -> None:
    assert QuietHours(text).holds(minute, level) is holds


@pytest.mark.parametrize("text", ["22", "22:00", "25:00-07:00", "22:0-07:00", "a-b", "22:00-07:61"])
def test_quiet_hours_written_otherwise_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no time of day such as 22:00"):
        QuietHours(text)
