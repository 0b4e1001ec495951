"""Which samples a step reads, and that every rank gets its own share of exactly those."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, islice
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.config.schema import DataConfig, TokenDtype
from runner.data.cursor import BatchPlan, SampleStream, held_out
from runner.data.dataset import Dataset, Sample
from runner.data.feed import NOT_COUNTED, Feed, MicroBatch, RankShare, _quiet_worker
from runner.data.synthetic import SyntheticLanguage
from runner.data.tokens import open_tokens
from runner.policy.decision.skip_ledger import Ledger
from runner.system.error import DataError
from runner.system.process import started_at
from tests.programs import python

SEQ_LEN = 8
LANGUAGE = SyntheticLanguage(vocab_size=20, samples=50, seq_len=SEQ_LEN, seed=1)

# The stream


def stream(
    num_samples: int = 50, *, share: float = 0.1, seed: int = 3, size: int = 8
) -> SampleStream:
    return SampleStream.of_one(
        num_samples=num_samples, seed=seed, held_out_share=share, global_size=size
    )


def walked(one: SampleStream, ledger: Ledger, *, share: float, start: int = 0) -> Iterator[int]:
    """The slow way: every position in turn, asked whether it may be read."""
    for position in count(start):
        index = one.indices(np.array([position]))
        if position not in ledger and not held_out(index, share=share)[0]:
            yield position


def plans(one: SampleStream, ledger: Ledger, number: int, cursor: int = 0) -> list[BatchPlan]:
    found = []
    for _ in range(number):
        found.append(one.plan(cursor, ledger))
        cursor = found[-1].stop
    return found


def splits(num_samples: int, share: float) -> bool:
    """Whether anything is left to train on."""
    return not bool(held_out(np.arange(num_samples), share=share).all())


LEDGERS = st.lists(st.tuples(st.integers(0, 120), st.integers(1, 40)), max_size=4).map(
    lambda ranges: Ledger((start, start + length) for start, length in ranges)
)


@given(
    ranges=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 60)), max_size=4),
    steps=st.integers(1, 12),
    share=st.sampled_from([0.0, 0.1, 0.5]),
)
@settings(max_examples=40, deadline=None)
def test_the_batch_before_the_cursor_is_the_one_that_was_read(
    ranges: list[tuple[int, int]], steps: int, share: float
) -> None:
    ledger = Ledger((start, start + count) for start, count in ranges)
    order, cursor = stream(size=8, share=share), 0
    for _ in range(steps):
        read = order.plan(cursor, ledger)
        cursor = read.stop
    found = order.plan_before(cursor, ledger)
    assert found.positions.tolist() == read.positions.tolist()
    assert found.indices.tolist() == read.indices.tolist()


@settings(deadline=None)
@given(
    num_samples=st.integers(1, 60),
    share=st.sampled_from([0.0, 0.1, 0.5]),
    size=st.integers(1, 20),
    seed=st.integers(0, 5),
    start=st.integers(0, 100),
    ledger=LEDGERS,
)
def test_plans_in_a_row_are_all_allowed_positions_in_order(
    num_samples: int, share: float, size: int, seed: int, start: int, ledger: Ledger
) -> None:
    if not splits(num_samples, share):
        with pytest.raises(DataError, match=rf"data\.held_out={share}: all {num_samples} samples"):
            stream(num_samples, share=share, size=size, seed=seed)
        return
    one = stream(num_samples, share=share, size=size, seed=seed)
    found = plans(one, ledger, 3, start)
    positions = [int(position) for plan in found for position in plan.positions]
    assert positions == list(islice(walked(one, ledger, share=share, start=start), 3 * size))
    for plan in found:
        assert len(plan.positions) == size
        assert (plan.start, plan.stop) == (plan.positions[0], plan.positions[-1] + 1)
        assert plan.indices.tolist() == one.indices(plan.positions).tolist()
        assert not held_out(plan.indices, share=share).any()


@settings(deadline=None, max_examples=50)
@given(asked=st.lists(st.tuples(st.integers(0, 60), LEDGERS), max_size=12), size=st.integers(1, 20))
def test_a_plan_does_not_depend_on_what_was_asked_before(
    asked: list[tuple[int, Ledger]], size: int
) -> None:
    """What is remembered of earlier answers is never a wrong one."""
    one = stream(size=size)
    for cursor, ledger in [*asked, *asked]:
        told, fresh = one.plan(cursor, ledger), stream(size=size).plan(cursor, ledger)
        assert told.positions.tolist() == fresh.positions.tolist()
        assert told.indices.tolist() == fresh.indices.tolist()


@pytest.mark.parametrize("num_samples", [1, 2, 3, 50])
def test_every_epoch_is_a_permutation_and_another_one(num_samples: int) -> None:
    one = stream(num_samples, share=0)
    orders = [
        one.indices(np.arange(epoch * num_samples, (epoch + 1) * num_samples)).tolist()
        for epoch in range(3)
    ]
    assert all(sorted(order) == list(range(num_samples)) for order in orders)
    assert num_samples < 50 or len(set(map(tuple, orders))) == 3


def test_far_on_costs_what_the_beginning_costs() -> None:
    one = stream(10**9, share=0.01, size=64)
    ledger = Ledger([(0, 10**15)])
    for cursor in (10**12, 10**15, 4 * 10**17):
        plan = one.plan(cursor, ledger)
        assert plan.start >= max(cursor, 10**15)
        assert plan.stop - plan.start < 200, "to walk there would take years"


def test_seeds_give_other_orders_and_the_same_split() -> None:
    orders = [plans(stream(seed=seed), Ledger(), 5) for seed in range(3)]
    assert len({tuple(plan.indices[0] for plan in found) for found in orders}) == 3
    usable = [i for i in range(50) if not held_out(np.array([i]), share=0.1)[0]]
    for found in orders:
        seen = np.concatenate([plan.indices for plan in found])
        assert set(seen[: len(usable)]) <= set(usable)


@pytest.mark.parametrize(("wanted", "share"), [(3, 0.3), (1000, 0.3), (5, 0.0), (1, 0.05)])
def test_the_evaluation_set_is_held_out_and_fixed(wanted: int, share: float) -> None:
    found = stream(share=share).held_out_indices(wanted)
    all_of_them = np.flatnonzero(held_out(np.arange(50), share=share))
    assert len(set(found.tolist())) == len(found) == min(wanted, len(all_of_them))
    assert set(found.tolist()) <= set(all_of_them.tolist())
    assert found.tolist() == stream(share=share).held_out_indices(wanted).tolist()


# The loader


def made_feed(
    dataset: Dataset, order: SampleStream, rank: int = 0, world_size: int = 1, **changes: Any
) -> Feed:
    sizes = {name: changes.pop(name) for name in ("global_size", "micro_size") if name in changes}
    sizes = {"global_size": 8, "micro_size": 3} | sizes
    return Feed(
        dataset,
        order,
        settings=DataConfig(**{"seq_len": SEQ_LEN, "workers": 0} | changes),
        share=RankShare(rank=rank, world_size=world_size, **sizes),
    )


@contextmanager
def ranks(
    world_size: int, dataset: Dataset = LANGUAGE, order: SampleStream | None = None, **changes: Any
) -> Iterator[list[Feed]]:
    """One feed a rank over the same stream."""
    feeds = [
        made_feed(dataset, order or stream(len(dataset)), rank, world_size, **changes)
        for rank in range(world_size)
    ]
    try:
        yield feeds
    finally:
        for feed in feeds:
            feed.close()


def check_rows(batch: MicroBatch, one: SampleStream, dataset: Dataset) -> None:
    """Every row is its position's sample, or padding that counts for nothing."""
    assert batch.tokens.shape == batch.targets.shape == (len(batch.positions), SEQ_LEN)
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    for row, position in enumerate(batch.positions):
        if position is None:
            assert (batch.targets[row] == NOT_COUNTED).all()
            continue
        sample = dataset[int(one.indices(np.array([position]))[0])]
        assert batch.tokens[row].tolist() == sample.tokens[:-1].tolist()
        assert batch.targets[row].tolist() == sample.tokens[1:].tolist()


