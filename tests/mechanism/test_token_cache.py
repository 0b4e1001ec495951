"""Who makes a token cache, what a dead owner leaves, and the digest of a whole corpus."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from runner.data import cache as cache_module
from runner.data import corpus_digest as whole_module
from runner.data import text as text_module
from runner.data.cache import Job, cached
from runner.data.claim import CacheClaim, Overtaken, Owners
from runner.data.corpus_digest import whole_digest
from runner.data.dataset import fingerprint_files
from runner.data.documents import find_files
from runner.data.text import TextSource, prepare_text
from runner.data.tokenizer import open_codec
from runner.system.error import DataError
from runner.system.process import is_alive, own_process
from runner.train.corpus_check import known_digest
from tests.stored import open_text

ME = Owners(own=own_process(), is_alive=is_alive)
FORK = multiprocessing.get_context("fork")


def silent(what: str, done: int, total: int) -> None:
    pass


def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {n}"}) + "\n" for n in range(300)))
    return path


def source(tmp_path: Path) -> TextSource:
    return TextSource(
        paths=[str(corpus(tmp_path))], suffixes=(), tokenizer=None, cache=tmp_path / "cache"
    )


def job(tmp_path: Path) -> Job:
    files = find_files([str(corpus(tmp_path))], (), "text")
    return Job(
        files=files,
        field="text",
        codec=open_codec(None, begin_token=None, end_token=None),
        source=fingerprint_files([(file.name, file.path) for file in files]),
    )


def visible(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if not path.name.startswith(".")]


def build_slowly(monkeypatch: pytest.MonkeyPatch, seconds: float, batch: int = 30) -> None:
    batches = cache_module._batches

    def slowly(pieces: Any) -> Any:
        for made in batches(pieces):
            time.sleep(seconds)
            yield made

    monkeypatch.setattr(cache_module, "_batches", slowly)
    monkeypatch.setattr(cache_module, "_BATCH_PIECES", batch)


# ---- who makes it


def test_of_three_processes_one_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_slowly(monkeypatch, 0.05)
    build, made = cache_module._build, FORK.Queue()

    def counted(*arguments: Any) -> None:
        made.put(os.getpid())
        build(*arguments)

    monkeypatch.setattr(cache_module, "_build", counted)
    where, go, told = source(tmp_path), FORK.Event(), FORK.Queue()

    def work() -> None:
        go.wait()
        owners = Owners(own=own_process(), is_alive=is_alive)
        told.put(str(prepare_text(where, progress=silent, owners=owners).place))

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
    owner = FORK.Process(
        target=lambda: prepare_text(
            where, progress=silent, owners=Owners(own=own_process(), is_alive=is_alive)
        )
    )
    owner.start()
    assert owner.pid is not None
    limit = time.monotonic() + 30
    while not list(tmp_path.glob("cache/.*/tokens.bin")) and time.monotonic() < limit:
        time.sleep(0.02)
    os.kill(owner.pid, signal.SIGKILL)
    owner.join(30)
    assert visible(tmp_path / "cache") == []
    assert len(list((tmp_path / "cache").iterdir())) == 2, "his claim and his draft"
    monkeypatch.undo()
    place = prepare_text(where, progress=silent, owners=ME).place
    assert list((tmp_path / "cache").iterdir()) == [place], "swept"


@pytest.mark.parametrize("elsewhere", [True, False])
def test_an_owner_who_does_not_move_is_overtaken(tmp_path: Path, elsewhere: bool) -> None:
    """He lives as far as anybody knows, and has not moved for too long."""
    place = tmp_path / "cache" / "key"
    place.parent.mkdir()
    process = {**own_process(), "host": "another"} if elsewhere else own_process()
    stuck = CacheClaim(place.with_name(".key.owner"), Owners(own=process, is_alive=is_alive))
    assert stuck.take()
    draft = place.with_name(f".key.{stuck.token}")
    draft.mkdir()
    told: list[str] = []
    cached(
        place,
        job(tmp_path),
        progress=lambda what, done, total: told.append(what),
        owners=ME,
        stale_seconds=0.6,
    )
    assert place.is_dir() and not draft.exists()
    assert any("waiting for the process that tokenises" in what for what in told)
    with pytest.raises(Overtaken):
        stuck.beat(1, 2)
    stuck.release()
    assert visible(place.parent) == ["key"]


def test_an_owner_who_moves_is_waited_for(tmp_path: Path) -> None:
    place = tmp_path / "cache" / "key"
    place.parent.mkdir()
    owner = CacheClaim(place.with_name(".key.owner"), ME)
    assert owner.take()
    over = threading.Event()

    def beat() -> None:
        for number in range(4):  # for far longer than he would be taken for dead
            time.sleep(1.05)
            owner.beat(number, 4)
        owner.release()
        over.set()

    thread = threading.Thread(target=beat)
    thread.start()
    seen: list[int] = []
    cached(
        place,
        job(tmp_path),
        progress=lambda what, done, total: seen.append(done) if "waiting" in what else None,
        owners=ME,
        stale_seconds=2.5,
    )
    assert over.is_set(), "he was not waited for"
    assert {0, 1, 2} <= set(seen), "his progress is shown"
    thread.join()


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"token": "../../x", "process": 7}'])
def test_a_damaged_claim_stops_nobody(tmp_path: Path, damage: bytes) -> None:
    place = tmp_path / "cache" / "key"
    place.parent.mkdir()
    place.with_name(".key.owner").write_bytes(damage)
    cached(place, job(tmp_path), progress=silent, owners=ME, stale_seconds=0.3)
    assert [path.name for path in place.parent.iterdir()] == ["key"]


def test_work_that_is_called_off_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "_BATCH_PIECES", 30)

    def call_off(what: str, done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_text(source(tmp_path), progress=call_off, owners=ME)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_failed_owner_s_error_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = source(tmp_path)
    with Path(where.paths[0]).open("a") as out:
        out.write("no json\n")
    for _ in range(2):
        with pytest.raises(DataError, match="line 301: is not JSON"):
            prepare_text(where, progress=silent, owners=ME)
        assert list((tmp_path / "cache").iterdir()) == []


# ---- the digest of every byte


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin"])
def test_a_storage_that_fails_looks_like_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A sample that the system refuses is read again; a damaged one is skipped at once."""
    dataset = open_text(source(tmp_path), seq_len=4, isolate_documents=True)
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
    hash_file = whole_module._hash_file

    def noted(path: Path, *rest: Any) -> Any:
        names.append(path.name)
        return hash_file(path, *rest)

    monkeypatch.setattr(whole_module, "_hash_file", noted)
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
    where = TextSource(paths=[str(path)], suffixes=(), tokenizer=None, cache=tmp_path / "cache")
    first = open_text(where, seq_len=4, isolate_documents=False)
    path.write_text("behind")
    second = open_text(where, seq_len=4, isolate_documents=False)
    assert bytes(second[0].tokens.tolist()) == b"behin"
    assert first.fingerprint() != second.fingerprint()
    assert bytes(first[0].tokens.tolist()) == b"befor", "a run that reads the old one goes on"
    shutil.rmtree(tmp_path / "cache")
    assert open_text(where, seq_len=4, isolate_documents=False).fingerprint() == (
        second.fingerprint()
    )


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
