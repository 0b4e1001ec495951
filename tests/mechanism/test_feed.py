"""Which samples a step reads, and that every rank gets its own share of exactly those."""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.data.cursor import BatchPlan, SampleStream
from runner.data.dataset import Dataset, Sample
from runner.data.feed import NOT_COUNTED, Feed, MicroBatch, _quiet_worker
from runner.data.permutation import held_out
from runner.data.synthetic import SyntheticLanguage
from runner.data.tokens import open_tokens
from runner.error import DataError
from runner.policy.ledger import Ledger

SEQ_LEN = 8
LANGUAGE = SyntheticLanguage(vocab_size=20, samples=50, seq_len=SEQ_LEN, seed=1)

# The stream


def stream(
    num_samples: int = 50, *, share: float = 0.1, seed: int = 3, size: int = 8
) -> SampleStream:
    return SampleStream(num_samples=num_samples, seed=seed, held_out_share=share, global_size=size)


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
        with pytest.raises(DataError, match=r"data\.held_out"):
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
@given(
    asked=st.lists(st.tuples(st.integers(0, 60), LEDGERS), max_size=12),
    size=st.integers(1, 20),
)
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


def test_a_batch_goes_on_in_the_next_epoch() -> None:
    plan = stream(5, share=0, size=12).plan(3, Ledger())
    assert plan.positions.tolist() == list(range(3, 15))
    assert sorted(plan.indices[2:7].tolist()) == list(range(5))


@settings(deadline=None, max_examples=30)
@given(steps=st.integers(1, 8), ledger=LEDGERS)
def test_a_plan_depends_on_its_cursor_alone(steps: int, ledger: Ledger) -> None:
    last = plans(stream(), ledger, steps)[-1]
    fresh = stream().plan(last.start, ledger)
    assert fresh.positions.tolist() == last.positions.tolist()
    assert fresh.indices.tolist() == last.indices.tolist()


def test_far_on_costs_what_the_beginning_costs() -> None:
    one = stream(10**9, share=0.01, size=64)
    ledger = Ledger([(0, 10**15)])
    began = time.monotonic()
    for cursor in (10**12, 10**15, 4 * 10**17):
        plan = one.plan(cursor, ledger)
        assert plan.start >= max(cursor, 10**15)
        assert plan.stop - plan.start < 200
    assert time.monotonic() - began < 1.0


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


def test_nothing_left_to_train_on_is_told() -> None:
    with pytest.raises(DataError, match=r"data\.held_out=0\.999: all 3 samples"):
        stream(3, share=0.999)


# The loader


@contextmanager
def ranks(
    world_size: int,
    dataset: Dataset = LANGUAGE,
    order: SampleStream | None = None,
    **changes: Any,
) -> Iterator[list[Feed]]:
    """One feed a rank over the same stream."""
    options: dict[str, Any] = {
        "seq_len": SEQ_LEN,
        "global_size": 8,
        "micro_size": 3,
        "world_size": world_size,
        "workers": 0,
        "prefetch": 2,
        "pin_memory": False,
    }
    feeds = [
        Feed(dataset, order or stream(len(dataset)), rank=rank, **options | changes)
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


class Counting:
    """The language, and how often a sample of it was read."""

    def __init__(self) -> None:
        self.num_reads = 0

    def __len__(self) -> int:
        return len(LANGUAGE)

    def __getitem__(self, index: int) -> Sample:
        self.num_reads += 1
        return LANGUAGE[index]


def test_a_step_that_is_launched_again_reads_nothing_again() -> None:
    """As after one that was launched in vain; the loader goes on from where it was."""
    counting: Any = Counting()
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


class Damaged:
    """A corpus with one sample that cannot be read."""

    vocab_size = LANGUAGE.vocab_size

    def __init__(self, index: int) -> None:
        self._index = index

    def __len__(self) -> int:
        return len(LANGUAGE)

    def __getitem__(self, index: int) -> Sample:
        if index == self._index:
            raise DataError(f"sample {index}: the file is gone")
        return LANGUAGE[index]

    def describe(self, index: int) -> str:
        return LANGUAGE.describe(index)

    def fingerprint(self) -> str:
        return LANGUAGE.fingerprint()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("slot", [0, 3, 7])
def test_a_sample_that_cannot_be_read_fails_one_rank_of_one_step(slot: int, workers: int) -> None:
    before, broken, after = plans(stream(), Ledger(), 3)
    index = int(broken.indices[slot])
    with ranks(2, Damaged(index), workers=workers) as feeds:
        healthy = [feed.fetch(before, Ledger()) for feed in feeds]
        assert [fetched.failure for fetched in healthy] == [None, None]
        fetched = [feed.fetch(broken, Ledger()) for feed in feeds]
        assert [one.failure is None for one in fetched] == [slot % 2 == 1, slot % 2 == 0]
        ill = fetched[slot % 2]
        assert ill.failure is not None and f"sample {index}: the file is gone" in ill.failure
        assert ill.failure.startswith("DataError")
        for padding, real in zip(
            ill.micro_batches, fetched[1 - slot % 2].micro_batches, strict=True
        ):
            assert padding.tokens.shape == real.tokens.shape
            assert padding.num_counted == 0
            assert set(padding.positions) == {None}
        check_fetch(feeds, after, Ledger())
        check_fetch(feeds, before, Ledger())
        assert feeds[slot % 2].fetch(broken, Ledger()).failure is not None


@pytest.mark.parametrize("workers", [0, 1])
def test_the_first_token_of_a_document_is_not_predicted(tmp_path: Path, workers: int) -> None:
    ids = [5, 6, 1, 7, 8, 9, 10, 1, 1, 11, 12, 13, 14, 15, 16, 17, 18, 1, 19]
    ids += [7] * (10 * SEQ_LEN)
    np.array(ids, dtype="<u2").tofile(tmp_path / "corpus.bin")
    dataset = open_tokens(
        paths=[str(tmp_path / "corpus.bin")],
        token_dtype="uint16",
        vocab_size=32,
        seq_len=SEQ_LEN,
        end_token=1,
        isolate_documents=True,
    )
    whole = SampleStream(
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
        assert batch.num_counted == batch.tokens.numel() - int(begins.sum())
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
            assert set(batch.positions) <= {None}
            counted = (batch.targets != NOT_COUNTED).any(dim=1)
            assert batch.num_counted == SEQ_LEN * int(counted.sum())
            rows += [
                row.tolist()
                for row, is_counted in zip(batch.tokens, counted, strict=True)
                if is_counted
            ]
    assert sorted(rows) == sorted(LANGUAGE[int(i)].tokens[:-1].tolist() for i in indices)
    assert len({tuple(batch.tokens.shape for batch in share) for share in shares}) == 1


def test_a_batch_can_move() -> None:
    with ranks(1) as feeds:
        batch = feeds[0].fetch(stream().plan(0, Ledger()), Ledger()).micro_batches[0]
    moved = batch.to(torch.device("cpu"))
    assert torch.equal(moved.tokens, batch.tokens)
    assert moved.positions == batch.positions
    assert moved.segments is None


def _signal_at_the_parents_death(told: Any) -> None:
    _quiet_worker(0)
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
