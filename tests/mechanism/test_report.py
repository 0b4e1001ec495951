"""The report: which steps it draws, what it makes of damaged files, and that it stops no run."""

from __future__ import annotations

import html
import io
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from runner.__main__ import main
from runner.observe.metrics import Throughput
from runner.observe.page_writer import PageWriter
from runner.system.error import ConfigError
from runner.tools.report import page as pages
from runner.tools.report import sections
from runner.tools.report.attempts import AttemptRow, Thinned, row_of
from runner.tools.report.drawing import ABOVE, CURVES, NONE, drawing, heat, picture, script_json
from runner.tools.report.episode import command, episodes
from runner.tools.report.follow import Follower
from runner.tools.report.incident import group_incidents, line_of
from runner.tools.report.markup import tag
from runner.tools.report.metrics_text import metrics_text, samples_of
from runner.tools.report.run_reader import RunReader, RunStatus
from runner.tools.report.side_files import LayerFold, RingFold, ValueGrid
from runner.tools.report.terminal import now_parts
from tests.made_run import BEGAN, Made, checkpoint, incident, write_lines
from tests.waiting import until


def page_of(out: Path) -> str:
    return pages.page(pages.read_runs([out]))


def read(out: Path) -> RunReader:
    run = RunReader(out)
    run.update()
    return run


def journalled(out: Path, lines: Iterable[dict[str, Any]]) -> Path:
    """A run that has a journal and nothing else."""
    out.mkdir(exist_ok=True)
    (out / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return out


@pytest.mark.parametrize("unit", [None, "", "nats per token"])
def test_losses_have_the_unit_that_the_start_tells(tmp_path: Path, unit: str | None) -> None:
    out = Made(steps=70, sources=("a", "b")).write(tmp_path / "run")
    lines = [json.loads(line) for line in (out / "journal.jsonl").read_text().splitlines()]
    if unit is not None:
        lines[0]["detail"]["unit"] = unit
    journalled(out, lines)
    run = read(out)
    has_unit = unit != ""
    assert ("nats" in RunStatus(run).sentence()) is has_unit
    assert ("nats" in page_of(out)) is has_unit
    console = Console(record=True, file=io.StringIO(), width=100)
    console.print(*now_parts(run, 80))
    assert ("loss, nats per token" in console.export_text()) is has_unit


# -- following a file ---------------------------------------------------------------------------


def test_a_torn_last_line_waits(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    follower = Follower(path)
    assert list(follower.lines()) == []
    path.write_bytes(b'{"a": 1}\n{"a": ')
    assert list(follower.lines()) == [{"a": 1}]
    assert list(follower.lines()) == []
    with path.open("ab") as file:
        file.write(b'2}\n{"a": 3}\n')
    assert list(follower.lines()) == [{"a": 2}, {"a": 3}]
    assert not follower.was_replaced()


def test_a_file_that_was_cut_is_read_anew(tmp_path: Path) -> None:
    out = Made(steps=30).write(tmp_path / "run")
    run = RunReader(out)
    assert len(run.update()) == 30 and run.update() == []
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "new").write_text("".join(lines[:20]))
    (out / "new").rename(out / "metrics.jsonl")
    assert len(run.update()) == 20
    assert run.generation == 1 and len(run.fold.attempts) == 20


# -- which steps are drawn ----------------------------------------------------------------------


def row(attempt: int, loss: float, **more: Any) -> AttemptRow:
    line = {"step": attempt + 1, "loss": loss, "grad_norm": 1.0, "action": "apply"}
    return row_of(attempt, line | more)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000), st.integers(1, 40))