def check_fetch(feeds: Sequence[Feed], plan: BatchPlan, ledger: Ledger) -> None:
    fetched = [feed.fetch(plan, ledger) for feed in feeds]
    one = stream()
    for mine in fetched:
        assert mine.failure is None
        for batch in mine.micro_batches:
            check_rows(batch, one, LANGUAGE)
    dealt = [
        [position for batch in mine.micro_batches for position in batch.positions]
        for mine in fetched
    ]
    assert dealt == [feed.own_positions(plan) for feed in feeds]
    read = [position for row in dealt for position in row if position is not None]
    assert sorted(read) == plan.positions.tolist()
    padding = sum(row.count(None) for row in dealt)
    assert padding == -len(plan.positions) % len(feeds)
    shapes = {tuple(batch.tokens.shape for batch in mine.micro_batches) for mine in fetched}
    assert len(shapes) == 1  # collectives run in lockstep
    assert len(fetched[0].micro_batches) == feeds[0].num_micro_batches


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_ranks_together_read_the_plan(world_size: int, workers: int) -> None:
    with ranks(world_size, workers=workers) as feeds:
        for plan in plans(stream(), Ledger(), 3):
            check_fetch(feeds, plan, Ledger())


@pytest.mark.parametrize("workers", [0, 2])
def test_going_back_gives_no_stale_batch(workers: int) -> None:
    ahead = plans(stream(), Ledger(), 6)
    with ranks(2, workers=workers) as feeds:
        for plan in [*ahead[:4], ahead[1], *ahead[1:4], ahead[0], ahead[5], *ahead[4:]]:
            check_fetch(feeds, plan, Ledger())


