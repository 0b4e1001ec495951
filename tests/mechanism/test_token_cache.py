"""Who makes a token cache, what a dead owner leaves, and the digest of a whole corpus."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runner.config.schema import DataConfig
from runner.data import corpus_digest as whole_module
from runner.data import text as text_module
from runner.data.corpus_digest import Progress, whole_digest
from runner.data.dataset import fingerprint_files
from runner.data.documents import find_files
from runner.data.text import TokenizingJob, cached, prepare_text
from runner.data.tokenizer import open_codec
from runner.system.error import DataError
from runner.train.corpus_check import known_digest
from tests.stored import open_text
from tests.waiting import until

FORK = multiprocessing.get_context("fork")


def silent(what: str, done: int, total: int) -> None:
    pass


def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {n}"}) + "\n" for n in range(300)))
    return path


def source(tmp_path: Path) -> DataConfig:
    return DataConfig(path=[str(corpus(tmp_path))], cache=str(tmp_path / "cache"), seq_len=4)


def prepare(data: DataConfig, progress: Progress = silent) -> Path:
    return prepare_text(data, Path(str(data.cache)), progress=progress).place


def job(tmp_path: Path) -> TokenizingJob:
    files = find_files([str(corpus(tmp_path))], (), "text")
    return TokenizingJob(
        files=files,
        field="text",
        codec=open_codec(None, begin_token=None, end_token=None),
        source=fingerprint_files([(file.name, file.path) for file in files]),
    )


def visible(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if not path.name.startswith(".")]


def build_slowly(monkeypatch: pytest.MonkeyPatch, seconds: float, batch: int = 30) -> None:
    batches = text_module._batches

    def slowly(pieces: Any) -> Any:
        for made in batches(pieces):
            time.sleep(seconds)
            yield made

    monkeypatch.setattr(text_module, "_batches", slowly)
    monkeypatch.setattr(text_module, "_BATCH_PIECES", batch)


# ---- who makes it


def test_of_three_processes_one_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_slowly(monkeypatch, 0.05)
    build, made = text_module._build, FORK.Queue()

    def counted(*arguments: Any) -> None:
        made.put(os.getpid())
        build(*arguments)

    monkeypatch.setattr(text_module, "_build", counted)
    where, go, told = source(tmp_path), FORK.Event(), FORK.Queue()

    def work() -> None:
        go.wait()
        told.put(str(prepare(where)))

    processes = [FORK.Process(target=work) for _ in range(3)]
    for process in processes:
        process.start()
    go.set()
    places = {told.get(timeout=60) for _ in processes}
    for process in processes:
        process.join(60)
    assert len(places) == 1
    made.get(timeout=10)
    assert made.empty(), "somebody made it again"
    assert [str(path) for path in (tmp_path / "cache").iterdir()] == list(places)


def test_a_killed_owner_leaves_nothing_that_counts_and_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = source(tmp_path)
    build_slowly(monkeypatch, 10.0)
    owner = FORK.Process(target=lambda: prepare(where))
    owner.start()
    assert owner.pid is not None
    until(lambda: list(tmp_path.glob("cache/.*/tokens.bin")))
    os.kill(owner.pid, signal.SIGKILL)
    owner.join(30)
    assert visible(tmp_path / "cache") == []
    assert len(list((tmp_path / "cache").iterdir())) == 2, "his file and his draft"
    monkeypatch.undo()
    place = prepare(where)
    assert list((tmp_path / "cache").iterdir()) == [place], "swept"


WAITING = "waiting for the process that tokenises"


class Owner:
    """Another process that holds the lock, as far as this one can see."""

    def __init__(self, tmp_path: Path) -> None:
        self.place = tmp_path / "cache" / "key"
        self.place.parent.mkdir(exist_ok=True)
        self._path = self.place.with_name(".key.owner")
        self._file = self._path.open("w+b", buffering=0)
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def beat(self, held: bytes) -> None:
        os.pwrite(self._file.fileno(), held, 0)

    def remove(self) -> None:
        self._path.unlink()

    def release(self) -> None:
        self._file.close()


@pytest.mark.parametrize("damage", [b"", b"\xff\x00", b"7", b"1 2 3 4"])
def test_an_owner_who_does_not_move_stops_nobody_for_long(tmp_path: Path, damage: bytes) -> None:
    owner = Owner(tmp_path)
    owner.beat(damage)
    words: list[str] = []
    cached(
        owner.place,
        job(tmp_path),
        progress=lambda what, done, total: words.append(what),
        stale_seconds=0.6,
    )
    assert any(WAITING in what for what in words)
    assert [path.name for path in owner.place.parent.iterdir()] == ["key"]
    owner.release()


def test_an_owner_who_moves_is_waited_for(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    over = threading.Event()

    def beat() -> None:
        for number in range(4):  # for longer than he would be taken for dead
            time.sleep(0.5)
            owner.beat(b"%20d %20d" % (number, 4))
        time.sleep(0.5)
        over.set()
        owner.release()

    thread = threading.Thread(target=beat)
    thread.start()
    seen: list[int] = []
    cached(
        owner.place,
        job(tmp_path),
        progress=lambda what, done, total: seen.append(done) if "waiting" in what else None,
        stale_seconds=1.5,
    )
    assert over.is_set(), "he was not waited for"
    assert {0, 1, 2} <= set(seen), "his progress is shown"
    thread.join()


def test_a_lock_on_a_file_that_was_removed_is_nobody_s(tmp_path: Path) -> None:
    """Who waited for the first owner would else work beside the second."""
    first, words = Owner(tmp_path), set[tuple[str, int]]()

    thread = threading.Thread(
        target=lambda: cached(
            first.place, job(tmp_path), progress=lambda what, done, _: words.add((what, done))
        )
    )
    thread.start()
    until(lambda: (WAITING, 0) in words)
    first.remove()
    second = Owner(tmp_path)
    second.beat(b"7 9")
    first.release()
    until(lambda: (WAITING, 7) in words, "waiting for the second owner")
    second.release()
    thread.join(60)
    assert [path.name for path in first.place.parent.iterdir()] == ["key"]


def test_the_draft_of_who_passed_an_owner_over_is_not_swept(tmp_path: Path) -> None:
    owner, begun, go = Owner(tmp_path), threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def slowly(what: str, *_: int) -> None:
        if what == "tokenising":
            begun.set()
            go.wait(60)

    def pass_over() -> None:
        try:
            cached(owner.place, job(tmp_path), progress=slowly, stale_seconds=0.1)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=pass_over)
    thread.start()
    assert begun.wait(60)
    owner.release()
    cached(owner.place, job(tmp_path), progress=silent)
    go.set()
    thread.join(60)
    assert errors == []
    assert [path.name for path in owner.place.parent.iterdir()] == ["key"]


def test_where_there_are_no_locks_everybody_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    place = tmp_path / "cache" / "key"
    assert cached(place, job(tmp_path), progress=silent).num_tokens
    assert [path.name for path in place.parent.iterdir()] == ["key"]


def test_work_that_is_called_off_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_module, "_BATCH_PIECES", 30)

    def call_off(what: str, done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(source(tmp_path), call_off)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_failed_owner_s_error_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = source(tmp_path)
    with Path(where.path[0]).open("a") as out:
        out.write("no json\n")
    for _ in range(2):
        with pytest.raises(DataError, match="line 301: is not JSON"):
            prepare(where)
        assert list((tmp_path / "cache").iterdir()) == []


# ---- the digest of every byte


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin"])
def test_a_storage_that_fails_looks_like_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A sample that the system refuses is read again; a damaged one is skipped at once."""
    dataset = open_text(replace(source(tmp_path), isolate_documents=True))
    whole = dataset[0]
    read_at = os.pread

    def refusing(descriptor: int, count: int, offset: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(name):
            raise OSError(5, "Input/output error")
        return read_at(descriptor, count, offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", refusing)
        with pytest.raises(OSError, match="Input/output"):
            dataset[0]
    assert dataset[0].tokens.tolist() == whole.tokens.tolist()  # type: ignore[union-attr]


def files(*paths: Path) -> list[tuple[str, Path]]:
    return [(path.name, path) for path in paths]


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has just been written may be remembered."""
    monkeypatch.setattr(whole_module, "_SETTLED_NS", -(10**18))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read."""
    names: list[str] = []
    hash_file = whole_module.hash_file

    def noted(path: Path, *rest: Any) -> Any:
        names.append(path.name)
        return hash_file(path, *rest)

    monkeypatch.setattr(whole_module, "hash_file", noted)
    return names


def test_every_byte_counts_and_names_do_and_order_does(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"a" * 100_000)
    two.write_bytes(b"b")
    seen = [whole_digest(files(one, two), notes=None, progress=silent)]
    seen.append(whole_digest(files(two, one), notes=None, progress=silent))
    one.write_bytes(b"a" * 50_000 + b"c" + b"a" * 49_999)
    seen.append(whole_digest(files(one, two), notes=None, progress=silent))
    seen.append(whole_digest([("other", one), ("two", two)], notes=None, progress=silent))
    assert len({whole.sha256 for whole in seen}) == 4
    assert [whole.num_bytes for whole in seen] == [100_001] * 4


def test_it_is_read_once_while_the_files_look_the_same(
    tmp_path: Path, settled: None, read: list[str]
) -> None:
    path, notes = tmp_path / "a", tmp_path / "notes"
    path.write_bytes(b"123")
    first = whole_digest(files(path), notes=notes, progress=silent)
    assert whole_digest(files(path), notes=notes, progress=silent) == first
    assert read == ["a"]
    for note in notes.iterdir():  # a damaged note is no answer
        note.write_text(note.read_text().replace(first.sha256[:8], "0" * 8))
    assert whole_digest(files(path), notes=notes, progress=silent) == first
    assert read == ["a", "a"]


@pytest.mark.parametrize("change", ["in place", "replaced", "time put back"])
def test_a_file_that_looks_changed_is_read_again(
    tmp_path: Path, settled: None, read: list[str], change: str
) -> None:
    path, notes = tmp_path / "a", tmp_path / "notes"
    path.write_bytes(b"123")
    seen = path.stat()
    first = whole_digest(files(path), notes=notes, progress=silent)
    time.sleep(0.02)
    if change == "replaced":
        (tmp_path / "b").write_bytes(b"321")
        os.replace(tmp_path / "b", path)
    else:
        with path.open("r+b") as file:
            file.write(b"321")
    if change != "in place":
        os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert whole_digest(files(path), notes=notes, progress=silent) != first
    assert read == ["a", "a"]


def test_what_has_just_been_written_is_not_remembered(tmp_path: Path, read: list[str]) -> None:
    """A second change within the clock's tick would look like none."""
    path, notes = tmp_path / "a", tmp_path / "notes"
    path.write_bytes(b"123")
    for _ in range(2):
        whole_digest(files(path), notes=notes, progress=silent)
    assert read == ["a", "a"]


def test_a_reading_that_was_cut_short_goes_on_behind_the_large_files(
    tmp_path: Path, settled: None, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_module, "_LARGE_BYTES", 10)
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.write_bytes(path.name.encode() * 20)

    def cut(what: str, done: int, total: int) -> None:
        if done > 40:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        whole_digest(files(*paths), notes=tmp_path / "notes", progress=cut)
    again = whole_digest(files(*paths), notes=tmp_path / "notes", progress=silent)
    assert read == ["a", "b", "c", "c"]
    assert again == whole_digest(files(*paths), notes=None, progress=silent)


def test_a_large_text_corpus_changed_between_the_samples_is_made_into_tokens_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fingerprint is the same, the tokens must not be."""
    monkeypatch.setattr(text_module, "is_sampled", lambda num_bytes: True)
    fixed = "0" * 64
    monkeypatch.setattr(text_module, "fingerprint_files", lambda files: fixed)
    path = tmp_path / "a.txt"
    path.write_text("before")
    where = DataConfig(path=[str(path)], cache=str(tmp_path / "cache"), seq_len=4)
    first = open_text(where)
    path.write_text("behind")
    second = open_text(where)
    assert bytes(second[0].tokens.tolist()) == b"behin"
    assert first.fingerprint() != second.fingerprint()
    assert bytes(first[0].tokens.tolist()) == b"befor", "a run that reads the old one goes on"
    shutil.rmtree(tmp_path / "cache")
    assert open_text(where).fingerprint() == (second.fingerprint())


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([], None),
        ([("start", {"data": "f"})], None),
        ([("data_digest", {"data": "f", "sha256": "a"})], "a"),
        ([("data_digest", {"data": "other", "sha256": "a"})], None),
        (
            [
                ("data_digest", {"data": "f", "sha256": "a"}),
                ("data_digest", {"data": "f", "sha256": "b"}),
                ("data_changed", {"data": "f", "sha256": "c"}),
            ],
            "b",
        ),
        ([("data_digest", {"data": "f", "sha256": 7})], None),
    ],
)
def test_what_the_journal_knows(
    lines: list[tuple[str, Mapping[str, Any]]], found: str | None
) -> None:
    journal = [{"kind": kind, "detail": detail} for kind, detail in lines]
    known = known_digest(journal, "f")
    assert (known or {}).get("sha256") == found
