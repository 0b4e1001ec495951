"""The states of a checkpoint's copies: the drawn table is the code's, and no arrow is idle."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

from runner.checkpoint import lifecycle as module
from runner.checkpoint.lifecycle import MOVES, Copy, Life
from runner.checkpoint.ring import CheckpointRing
from runner.policy.retention.records import Record, State, Tier, rollback_targets
from runner.system.error import CheckpointError
from tests.mechanism.test_memory import Rig, flip

Moves = set[tuple[Tier, Life, Life]]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Moves:
    """Every move of every copy since the test began."""
    seen: Moves = set()
    move = Copy.move

    def noted(copy: Copy, life: Life) -> None:
        before = copy.life
        move(copy, life)
        seen.add((copy.tier, before, life))

    monkeypatch.setattr(Copy, "move", noted)
    return seen


def drawn() -> set[tuple[str, str]]:
    """The moves in the docstring's table."""
    assert module.__doc__ is not None
    return set(re.findall(r"^(\w+) -> (\w+) ", module.__doc__, re.MULTILINE))


def test_the_table_of_the_docstring_is_the_one_of_the_code() -> None:
    assert drawn() == {(a.name, b.name) for a, others in MOVES.items() for b in others}
    assert set(MOVES) == set(Life)


@pytest.mark.parametrize("life", Life)
def test_a_move_that_is_not_in_the_table_is_refused(life: Life) -> None:
    record = Record(serial=1, step=2, cursor=3, state=State.committed)
    for other in set(Life) - MOVES[life]:
        with pytest.raises(AssertionError, match=f"{life.value} -> {other.value}"):
            Copy(record, life).move(other)


def back_to(ring: CheckpointRing, rig: Rig, step: int) -> None:
    """As a rollback does it."""
    [target] = [r for r in rollback_targets(ring.records, cursor=10_000, step=step)][:1]
    rig.step = ring.restore([target]).step
    ring.abandon_after(target.serial)


def trained(rig: Rig, steps: int, *, with_memory: bool = True) -> CheckpointRing:
    ring = rig.ring(with_memory=with_memory)
    ring.begin()
    for _ in range(steps):
        rig.train(ring, 1)
        ring.drain()
    return ring


def a_quiet_run(rig: Rig) -> None:
    """Saved, proven, retired, and slots filled anew."""
    trained(rig, 21).close()


def a_slow_disk(rig: Rig) -> None:
    """Probation is over before the bytes are safe."""
    ring = trained(rig, 3)
    rig.write_gate.clear()
    rig.train(ring, 4)
    rig.write_gate.set()
    ring.drain()
    ring.close()


def back_while_saving(rig: Rig, *, steps: int = 1) -> None:
    ring = trained(rig, 7)
    rig.write_gate.clear()
    rig.train(ring, steps)
    back_to(ring, rig, 5)
    rig.write_gate.set()
    ring.drain()
    ring.close()


def back_while_a_served_one_is_saved(rig: Rig) -> None:
    back_while_saving(rig, steps=4)


def a_full_disk(rig: Rig) -> None:
    ring = trained(rig, 7)
    store = ring._disk.directory
    commit = store.commit
    store.commit = fail  # type: ignore[assignment]
    rig.train(ring, 1)
    ring.drain()
    rig.write_gate.clear()
    rig.train(ring, 7)  # 12 is being written, its probation is over
    rig.write_gate.set()
    ring.drain()
    store.commit = commit  # type: ignore[method-assign]
    assert [i.kind for i in rig.incidents] == ["save_failed"] * 2
    ring.close()


def back_while_publishing(rig: Rig) -> None:
    ring = trained(rig, 7, with_memory=False)
    store, began, go_on = ring._disk.directory, threading.Event(), threading.Event()
    commit = store.commit

    def slowly(*told: object) -> None:
        began.set()
        assert go_on.wait(20)
        commit(*told)  # type: ignore[arg-type]

    store.commit = slowly  # type: ignore[method-assign]
    rig.train(ring, 1)
    while not began.is_set():
        ring.turn()
    back_to(ring, rig, 5)
    go_on.set()
    ring.drain()
    ring.close()


def back_while_proving(rig: Rig) -> None:
    """Steps to where both copies of step 8 are read back, in queues that nobody looks at."""
    ring = trained(rig, 9)
    rig.step += 1
    ring.after_step(rig.step, rig.step)
    back_to(ring, rig, 5)
    ring.drain()
    ring.close()


def a_mark_that_fails(rig: Rig) -> None:
    ring = trained(rig, 5, with_memory=False)
    mark = ring._disk.directory.mark
    ring._disk.directory.mark = fail  # type: ignore[assignment]
    rig.step += 1
    ring.after_step(rig.step, rig.step)
    ring.drain()
    assert {r.state for r in ring.records} == {State.committed}
    ring._disk.directory.mark = mark  # type: ignore[method-assign]
    ring.after_step(rig.step, rig.step)
    ring.drain()
    assert {r.state for r in ring.records} == {State.clean}
    ring.close()


def damage(rig: Rig) -> None:
    """In a slot; and on disk, found by the proof."""
    ring = trained(rig, 9)
    for path in [*ring.snapshot_files(), *newest(rig)]:
        flip(path)
    rig.train(ring, 2)
    ring.drain()
    ring.close()


def damage_that_loading_finds(rig: Rig) -> None:
    ring = trained(rig, 5, with_memory=False)
    for path in newest(rig):
        flip(path)
    with pytest.raises(CheckpointError):
        ring.restore(ring.records)
    ring.close()


def distrust(rig: Rig) -> None:
    """Clean and committed ones alike."""
    ring = trained(rig, 9)
    ring.distrust_after(3)
    assert not any(r.state is State.clean for r in ring.records)
    ring.close()


def newest(rig: Rig) -> list[Path]:
    folder = max((rig.folder / "ring").iterdir())
    return list(folder.glob("rank-*.bin"))


def fail(*told: object) -> None:
    raise OSError("No space left on device")


def test_every_move_of_the_table_is_made(tmp_path: Path, made: Moves) -> None:
    for number, scene in enumerate(
        (
            a_quiet_run,
            a_slow_disk,
            back_while_saving,
            back_while_a_served_one_is_saved,
            a_full_disk,
            back_while_publishing,
            back_while_proving,
            a_mark_that_fails,
            damage,
            damage_that_loading_finds,
            distrust,
        )
    ):
        (tmp_path / str(number)).mkdir()
        scene(Rig(tmp_path / str(number)))
    moves = {(before.name, after.name) for _, before, after in made}
    assert moves == drawn()
    in_memory = {after for tier, _, after in made if tier is Tier.memory}
    assert not in_memory & {Life.tainted, Life.condemned}, "a copy in memory is given up at once"