class Language:
    """The language; what a test does to it is in ``__getitem__`` alone."""

    vocab_size = LANGUAGE.vocab_size
    describe = staticmethod(LANGUAGE.describe)
    fingerprint = staticmethod(LANGUAGE.fingerprint)

    def __len__(self) -> int:
        return len(LANGUAGE)

    def __getitem__(self, index: int) -> Sample:
        return LANGUAGE[index]


class Counting(Language):
    """How often a sample of it was read."""

    num_reads = 0

    def __getitem__(self, index: int) -> Sample:
        self.num_reads += 1
        return LANGUAGE[index]


def test_a_step_that_is_launched_again_reads_nothing_again() -> None:
    """As after one that was launched in vain; the loader goes on from where it was."""
    counting = Counting()
    first, second, third = plans(stream(), Ledger(), 3)
    with ranks(1, counting) as feeds:
        for plan in (first, second, second, third):
            check_fetch(feeds, plan, Ledger())
    assert counting.num_reads == 3 * 8


@pytest.mark.parametrize(("workers", "offset"), [*((0, at) for at in range(8)), (2, 0), (2, 7)])
def test_a_new_skip_range_is_respected_at_once(workers: int, offset: int) -> None:
    """Wherever it begins: also behind what the first micro-batch of a rank reads."""
    ledger = Ledger()
    first, second = plans(stream(), ledger, 2)
    with ranks(1, workers=workers) as feeds:
        check_fetch(feeds, first, ledger)
        position = int(second.positions[offset])
        ledger.add(position, position + 1)
        for plan in plans(stream(), ledger, 3, cursor=first.stop):
            assert position not in plan.positions
            check_fetch(feeds, plan, ledger)


def test_growing_and_going_back_at_random() -> None:
    chance = np.random.default_rng(0)
    ledger, cursor = Ledger(), 0
    with ranks(3) as feeds:
        for _ in range(60):
            plan = stream().plan(cursor, ledger)
            check_fetch(feeds, plan, ledger)
            cursor = plan.stop
            if chance.random() < 0.3:
                cursor = int(chance.integers(0, cursor + 1))
            if chance.random() < 0.3:
                start = int(chance.integers(0, cursor + 20))
                ledger.add(start, start + int(chance.integers(1, 9)))


class Damaged(Language):
    """A corpus some of whose samples cannot be read: ``broken`` gives or raises what they are."""

    def __init__(self, broken: dict[int, Any]) -> None:
        self._broken = broken

    def __getitem__(self, index: int) -> Sample:
        fault = self._broken.get(index)
        if isinstance(fault, Exception):
            raise fault
        return LANGUAGE[index] if fault is None else Sample(tokens=fault, segments=None)

    def describe(self, index: int) -> str:  # type: ignore[override]
        if index in self._broken:
            raise KeyError(index)  # it would have to read the sample
        return LANGUAGE.describe(index)