def test_no_spike_is_lost(losses: list[float], columns: int) -> None:
    thinned = Thinned(columns=columns, near=0, most_near=0)
    for at, loss in enumerate(losses):
        thinned.add(row(at, loss), odd=False)
    rows = thinned.rows()
    assert [one.attempt for one in rows] == sorted({one.attempt for one in rows})
    assert len(rows) <= 2 * columns * 9 + 1
    assert {min(losses), max(losses)} <= {one.loss for one in rows}
    width = -(-len(losses) // columns)
    for start in range(0, len(losses), 2 * width):  # of every two columns that a screen could have
        part = losses[start : start + 2 * width]
        assert any(start <= one.attempt < start + len(part) for one in rows)
    assert rows[-1].attempt == len(losses) - 1


def test_every_step_near_an_odd_one_stays_and_many_are_bounded() -> None:
    thinned = Thinned(columns=16, near=20)
    for at in range(5000):
        thinned.add(row(at, 1.0), odd=at == 3000)
    assert {*range(2980, 3021)} <= {one.attempt for one in thinned.rows()}
    thinned = Thinned(columns=16, near=50, most_near=200)
    for at in range(20_000):
        thinned.add(row(at, 1.0), odd=at % 3 == 0)
    assert len(thinned.rows()) <= 200 + 32 * 9 + 1


# -- what the files say -------------------------------------------------------------------------


def test_the_state_says_what_would_be_lost(tmp_path: Path) -> None:
    out = Made(steps=100, status=None).write(tmp_path / "run")
    assert RunStatus(read(out)).status == "silent"
    (out / "incarnation").mkdir()
    (out / "incarnation" / "beat").touch()
    checkpoint(out, serial=9, step=60, mark="TAINTED")
    run = read(out)
    now = RunStatus(run)
    assert now.status == "running" and now.step == 100 and now.lost_steps == 0
    (out / "ring" / "000004-step-00000100" / "COMMITTED").unlink()
    words = RunStatus(run).sentence()
    assert words.startswith("As of 20") and ". Running: step 100 of 100" in words
    assert "proven checkpoint is of step 80" in words and "20 steps (20s of work)" in words


def test_a_dead_run_is_down_and_its_goodput_falls(tmp_path: Path) -> None:
    out = Made(steps=100, status=None).write(tmp_path / "run")
    beat = out / "incarnation" / "beat"
    beat.parent.mkdir()
    beat.write_text("1 7\n")
    os.utime(beat, (BEGAN + 101, BEGAN + 101))
    now = BEGAN + 102
    run = RunReader(out, clock=lambda: now)
    run.update()
    alive = RunStatus(run)
    now += 400
    dead = RunStatus(run)
    assert (alive.status, dead.status) == ("running", "silent")
    assert dead.goodput < 0.3 * alive.goodput
    assert run.time_spent()["restart"] > 390
    assert sum(run.time_spent().values()) == pytest.approx(now - BEGAN)
    assert "give the same command again" in dead.sentence()
    # A file server's clock may be an hour behind: a beat that moves is life.
    beat.write_text("1 8\n")
    os.utime(beat, (BEGAN, BEGAN))
    assert RunStatus(run).status == "running"


def test_a_halted_run_has_its_last_loss_and_what_to_do(tmp_path: Path) -> None:
    out = Made(steps=100, status="halted").write(tmp_path / "run")
    with (out / "metrics.jsonl").open("a") as file:
        line = {"step": 101, "action": "halt", "loss": None, "time": BEGAN + 102, "seconds": 1}
        file.write(json.dumps(line) + "\n")
    (out / "ring" / "000004-step-00000100" / "COMMITTED").unlink()
    now = RunStatus(read(out))
    assert now.loss is not None
    assert "if the run were lost now" not in now.sentence()
    assert "Remove the cause" in now.sentence() and "give the same command again" in now.sentence()
    assert "to try" not in now.sentence(), "of a run of an older version"
    with (out / "journal.jsonl").open("a") as file:
        detail = {"settings": ["data.skip=[[64,96]]", "guard.max_rollbacks=10"]}
        file.write(json.dumps(incident("halt", 101, detail=detail)) + "\n")
    assert (
        "(to try: data.skip=[[64,96]], guard.max_rollbacks=10)" in RunStatus(read(out)).sentence()
    )


def test_a_rollback_to_the_initial_state_goes_back_to_the_first_attempt(tmp_path: Path) -> None:
    run = read(Made(steps=30, back_at=10).write(tmp_path / "run"))
    [mark] = [mark for mark in run.marks() if mark.line.kind == "rollback"]
    assert mark.line.detail["to_step"] == 0 and mark.back_to == 0
    still = drawing(run, CURVES[0], episodes(run))
    (path,) = re.findall(r'<path d="([^"]*)" class="curve"', still)
    assert path.count("M") == 2, "the line starts again after the rollback"


def test_no_counter_falls_at_a_rollback(tmp_path: Path) -> None:
    """Prometheus takes one that does for one that began anew at 0."""
    out = Made(steps=60, back_at=40, status=None).write(tmp_path / "run")
    whole = {file: file.read_text().splitlines(True) for file in out.glob("[jm]*.jsonl")}

    def counters(*, is_back: bool) -> dict[str, float]:
        for file, lines in whole.items():
            [at] = [number for number, line in enumerate(lines) if '"rollback"' in line]
            file.write_text("".join(lines[: at + is_back]))
        text = metrics_text({"a": samples_of(read(out))})
        names = re.findall(r"^# TYPE (\S+) counter$", text, re.MULTILINE)
        told = [line.rpartition(" ") for line in text.splitlines() if line[0] != "#"]
        return {one: float(value) for one, _, value in told if one.partition("{")[0] in names}

    before, after = counters(is_back=False), counters(is_back=True)
    assert len(before) > 3 and after['holdfast_rollbacks_total{run="a"}'] == 1
    assert not [name for name, value in before.items() if after[name] < value]


def test_the_state_in_prometheus_text_format(tmp_path: Path) -> None:
    out = Made(steps=100, bad_at=(50,), back_at=80, status=None).write(tmp_path / "run")
    with (out / "journal.jsonl").open("a") as file:
        for cause in ("memory", 'a "quoted\\ one'):
            crash = incident("crash", 90, time=BEGAN + 95, detail={"cause": cause})
            file.write(json.dumps(crash | {"seq": 99, "attempt": 1}) + "\n")
    beat = out / "incarnation" / "beat"
    beat.parent.mkdir()
    beat.write_text("1 7\n")
    os.utime(beat, (BEGAN, BEGAN))
    hot = {
        "gpu_gib": [70, 71],
        "gpu_watts": [690, 0],
        "gpu_celsius": [61, 83],
        "gpu_mhz": [1980, 990],
    }
    with (out / "ranks.jsonl").open("a") as file:
        file.write(json.dumps({"step": 100, "ranks": 2, "ranks_a_value": 1, **hot}) + "\n")
    run = read(out)
    samples = {}
    text = metrics_text({'a "b"': samples_of(run)})
    for line in text.splitlines():
        if not line.startswith("#"):
            match = re.fullmatch(
                r'(holdfast_[a-z_]+)\{run="a \\"b\\"",?([a-z]+="(?:[^"\\]|\\.)*")?\} (.+)', line
            )
            assert match, line
            samples[match[1] + (f"{{{match[2]}}}" if match[2] else "")] = float(match[3])
    both = metrics_text({"x" * 60 + end: samples_of(run) for end in "ab"})
    told = [line.rpartition(" ")[0] for line in both.splitlines() if line[0] != "#"]
    assert len(set(told)) == len(told) == 2 * len(samples), "each series is there once"
    types = re.findall(r"^# TYPE (\S+) (gauge|counter)$", text, re.MULTILINE)
    assert {name for name, _ in types} == {name.partition("{")[0] for name in samples}
    now = RunStatus(run)
    assert samples["holdfast_step"] == 100 and samples["holdfast_rollbacks_total"] == 1
    assert samples["holdfast_loss"] == pytest.approx(now.loss)
    assert samples['holdfast_status{status="silent"}'] == 1
    assert samples['holdfast_journal_lines_total{kind="rollback"}'] == 1
    assert samples['holdfast_crashes_total{cause="memory"}'] == 1
    assert samples['holdfast_gpu_celsius{rank="1"}'] == 83
    assert 'holdfast_gpu_watts{rank="1"}' not in samples, "0 is unknown"
    dashboard = (Path(__file__).parents[2] / "launch/grafana.json").read_text()
    asked = set(re.findall(r"holdfast_[a-z_]+", dashboard)) - {"holdfast_runs"}
    assert asked <= {name for name, _ in types} and len(asked) > 20
    assert "Temperature of each GPU" in str(sections.ranks(run))
    spent = sum(value for name, value in samples.items() if "seconds_total{" in name)
    assert spent == pytest.approx(now.wall_seconds, rel=1e-3)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ([0.2512, 0.0006], "rank 0, 0.251 s; the median of the others 6.0e-04 s (419 times)."),
        ([1.0, 3.0, 1.0], "rank 1, 3 s; the median of the others 1 s (3 times)."),
        ([1.0], ""),
    ],
)
def test_the_slowest_rank_is_compared_with_the_others(seconds: list[float], words: str) -> None:
    names = [f"rank {number}" for number in range(len(seconds))]
    grid = SimpleNamespace(names=names, cells=lambda: [[one] for one in seconds])
    told = sections.slowest(grid)  # type: ignore[arg-type]
    assert told == (f"Slowest: {words}" if words else "")


