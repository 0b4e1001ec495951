"""P7: whatever a power cut leaves of what was not synced, a restart finds what was promised.

The real ring, journal, fence and resume over :mod:`tests.model_fs`: a crash after every operation,
and for each the legal states of the disk; then a restart, which may crash as well. What must hold
stands in :func:`tests.crash_world.check`. That the test can fail is shown by :data:`MUTANTS` and
:data:`SYNCS`: each a protocol with one care less.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from runner.checkpoint import ring as ring_module
from runner.checkpoint.disk import directory
from runner.checkpoint.disk.directory import CheckpointDirectory
from runner.checkpoint.manifest import Manifest
from runner.policy.decision.history import History, Incident
from runner.policy.retention.records import Record, State
from runner.startup import resume
from runner.system import files, json_lines
from runner.system.error import RunnerError
from runner.system.files import file_digest, sync_directory, write_durably, write_json
from runner.system.json_lines import LineFile
from tests.crash_world import Promises, World, check
from tests.model_fs import All, AllBut, Chooser, Dice, Disk, Fact, Trace, after_crash, key, lay_out

Step = Callable[[World], None]


class Life:
    """One incarnation on a disk of its own, traced from before its start."""

    def __init__(self, root: Path, number: int, promises: Promises, deaf: tuple[str, ...]) -> None:
        self.root = root
        self.number = number
        self.before = promises
        root.mkdir(parents=True, exist_ok=True)
        self.trace = Trace(root, deaf=deaf)
        self.world = World(root / "runs" / "a", self.trace.fact)

    def open_and_check(self) -> None:
        """Start, as the same command would; what it finds must be what was promised."""
        try:
            with self.trace.recording():
                found, resumed = self.world.open(self.number)
            check(self.world, found, resumed, self.before)
        except (RunnerError, OSError) as error:
            raise AssertionError(f"the restart failed: {type(error).__name__}: {error}") from error

    def do(self, step: Step) -> None:
        with self.trace.recording():
            step(self.world)

    def crash(self, num: int, chooser: Chooser) -> tuple[Disk, Promises]:
        facts = [op.what for op in self.trace.operations[:num] if isinstance(op, Fact)]
        return after_crash(self.trace, num, chooser), self.before.after(facts)

    def close(self) -> None:
        self.world.close()
        shutil.rmtree(self.root)


# A fixed story with every kind of change in it, crashed everywhere

STORY: list[Step] = [
    lambda w: w.train(2),
    World.save,
    lambda w: w.train(2),
    World.discard,
    World.save,
    lambda w: w.train(2),  # proves the second, retires the first
    World.save,
    World.roll_back,
    lambda w: w.train(1),
    World.save,
    lambda w: w.train(3),
    World.save,
    lambda w: w.distrust(w.state.step - 1),
]


def choosers(life: Life, num: int, dice: random.Random, *, many: bool) -> Iterator[Chooser]:
    yield All(True)
    yield All(False)
    for _ in range(6 if many else 2):
        yield Dice(dice)
    counter = AllBut(True, 1 << 30)
    after_crash(life.trace, num, counter)
    num_pending = (1 << 30) - counter.left
    for number in range(num_pending if many else min(2, num_pending)):
        yield AllBut(True, number)
        yield AllBut(False, number)


def explore(
    tmp_path: Path, *, many: bool, seed: int = 1, deaf: tuple[str, ...] = (), stride: int = 1
) -> tuple[int, int, set[str]]:
    """Crash the story everywhere; (crash points, states recovered from, fsync sites)."""
    dice = random.Random(seed)
    life = Life(tmp_path / "story", 1, Promises(), deaf)
    life.open_and_check()
    for step in STORY:
        life.do(step)
    num_states = 0
    seen: set[tuple[int, int]] = set()
    for num in range(0, len(life.trace.operations) + 1, stride):
        num_facts = sum(isinstance(op, Fact) for op in life.trace.operations[:num])
        for chooser in choosers(life, num, dice, many=many):
            disk, promises = life.crash(num, chooser)
            if (key(disk), num_facts) in seen:
                continue
            seen.add((key(disk), num_facts))
            num_states += 1
            told = f"seed {seed}, crash after operation {num} ({chooser}): {show(life, num)}"
            recover(tmp_path / "again", disk, promises, dice, deaf, told)
    points, sites = len(life.trace.operations) // stride + 1, life.trace.sites
    life.close()
    return points, num_states, sites


def show(life: Life, num: int) -> str:
    last = [op for op in life.trace.operations[:num] if not isinstance(op, Fact)][-3:]
    return "; ".join(str(op)[:160] for op in last)


def recover(
    root: Path,
    disk: Disk,
    promises: Promises,
    dice: random.Random,
    deaf: tuple[str, ...],
    told: str,
) -> None:
    """Restart; one time in four crash the restart too, and restart again."""
    lay_out(disk, root)
    life = Life(root, 2, promises, deaf)
    try:
        try:
            life.open_and_check()
            again = None
            if dice.random() < 0.25:
                num = dice.randrange(len(life.trace.operations) + 1)
                again = life.crash(num, Dice(dice))
        finally:
            life.close()
        if again is not None:
            lay_out(again[0], root)
            life = Life(root, 3, again[1], deaf)
            try:
                life.open_and_check()
            finally:
                life.close()
    except AssertionError as error:
        raise AssertionError(f"{told}\n{error}") from error


@pytest.fixture
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """In memory where there is such a place: thousands of small trees are made."""
    memory = Path("/dev/shm")
    folder = tmp_path_factory.mktemp("disk")
    if memory.is_dir():
        folder = memory / f"holdfast-{folder.parent.name}-{folder.name}"
        folder.mkdir()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_nothing_promised_is_lost(disk: Path) -> None:
    points, states, _ = explore(disk, many=False)
    print(f"{points} crash points, {states} states of the disk")
    assert points > 200 and states > points


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(4))
def test_nothing_promised_is_lost_in_many_states(disk: Path, seed: int) -> None:
    points, states, _ = explore(disk, many=True, seed=seed)
    print(f"{points} crash points, {states} states of the disk")


# The same with one care less: each must be noticed

SYNCS = {
    "replace_for_writing<json_lines._open": "a journal taken over is whole",
    "sync_directory<replace_for_writing<json_lines._open": "and in its place",
    "json_lines._sync": "a journal line, and the metrics up to a checkpoint",
    "shards.write_rank_file": "a rank's bytes",
    "write_durably<shards.write_index": "and where they lie",
    "write_durably<write_json<directory.commit": "the manifest's bytes",
    "sync_directory<write_durably<write_json<directory.commit": "the names in a checkpoint",
    "sync_directory<directory._publish": "a checkpoint's own name",
    "write_durably<directory._publish": "the marker's bytes",
    "sync_directory<write_durably<directory._publish": "the marker's name",
    "sync_directory<write_durably<directory.mark": "CLEAN and TAINTED",
    "sync_directory<directory.remove": "the marker goes first",
    "sync_directory<lease._claim": "an incarnation's number",
    "sync_directory<make_folder<lease.acquire": "and its folder's name",
    "sync_directory<make_folder<paths.create": "the run's own name",
}
# Noticed by nobody, and why that is right.
HARMLESS = {
    "lease._claim": "a claim that cannot be read is waited for like any other",
    "write_durably<directory.mark": "the file is empty: there are no bytes to lose",
    "sync_directory<write_durably<shards.write_index": "on one machine the manifest's does the "
    "same; on several each has to sync its own names",
    "sync_directory<remove_folder<directory.remove": "a folder that comes back has no marker",
    "sync_directory<remove_folder<directory.sweep": "the same",
}


def test_every_sync_is_accounted_for(disk: Path) -> None:
    """A new fsync belongs into one of the lists, and one that is gone out of them."""
    _, _, sites = explore(disk, many=False, stride=40)
    assert (
        sites | {"sync_directory<remove_folder<directory.sweep"} == SYNCS.keys() | HARMLESS.keys()
    )


# The longest searches; others of the same kind end sooner.
LONG = (
    *("sync_directory<directory.remove", "shards.write_rank_file"),
    *("replace_for_writing<json_lines._open", "sync_directory<directory._publish"),
)


@pytest.mark.parametrize(
    "site", [pytest.param(s, marks=[pytest.mark.full] * (s in LONG)) for s in SYNCS]
)
def test_a_sync_left_out_is_noticed(disk: Path, site: str) -> None:
    with pytest.raises(AssertionError, match=r"crash after operation") as caught:
        explore_until_noticed(disk, deaf=(site,))
    print(f"{SYNCS[site]}: {str(caught.value).splitlines()[-1]}")


def explore_until_noticed(disk: Path, deaf: tuple[str, ...] = ()) -> None:
    for seed in range(3):
        explore(disk / str(seed), many=True, seed=seed, deaf=deaf)


def marker_before_rename(self: CheckpointDirectory, manifest: Manifest) -> None:
    writing = self.writing_folder(manifest.serial)
    write_json(writing / directory.MANIFEST, manifest.to_json())
    write_durably(writing / directory.COMMITTED, file_digest(writing / directory.MANIFEST).encode())
    writing.rename(self.folder_of(_record(manifest)))
    sync_directory(self.folder)


def marker_before_manifest(self: CheckpointDirectory, manifest: Manifest) -> None:
    writing = self.writing_folder(manifest.serial)
    final = self.folder_of(_record(manifest))
    writing.rename(final)
    sync_directory(self.folder)
    text = json.dumps(manifest.to_json(), allow_nan=False, indent=1, sort_keys=True) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    write_durably(final / directory.COMMITTED, digest.encode())
    write_json(final / directory.MANIFEST, manifest.to_json())


def _record(manifest: Manifest) -> Record:
    return Record(
        serial=manifest.serial, step=manifest.step, cursor=manifest.cursor, state=State.committed
    )


def marker_deleted_last(self: CheckpointDirectory, record: Record) -> None:
    folder = self.folder_of(record)
    for path in sorted(folder.iterdir(), key=lambda path: path.name == directory.COMMITTED):
        path.unlink()
        sync_directory(folder)
    files.remove_folder(folder)


def in_place(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path.parent)


def lines_in_place(path: Path, *, length: int, check: Any) -> None:
    data = path.read_bytes()[:length] if path.exists() else b""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path.parent)


def line_after_effect(self: World) -> None:
    """The rollback takes effect before it is journalled."""
    kept, self.ring.abandon_after = self.ring.abandon_after, lambda serial: None  # type: ignore
    add = self.add

    def late(incident: Incident) -> None:
        kept(incident.detail["serial"])
        self.ring.drain()
        add(incident)

    self.add = late  # type: ignore[method-assign]
    try:
        World_roll_back(self)
    finally:
        self.add, self.ring.abandon_after = add, kept  # type: ignore[method-assign]


World_roll_back = World.roll_back


def keeps_nothing(records: Any, **_: Any) -> list[Record]:
    """Retires a clean checkpoint as soon as there is a newer one, clean or not."""
    return sorted(records, key=lambda r: r.serial)[:-1]


MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "the marker before the rename": (CheckpointDirectory, "commit", marker_before_rename),
    "the marker before the manifest": (CheckpointDirectory, "commit", marker_before_manifest),
    "the marker deleted last": (CheckpointDirectory, "remove", marker_deleted_last),
    "files overwritten in place": (directory, "write_durably", in_place),
    "the journal taken over in place": (json_lines, "replace_for_writing", lines_in_place),
    "a rollback in effect before its line": (World, "roll_back", line_after_effect),
    "the last clean checkpoint retired": (ring_module, "retire", keeps_nothing),
    "nothing swept": (CheckpointDirectory, "sweep", lambda self: []),
    "what a rollback left is used": (History, "abandoned_serials", lambda self: set()),
    "what a mismatch left is used": (History, "distrusts", lambda self, record: False),
    "numbers given out again": (resume, "_serial_in", lambda line: 0),
    "metrics not synced with a save": (LineFile, "sync", lambda self: self.num_bytes()),
}


SLOW = (
    "what a rollback left is used",
    "metrics not synced with a save",
    "the marker deleted last",
    "the last clean checkpoint retired",
    "what a mismatch left is used",
    "numbers given out again",
    "a rollback in effect before its line",
)


@pytest.mark.parametrize(
    "mutant", [pytest.param(m, marks=[pytest.mark.full] * (m in SLOW)) for m in MUTANTS]
)
def test_a_change_of_the_protocol_is_noticed(
    disk: Path, mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, replacement = MUTANTS[mutant]
    if name == "roll_back":
        story = [replacement if step is World_roll_back else step for step in STORY]
        monkeypatch.setattr("tests.mechanism.test_crash_model.STORY", story)
    else:
        monkeypatch.setattr(owner, name, replacement)
    with pytest.raises(AssertionError) as caught:
        explore_until_noticed(disk)
    print(f"{mutant}: {str(caught.value).splitlines()[-1]}")


# Any order of anything


class Crashes(RuleBasedStateMachine):
    """Random lives: what the machine chooses is done, crashed anywhere, and started again."""

    root: Path
    num_lives = 0

    def __init__(self) -> None:
        super().__init__()
        Crashes.num_lives += 1
        self.folder = self.root / str(Crashes.num_lives)
        self.number = 1
        self.life = Life(self.folder, 1, Promises(), ())
        self.life.open_and_check()
        self.is_over = False

    @precondition(lambda self: not self.is_over)
    @rule(num=st.integers(1, 4))
    def train(self, num: int) -> None:
        self.life.do(lambda w: w.train(num))

    @precondition(lambda self: not self.is_over)
    @rule()
    def save(self) -> None:
        self.life.do(World.save)

    @precondition(lambda self: not self.is_over)
    @rule()
    def discard(self) -> None:
        self.life.do(World.discard)

    @precondition(lambda self: not self.is_over)
    @rule()
    def roll_back(self) -> None:
        self.life.do(World_roll_back)

    @precondition(lambda self: not self.is_over)
    @rule(back=st.integers(0, 3))
    def distrust(self, back: int) -> None:
        world = self.life.world
        good = max(world.begin, world.state.step - back)
        usable = [r for r in world.ring.records if r.state is not State.tainted]
        if any(record.step <= good for record in usable):  # runner.config.validate sees to it
            self.life.do(lambda w: w.distrust(good))
            self.is_over = True  # the run ends with it

    @rule(late=st.integers(0, 1000), seed=st.integers(0, 1 << 30))
    def crash(self, late: int, seed: int) -> None:
        """Somewhere in this life, its start included; later places are likelier."""
        operations = len(self.life.trace.operations)
        num = operations - late * operations // 1000 if late % 2 else operations
        disk, promises = self.life.crash(num, Dice(random.Random(seed)))
        self.life.close()
        self.number += 1
        lay_out(disk, self.folder)
        self.life = Life(self.folder, self.number, promises, ())
        self.life.open_and_check()
        self.is_over = False

    def teardown(self) -> None:
        self.life.close()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num", [15, pytest.param(2000, marks=pytest.mark.full)])
def test_any_order_of_anything(disk: Path, num: int) -> None:
    Crashes.root = disk
    chosen = settings(
        max_examples=num,
        stateful_step_count=25,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Crashes, settings=chosen)