def outside_the_vocabulary(token: int) -> Any:
    tokens = LANGUAGE[0].tokens.copy()
    tokens[3] = token
    return tokens


FAULTS = {
    "gone": (DataError("the file is gone"), "DataError: the file is gone", False),
    "refused": (OSError(5, "Input/output error"), "OSError: [Errno 5] Input/output error", True),
    "anything": (ZeroDivisionError(), "ZeroDivisionError: ", False),
    "an id too high": (outside_the_vocabulary(20), "token 3 of it has id 20, allowed", False),
    "a negative id": (outside_the_vocabulary(-100), "token 3 of it has id -100, allowed", False),
    "too short": (np.zeros(2, dtype=np.int64), "DataError: is of shape (2,), not (9,)", False),
    "no array": ([1, 2, 3], "AttributeError", False),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("name", "slot"), [("gone", 0), ("refused", 3), ("an id too high", 7)])
def test_a_sample_that_cannot_be_read_is_told_by_its_rank(
    name: str, slot: int, workers: int
) -> None:
    before, broken, after = plans(stream(), Ledger(), 3)
    index, position = int(broken.indices[slot]), int(broken.positions[slot])
    fault, words, refused = FAULTS[name]
    with ranks(2, Damaged({index: fault}), workers=workers, retry_seconds=0.2) as feeds:
        check_fetch(feeds, before, Ledger())
        fetched = [feed.fetch(broken, Ledger()) for feed in feeds]
        told = [one for rank in fetched for one in rank.unreadable]
        assert [(one.rank, one.position, one.index) for one in told] == [
            (slot % 2, position, index)
        ]
        assert words in told[0].error and told[0].refused is refused
        assert told[0].name == f"sample {index}"
        assert [one.num_samples for one in fetched] == [4, 4]
        assert [one.failure for one in fetched] == [None, None]
        for rank in fetched:
            for batch in rank.micro_batches:
                for row, at in enumerate(batch.positions):
                    counted = bool((batch.targets[row] != NOT_COUNTED).any())
                    assert counted is (at not in (None, position))
        # Planned anew without it; then the steps before and after, and the same again.
        skipping = Ledger([(position, position + 1)])
        check_fetch(feeds, stream().plan(broken.start, skipping), skipping)
        check_fetch(feeds, after, Ledger())
        check_fetch(feeds, before, Ledger())
        again = [feed.fetch(broken, Ledger()) for feed in feeds]
        assert [one for rank in again for one in rank.unreadable] == told


@pytest.mark.parametrize("name", FAULTS)
def test_whatever_a_sample_is_it_ends_nothing(name: str) -> None:
    fault, words, refused = FAULTS[name]
    plan = stream().plan(0, Ledger())
    with ranks(1, Damaged({int(plan.indices[2]): fault}), retry_seconds=0.2) as (feed,):
        (told,) = feed.fetch(plan, Ledger()).unreadable
        assert (
            told.index == int(plan.indices[2]) and words in told.error and told.refused is refused
        )
        assert [one.error for one in feed.fixed(plan.indices)[0].unreadable] == [told.error]


class Stuttering(Language):
    """Refuses each sample so many times before it gives it."""

    def __init__(self, times: int) -> None:
        self._times = times
        self.asked: dict[int, int] = {}

    def __getitem__(self, index: int) -> Sample:
        self.asked[index] = self.asked.get(index, 0) + 1
        if self.asked[index] <= self._times:
            raise OSError(116, "Stale file handle")
        return LANGUAGE[index]


def test_what_the_system_refuses_is_asked_for_again() -> None:
    plan = stream().plan(0, Ledger())
    with ranks(1, Stuttering(2), retry_seconds=30.0) as feeds:
        check_fetch(feeds, plan, Ledger())