def test_lines_of_one_trouble_are_told_together() -> None:
    told = [
        incident("start", 0),
        incident("discard", 30, samples=[100, 110]),
        incident("discard", 30, samples=[110, 120]),
        incident("episode", 30, samples=[100, 130], decision="persistent"),
        incident("rollback", 30, samples=[90, 130]),
        incident("discard", 31, samples=[400, 410]),
        incident("crash", 50),
    ]
    lines = [line for line in map(line_of, told) if line is not None]
    assert [[line.kind for line in one] for one in group_incidents(lines)] == [
        ["discard", "discard", "episode", "rollback"],
        ["discard"],
        ["crash"],
    ]


def test_an_incident_is_told_in_one_sentence(tmp_path: Path) -> None:
    made = Made(steps=100, bad_at=(40, 80), back_at=80, reason="loss nan " + "x" * 400)
    run = read(made.write(tmp_path / "run"))
    first, second = episodes(run)
    assert (first.number, second.number, first.kinds) == (1, 2, ["discard"])
    assert first.sentence().startswith("A bad step at step 40, rank 1: loss nan xxx")
    assert "x…. Done: step discarded. Recovered: clean since step 40 (" in first.sentence()
    assert "Done: step discarded, rollback; went back to step 70. Recovered" in second.sentence()
    assert second.clean_step == 71 and second.cost() == "2 steps, 1.8s"
    out = journalled(tmp_path / "other", [incident("start", 0), incident("crash", 7)])
    [crash] = episodes(read(out))
    assert crash.sentence().endswith("Done: crash. Not recovered yet.") and crash.cost() == ""


