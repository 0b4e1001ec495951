"""What ranks agree on: sums, values, and failures, which no rank may keep to itself."""

from __future__ import annotations

import os
import sys
import threading

import pytest
import torch

from runner.distributed.agreement import Ranks
from runner.distributed.device import FoundDevice, find_device
from runner.distributed.env import RankEnv, place_from
from runner.distributed.rendezvous import end_group, start_group
from runner.system.error import (
    CheckpointError,
    ConfigError,
    CorruptCheckpoint,
    DataError,
    RankError,
    RunnerError,
)
from runner.train.agreed_step import MetricNames
from tests import warm

WORLD = 3


def raised(ranks: Ranks, failing: dict[int, Exception]) -> RunnerError:
    """What this rank is told when those ranks fail."""

    def work() -> int:
        if ranks.rank in failing:
            raise failing[ranks.rank]
        return ranks.rank

    try:
        ranks.all_or_none("reading", work)
    except RunnerError as error:
        cause = failing.get(ranks.rank)
        assert error.__cause__ is cause
        return error
    raise AssertionError("nobody was told")


def check_values(ranks: Ranks) -> None:
    rank = ranks.rank
    assert ranks.world_size == WORLD
    assert ranks.sum([1.0, float(rank), 0.1 * rank]) == [3.0, 3.0, 0.1 * 0 + 0.1 + 0.2]
    assert ranks.sum([2.0**52, float(rank == 2)]) == [3 * 2.0**52, 1.0]
    # Texts of other lengths, and none: the short ones are padded on the way.
    told = ["", "é" * 1000, {"a": [1, None, "x" * rank]}]
    assert ranks.gather(told[rank]) == ["", "é" * 1000, {"a": [1, None, "xx"]}]
    assert ranks.gather(None) == [None] * WORLD
    for value in ({"a": [1, 2.5, None, "ö"]}, [], "", None, 7):
        assert ranks.from_first(value if rank == 0 else "ignored") == value
    assert ranks.all_or_none("counting", lambda: rank * 10) == rank * 10
    assert ranks.all_or_none_patiently("counting", lambda: rank * 10) == rank * 10


def check_patience(ranks: Ranks) -> None:
    """A slow rank is waited for in short collectives, on every rank; a failure reaches all."""
    collectives: list[float] = []
    total = ranks.sum

    def counted(numbers: list[float]) -> list[float]:
        collectives.extend(numbers)
        return total(numbers)

    others_look = threading.Event()

    def work() -> None:
        if ranks.rank == 1:
            others_look.wait()
            raise OSError("a slow disk")

    ranks.sum = counted  # type: ignore[method-assign]
    if ranks.rank == 1:
        threading.Timer(1.2, others_look.set).start()
    try:
        ranks.all_or_none_patiently("reading", work)
    except RankError as error:
        assert "rank 1: OSError: a slow disk" in str(error)
        assert isinstance(error.__cause__, OSError) == (ranks.rank == 1)
    else:
        raise AssertionError("nobody was told")
    del ranks.sum  # type: ignore[misc]
    assert len(collectives) > 2, collectives


def check_failures(ranks: Ranks) -> None:
    table: list[tuple[dict[int, Exception], type[RunnerError], str]] = [
        ({1: DataError("a.bin is short")}, DataError, "a.bin is short"),
        ({0: DataError("a.bin is short")}, DataError, "a.bin is short"),
        ({r: ConfigError("same") for r in range(WORLD)}, ConfigError, "same"),
        ({2: CorruptCheckpoint("torn")}, CorruptCheckpoint, "torn"),
        (
            {1: OSError("disk full")},
            RankError,
            "reading failed on 1 of 3 ranks: rank 1: OSError: disk full",
        ),
        ({2: KeyError()}, RankError, "reading failed on 1 of 3 ranks: rank 2: KeyError: KeyError"),
        (
            {0: OSError("disk full"), 2: ValueError("bad")},
            RankError,
            "reading failed on 2 of 3 ranks: rank 0: OSError: disk full; rank 2: ValueError: bad",
        ),
        (
            {0: CheckpointError("of another model"), 1: CheckpointError("gone")},
            CheckpointError,
            "reading failed on 2 of 3 ranks: rank 0: CheckpointError: of another model; "
            "rank 1: CheckpointError: gone",
        ),
    ]
    for failing, kind, text in table:
        error = raised(ranks, failing)
        assert (type(error), str(error)) == (kind, text)
    assert ranks.sum([1.0]) == [3.0]  # and all are still together


