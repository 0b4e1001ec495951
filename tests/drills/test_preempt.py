"""Asked to stop: saved within the grace, exit 75, and the same end when started again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.clouds import served
from tests.drills.compare import assert_same_run
from tests.drills.test_memory import NODES_APART, empty, started_at
from tests.drills.test_supervise import launch
from tests.rows import full
from tests.run import Result, finish, left_behind, metrics_step, start
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("leaves_nothing")
SLOWED = "faults=[slow@step=15-60,seconds=0.25]"
NEVER = "parallel.timeout_seconds=3600"  # no collective ends what the grace should end


def stopped(
    out: Path, *overrides: str, number: int = signal.SIGUSR1, rank: int = 1, times: int = 1
) -> Result:
    """Signal one rank in the middle of the run, the launcher not at all."""
    started = start(out, SLOWED, *overrides)
    started.until(lambda out: metrics_step(out) >= 20)
    pid = started.ranks()[rank]
    for _ in range(times):
        os.kill(pid, number)
        time.sleep(2.2 if times > 1 else 0)
    return started.wait()


def test_a_scheduler_asks_every_process(tmp_path: Path, clean: Result) -> None:
    """The loading processes too, and the launcher last, as scancel does it."""
    out = tmp_path / "run"
    started = start(out, SLOWED, "data.workers=1")
    started.until(lambda out: metrics_step(out) >= 20)
    for pid in [*started.workers(), started.process.pid]:
        os.kill(pid, signal.SIGTERM)
    asked = started.wait()
    assert asked.summary["exit_code"] == 75 and "saved at step" in asked.summary["reason"]
    assert not left_behind(out), "loading processes too"
    assert_same_run(finish(out), clean)


@pytest.mark.parametrize("late", [False, full(True)])
def test_a_cloud_takes_the_machine_back(tmp_path: Path, clean: Result, late: bool) -> None:
    """First it may do so, which saves a checkpoint; then it does, and nothing starts there."""
    out, rules = tmp_path / "run", ("guard.sync=false",) if late else ()
    with served() as (cloud, address):
        started = launch(out, SLOWED, *rules, f"preempt.notice=aws:{address}")
        started.until(lambda out: metrics_step(out) >= 16)
        cloud.event = "rebalance"
        started.until(lambda out: b'"notice"' in (out / "journal.jsonl").read_bytes())
        cloud.event = "spot"
        asked = started.wait()
    assert asked.code == asked.summary["exit_code"] == 75
    assert "launcher: this machine is taken back (AWS: spot" in asked.text, asked.tail
    assert len(asked.journal("start")) == 1
    reason = asked.summary["reason"]  # in some steps also: the next start makes the evaluation
    assert "asked to stop (rank 0: AWS: spot instance, terminate" in reason and "; saved" in reason
    assert "a notice of 30 s (Google, Azure) saves the last step if a step takes" in asked.text
    [advice] = asked.journal("notice")
    assert advice["reason"].startswith("rank 0: AWS: rebalance")
    assert list((out / "ring").glob(f"*-step-{advice['step']:08d}")), "saved at once"
    with served() as (_, address):
        ended = finish(out, f"preempt.notice=aws:{address}")
    assert ended.text.count("a notice of 30 s (Google, Azure)") == 1, "said by each start, once"
    assert_same_run(ended, clean)


# Two nodes of one rank each, as far as memory goes; the disk or the bucket can become slow.
SLOW_TIERS = (
    """
import os, time
from pathlib import Path
from runner.checkpoint.disk import tier
from runner.checkpoint.remote.retrying_files import RemoteFiles
def slowly(what, work):
    def slow(*arguments):
        if (Path(os.environ["SLOW"]) / what).exists():
            time.sleep(60)
        return work(*arguments)
    return slow