def test_a_crash_costs_the_steps_and_the_time_until_training_again(tmp_path: Path) -> None:
    made = list(Made(steps=20).metrics())
    (tmp_path / "run").mkdir()
    made[6] |= {"stalls": {"restart": 9.5}}  # what was after step 6 is cut off
    again = [line | {"time": line["time"] + 20 * (at >= 6)} for at, line in enumerate(made)]
    write_lines(tmp_path / "run" / "metrics.jsonl", again)
    lines = [incident("start", 0), incident("crash", 10), incident("start", 6, time=BEGAN + 15)]
    [crash] = episodes(read(journalled(tmp_path / "run", lines)))
    assert crash.cost() == "3 steps, 9.5s" and crash.recovered == "since step 7"


def test_the_time_to_go_is_that_of_the_console(tmp_path: Path) -> None:
    out = Made(steps=100, status=None).write(tmp_path / "run")
    lines = list(Made(steps=100).metrics())
    average = Throughput(flops_per_token=0.0, peak_flops=None)
    for at, line in enumerate(lines):
        line |= {"seconds": 0.5 + at / 100, "time": line["time"] + 900 * (at > 90)}  # it was down
        pace = average.note(line["seconds"], line["tokens"])
    write_lines(out / "metrics.jsonl", lines)
    (out / "config.yaml").write_text("steps: 400\n")
    (out / "incarnation").mkdir()
    (out / "incarnation" / "beat").touch()
    assert RunStatus(read(out)).eta_seconds == pytest.approx(300 * pace.seconds_per_step)


