"""The remote ring: nothing partial is taken for whole, nothing foreign is touched or believed."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from runner.checkpoint.disk.directory import CheckpointDirectory
from runner.checkpoint.jobs import LockstepQueue
from runner.checkpoint.manifest import FileFacts
from runner.checkpoint.remote.retrying_files import RemoteFault, RemoteFiles
from runner.checkpoint.remote.store import RUN_FILES, RemoteRing, RemoteTaken, WriterClaim
from runner.checkpoint.remote.upload import Uploads
from runner.command.ring import ring_command
from runner.config.compose import compose, to_yaml
from runner.config.schema import CheckpointConfig
from runner.config.validate import check, url_problem
from runner.observe.journal import read_journal
from runner.policy.decision.history import Incident
from runner.policy.retention.records import Record, State, folder_name
from runner.run_dir.paths import RunDir
from runner.startup.restore import RemoteRun, Restorer, is_lost, run_name
from runner.system.error import CheckpointError, ConfigError, CorruptCheckpoint, RankError
from runner.system.files import file_digest
from tests.crash_world import disk_ring
from tests.mechanism.test_ring_on_disk import tensors, write
from tests.observed import OneRank
from tests.rows import full
from tests.store import BUCKET, Store, once
from tests.stored import moment

RUN = "a" * 64


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A run directory with four clean checkpoints, a journal, metrics and settings."""
    folder = tmp_path / "run"
    store = CheckpointDirectory(folder / "ring")
    for serial in range(1, 5):
        record = write(folder / "ring", tensors(serial), serial=serial, step=10 * serial)
        store.mark(record, State.clean)
    line = Incident(kind="start", step=0, decision="begin", reason="command").to_json()
    text = "".join(json.dumps({"seq": n, "time": 5.0 + n} | line) + "\n" for n in range(2))
    (folder / "journal.jsonl").write_text(text)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"ste')  # a line being written
    (folder / "config.yaml").write_text(to_yaml(compose([])))
    return folder


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/remote"


def uploads(
    out: Path, url: str, *, number: int = 1, run: str = RUN, keep: int = 3, **changes: Any
) -> tuple[Uploads, list[Incident]]:
    said: list[Incident] = []
    ring = changes.pop("ring", None) or RemoteRing(url, pauses=())
    made = Uploads(
        ring,
        CheckpointDirectory(out / "ring", check=changes.pop("check", lambda: None)),
        run=run,
        claim=WriterClaim(number=number, token="0" * 8),
        settings=CheckpointConfig(keep=keep),
        stored=list(changes.pop("stored", [])),
        tainted=set(changes.pop("tainted", [])),
        queue=changes.pop("queue") if "queue" in changes else LockstepQueue(OneRank().gather),
        ranks=OneRank(),
        report=said.append,
    )
    assert not changes
    return made, said


def local(out: Path) -> list[Record]:
    return [entry.record for entry in CheckpointDirectory(out / "ring").entries()[0]]


def send(out: Path, url: str, count: int | None = None, **options: Any) -> list[Incident]:
    """Send the checkpoints one after another, as each becomes clean; the first ``count``."""
    made, said = uploads(out, url, **options)
    known = local(out)[:count]
    for number in range(1, len(known) + 1):
        made.finish(known[:number])
    made.close()
    return said


def folders(url: str) -> list[str]:
    return [folder_name(record) for record in RemoteRing(url).list_checkpoints().stored]


# -- sending ------------------------------------------------------------------------------