def test_a_storage_that_is_gone_is_waited_for_once() -> None:
    plan, gone = stream().plan(0, Ledger()), Stuttering(10**9)
    with ranks(1, gone, retry_seconds=0.2) as (feed,):
        assert len(feed.fetch(plan, Ledger()).unreadable) == 8
        asked = [gone.asked[int(index)] for index in plan.indices]
        assert asked[0] > 1 and asked[1:] == [1] * 7
        gone._times = 0  # it is back
        assert not feed.fetch(stream().plan(plan.stop, Ledger()), Ledger()).unreadable
        gone._times = 10**9
        third = stream().plan(100, Ledger())
        assert feed.fetch(third, Ledger()).unreadable
        assert gone.asked[int(third.indices[0])] > 2  # waited for again


class GarbledOnce(Stuttering):
    """Gives each sample with an id outside of the vocabulary, so many times before it is right."""

    def __getitem__(self, index: int) -> Sample:
        self.asked[index] = self.asked.get(index, 0) + 1
        sample = LANGUAGE[index]
        if self.asked[index] <= self._times:
            sample = replace(sample, tokens=outside_the_vocabulary(20))
        return sample


class UndecodableOnce(GarbledOnce):
    """As a picture or JSON whose bytes were garbled: the data set's own error."""

    def __getitem__(self, index: int) -> Sample:
        sample = super().__getitem__(index)
        if self.asked[index] <= self._times:
            raise ValueError("the bytes make no sense")
        return sample


@pytest.mark.parametrize("garbled", [GarbledOnce, UndecodableOnce])
def test_a_sample_that_was_garbled_once_is_read_again(garbled: type[GarbledOnce]) -> None:
    plan = stream().plan(0, Ledger())
    with ranks(1, garbled(1)) as feeds:
        check_fetch(feeds, plan, Ledger())
    with ranks(1, garbled(2)) as (feed,):
        assert len(feed.fetch(plan, Ledger()).unreadable) == 8


class Dying(Language):
    """Ends the process that reads it."""

    def __getitem__(self, index: int) -> Sample:
        os._exit(3)


def test_a_loading_process_that_dies_is_a_failure_of_the_loader() -> None:
    plan = stream().plan(0, Ledger())
    with ranks(1, Dying(), workers=1) as (feed,):
        fetched = feed.fetch(plan, Ledger())
    assert fetched.failure is not None and "exited unexpectedly" in fetched.failure
    assert not fetched.unreadable and {p for b in fetched.micro_batches for p in b.positions} == {
        None
    }


@pytest.mark.parametrize("workers", [0, 1])
def test_the_first_token_of_a_document_is_not_predicted(tmp_path: Path, workers: int) -> None:
    ids = [5, 6, 1, 7, 8, 9, 10, 1, 1, 11, 12, 13, 14, 15, 16, 17, 18, 1, 19]
    ids += [7] * (10 * SEQ_LEN)
    np.array(ids, dtype="<u2").tofile(tmp_path / "corpus.bin")
    dataset = open_tokens(
        DataConfig(
            path=[str(tmp_path / "corpus.bin")],
            token_dtype=TokenDtype.uint16,
            vocab_size=32,
            seq_len=SEQ_LEN,
            end_token=1,
            isolate_documents=True,
        )
    )
    whole = SampleStream.of_one(
        num_samples=len(dataset), seed=3, held_out_share=0, global_size=len(dataset)
    )
    options = {"global_size": len(dataset), "micro_size": 4, "workers": workers}
    with ranks(1, dataset, order=whole, **options) as (feed,):
        fetched = feed.fetch(whole.plan(0, Ledger()), Ledger())
    assert fetched.failure is None
    num_masked = 0
    for batch in fetched.micro_batches:
        assert batch.segments is not None and batch.segments.dtype == torch.int32
        begins = batch.tokens == 1
        assert torch.equal(batch.targets == NOT_COUNTED, begins)
        steps = batch.segments[:, 1:] - batch.segments[:, :-1]
        assert torch.equal(steps == 1, begins[:, :-1])
        num_masked += int(begins.sum())
        assert sum(batch.counts()) == batch.tokens.numel() - int(begins.sum())
    assert num_masked == 4


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("number", [0, 1, 5, 8, 13])
def test_the_evaluation_set_is_read_once(world_size: int, number: int) -> None:
    indices = np.arange(20, 20 + number)
    rows: list[list[int]] = []
    with ranks(world_size) as feeds:
        shares = [feed.fixed(indices) for feed in feeds]
    for share in shares:
        for batch in share:
            counted = (batch.targets != NOT_COUNTED).any(dim=1)
            assert [place is not None for place in batch.positions] == counted.tolist()
            assert sum(batch.counts()) == SEQ_LEN * int(counted.sum())
            rows += [
                row.tolist()
                for row, is_counted in zip(batch.tokens, counted, strict=True)
                if is_counted
            ]
    assert sorted(rows) == sorted(LANGUAGE[int(i)].tokens[:-1].tolist() for i in indices)
    assert len({tuple(batch.tokens.shape for batch in share) for share in shares}) == 1