def test_the_command_that_resumes_is_that_of_the_newest_start(tmp_path: Path) -> None:
    def told(words: object, ranks: int = 8, hosts: object = None) -> str:
        detail = {"command": words, "world_size": ranks, "hosts": hosts or {"a": "0-3", "b": "4-7"}}
        lines = [incident("start", 0), incident("start", 9, detail=detail)]
        return command(read(journalled(tmp_path, lines)))

    assert told(["/x/runner/__main__.py", "out=a b"]) == "holdfast launch --nproc 4 'out=a b'"
    assert told(["/bin/holdfast", "out=a"]) == "holdfast launch --nproc 4 out=a"
    assert told(["t.py", "--lr", "1"]) == "torchrun --nproc-per-node 4 t.py --lr 1"
    assert told(None) == told([]) == told("text") == told(["t.py"], hosts=[1]) == ""


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
FIELDS = {
    "metrics": ("step", "loss", "grad_norm", "lr", "time", "action", "verdict", "stalls", "cursor"),
    "journal": ("kind", "step", "time", "reason", "samples", "ranks", "detail", "sample_ids"),
    "layers": ("step", "layers", "model", "histograms", "loss_by_position", "positions"),
    "ranks": ("step", "time", "own_seconds", "device_seconds", "ranks_a_value"),
    "ring": ("tier", "serial", "of", "state", "step", "time"),
    "summary": ("status", "steps", "incarnation", "time", "reason"),
}


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from(list(FIELDS)), st.binary(max_size=30))
def test_no_line_ends_it(data: st.DataObject, name: str, torn: bytes) -> None:
    lines = data.draw(st.lists(st.dictionaries(st.sampled_from(FIELDS[name]), JSON), max_size=4))
    assert_shown(name, lines, torn)


@pytest.mark.parametrize(
    ("name", "line", "torn"),
    [
        ("metrics", {"grad_norm": 0}, b""),
        ("metrics", {"step": 10**20}, b""),
        ("layers", {"layers": {"a": {"grad": 10**400}}, "model": {"b": "c"}}, b"{"),
        ("layers", {"histograms": {"a": {"weights": [1] * 9, "outputs": [0] * 9}, "b": 1}}, b""),
        ("layers", {"histograms": {"a": {"weights": [5e-324] * 9, "outputs": [1e308] * 9}}}, b""),
        ("layers", {"histograms": {"a": {"weights": [1, -2, *[3] * 7], "outputs": [2]}}}, b""),
        ("ranks", {"own_seconds": [1, None, "x"], "ranks_a_value": -3}, b""),
        ("ring", {"tier": [], "serial": 1, "state": {}, "time": "x"}, b""),
        ("ring", {"time": 0}, b""),
        ("ring", {"time": 1.4e17}, b""),
    ],
)
def test_known_lines_do_not_end_it(name: str, line: dict[str, Any], torn: bytes) -> None:
    assert_shown(name, [line], torn)


def assert_shown(name: str, lines: list[dict[str, Any]], torn: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Made(steps=20, layers=("a", "b"), slow_rank=1).write(Path(folder))
        file = out / ("summary.json" if name == "summary" else f"{name}.jsonl")
        good = json.loads(file.read_text().splitlines()[0])
        file.write_bytes("".join(json.dumps(good | line) + "\n" for line in lines).encode() + torn)
        assert "</html>" in page_of(out)


def test_no_run_is_an_error_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run: it has neither"):
        RunReader(tmp_path)
    assert main(["report", str(tmp_path)]) == 2
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 1, "accuracy": 0.3}\n')
    with pytest.raises(ConfigError, match="nor steps in metrics"):
        RunReader(tmp_path)
    with pytest.raises(ConfigError, match="no such directory"):
        RunReader(tmp_path / "none")
    run = Made(steps=20).write(tmp_path / "run")
    assert main(["report", str(run), "-o", str(tmp_path / "none" / "page.html")]) == 2


