"""Work that takes hours on one rank: the others see it move, hear of its end, and can stop it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from runner.distributed import agreement
from runner.distributed.agreement import Cancelled, all_or_none_slowly
from runner.system.error import DataError, RankError

Tell = Callable[[str, int, int], None]


class Together:
    """Two ranks in two threads; sums wait for both, and no longer than a second."""

    def __init__(self, rank: int, shared: dict[str, Any]) -> None:
        self.rank, self.world_size = rank, 2
        self._shared = shared

    def sum(self, numbers: list[float]) -> list[float]:
        return [a + b for a, b in zip(*self.gather(numbers), strict=True)]

    def gather(self, value: Any) -> list[Any]:
        self._shared[self.rank] = value
        self._shared["barrier"].wait(1.0)
        found = [self._shared[0], self._shared[1]]
        self._shared["barrier"].wait(1.0)
        return found

    def all_or_none(self, what: str, work: Callable[[], Any]) -> Any:
        words, result = "", None
        try:
            result = work()
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
        said = [text for text in self.gather(words) if text]
        if said:
            raise DataError(said[0])
        return result


def run_both(
    monkeypatch: pytest.MonkeyPatch,
    work: Callable[[Tell], Any],
    *,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[list[Any], list[float]]:
    """Rank 0 works, rank 1 has nothing to do: what each got, and when rank 1 saw it move."""
    monkeypatch.setattr(agreement, "_LOOK_SECONDS", 0.05)
    shared: dict[str, Any] = {"barrier": threading.Barrier(2)}
    got: list[Any] = [None, None]
    moved: list[float] = []

    def rank(number: int) -> None:
        try:
            got[number] = all_or_none_slowly(
                Together(number, shared),  # type: ignore[arg-type]
                "working",
                work if number == 0 else lambda tell: "nothing",
                moved=(lambda: moved.append(time.monotonic())) if number else lambda: None,
                show=lambda *_: None,
                is_asked_to_stop=stop if number else lambda: False,
            )
        except Exception as error:
            got[number] = error

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return got, moved


def test_the_other_rank_waits_for_longer_than_a_collective_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def work(tell: Tell) -> str:
        for number in range(6):
            time.sleep(0.25)
            tell("working", number, 6)
        return "made"

    got, moved = run_both(monkeypatch, work)
    assert got == ["made", "nothing"]
    assert len(moved) >= 6, "the watchdog sees every movement"


def test_work_that_does_not_move_is_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(tell: Tell) -> None:
        for _ in range(20):
            time.sleep(0.05)
            tell("working", 1, 6)  # the same again and again

    _, moved = run_both(monkeypatch, work)
    assert len(moved) <= 2


def test_an_error_is_told_to_both(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(tell: Tell) -> None:
        raise DataError("a.jsonl line 3")

    got, _ = run_both(monkeypatch, work)
    assert [str(error) for error in got] == ["DataError: a.jsonl line 3"] * 2


def test_a_panic_of_a_library_is_an_error_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        pass

    def work(tell: Tell) -> None:
        raise Panic("in Rust")

    got, _ = run_both(monkeypatch, work)
    assert [str(error) for error in got] == [f"{RankError.__name__}: Panic: in Rust"] * 2


def test_a_stop_is_heard_by_both_and_ends_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    begun = threading.Event()

    def work(tell: Tell) -> None:
        try:
            for number in range(10**6):
                begun.set()
                time.sleep(0.01)
                tell("working", number, 10**6)
        except Cancelled:
            ended.append("cancelled")
            raise

    got, _ = run_both(monkeypatch, work, stop=begun.is_set)
    assert got == [None, None]
    assert ended == ["cancelled"]
