"""Background jobs that end at the same step on every rank, whoever was fast."""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.checkpoint.jobs import LockstepQueue
from tests.programs import ended
from tests.rows import full


class World:
    """Several ranks' queues in one process; ``gather`` waits for nobody, texts come first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.said: list[str] = []
        self.ranks = [LockstepQueue(self._gather) for _ in range(size)]
        self.events: list[list[str]] = [[] for _ in range(size)]

    def _gather(self, text: str) -> list[str]:
        """What the ranks said, by rank: told by :meth:`step` beforehand."""
        assert text in self.said
        return self.said

    def submit(self, rank: int, name: str, work: Callable[[], None]) -> None:
        def then(failures: list[str]) -> None:
            self.events[rank].append(" | ".join([name, *failures]))

        self.ranks[rank].submit(work, then)

    def step(self, *failures: str) -> None:
        """One agreement of all ranks."""
        self.said = list(failures) or [""] * self.size
        told = [one.progress() for one in self.ranks]
        for one in self.ranks:
            one.apply_progress(sum(t[0] for t in told), sum(t[1] for t in told), self.size)

    def finish(self) -> None:
        while any(queue.num_jobs for queue in self.ranks):
            for one in self.ranks:
                one.wait()
            self.step()


@pytest.fixture
def pair() -> Iterator[World]:
    world = World(2)
    yield world
    for one in world.ranks:
        one.close()


def nothing() -> None:
    pass


NICE = """
import os, threading
from runner.checkpoint.jobs import LockstepQueue
found = []
work = LockstepQueue(lambda text: [text])
own = lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
work.submit(lambda: found.append(own()), lambda failures: None)
work.wait()
work.close()
print(own(), *found)
"""


@pytest.mark.parametrize("more", [5, full(0), full(19)])
def test_its_thread_gives_way_to_the_step_under_nice_as_well(more: int) -> None:
    """Relative to the process: an absolute priority would put it before the step, under nice."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    told = ended("nice", "-n", str(more), sys.executable, "-c", NICE, check=True).stdout.split()
    step, thread = map(int, told)
    assert (step, thread) == (min(19, own + more), min(19, own + more + 10))


def fail(text: str) -> Callable[[], None]:
    def work() -> None:
        raise OSError(text)

    return work


def test_without_jobs_nothing_is_told_or_settled(pair: World) -> None:
    one = pair.ranks[0]
    assert one.progress() == (0.0, 0.0)
    one.wait()
    one.apply_progress(2.0, 0.0, 2)
    assert one.num_jobs == 0


def test_jobs_run_in_order_one_at_a_time(pair: World) -> None:
    order: list[str] = []
    for name in ("a", "b", "c"):
        for rank in (0, 1):
            pair.submit(rank, name, lambda name=name, rank=rank: order.append(f"{name}{rank}"))
    for one in pair.ranks:
        one.wait()
    assert sorted(order) == ["a0", "a1"]  # b waits for the agreement on a
    assert [one.num_jobs for one in pair.ranks] == [3, 3]
    pair.finish()
    assert [place[0] for place in order] == ["a", "a", "b", "b", "c", "c"]
    assert pair.events == [["a", "b", "c"]] * 2


def test_nothing_settles_before_the_slowest_rank(pair: World) -> None:
    gate = threading.Event()
    pair.submit(0, "a", nothing)
    pair.submit(1, "a", lambda: gate.wait(30) and None)
    pair.ranks[0].wait()
    for _ in range(5):
        pair.step()
        assert pair.events == [[], []]
    assert [one.progress() for one in pair.ranks] == [(1.0, 0.0), (0.0, 0.0)]
    gate.set()
    pair.ranks[1].wait()
    assert pair.events == [[], []]  # done, and yet to be agreed
    pair.step()
    assert pair.events == [["a"], ["a"]]


def test_fewer_done_than_ranks_changes_nothing(pair: World) -> None:
    one = pair.ranks[0]
    pair.submit(0, "a", nothing)
    one.wait()
    for num_done in (0.0, 1.0):
        one.apply_progress(num_done, 0.0, 2)
        assert (one.num_jobs, one.progress(), pair.events[0]) == (1, (1.0, 0.0), [])
    one.apply_progress(2.0, 0.0, 2)
    assert (one.num_jobs, one.progress(), pair.events[0]) == (0, (0.0, 0.0), ["a"])


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ({1: "disk full"}, "a | rank 1: OSError: disk full"),
        ({0: "gone"}, "a | rank 0: OSError: gone"),
        ({0: "gone", 1: "disk full"}, "a | rank 0: OSError: gone | rank 1: OSError: disk full"),
    ],
)
def test_failures_are_told_to_all_ranks_by_rank(
    pair: World, failing: dict[int, str], expected: str
) -> None:
    for rank in (0, 1):
        pair.submit(rank, "a", fail(failing[rank]) if rank in failing else nothing)
        pair.ranks[rank].wait()
    assert [one.progress() for one in pair.ranks] == [
        (1.0, float(rank in failing)) for rank in (0, 1)
    ]
    pair.step(*(f"OSError: {failing[rank]}" if rank in failing else "" for rank in (0, 1)))
    assert pair.events == [[expected], [expected]]


def test_a_failed_job_does_not_stop_the_next(pair: World) -> None:
    for rank in (0, 1):
        pair.submit(rank, "a", fail("x"))
        pair.submit(rank, "b", nothing)
        pair.ranks[rank].wait()
    pair.step("OSError: x", "OSError: x")
    pair.finish()
    assert [events[-1] for events in pair.events] == ["b", "b"]


def test_then_may_submit_and_may_raise(pair: World) -> None:
    one = pair.ranks[0]
    seen: list[str] = []

    def again(failures: list[str]) -> None:
        one.submit(nothing, lambda failures: seen.append("b"))
        raise RuntimeError("told")

    one.submit(nothing, again)
    one.wait()
    with pytest.raises(RuntimeError, match="told"):
        one.apply_progress(1.0, 0.0, 1)
    one.wait()
    one.apply_progress(1.0, 0.0, 1)
    assert seen == ["b"] and one.num_jobs == 0


def test_close_waits_for_the_running_job_and_drops_the_rest() -> None:
    world = World(1)
    begun, gate, ran = threading.Event(), threading.Event(), []

    def first() -> None:
        begun.set()
        gate.wait(30)
        ran.append("first")

    world.submit(0, "a", first)
    world.submit(0, "b", lambda: ran.append("second"))
    assert begun.wait(30)
    threading.Timer(0.05, gate.set).start()
    world.ranks[0].close()
    assert ran == ["first"]
    assert world.ranks[0].num_jobs == 0


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 4), jobs=st.integers(0, 6))
def test_every_rank_sees_the_same_ends_at_the_same_step(seed: int, size: int, jobs: int) -> None:
    """Jobs are held back and let go at random; what the ranks saw must never differ."""
    chance = random.Random(seed)
    world = World(size)
    gates = [[threading.Event() for _ in range(jobs)] for _ in range(size)]
    for number in range(jobs):
        for rank in range(size):
            world.submit(rank, str(number), lambda g=gates[rank][number]: g.wait(30) and None)
    closed = [gate for row in gates for gate in row]
    chance.shuffle(closed)
    while closed:
        closed.pop().set()
        world.step()
        assert len({tuple(events) for events in world.events}) == 1
    world.finish()
    assert world.events == [[str(number) for number in range(jobs)]] * size
    for one in world.ranks:
        one.close()
