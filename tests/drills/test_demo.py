"""What ``holdfast demo`` shows, it must have seen: real runs, equal digests, or an exit code."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from runner.__main__ import main
from runner.command import demo
from runner.system.error import EXIT_CRASH
from tests.programs import python
from tests.run import finish

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def healed_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the demo's first run leaves, from processes that have torch imported."""
    out = tmp_path_factory.mktemp("demo") / "healed"
    return finish(out, *demo.SETTINGS, demo.FAULTS, "track.report_minutes=0", restarts=1).out


@pytest.fixture(scope="module")
def healed(healed_out: Path) -> demo.DemoEnd:
    return demo.ended(healed_out)


def test_the_two_runs_of_the_demo_end_alike(healed: demo.DemoEnd, tmp_path: Path) -> None:
    told = demo.ended(
        finish(tmp_path / "told", *demo.SETTINGS, demo.skip_override(healed.skipped)).out
    )
    assert demo.verdict(healed, told) is None
    assert healed.restarts == 1 and told.restarts == 0


def test_its_runs_leave_a_page(healed_out: Path) -> None:
    text = (healed_out / "report.html").read_text()
    journal = (healed_out / "journal.jsonl").read_text()
    data = json.loads((healed_out / "summary.json").read_text())["data"]
    assert data == "a synthetic language"
    for shown in (
        data,
        "Done: step 60 of 60",
        "killed by SIGKILL",
        "rollback",
        ">Curves<",
        ">The ring<",
    ):
        assert shown in text, f"{shown!r} is not on the page of a run with this journal:\n{journal}"


def test_the_demo_fails_where_it_shows_nothing(healed: demo.DemoEnd) -> None:
    told = replace(healed, kinds=frozenset({"start"}), restarts=0)
    assert demo.verdict(healed, told) is None
    for wrong, words in (
        (replace(healed, kinds=healed.kinds - {"rollback"}), "go back"),
        (replace(healed, skipped=[]), "go back"),
        (replace(healed, kinds=healed.kinds - {"crash"}), "lose a rank"),
        (replace(healed, restarts=0), "lose a rank"),
        (replace(healed, digest="0" * 64), "differ"),
    ):
        assert words in (demo.verdict(wrong, told) or "")
    assert "bad steps or a crash" in (demo.verdict(healed, healed) or "")


def test_a_run_that_fails_ends_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "SETTINGS", ("steps=0",))
    assert main(["demo", "--keep", str(tmp_path)]) == EXIT_CRASH
    assert "FAILED: the run in" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.usefixtures("leaves_nothing")
def test_the_command_itself(tmp_path: Path) -> None:
    done = python("-m", "runner", "demo", env={"TMPDIR": str(tmp_path)}, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    digests = [line.split()[-1] for line in done.stdout.splitlines() if "state of the" in line]
    assert len(digests) == 2 and len({*digests}) == 1 and len(digests[0]) == 64
    assert not list(tmp_path.glob("holdfast-demo-*")), "the runs are removed"