tier.write_rank_file = slowly("disk", tier.write_rank_file)
RemoteFiles.put = slowly("bucket", RemoteFiles.put)
"""
    + NODES_APART
)


@pytest.mark.parametrize("engine", ["fsdp", *map(full, ("zero1", "zero3"))])
@pytest.mark.parametrize(
    ("slow", "lost", "step", "tier"),
    [
        ("disk", "one node", 30, "memory"),
        full("disk", "all nodes", 10, "disk"),
        ("nothing", "out", 30, "disk"),
        full("bucket", "out", 10, "disk"),
        full("bucket", "all nodes", 30, "disk"),
    ],
)
def test_what_fits_into_a_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean: Result, slow: str, lost: str,
    step: int, tier: str, engine: str,
) -> None:  # fmt: skip
    """Memory, another node's memory, disk and bucket; what the reason says is there afterwards."""
    out, nodes, slowness = tmp_path / "run", tmp_path / "nodes", tmp_path / "slow"
    program, notice, url = tmp_path / "program.py", tmp_path / "notice", f"file://{tmp_path}/copy"
    program.write_text(SLOW_TIERS)
    slowness.mkdir()
    for rank in "01":
        (nodes / rank).mkdir(parents=True)
    monkeypatch.setenv("NODES", str(nodes))
    monkeypatch.setenv("SLOW", str(slowness))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    words = () if engine == "fsdp" else (f"parallel={engine}",)
    settings = (
        *words,
        *("checkpoint.memory_mirror=true", f"checkpoint.remote={url}", "checkpoint.clean_after=2"),
        *(
            f"preempt.notice=file:{notice}",
            "faults=[slow@step=13-19,seconds=0.8,slow@step=20-40,seconds=0.3]",
        ),
    )
    started = start(out, *settings, program=program)
    is_disk = slow == "disk"
    there = (out if is_disk else tmp_path / "copy") / "ring"
    started.until(lambda _: any(there.glob("*-step-00000010/COMMITTED")))
    (slowness / slow).touch()
    # The save of step 30 waits for that of step 20, and sees the request while it does.
    started.until(lambda out: metrics_step(out) >= (30 if is_disk else 20))
    notice.write_text(json.dumps({"seconds": 60 if slow == "nothing" else 15}))
    asked = started.wait()
    reason = asked.summary["reason"]
    assert asked.summary["exit_code"] == 75, asked.tail
    assert "a checkpoint takes" in asked.text and "and its copy if less than" in asked.text
    stopped = asked.summary["steps"]
    if is_disk:
        assert "step 30 could not be saved in preempt.grace_seconds" in reason
        assert "is of step 10; a snapshot of step 30 is in memory, also on other nodes" in reason
    else:
        was = "" if slow == "nothing" else "not "
        assert f"saved at step {stopped}, {was}copied to {url}" in reason, reason
    assert reason in asked.journal("preempted")[-1]["reason"]
    notice.unlink()
    shutil.rmtree(slowness)
    if lost == "out":
        shutil.rmtree(out)
    else:
        for rank in "1" if lost == "one node" else "01":
            empty(nodes / rank)
    run = finish(out, *settings, program=program)
    first = stopped if step == 30 else step
    assert started_at(run) == (first, tier), run.tail
    assert_same_run(run, finish(tmp_path / "clean", *words) if words else clean)


@pytest.mark.twin
def test_a_save_that_takes_too_long_is_given_up(tmp_path: Path, clean: Result) -> None:
    """The writer of one rank hangs: the newest committed checkpoint has to do."""
    out = tmp_path / "run"
    started = start(
        out, "preempt.grace_seconds=2", "checkpoint.every=20", NEVER,
        "faults=[hang@step=40,rank=1,at=save,slow@step=41-60,seconds=0.5]",
    )  # fmt: skip
    started.until(lambda out: metrics_step(out) >= 45)
    os.kill(started.ranks()[0], signal.SIGTERM)
    ended = started.wait()
    assert ended.summary["exit_code"] == 75, ended.tail
    assert "newest checkpoint is of step 20" in ended.summary["reason"], ended.tail
    again = finish(out, "checkpoint.every=20")
    assert again.journal("start")[-1]["step"] == 20, again.tail
    assert again.digest == clean.digest and again.counted() == clean.counted()


@pytest.mark.twin
def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    """Also while the training thread waits for a rank that will never come."""
    started = start(
        tmp_path / "run", "faults=[hang@step=25,rank=1]", "preempt.grace_seconds=3000", NEVER,
    )  # fmt: skip
    started.until(lambda out: metrics_step(out) >= 24)
    time.sleep(1)
    pid = started.ranks()[0]
    os.kill(pid, signal.SIGTERM)
    time.sleep(3)
    assert started.process.poll() is None, "the first one waits for the step to end"
    os.kill(pid, signal.SIGTERM)
    until(lambda: 0 not in started.ranks(), "an end before the grace is over", seconds=300)
    started.kill()
    assert "SIGTERM for the second time" in started.wait().text


@pytest.mark.twin
def test_the_grace_ends_a_step_that_does_not_end(tmp_path: Path) -> None:
    hang = "faults=[hang@step=25,rank=1]"
    started = start(tmp_path / "run", hang, "preempt.grace_seconds=2", NEVER)
    started.until(lambda out: metrics_step(out) >= 24)
    os.kill(started.ranks()[0], signal.SIGTERM)
    until(lambda: 0 not in started.ranks(), "an end without the collective", seconds=300)
    started.kill()
    assert "of step 25 did not end within preempt.grace_seconds=2" in started.wait().text