def check_metrics(ranks: Ranks) -> None:
    """A new name is agreed on once; one that some ranks lack, or no name, is told to all."""
    device, names = torch.device("cpu"), MetricNames(ranks, "losses", are_evaluated=True)
    gather, num_gathered = ranks.gather, []

    def counted(value: object) -> list[object]:
        num_gathered.append(value)
        return gather(value)

    def reduced(given: dict[str, tuple[float, float]]) -> dict[str, float]:
        own = {name: (torch.tensor(a), torch.tensor(b)) for name, (a, b) in given.items()}
        packed = names.pack(own, device)
        return packed.read(ranks.sum([*packed.flags, *packed.sums.tolist()]))

    ranks.gather = counted  # type: ignore[method-assign]
    rank = ranks.rank
    for repeat in range(4):
        assert reduced({"right": (float(rank), 2.0), "none": (0.0, 0.0)}) == {"right": 0.5}
        assert reduced({}) == {}
        assert len(num_gathered) == 1, repeat
    refused = [
        ({"right": (1.0, 1.0)} if rank == 1 else {}, "rank 1 gives the metric 'right' and rank 0"),
        ({"new": (1.0, 1.0)} if rank != 2 else {}, "rank 0 gives the metric 'new' and rank 2 does"),
        ({f"r{rank}": (1.0, 1.0)}, "rank 0 gives the metric 'r0' and rank 1 does not"),
        ({"eval_x": (1.0, 1.0)}, "a metric cannot be called 'eval_x'"),
        ({f"step{n}": (1.0, 1.0) for n in range(300)}, "302 metrics by different names"),
    ]
    for given, words in refused:
        try:
            reduced(given)
        except ConfigError as error:
            assert words in str(error), error
        else:
            raise AssertionError(words)
        assert reduced({"right": (float(rank), 2.0)}) == {"right": 0.5}  # all are still together
    ranks.gather = gather  # type: ignore[method-assign]


def check_all() -> None:
    """The ranks' part, under torchrun."""
    place = place_from(os.environ)
    start_group(place, torch.device("cpu"), timeout_seconds=60)
    ranks = Ranks(torch.device("cpu"))
    assert (ranks.rank, ranks.world_size) == (place.rank, place.world_size)
    check_values(ranks)
    check_failures(ranks)
    check_metrics(ranks)
    check_patience(ranks)
    end_group()
    sys.stdout.write(f"rank {ranks.rank} ok\n")
    sys.stdout.flush()
    os._exit(0)  # as runner.__main__ does: gloo's threads do not always end well


def test_three_ranks_agree() -> None:
    done = warm.torchrun(["-m", "tests.mechanism.test_agree"], ranks=WORLD, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"rank {rank} ok" in done.stdout for rank in range(WORLD))


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, (0, 1, 0, 1)),
        ({"PATH": "x"}, (0, 1, 0, 1)),
        (
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
            (5, 8, 1, 4),
        ),
    ],
)
def test_the_place_is_read(environment: dict[str, str], place: tuple[int, ...]) -> None:
    found = place_from(environment)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == place
    assert found.is_first is (place[0] == 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told() -> None:
    place = RankEnv(rank=0, world_size=2, local_rank=0, local_world_size=2)
    for wanted in ("auto", "cpu"):
        assert find_device(wanted, place, {}) == FoundDevice(device=torch.device("cpu"))
    problem = find_device("cuda", place, {}).problem
    assert "torch sees no GPU, but parallel.device=cuda" in problem


if __name__ == "__main__":
    check_all()