def test_a_file_that_is_no_page_of_ours_is_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Made(steps=20).write(tmp_path / "run")
    link, folder, secret = tmp_path / "link.html", tmp_path / "folder", tmp_path / "secret"
    folder.mkdir()
    secret.write_text("<!doctype html> of another program")
    link.symlink_to(out / "metrics.jsonl")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for target in (out / "metrics.jsonl", secret, link, folder):
        assert main(["report", str(out), "-o", str(target)]) == 2
        told = capsys.readouterr().err
        assert len(told.splitlines()) == 1 and str(target) in told and "-o FILE" in told
    assert {path: path.read_bytes() for path in before} == before
    assert not list(tmp_path.rglob("*.tmp")) and link.is_symlink()
    for _ in range(2):  # its own page is replaced
        assert main(["report", str(out), "-o", str(tmp_path / "page.html")]) == 0
    own = Made(steps=20).write(tmp_path / "other")
    assert main(["report", str(out)]) == 0
    page = (out / "report.html").read_bytes()
    assert main(["report", str(out), str(own)]) == 0
    assert (out / "report.html").read_bytes() == page, "a comparison is another file"
    assert b"Side by side" in (out / "comparison.html").read_bytes()


def test_links_in_a_foreign_run_are_not_followed(tmp_path: Path) -> None:
    out = Made(steps=50, redo_at=(20,), excerpt="SECRET-1").write(tmp_path / "run")
    assert "SECRET-1" in page_of(out)
    (out / "explanations").rename(tmp_path / "elsewhere")
    (out / "explanations").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "kubeconfig").write_text("users: {token: SECRET-2}\n")
    (out / "config.yaml").unlink()
    (out / "config.yaml").symlink_to(tmp_path / "kubeconfig")
    assert "SECRET" not in page_of(out)


# -- the page ------------------------------------------------------------------------------------


def test_everything_is_escaped() -> None:
    assert str(tag("p", "<b>&\"'\x1b[31m", cls='"><i>')) == (
        '<p class="&quot;&gt;&lt;i&gt;">&lt;b&gt;&amp;&quot;&#x27;\\x1b[31m</p>'
    )
    assert "</script" not in script_json({"a": "</script><!--"})
    assert json.loads(script_json({"a": "</script>"})) == {"a": "</script>"}


def test_sections_without_data_are_not_there(tmp_path: Path) -> None:
    text = page_of(journalled(tmp_path, [incident("start", 0)]))
    for title in ("Curves", "Incidents", "The ring", "The stream", "Warnings"):
        assert f"<h3>{title}" not in text
    assert text.count("<svg") == 1, "where the time went: it is down"


def test_the_policy_names_what_the_page_holds(tmp_path: Path) -> None:
    text = page_of(Made(steps=5).write(tmp_path / "run"))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert "unsafe" not in policy[1] and policy[1].startswith("default-src &#x27;none&#x27;; ")
    assert "connect-src" not in policy[1]
    assert not re.search(r"""(src|href|action)=["']?(http|//)""", text)
    assert 'style="' not in text.split("<script")[0]


def test_what_is_vendored_is_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in pages.VENDORED:
        assert pages.asset(name)
    pages.asset.cache_clear()
    monkeypatch.setitem(pages.VENDORED, "uPlot.min.css", "0" * 64)
    with pytest.raises(ConfigError, match="is not the vendored file"):
        pages.asset("uPlot.min.css")


# -- beside a run --------------------------------------------------------------------------------


def test_the_page_is_written_while_the_run_goes_on(tmp_path: Path) -> None:
    out = Made(steps=20, status=None).write(tmp_path / "run")
    writer = PageWriter(out, every_seconds=0.05)
    writer.begin()
    until((out / "report.html").exists)
    writer.finish(20)
    assert writer.loss is None
    assert "No heartbeat" in (out / "report.html").read_text()
    assert [one.name for one in out.glob("report.html?*")] == []