def test_a_small_batch_comes_through_the_pipe_and_a_large_one_through_shared_memory() -> None:
    for length, dtype in ((8, torch.float32), (8, torch.bfloat16), (1 << 14, torch.float32)):
        tokens = torch.arange(3 * 4).view(4, 3).T  # strides as they come
        batch = MicroBatch(
            tokens=tokens,
            targets=tokens[:, :0],
            segments=None,
            positions=(7, None, 9),
            fields={"x": torch.arange(length).to(dtype)},
            real=torch.tensor([True, False, True]),
        )
        sent = bytes(ForkingPickler.dumps(batch))
        is_inline = length == 8 and dtype is torch.float32
        assert (b"rebuild" not in sent) == is_inline
        came = ForkingPickler.loads(sent)
        assert torch.equal(came.tokens, tokens) and came.targets.shape == (3, 0)
        assert came.positions == batch.positions and came.segments is None
        assert came.real.tolist() == [True, False, True]
        assert came.fields["x"].dtype is dtype and len(came.fields["x"]) == length
        came.fields["x"].add_(1)  # nobody else's memory, or writable
        assert came.tokens.dtype is torch.int64


def _signal_at_the_parents_death(told: Any) -> None:
    _quiet_worker()
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(number))  # PR_GET_PDEATHSIG
    told.put(number.value)


def test_a_loading_process_dies_with_its_rank() -> None:
    """It holds the rank's sockets: the other ranks waited five seconds for one that was dead."""
    context = multiprocessing.get_context("fork")
    told = context.SimpleQueue()
    worker = context.Process(target=_signal_at_the_parents_death, args=(told,))
    worker.start()
    assert told.get() == signal.SIGKILL
    worker.join()


LEFT_OPEN = """
import sys
from tests.mechanism.test_feed import Damaged, Ledger, made_feed, plans, stream
plan, = plans(stream(), Ledger(), 1)
faults = {int(plan.indices[0]): OSError(5, "x")}
feed = made_feed(Damaged(faults), stream(), workers=2)
loading = iter(feed._loader)
feed._loading = loading
fetched = feed.fetch(plan, Ledger())
print(*(worker.pid for worker in loading._workers), flush=True)
"""


def test_an_interpreter_ends_with_a_feed_that_was_not_closed() -> None:
    """Its exit handler sends SIGTERM, which they ignore, and joined them for ever."""
    ended = python("-c", LEFT_OPEN)
    assert ended.returncode == 0, ended.stderr
    pids = [int(word) for word in ended.stdout.split()]
    assert len(pids) == 2 and not [pid for pid in pids if started_at(pid)]


def test_loading_processes_end_when_they_are_told_to_and_not_by_a_signal() -> None:
    with ranks(1, workers=2) as (feed,):
        check_fetch([feed], *plans(stream(), Ledger(), 1), Ledger())  # type: ignore[call-arg]
        workers = multiprocessing.active_children()
        assert len(workers) == 2
        for worker in workers:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
                os.kill(worker.pid or 0, number)
        check_fetch([feed], *plans(stream(), Ledger(), 1), Ledger())  # type: ignore[call-arg]
        assert all(worker.is_alive() for worker in workers)
        feed._end_workers()  # as on any way out
        for worker in workers:
            worker.join(60)
        assert [worker.exitcode for worker in workers] == [0, 0]
