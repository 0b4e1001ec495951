"""The whole corpus compared while training goes on: what waits for it, and what comes of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner.checkpoint.disk.directory import CheckpointDirectory
from runner.config.schema import CheckpointConfig
from runner.data.corpus_digest import Whole
from runner.data.dataset import TokenFile, TokenStream, Windows, name_in_files
from runner.policy.decision.history import Incident
from runner.policy.retention.records import State, on_disk
from runner.system.error import ConfigError, DataError
from runner.train import corpus_check as corpus_module
from runner.train.corpus_check import CorpusCheck
from tests.crash_world import Holder, disk_ring
from tests.observed import OneRank
from tests.stored import moment

KNOWN = {"data": "f", "sha256": "a" * 64, "files": [["a.bin", "1"], ["b.bin", "2"]]}


class Ranks(OneRank):
    """Rank 0 of as many as ``others`` says; ``others`` are the digests that those tell."""

    def __init__(self, others: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.world_size = 1 + len(others)
        self._others = others

    def sum(self, numbers: list[float]) -> list[float]:
        return [number * self.world_size for number in numbers]

    def gather(self, value: Any) -> list[Any]:
        return [json.loads(json.dumps(value)), *self._others]


@dataclass
class World:
    """A ring, a corpus of one file, and a reading that ends when ``digest`` is set."""

    folder: Path
    ranks: Ranks = field(default_factory=Ranks)
    may_end: threading.Event = field(default_factory=threading.Event)
    outcome: Whole | Exception | None = None
    told: list[Incident] = field(default_factory=list)
    noted: list[Incident] = field(default_factory=list)

    def __post_init__(self) -> None:
        path = self.folder / "a.bin"
        path.write_bytes(bytes(100))
        tokens = TokenStream([TokenFile(path=path, dtype="<u2", num_tokens=50)])
        self.dataset = Windows(
            stream=tokens,
            name=partial(name_in_files, ["a.bin"], tokens.starts, "tokens"),
            seq_len=4,
            vocab_size=9,
            source="",
        )
        self.dataset.sampled_files = [("a.bin", path)]
        self.holder = Holder()
        of_test = {"sharded": self.holder, "ranks": self.ranks, "report": self.told.append}
        self.ring = disk_ring(self.folder, CheckpointConfig(clean_after=2, keep=9), **of_test)

    def read(self, *_: Any, **__: Any) -> Whole:
        assert self.may_end.wait(30)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome

    def check(self, known: dict[str, Any] | None, *, allowed: bool = False) -> CorpusCheck:
        one: Any = SimpleNamespace
        run = one(
            corpus=one(dataset=self.dataset),
            group=one(heart=one(enter=str)),
            ranks=self.ranks,
            ring=self.ring,
            resumed=one(step=10),
            written=one(report=self.told.append, journal=one(add=self.noted.append)),
        )
        made = CorpusCheck(run, known=known, notes=self.folder / "notes", may_change=allowed)
        made.begin()
        return made

    def save(self, step: int) -> None:
        self.ring.save(moment(step))
        self.ring.drain()

    def end(self, check: CorpusCheck, sha256: str = "a" * 64) -> None:
        """The reading ends, and the ranks hear of it."""
        if self.outcome is None:
            files = (("a.bin", "1"), ("b.bin", "2" if sha256 == "a" * 64 else "3"))
            self.outcome = Whole(sha256=sha256, num_bytes=100, files=files)
        self.may_end.set()
        check.finish(14)

    def states(self) -> dict[int, State]:
        return {record.step: record.state for record in on_disk(self.ring.records)}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(tmp_path)
    monkeypatch.setattr(corpus_module, "whole_digest", made.read)
    yield made
    made.may_end.set()
    made.ring.close(wait=True)


def test_nothing_is_proven_before_the_corpus_is_compared(world: World) -> None:
    check = world.check(KNOWN)
    world.save(12)
    world.ring.after_step(14, 4, may_prove=not check.holds_proofs)
    world.ring.drain()
    check.look(14)
    assert check.holds_proofs and world.states() == {12: State.committed}
    world.end(check)
    world.ring.after_step(14, 4)
    world.ring.drain()
    assert world.states() == {12: State.clean}
    assert world.told == [] and world.noted == [], "known, and the same: nothing to tell"


def test_a_first_run_waits_for_nothing_and_notes_what_it_found(world: World) -> None:
    check = world.check(None)
    world.save(12)
    world.ring.after_step(14, 4)
    world.ring.drain()
    assert not check.holds_proofs and world.states() == {12: State.clean}
    world.end(check)
    [line] = world.noted
    assert line.kind == "data_digest"
    assert line.detail["sha256"] == "a" * 64
    assert line.detail["data"] == world.dataset.fingerprint()
    assert line.detail["files"] == [["a.bin", "1"], ["b.bin", "2"]]


def test_another_corpus_ends_the_run_and_taints_what_was_saved_on_it(world: World) -> None:
    world.save(10)
    check = world.check(KNOWN)
    world.save(12)
    with pytest.raises(ConfigError, match=r"began on: b.bin changed .*SHA-256 aaaaaaaaaaaa, now b"):
        world.end(check, "b" * 64)
    assert world.states() == {10: State.committed, 12: State.tainted}
    assert [line.kind for line in world.told] == ["data_changed"]
    entries, _ = CheckpointDirectory(world.folder / "ring").entries()
    assert {e.record.step: e.record.state for e in entries} == world.states(), "on disk as well"


def test_a_change_that_is_allowed_is_noted(world: World) -> None:
    check = world.check(KNOWN, allowed=True)
    assert not check.holds_proofs
    world.end(check, "b" * 64)
    [line] = world.noted
    assert line.kind == "data_digest" and "allow_change" in line.reason
    assert world.told == []


def test_a_corpus_that_cannot_be_read_whole_does_not_end_the_run(world: World) -> None:
    world.outcome = DataError("a.bin: cannot be read (Input/output error)")
    check = world.check(KNOWN)
    world.end(check)
    [line] = world.told
    assert line.kind == "data_unchecked" and "Input/output error" in line.reason
    assert not check.holds_proofs


def test_nodes_that_see_different_files_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = World(tmp_path, ranks=Ranks(others=("b" * 64,)))
    monkeypatch.setattr(corpus_module, "whole_digest", made.read)
    check = made.check(None)
    with pytest.raises(ConfigError, match="ranks see different data"):
        made.end(check)
    made.ring.close(wait=True)


def test_a_corpus_that_the_fingerprint_covers_is_not_read_again(tmp_path: Path) -> None:
    made = World(tmp_path)
    made.dataset.sampled_files = ()
    check = made.check(KNOWN)
    assert not check.holds_proofs and made.ring.upload_queue.num_jobs == 0
    check.finish(14)
    made.ring.close(wait=True)