def test_a_page_that_fails_is_a_loss_and_no_more(tmp_path: Path) -> None:
    out = Made(steps=20).write(tmp_path / "run")
    (out / "metrics.jsonl").unlink()
    (out / "metrics.jsonl").mkdir()
    writer = PageWriter(out, every_seconds=0.05)
    writer.begin()
    until(lambda: writer.loss is not None)
    writer.finish(20)
    assert writer.loss is not None and "metrics.jsonl" in writer.loss.reason


def test_an_owner_that_was_replaced_writes_no_page(tmp_path: Path) -> None:
    out = Made(steps=20).write(tmp_path / "run")

    def check() -> None:
        raise ConfigError("another one owns it")

    writer = PageWriter(out, every_seconds=0, check=check)
    writer.finish(20)
    assert not (out / "report.html").exists()
    assert writer.loss is not None and "another one" in writer.loss.reason


def test_a_page_that_takes_long_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Made(steps=20).write(tmp_path / "run")
    writer = PageWriter(out, every_seconds=0)
    monkeypatch.setattr("runner.system.process._POLL_SECONDS", 0.01)
    writer.finish(0.02)  # no interpreter starts so fast
    assert writer.loss is not None and "longer than 0.02 s" in writer.loss.reason
    assert [one.name for one in out.glob("report.html*")] == []