def test_the_best_is_sent_behind_a_newer_one_and_stays(
    out: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, refused = RemoteFiles.put, list[str]()

    def refuse_once(files: RemoteFiles, source: Path, name: str, facts: FileFacts) -> None:
        if "-step-00000020/" in name and not refused:
            refused.append(name)
            raise RemoteFault(f"{name}: no")
        put(files, source, name, facts)

    monkeypatch.setattr(RemoteFiles, "put", refuse_once)
    made, said = uploads(out, url, keep=1)
    steps = {20}
    made.best = lambda records: {record.serial for record in records if record.step in steps}
    first, second, third, fourth = known = local(out)
    made.finish([first, second, third])  # the newest first; the best fails
    assert folders(url) == [folder_name(third)] and refused and len(said) == 1
    made.finish([first, second, third])  # not again and again
    assert folders(url) == [folder_name(third)] and len(said) == 1
    made.finish(known)
    assert folders(url) == [folder_name(second), folder_name(fourth)]
    steps = {30}
    made.finish(known)
    assert folders(url) == [folder_name(third), folder_name(fourth)]
    made.distrust(lambda record: record.step >= 40)
    steps = {40}
    made.finish(known)
    assert folders(url) == [folder_name(third)], "one that is not clean is not sent"
    made.close()


def test_what_is_sent_has_the_names_and_bytes_of_the_ring(out: Path, url: str) -> None:
    assert send(out, url) == []
    remote = Path(url.removeprefix("file://"))
    kept = folders(url)
    assert kept == [folder_name(record) for record in local(out)[1:]]
    assert sorted(path.name for path in (remote / "ring").iterdir()) == kept
    for folder in kept:
        for path in (out / "ring" / folder).iterdir():
            assert (remote / "ring" / folder / path.name).read_bytes() == path.read_bytes()
        run = remote / "ring" / folder / "run"
        assert (run / "journal.jsonl").read_bytes() == (out / "journal.jsonl").read_bytes()
        assert (run / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert ring_command([url, "--verify"]) == 0
    # Copied back with any tool, it is a ring.
    shutil.copytree(remote / "ring", out.parent / "copied" / "ring")
    assert ring_command([str(out.parent / "copied"), "--verify"]) == 0


class Dies:
    """A file system whose ``left``-th change fails, and all after it."""

    def __init__(self, files: Any, left: int) -> None:
        self._files, self.left = files, left

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._files, name)
        if name not in ("put_file", "pipe_file", "rm_file", "rm"):
            return found

        def change(*arguments: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                if name == "put_file" and self.left == -1:  # torn, as file systems may leave it
                    self._files.pipe_file(arguments[1], Path(arguments[0]).read_bytes()[:-5])
                raise OSError(f"died before {name} {arguments}")
            return found(*arguments, **options)

        return change


@pytest.mark.parametrize("stride", [3, full(1)])
def test_dying_at_any_change_leaves_nothing_that_passes_for_whole(
    out: Path, url: str, stride: int
) -> None:
    at = 0
    while True:
        shutil.rmtree(url.removeprefix("file://"), ignore_errors=True)
        ring = RemoteRing(url, pauses=())
        ring.files._files = Dies(ring.files._files, at)
        said = send(out, url, ring=ring, keep=1)
        entries, damaged = RemoteRing(url).entries(verify=True)
        assert damaged == [], f"died at change {at}"
        if not said:
            break
        assert {incident.kind for incident in said} == {"upload_failed"}
        # The next start goes on where this one stopped.
        stored = RemoteRing(url).list_checkpoints().stored
        assert send(out, url, number=2, stored=stored, keep=1) == []
        assert folders(url)[-1] == folder_name(local(out)[-1])
        assert RemoteRing(url).entries(verify=True)[1] == []
        at += stride
    assert at > 40 and len(entries) == 1


def test_a_file_that_is_there_already_is_not_sent_again(out: Path, url: str) -> None:
    send(out, url)
    entry = CheckpointDirectory(out / "ring").entries()[0][-1]
    marker = Path(url.removeprefix("file://")) / "ring" / entry.folder.name / "rank-00000.bin"
    before = marker.stat().st_ino, marker.stat().st_mtime_ns
    there = f"ring/{entry.folder.name}/rank-00000.bin"
    facts = entry.manifest.files["rank-00000.bin"]
    RemoteRing(url).files.put(entry.folder / "rank-00000.bin", there, facts)
    assert (marker.stat().st_ino, marker.stat().st_mtime_ns) == before
    marker.write_bytes(b"\0" * facts.num_bytes)  # the right size is not enough
    RemoteRing(url).files.put(entry.folder / "rank-00000.bin", there, facts)
    assert file_digest(marker) == facts.sha256


def test_bytes_that_rotted_in_the_ring_are_not_published(out: Path, url: str) -> None:
    path = out / "ring" / folder_name(local(out)[-1]) / "rank-00001.bin"
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    (said,) = send(out, url)
    assert "digest differs" in said.reason and "checkpoint 4" in said.reason
    assert folders(url) == [folder_name(record) for record in local(out)[:3]]


def test_a_checkpoint_of_the_same_name_and_other_bytes_is_replaced(out: Path, url: str) -> None:
    send(out, url)
    name = folder_name(local(out)[-1])
    other = write(out / "ring2", tensors(99), serial=4, step=40)
    CheckpointDirectory(out / "ring2").mark(other, State.clean)
    shutil.rmtree(out / "ring" / name)
    shutil.move(out / "ring2" / name, out / "ring" / name)
    assert send(out, url, number=2) == []
    assert RemoteRing(url).entries(verify=True)[1] == []
    marker = Path(url.removeprefix("file://")) / "ring" / name / "COMMITTED"
    assert marker.read_bytes() == (out / "ring" / name / "COMMITTED").read_bytes()


def test_the_end_of_a_run_shows_how_far_it_is(out: Path, url: str) -> None:
    made, said = uploads(out, url)
    shown: list[tuple[str, int, int]] = []
    made.show = lambda *far: shown.append(far)
    made.finish(local(out))
    assert said == [] and shown and {what for what, _, _ in shown} == {"uploading"}
    assert all(0 <= done <= due for _, done, due in shown)
    assert made._moved == made._due > 0, "sent and read back"


def test_what_a_rollback_leaves_behind_is_withdrawn(out: Path, url: str) -> None:
    made, said = uploads(out, url)
    known = local(out)
    made.finish(known[:2])
    made.finish(known[:3])
    made.distrust(lambda record: record.serial > 2)
    made.finish(known[:2])
    assert folders(url) == [folder_name(known[1])] and said == []
    made.close()
    # And at a restart, when the run ended before it could be done.
    send(out, url, number=2)
    stored = RemoteRing(url).list_checkpoints().stored
    made, said = uploads(out, url, number=3, stored=stored, tainted=[4])
    made.finish(known[:3])
    made.close()
    assert folder_name(known[3]) not in folders(url) and said == []


def test_a_rollback_may_go_back_to_what_was_never_sent(out: Path, url: str) -> None:
    """The store was slower than the ring, or keeps one: else it would have nothing for long."""
    made, said = uploads(out, url, keep=1)
    known = local(out)
    made.finish(known)
    made.distrust(lambda record: record.serial > 2)
    made.finish(known[:2])
    made.close()
    assert folders(url) == [folder_name(known[1])] and said == []


def test_a_tainted_one_that_stays_there_is_no_best(
    out: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete, is_open = RemoteFiles.delete, list[bool]()

    def refuse(files: RemoteFiles, name: str) -> None:
        if "ring/" in name and not is_open:
            raise RemoteFault(f"{name}: no")
        delete(files, name)

    monkeypatch.setattr(RemoteFiles, "delete", refuse)
    order = {30: 0, 10: 1, 20: 2, 40: 3}
    made, said = uploads(out, url, keep=1)
    made.best = lambda records: {min((order[one.step], one.serial) for one in records)[1]}
    first, second, third, fourth = local(out)
    made.finish([first, second, third])
    assert folders(url) == [folder_name(third)] and said == []
    made.distrust(lambda record: record.serial > 2)
    made.finish([first, second])
    assert folders(url) == [folder_name(one) for one in (first, second, third)] and said
    is_open.append(True)
    made.finish([first, second, fourth])
    made.close()
    assert folders(url) == [folder_name(first), folder_name(fourth)]


def test_a_failure_is_told_once_while_it_lasts(out: Path, url: str) -> None:
    ring, down = RemoteRing(url, pauses=()), threading.Event()
    files = ring.files._files
    put = files.put_file

    def put_file(*what: Any) -> None:
        if down.is_set():
            raise OSError(errno.EBUSY, "Please reduce your request rate.")
        put(*what)

    files.put_file = put_file
    made, said = uploads(out, url, ring=ring)
    for number in range(1, 5):
        (down.clear if number == 3 else down.set)()
        made.finish(local(out)[:number])
    assert [one.detail["stored"] for one in said] == [[], [3]]
    assert folders(url) == [folder_name(local(out)[2])]


def test_an_upload_under_way_is_pinned_and_given_up_when_tainted(out: Path, url: str) -> None:
    made, said = uploads(out, url)
    known = local(out)
    made.after_step(known[:2], 25)
    assert made.pinned == {2}
    made.distrust(lambda record: record.serial == 2)
    made.finish([])
    made.close()
    assert made.pinned == set() and folders(url) == [] and said == []


def test_a_remote_that_hangs_holds_up_no_end(out: Path, url: str) -> None:
    ring = RemoteRing(url)
    gone = threading.Event()
    ring.claim = lambda claim, run: gone.wait()  # type: ignore[method-assign,assignment]
    made, said = uploads(out, url, ring=ring)
    made.settings = CheckpointConfig(remote_wait_seconds=0.5)
    made.finish(local(out))
    made.close()
    assert ["not finished within" in incident.reason for incident in said] == [True]
    gone.set()


# -- who writes there ---------------------------------------------------------------------


def test_an_older_incarnation_publishes_and_removes_nothing(out: Path, url: str) -> None:
    older, said = uploads(out, url, number=4)
    known = local(out)
    older.finish(known[:1])
    assert send(out, url, 2, number=5) == []  # elsewhere, from a copy of out
    before = {path: path.read_bytes() for path in Path(url[7:]).rglob("*") if path.is_file()}
    older.finish(known)
    older.close()
    after = {path: path.read_bytes() for path in Path(url[7:]).rglob("*") if path.is_file()}
    assert after == before
    assert "incarnation 5 has taken this run over" in said[0].reason


def test_of_two_with_one_number_the_first_wins(url: str) -> None:
    one, two = WriterClaim(number=3, token="a" * 8), WriterClaim(number=3, token="b" * 8)
    RemoteRing(url).claim(one, RUN)
    with pytest.raises(RemoteTaken, match=r"incarnation 3 has taken .* \(host .*, since "):
        RemoteRing(url).claim(two, RUN)
    RemoteRing(url).check(one)
    RemoteRing(url).claim(one, RUN)  # tried again, as the answer was lost
    with pytest.raises(RemoteTaken):
        RemoteRing(url).claim(WriterClaim(number=2, token="c" * 8), RUN)
    RemoteRing(url).claim(WriterClaim(number=4, token="c" * 8), RUN)
    with pytest.raises(RemoteTaken, match="incarnation 4 has taken"):
        RemoteRing(url).check(one)
    assert RemoteRing(url).files.names("incarnation") == ["000004.json"]


def claim_together(rings: list[RemoteRing], claims: list[tuple[WriterClaim, str]]) -> list[str]:
    """Several at the same moment, each with connections of its own; "" or why not."""
    told = [""] * len(claims)
    at_once = threading.Barrier(len(claims))

    def one(number: int) -> None:
        at_once.wait()
        try:
            rings[number].claim(*claims[number])
        except RemoteTaken as error:
            told[number] = str(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(claims))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


def two(url: str) -> list[RemoteRing]:
    return [RemoteRing(url, pauses=(0.1, 0.2, 0.4)) for _ in range(2)]


def claims_of(numbers: tuple[int, int], runs: tuple[str, str]) -> list[tuple[WriterClaim, str]]:
    return [
        (WriterClaim(number=number, token=f"{number:04x}{place:04x}"), run)
        for place, (number, run) in enumerate(zip(numbers, runs, strict=True))
    ]


@pytest.mark.parametrize(("place", "times"), [("file", 15), ("memory", 15), ("s3", 5)])
def test_of_two_that_claim_at_once_one_wins(
    store: Store, tmp_path: Path, place: str, times: int
) -> None:
    """Again and again; the other finds it as the owner, and is told so."""
    prefix = {"file": f"file://{tmp_path}", "memory": f"memory://{tmp_path}"}
    rings = two(f"{prefix.get(place, f's3://{BUCKET}')}/at-once")
    won = [0, 0]
    for number in range(3, 3 + times):
        claims = claims_of((number, number), (RUN, RUN))
        told = claim_together(rings, claims)
        (winner,) = (place for place, words in enumerate(told) if not words)
        words = told[1 - winner]
        assert f"incarnation {number} has taken this run over there (host " in words, words
        rings[1 - winner].check(claims[winner][0])
        with pytest.raises(RemoteTaken):
            rings[winner].check(claims[1 - winner][0])
        assert rings[0].files.names("incarnation") == [f"{number:06d}.json"]
        won[winner] += 1
    print(f"{place}: won {won}")


def next_is(monkeypatch: pytest.MonkeyPatch, target: Any, name: str, spoiled: Any) -> None:
    """Let the next call of a method be ``spoiled``."""
    waiting, real = [spoiled], getattr(target, name)
    monkeypatch.setattr(target, name, lambda *a, **k: (waiting.pop() if waiting else real)(*a, **k))


def test_one_odd_error_does_not_make_a_store_that_cannot_exclude(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two writers would then have names of their own, and both be let in."""
    ring = RemoteRing(f"s3://{BUCKET}/odd")
    next_is(monkeypatch, ring.files, "_create", Mock(side_effect=ValueError("garbled answer")))
    ring.claim(WriterClaim(number=3, token="a" * 8), RUN)
    assert ring.files.names("incarnation") == ["000003.json"]


@pytest.mark.parametrize(
    "spoiled", [lambda *_: b'{"run": ', Mock(side_effect=CorruptCheckpoint("is missing"))]
)
def test_a_claim_that_reads_badly_once_stands(
    store: Store, monkeypatch: pytest.MonkeyPatch, spoiled: Any
) -> None:
    rings = two(f"s3://{BUCKET}/badly")
    rings[0].claim(WriterClaim(number=3, token="a" * 8), RUN)
    next_is(monkeypatch, rings[1].files, "read", spoiled)
    with pytest.raises(RemoteTaken, match="incarnation 3 has taken"):
        rings[1].claim(WriterClaim(number=3, token="b" * 8), RUN)


def test_of_two_runs_that_claim_at_once_one_wins(store: Store) -> None:
    """A place without checkpoints that two new runs were given by mistake."""
    rings = two(f"s3://{BUCKET}/two-runs")
    for number in range(1, 5):
        claims = claims_of((number, number), (RUN, "b" * 64))
        told = claim_together(rings, claims)
        (winner,) = (place for place, words in enumerate(told) if not words)
        assert "another run was faster (host " in told[1 - winner], told
        rings[1 - winner].check(claims[winner][0])


def test_the_newer_of_two_that_claim_at_once_ends_as_the_owner(store: Store) -> None:
    rings = two(f"s3://{BUCKET}/newer")
    for number in range(1, 9, 2):
        claims = claims_of((number, number + 1), (RUN, RUN))
        told = claim_together(rings, claims)
        assert told[1] == "", "the newer one is never refused"
        rings[0].check(claims[1][0])
        with pytest.raises(RemoteTaken, match=f"incarnation {number + 1} "):
            rings[0].check(claims[0][0])


def test_a_claim_whose_answer_is_lost_is_a_claim(store: Store) -> None:
    url, one = f"s3://{BUCKET}/lost-answer", WriterClaim(number=3, token="a" * 8)
    # Of the probe, which comes first, and of the claim itself.
    store.trouble = lambda asked: (
        "lost" if "HTTP_IF_NONE_MATCH" in asked and store.met["lost"] < 3 else ""
    )
    ring = RemoteRing(url, pauses=(0.1, 0.1, 0.1, 0.1))
    ring.claim(one, RUN)
    assert store.met["lost"] == 3
    ring.check(one)
    assert ring.files.names("incarnation") == ["000003.json"]


def test_a_store_that_ignores_the_condition_is_found_out(store: Store) -> None:
    """Then each looks once more after its own claim: of two at once only one may write."""
    store.ignores_conditions = True
    rings = two(f"s3://{BUCKET}/ignoring")
    assert not any(ring.files.is_exclusive("probe") for ring in rings)
    for number in range(1, 5):
        claims = claims_of((number, number), (RUN, RUN))
        claim_together(rings, claims)
        may_write = []
        for claim, _ in claims:
            with contextlib.suppress(RemoteTaken):
                rings[0].check(claim)
                may_write.append(claim.token)
        assert len(may_write) == 1
        assert f"{number:06d}-{may_write[0]}.json" in rings[0].files.names("incarnation")


def test_a_file_system_without_hard_links(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As some that are mounted from an object store: claims have tokens there."""

    def refuse(*names: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    one, other = WriterClaim(number=3, token="a" * 8), WriterClaim(number=3, token="b" * 8)
    ring = RemoteRing(url, pauses=())
    ring.claim(one, RUN)
    assert ring.files.names("incarnation") == ["000003-aaaaaaaa.json"]
    ring.check(one)
    with pytest.raises(RemoteTaken, match="incarnation 3"):
        ring.claim(other, RUN)


def test_claims_that_another_run_left_where_no_checkpoint_is(url: str) -> None:
    RemoteRing(url).claim(WriterClaim(number=5, token="a" * 8), "b" * 64)
    for number in (1, 2):
        RemoteRing(url).claim(WriterClaim(number=number, token="c" * 8), RUN)
        seen = RemoteRing(url).list_checkpoints()
        assert (seen.claim, seen.run) == (number, RUN)
    with pytest.raises(RemoteTaken, match="incarnation 2"):
        RemoteRing(url).claim(WriterClaim(number=1, token="c" * 8), RUN)


def test_another_run_is_not_written_over(out: Path, url: str) -> None:
    send(out, url)
    before = sorted(Path(url.removeprefix("file://")).rglob("*"))
    (said,) = send(out, url, 1, run="b" * 64, number=9)
    assert "a different run" in said.reason
    assert sorted(Path(url.removeprefix("file://")).rglob("*")) == before


def test_a_stop_sends_what_is_unproven_if_there_is_time(
    out: Path, url: str, tmp_path: Path
) -> None:
    """A lost run goes on from it, and has the newest clean one to go back to."""
    last = out / "ring" / folder_name(local(out)[-1])
    (last / "CLEAN").unlink()
    made, _ = uploads(out, url)
    made.finish(local(out))
    assert folders(url)[-1].endswith("-step-00000030") and made.seconds > 0
    made.seconds = 5.0
    told = made.finish_at_a_stop(local(out), lambda: 4.0)
    assert told == f"not copied to {url}: the last copy took 5.0 s, and 4.0 s are left"
    assert made.finish_at_a_stop(local(out), lambda: 6.0) == f"copied to {url}"
    made.close()
    restored = restorer(tmp_path / "new", url).restore_if_lost()
    wanted = [(40, State.committed), (30, State.clean)]
    assert restored is not None and [(r.step, r.state) for r in restored.records] == wanted
    assert [(r.step, r.state) for r in local(tmp_path / "new")] == wanted[::-1]
    (last / "CLEAN").touch()  # proven by the next start, which sends the mark
    stored = RemoteRing(url).list_checkpoints().stored
    send(out, url, number=2, stored=stored)
    assert RemoteRing(url).list_checkpoints().stored[-1].state is State.clean


# -- taking a run back --------------------------------------------------------------------


def restorer(into: Path, url: str, *overrides: str, fingerprint: str = "d") -> Restorer:
    ring = RemoteRing(url, pauses=())
    run_dir = RunDir(into)
    run_dir.create()
    config = compose([f"out={into}", *overrides])
    remote = RemoteRun(ring, ring.list_checkpoints(), "", run_dir)
    store = CheckpointDirectory(run_dir.ring)
    return Restorer(remote, run_dir, store, config, fingerprint, OneRank())  # type: ignore[arg-type]


def test_a_lost_directory_comes_back(out: Path, url: str, tmp_path: Path) -> None:
    send(out, url)
    made = restorer(tmp_path / "new", url)
    shown: list[tuple[str, int, int]] = []
    made.show = lambda *far: shown.append(far)
    restored = made.restore_if_lost()
    assert restored is not None and [one.step for one in restored.records] == [40]
    store = CheckpointDirectory(tmp_path / "new" / "ring")
    files = store.read(store.folder_of(restored.records[0])).manifest.files.values()
    of_run = RemoteRing(url).run_facts(folders(url)[-1]).values()
    size = sum(file.num_bytes for file in (*files, *of_run))
    assert shown[-1] == ("taking back", size, size), "how far it is, in bytes"
    (entry,), damaged = CheckpointDirectory(tmp_path / "new" / "ring").entries()
    assert damaged == [] and entry.record == local(out)[-1]
    for path in entry.folder.iterdir():
        assert path.read_bytes() == (out / "ring" / entry.folder.name / path.name).read_bytes()
    assert run_name(RunDir(tmp_path / "new")) == run_name(RunDir(out))
    assert read_journal(tmp_path / "new" / "journal.jsonl") == read_journal(out / "journal.jsonl")
    assert made.restore_if_lost() is None  # it is there now


def test_a_download_may_outlast_a_collective(
    out: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks go on telling each other how far they are; the watchdog hears of it."""
    send(out, url)
    monkeypatch.setattr("runner.distributed.agreement._LOOK_SECONDS", 0.01)
    made = restorer(tmp_path / "new", url)
    calls, sums = list[str](), list[list[float]]()
    fetch, add = RemoteFiles.fetch, OneRank.sum

    def slow(self: RemoteFiles, name: str, target: Path, facts: FileFacts) -> None:
        before, limit = len(sums), time.monotonic() + 30
        while name.endswith(".bin") and len(sums) < before + 3 and time.monotonic() < limit:
            time.sleep(0.005)
        fetch(self, name, target, facts)

    def counted(self: OneRank, numbers: list[float]) -> list[float]:
        sums.append(numbers)
        return add(self, numbers)

    monkeypatch.setattr(OneRank, "sum", counted)
    monkeypatch.setattr(RemoteFiles, "fetch", slow)
    made.moved = lambda: calls.append("moved")
    assert made.restore() is not None
    assert len(sums) >= 3, "while a file was on its way"
    assert len(calls) >= 2, "and the watchdog was told"


def test_a_journal_that_is_there_is_kept(out: Path, url: str) -> None:
    send(out, url)
    with (out / "journal.jsonl").open("a") as file:
        line = Incident(kind="start", step=0, decision="go on", reason="x").to_json()
        file.write(json.dumps(line | {"time": 9.0}) + "\n")
    text = (out / "journal.jsonl").read_text()
    shutil.rmtree(out / "ring")
    restored = restorer(out, url).restore_if_lost()
    assert restored is not None and (out / "journal.jsonl").read_text() == text
    assert [one.step for one in restored.records] == [40]


def test_what_a_mismatch_distrusts_is_not_taken_back(out: Path, url: str) -> None:
    """Nor does it pass for one to go on from: the run was killed before it was marked."""
    send(out, url)
    told = {"next_serial": 5, "good_step": 25}
    line = Incident(kind="replica_mismatch", step=45, decision="go back", reason="x", detail=told)
    with (out / "journal.jsonl").open("a") as file:
        file.write(json.dumps(line.to_json() | {"time": 9.0}) + "\n")
    for record in local(out)[:2]:
        shutil.rmtree(out / "ring" / folder_name(record))
    restored = restorer(out, url).restore_if_lost()
    assert restored is not None and [one.step for one in restored.records] == [20]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: flip(folder / "rank-00001.bin"),
        lambda folder: flip(folder / "manifest.json"),
        lambda folder: (folder / "rank-00000.bin").write_bytes(b"x" * 1_000_000),
        lambda folder: (folder / "rank-00000.bin").unlink(),
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: flip(folder / "COMMITTED"),
        lambda folder: flip(folder / "run" / "journal.jsonl"),
        lambda folder: flip(folder / "run" / "config.yaml"),
        lambda folder: (folder / "run" / "files.json").write_text('{"journal.jsonl": 3}'),
        lambda folder: (folder / "run" / "files.json").write_text("[" * 100_000),
    ],
)
def test_damage_is_refused_and_an_older_one_used(
    damage: Callable[[Path], Any], out: Path, url: str, tmp_path: Path
) -> None:
    send(out, url)
    folder = Path(url.removeprefix("file://")) / "ring" / folders(url)[-1]
    damage(folder)
    restored = restorer(tmp_path / "new", url).restore_if_lost()
    assert restored is not None and restored.records[0].step == 30
    assert [incident.kind for incident in restored.incidents] == ["checkpoint_damaged", "restored"]
    assert folder.name in restored.incidents[0].reason
    entries, damaged = CheckpointDirectory(tmp_path / "new" / "ring").entries()
    assert [entry.record.step for entry in entries] == [30] and damaged == []


@pytest.mark.parametrize(
    "refused", ["rank-00001.bin", "manifest.json", "COMMITTED", *(f"run/{n}" for n in RUN_FILES)]
)
@pytest.mark.parametrize("error", [PermissionError, OSError])
def test_what_the_store_refuses_is_left_out_and_told(
    refused: str, error: type[OSError], out: Path, url: str, tmp_path: Path
) -> None:
    """One object, again and again: an archived one, or one whose disks are gone."""
    send(out, url)
    newest = folders(url)[-1]
    made = restorer(tmp_path / "new", url)
    files = made.remote.ring.files
    files._pauses, opened, ill = (0.0,), files._files.open, [newest]

    def open_(path: str, *more: Any, **named: Any) -> Any:
        if any(path.endswith(f"{folder}/{refused}") for folder in ill):
            raise error(errno.EIO, "no")
        return opened(path, *more, **named)

    files._files.open = open_
    restored = made.restore_if_lost()
    assert restored is not None and restored.records[0].step == 30
    told, _ = restored.incidents
    assert (told.kind, told.decision) == ("remote_unreachable", "an older one is used")
    assert newest in told.reason and refused in told.reason
    made = restorer(tmp_path / "none", url)
    made.remote.ring.files._pauses, made.remote.ring.files._files.open = (), open_
    ill += folders(url)
    with pytest.raises(RankError, match="start again when it answers"):
        made.restore_if_lost()


def test_nothing_sound_there_is_an_error_and_leaves_no_checkpoint(
    out: Path, url: str, tmp_path: Path
) -> None:
    send(out, url)
    for path in Path(url.removeprefix("file://")).rglob("rank-00000.bin"):
        flip(path)
    with pytest.raises(CheckpointError, match="and none at"):
        restorer(tmp_path / "new", url).restore_if_lost()
    assert is_lost(RunDir(tmp_path / "new"), CheckpointDirectory(tmp_path / "new" / "ring"))


def test_not_a_byte_more_is_read_than_was_written(out: Path, url: str, tmp_path: Path) -> None:
    send(out, url)
    name = f"ring/{folders(url)[-1]}/rank-00000.bin"
    Path(url.removeprefix("file://"), name).write_bytes(b"x" * 50_000_000)
    facts = FileFacts(num_bytes=100, sha256="0" * 64)
    with pytest.raises(CorruptCheckpoint, match="100 were written"):
        RemoteRing(url).files.fetch(name, tmp_path / "got", facts)
    assert (tmp_path / "got").stat().st_size == 0
    with pytest.raises(CorruptCheckpoint, match="more than 1000 bytes"):
        RemoteRing(url).files.read(name, 1000)


@pytest.mark.parametrize(
    ("overrides", "fingerprint", "words"),
    [
        (["seed=7"], "d", ["seed: was 0, now 7", "checkpoint.remote="]),
        (["optim.lr=0.5"], "d", ["optim.lr"]),
        ([], "other", ["another corpus"]),
    ],
)
def test_other_settings_and_other_data_are_refused(
    overrides: list[str], fingerprint: str, words: list[str], out: Path, url: str, tmp_path: Path
) -> None:
    send(out, url)
    new = tmp_path / "new"
    with pytest.raises(ConfigError) as caught:
        restorer(new, url, *overrides, fingerprint=fingerprint).restore_if_lost()
    assert all(word in str(caught.value) for word in words)
    assert not (new / "journal.jsonl").exists() and not (new / "config.yaml").exists()
    allowed = restorer(new, url, *overrides, "resume.allow_change=true", fingerprint=fingerprint)
    assert allowed.restore_if_lost() is not None


# -- settings -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "s3://user:secret-password@bucket/x",
        "https://host/x?key=secret-password",
        "bucket/x",
        "simplecache::s3://bucket",
        "s3://",
        "s3://[secret-password",
    ],
)
def test_urls_that_cannot_be(url: str) -> None:
    assert url_problem(url)
    config = compose([])
    config.checkpoint.remote = url
    with pytest.raises(ConfigError, match=r"checkpoint\.remote=") as caught:
        check(config, world_size=1)
    if "[" not in url:
        assert "secret-password" not in str(caught.value)


def test_which_urls_can_be() -> None:
    for url in ("s3://bucket/a/b", "file:///tmp/x", "memory://x", "abfs://box@account.host/x"):
        assert url_problem(url) == ""
    with pytest.raises(ConfigError, match="nosuch://x"):
        RemoteRing("nosuch://x")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    def missing(*_: Any, **__: Any) -> Any:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(ConfigError, match=r"pip install 'holdfast-train\[remote\]'"):
        RemoteRing("s3://bucket/x")


# -- against a real server ----------------------------------------------------------------


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    made = Store()
    for name, value in made.env.items():
        monkeypatch.setenv(name, value)
    yield made
    made.stop()


def test_a_server_that_comes_back_in_time_costs_a_pause(store: Store, out: Path) -> None:
    store.dies_at = 6  # after the claim and the first of its files
    back = store.comes_back()
    # On a busy machine a server takes long to start.
    ring = RemoteRing(f"s3://{BUCKET}/p", pauses=(0.5,) * 240)
    assert send(out, f"s3://{BUCKET}/p", 1, ring=ring) == []
    back.join()
    assert store.died.is_set()
    assert RemoteRing(f"s3://{BUCKET}/p").entries(verify=True)[1] == []
    for key in ("rank-00000.bin", "rank-00001.bin"):
        assert sum(name.endswith(key) for name in store.puts) == 1, "sent once"


def test_no_secret_is_in_what_a_failure_says(store: Store, out: Path) -> None:
    (said,) = send(out, "s3://no-such-bucket/p", 1)
    assert "bucket does not exist" in said.reason
    with pytest.raises(RemoteFault) as caught:
        RemoteRing(f"s3://{BUCKET}/p", pauses=()).files._try(
            "x", lambda: (_ for _ in ()).throw(OSError("key a-very-secret-key"))
        )
    assert "a-very-secret-key" not in str(caught.value)


@pytest.mark.parametrize(
    ("trouble", "methods"),
    [
        ("slow down", ()),
        ("lost", ("PUT", "POST", "DELETE")),
        full("cut", ("PUT", "POST")),
        full("short", ("GET",)),
        full("late", ()),
    ],
)
def test_a_store_in_trouble_at_each_request_gets_the_whole_of_it(
    store: Store, out: Path, trouble: str, methods: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file in parts, too: whoever completes it twice is told that there are no such parts."""
    monkeypatch.setattr("s3fs.S3FileSystem.read_timeout", 1)
    record = write(out / "ring", {"weight": torch.randn(3 << 20)}, serial=5, step=50)
    CheckpointDirectory(out / "ring").mark(record, State.clean)
    url = f"s3://{BUCKET}/{trouble.replace(' ', '-')}"
    ring = RemoteRing(url, pauses=(0.1,) * 5)
    files = ring.files._files
    monkeypatch.setattr(files, "put_file", functools.partial(files.put_file, chunksize=5 << 20))
    made, said = uploads(out, url, ring=ring)
    made.settings = CheckpointConfig(remote_wait_seconds=300)
    store.trouble = once(trouble, *methods)
    made.finish(local(out))
    store.trouble = lambda asked: ""
    assert said == [] and store.met[trouble] >= 10, store.met
    (entry,), damaged = RemoteRing(url).entries(verify=True)
    assert entry.record.serial == 5 and damaged == []


# -- with the ring ------------------------------------------------------------------------


def test_a_checkpoint_is_not_retired_while_it_is_sent(tmp_path: Path, url: str) -> None:
    folder = tmp_path / "run"
    ring = disk_ring(folder, CheckpointConfig(clean_after=1, keep=1))
    remote, go_on = RemoteRing(url, pauses=()), threading.Event()
    put = remote.files.put
    remote.files.put = lambda *what: (go_on.wait(60), put(*what))  # type: ignore[method-assign]
    sender, said = uploads(folder, url, ring=remote, queue=ring.upload_queue)
    ring.begin(sender)

    def step(number: int) -> None:
        ring.save(moment(number, cursor=0))
        ring.drain()
        ring.after_step(number + 1, 99)
        ring.drain()
        ring.after_step(number + 1, 99)

    step(10)
    # Begun: the store is being prepared, or the first file waits to be sent.
    assert sender.pinned == {1} and ring.is_busy
    for number in (20, 30, 40):
        step(number)
    assert [record.serial for record in ring.records] == [1, 4]
    assert (folder / "ring" / folder_name(ring.records[0]) / "COMMITTED").exists()
    go_on.set()
    sender.finish(ring.records)
    step(50)
    assert [record.serial for record in ring.records] == [5]
    sender.finish(ring.records)
    ring.close()
    assert said == [] and folders(url)[-1] == folder_name(ring.records[-1])
