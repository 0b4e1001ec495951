"""One writer: who owns a run directory, and what an older owner can still do to it (nothing)."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from runner.checkpoint.disk.directory import CheckpointDirectory
from runner.distributed.env import JobEnv
from runner.run_dir import lease
from runner.run_dir.lease import RunLease, acquire, has_ended, newest_number
from runner.system.error import ConfigError, Superseded
from runner.system.json_lines import LineFile, read_lines
from runner.system.process import own_process
from tests.stored import manifest

ALONE = JobEnv(job=None, order=(0, 0), step="", end_time=None, has_agent=False)


def job(name: str, restart: int = 0) -> JobEnv:
    return JobEnv(job=name, order=(restart, 0), step="0", end_time=None, has_agent=True)


def taken(folder: Path, launch: JobEnv = ALONE, *, take_over: bool = False) -> RunLease:
    return acquire(folder, launch, stale_seconds=0.5, take_over=take_over, say=said.append)


said: list[str] = []


def claimed_by(folder: Path, number: int, **changes: object) -> None:
    """Rewrite a claim as if another process had made it."""
    path = folder / f"{number:06d}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def ended_process() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


@contextlib.contextmanager
def beating(fence: RunLease) -> Iterator[None]:
    """The fence's owner takes steps meanwhile."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.05):
            fence.beat()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_numbers_count_up_after_orderly_ends(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        fence = taken(tmp_path)
        assert fence.number == number
        fence.check()
        fence.release()
        assert has_ended(tmp_path, number)
    assert newest_number(tmp_path) == 3


@pytest.fixture
def others_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims of this process count as those of another one."""
    monkeypatch.setattr(lease, "_is_own", lambda _claim: False)


@pytest.mark.usefixtures("others_claims")
def test_a_living_owner_is_left_alone(tmp_path: Path) -> None:
    fence = taken(tmp_path)
    with beating(fence):
        with pytest.raises(ConfigError, match=r"in use by a living run .*resume\.take_over=true"):
            taken(tmp_path)
        with pytest.raises(ConfigError, match="in use"):
            taken(tmp_path, job("a"))
    fence.check()
    assert newest_number(tmp_path) == 1


def test_a_process_that_lives_and_does_not_move_owns_nothing(tmp_path: Path) -> None:
    """It hangs: every later launch was refused for it."""
    fence = taken(tmp_path)
    fence.beat()
    said.clear()
    assert taken(tmp_path).number == 2
    assert any("lives but gave no sign of movement for 0.5 s" in words for words in said)
    with pytest.raises(Superseded):
        fence.beat()


def test_a_dead_owner_of_this_machine_is_replaced_at_once(tmp_path: Path) -> None:
    taken(tmp_path)
    claimed_by(tmp_path, 1, pid=ended_process())
    said.clear()
    assert taken(tmp_path).number == 2 and not said


def test_the_launcher_may_replace_its_own(tmp_path: Path) -> None:
    old = taken(tmp_path, job("slurm 7"))
    new = taken(tmp_path, job("slurm 7", restart=1))
    assert new.number == 2
    with pytest.raises(Superseded, match=r"incarnation 2 has taken this run over .*slurm 7"):
        old.check()
    new.check()
    with beating(new), pytest.raises(ConfigError, match="in use"):
        taken(tmp_path, job("slurm 7"))


def test_this_process_is_not_told_to_end_itself(tmp_path: Path) -> None:
    with beating(taken(tmp_path)), pytest.raises(ConfigError, match=r"itself\. Call close\(\)"):
        taken(tmp_path)


@pytest.mark.usefixtures("others_claims")
def test_a_second_launch_of_the_same_name_is_no_restart(tmp_path: Path) -> None:
    first = replace(job("torchrun x"), agents=("a", "b"))
    old = taken(tmp_path, first)
    words = r"has the name but is no restart.*resume\.take_over"
    with beating(old), pytest.raises(ConfigError, match=words):
        taken(tmp_path, replace(first, agents=("c",)))
    old.check()
    assert taken(tmp_path, replace(first, agents=("b", "d"))).number == 2
    with pytest.raises(Superseded):
        old.check()


def test_taking_over_by_force(tmp_path: Path) -> None:
    old = taken(tmp_path)
    assert taken(tmp_path, take_over=True).number == 2
    with pytest.raises(Superseded):
        old.check()
    with pytest.raises(Superseded):
        old.beat()


def test_elsewhere_only_the_heartbeat_counts(tmp_path: Path) -> None:
    """Not its age, by any clock: whether it moves."""
    fence = taken(tmp_path)
    claimed_by(tmp_path, 1, host="elsewhere")
    fence.beat()
    said.clear()
    with beating(fence), pytest.raises(ConfigError, match="host elsewhere"):
        taken(tmp_path)
    assert any("waiting up to 0.5 s" in words for words in said)
    assert taken(tmp_path).number == 2, "it beats no more"


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_an_owner_whose_directory_is_put_away_stops(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "run" / "incarnation"
    fence = taken(folder, job("a"))
    fence.beat()
    (tmp_path / "run").rename(tmp_path / "aside")
    if how == "replaced":
        taken(folder, job("b"))
    with pytest.raises(Superseded, match="run: was removed or replaced while incarnation 1 ran"):
        fence.beat()
    assert (how == "removed") is not folder.exists(), "and makes nothing of it anew"


def claim_together(folder: Path, number: int, at_once: object, results: object) -> None:
    at_once.wait()  # type: ignore[attr-defined]
    launch = JobEnv(job="j", order=(number, 0), step="", end_time=None, has_agent=False)
    try:
        fence = acquire(folder, launch, stale_seconds=0.2, take_over=True, say=lambda _: None)
        results.put(fence.number)  # type: ignore[attr-defined]
    except ConfigError:
        results.put(0)  # type: ignore[attr-defined]


def test_nobody_gets_the_number_of_another(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    at_once, results = context.Barrier(8), context.Queue()
    processes = [
        context.Process(target=claim_together, args=(tmp_path, n, at_once, results))
        for n in range(8)
    ]
    for process in processes:
        process.start()
    numbers = sorted(results.get(timeout=30) for _ in processes)
    for process in processes:
        process.join()
    assert numbers == list(range(1, 9))
    assert not list(tmp_path.glob("claim-*"))


@pytest.fixture
def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """As S3 through FUSE."""

    def link(source: object, target: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(lease.os, "link", link)


def test_where_there_are_no_hard_links(tmp_path: Path, no_links: None) -> None:
    first = taken(tmp_path)
    first.check()
    first.beat()
    assert not lease._claim(tmp_path, 1, ALONE), "the name is taken"
    first.release()
    assert taken(tmp_path).number == 2
    with pytest.raises(Superseded, match=r"host .*process"):
        first.check()
    assert sorted(path.name for path in tmp_path.glob("claim-*")) == []


def test_without_links_two_of_one_number_are_refused(
    tmp_path: Path, no_links: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that lets two create one file keeps the bytes of the last."""
    monkeypatch.setattr(lease, "read_bounded", lambda path, limit: b"another's")
    with pytest.raises(ConfigError, match="no hard links"):
        taken(tmp_path)


def test_a_claim_names_its_process(tmp_path: Path) -> None:
    taken(tmp_path, job("slurm 9"))
    claim = json.loads((tmp_path / "000001.json").read_text())
    assert claim["job"] == "slurm 9"
    assert {key: claim[key] for key in own_process()} == own_process()


def test_what_an_old_owner_writes_to_its_open_journal_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    old = LineFile(path, length=0)
    old.append({"by": "old"}, durably=True)
    _, length = read_lines(path)
    new = LineFile(path, length=length)
    old.append({"by": "old, too late"}, durably=True)
    new.append({"by": "new"}, durably=True)
    old.append({"by": "old, too late"}, durably=True)
    assert [line["by"] for line in read_lines(path)[0]] == ["old", "new"]


@pytest.mark.parametrize("moment", ["at_the_start", "after_the_copy", "at_the_rename"])
def test_an_old_owner_that_is_late_to_open_its_journal_does_not_replace_the_new_ones(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen while it started, wherever that was; in the meantime another has gone ahead."""
    path, claims = tmp_path / "journal.jsonl", tmp_path / "incarnation"
    path.write_text('{"by": "both"}\n')
    old = taken(claims, job("a"))
    opened: list[LineFile] = []

    def go_ahead() -> None:
        new = taken(claims, job("a", restart=1))
        opened.append(LineFile(path, length=path.stat().st_size, check=new.check))
        opened[0].append({"by": "new"}, durably=True)

    checks = 0

    def check() -> None:
        nonlocal checks
        checks += 1
        if (moment, checks) in (("at_the_start", 1), ("after_the_copy", 2)):
            go_ahead()
        old.check()

    rename = Path.rename

    def late(self: Path, target: Path) -> Path:
        if moment == "at_the_rename" and not opened:
            monkeypatch.setattr(Path, "rename", rename)
            go_ahead()
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", late)
    with pytest.raises((Superseded, FileNotFoundError)):
        LineFile(path, length=path.stat().st_size, check=check)
    opened[0].append({"by": "new"}, durably=True)
    assert [line["by"] for line in read_lines(path)[0]] == ["both", "new", "new"]
    assert not list(tmp_path.glob("*.tmp"))


def test_an_old_owner_that_is_late_to_sweep_leaves_the_new_ones_checkpoint(tmp_path: Path) -> None:
    ring, claims = tmp_path / "ring", tmp_path / "incarnation"
    old = taken(claims, job("a"))
    new = taken(claims, job("a", restart=1))
    fresh = CheckpointDirectory(ring, owner=2, check=new.check)
    fresh.writing_folder(1).mkdir(parents=True)
    with pytest.raises(Superseded):
        CheckpointDirectory(ring, owner=1, check=old.check).sweep()
    fresh.commit(manifest(serial=1, step=10, cursor=10))
    assert fresh.entries()[0]


def test_an_old_owner_cannot_commit(tmp_path: Path) -> None:
    """Whether it stalls before its check, or between the check and the rename."""
    ring, claims = tmp_path / "ring", tmp_path / "incarnation"
    old = taken(claims, job("a"))
    checked = CheckpointDirectory(ring, owner=1, check=old.check)
    unchecked = CheckpointDirectory(ring, owner=1)  # its last check lies before the new claim
    for serial, store in ((1, checked), (2, unchecked)):
        store.writing_folder(serial).mkdir(parents=True)
    new = taken(claims, job("a", restart=1))
    with pytest.raises(Superseded):
        checked.commit(manifest(serial=1, step=10, cursor=10))
    fresh = CheckpointDirectory(ring, owner=2, check=new.check)
    assert fresh.sweep() == ["writing-000001-000001", "writing-000002-000001"]
    with pytest.raises(OSError, match="No such file"):
        unchecked.commit(manifest(serial=2, step=10, cursor=10))
    assert fresh.entries() == ([], [])
    fresh.writing_folder(1).mkdir()
    fresh.commit(manifest(serial=1, step=10, cursor=10))
    assert [entry.record.serial for entry in fresh.entries()[0]] == [1]
    record = fresh.entries()[0][0].record
    with pytest.raises(Superseded):
        checked.remove(record)
    assert fresh.entries()[0]