# -- what is inside ------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 300), st.integers(0, 10**9), st.integers(2, 40), st.sampled_from([0.01, 50.0])
)
@example(3, 0, 2, 50.0)
def test_no_look_is_lost_in_a_grid(looks: int, seed: int, columns: int, factor: float) -> None:
    """Whatever columns are joined, the one odd value is in the column of its step."""
    grid = ValueGrid(most_columns=columns)
    odd = seed % looks
    for look in range(looks):
        values = {"a": 1.0 + 0.01 * (look % 7), "b": 2.0}
        grid.add(look, values | ({"a": factor} if look == odd else {}))
    assert len(grid.steps) <= columns and grid.steps == sorted(grid.steps)
    assert grid.steps == [at * grid.width for at in range(len(grid.steps))]
    row = grid.cells()[0]
    assert row[odd // grid.width] == factor
    assert sum(value == factor for value in row) == 1


def test_a_picture_shows_what_is_far_above_and_what_is_not_there() -> None:
    grid = ValueGrid()
    for look in range(100):
        grid.add(look, {"a": 1.0, "b": 0.1 * (1 + look / 100), "c": math.nan if look < 50 else 0.5})
    grid.add(100, {"a": 900.0, "b": float("nan")})
    made = picture(grid)
    assert made is not None and made.is_log and made.has_above
    rows = [made.places[at * 101 : (at + 1) * 101] for at in range(3)]
    assert rows[0][100] == ABOVE and ABOVE not in rows[1] + rows[2]
    assert rows[1][100] == NONE and rows[2][:50] == bytes([NONE] * 50)
    assert rows[1][0] < rows[1][99] < rows[2][60] < rows[0][0]
    drawn = heat(made, "a title", "a unit")
    assert drawn.count('class="above"') == 2, "the cell and the legend"
    assert re.search(r'<path d="M100 0h1" class="above">', drawn)
    (least,) = re.findall(r'<path d="([^"]*)" class="c0">', drawn)
    assert "M0 1h" in least and not re.search(r"M\d+ 2h[^\"]*50", least)
    assert 'd="M0 2' not in drawn and "M50 2h" in drawn, "an empty cell has no colour"


def test_many_rows_are_joined_and_lose_no_spike() -> None:
    grid = ValueGrid()
    for look in range(20):
        values = {f"layer {row}": 1.0 + row / 1000 for row in range(300)}
        grid.add(look, values | ({"layer 217": 500.0} if look == 9 else {}))
    made = picture(grid)
    assert made is not None and len(made.names) == 100
    assert made.names[72] == "layer 216 to layer 218" and made.places[72 * 20 + 9] == ABOVE
    assert picture(ValueGrid()) is None


def test_the_profiles_that_are_kept_are_the_first_the_last_and_some_between() -> None:
    fold = LayerFold(100)
    for step in range(1, 1001):
        fold.add({"step": step, "loss_by_position": [float(step), 1.0, None, "x"]})
    steps = [step for step, _ in fold.profiles]
    assert steps[0] == 1 and steps[-1] == 1000 and 30 < len(steps) <= 65
    assert steps == sorted(set(steps))


def test_the_life_of_checkpoints_is_bounded_and_keeps_the_long_ones() -> None:
    fold = RingFold()
    for serial in range(1, 10_001):
        at = {"tier": "memory", "serial": serial, "of": serial}
        fold.add(at | {"state": "committed", "time": float(serial)})
        gone = serial + (5000.0 if serial == 77 else 1.0)
        fold.add(at | {"state": "gone", "time": gone})
    assert len(fold.copies("memory")) <= 2001
    assert 77 in [copy.serial for copy in fold.copies("memory")]
    fold.add({"tier": "disk", "serial": 1, "state": "clean", "time": 3.0})
    assert fold.copies("disk") == [], "of one that was never saved nothing is known"


def test_a_verdict_takes_the_place_of_what_was_suspected(tmp_path: Path) -> None:
    cause = {"cause": "hardware, sticky", "why": "rank 1 stays bad", "ranks": [1], "bundle": 7}
    lines = [
        incident("start", 0),
        incident("discard", 30, samples=[100, 110], detail={"cause": cause}),
        incident(
            "episode", 30, samples=[100, 130], reason="s; suspected cause: data (flat)",
            detail={"cause": "data"},
        ),
    ]  # fmt: skip
    out = journalled(tmp_path / "a run", lines)
    text = page_of(out)
    assert "hardware, sticky" in text and "rank 1 stays bad" in text
    assert "suspected cause" not in text
    assert html.escape(f"holdfast replay '{out}' --incident 7") in text
    late = cause | {"cause": "state corrupted", "why": "step 30 is the first with other numbers"}
    told = [*lines, incident("explained", 30, decision="go on", detail={"cause": late})]
    text = page_of(journalled(out, told))
    assert "Incidents (1)" in text and "the first with other numbers" in text
    assert '<span class="verdict">state corrupted</span>' in text
    del lines[1]["detail"]["cause"]
    assert "suspected cause" in page_of(journalled(out, lines))


def test_a_run_that_is_being_written_is_shown_as_far_as_it_is(tmp_path: Path) -> None:
    """Half lines, an empty file, no settings, no ring: as a start leaves them for a moment."""
    made = Made(steps=40, layers=("a", "b"), slow_rank=1, redo_at=(30,), sources=("web",))
    out = made.write(tmp_path / "run")
    for name in ("metrics", "journal", "layers", "ranks", "ring"):
        whole = (out / f"{name}.jsonl").read_bytes()
        for length in (0, 1, len(whole) // 2, len(whole) - 1):
            (out / f"{name}.jsonl").write_bytes(whole[:length])
            assert "</html>" in page_of(out), (name, length)
        (out / f"{name}.jsonl").write_bytes(whole)
    for name in ("explanations", "ring"):
        shutil.rmtree(out / name)
    for name in ("config.yaml", "summary.json", "layers.jsonl"):
        (out / name).unlink()
    assert "</html>" in page_of(out)


def test_very_many_incidents_are_a_page_of_bounded_size(tmp_path: Path) -> None:
    out = Made(steps=50).write(tmp_path / "run")
    names = [f"file {number} " + "x" * 300 for number in range(64)]
    with (out / "journal.jsonl").open("a") as file:
        for number in range(4_000):
            kind = ("discard", "straggler", "redo", "crash")[number % 4]
            span = [100 * number, 100 * number + 8]
            line = incident(
                kind, number, reason=f"r{number} " + "y" * 1000, samples=span, sample_ids=names,
                detail={"skipped": [span[0]]},
            )  # fmt: skip
            file.write(json.dumps(line) + "\n")
    text = page_of(out)
    assert len(text) < 2_000_000, len(text)
    assert re.search(r"Incidents \(2,\d\d\d\)", text) and "are left out" in text
