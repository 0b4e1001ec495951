"""Samples that draw at random: the same at a position of the stream, wherever they are read."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runner.command.check_samples import read_digests
from runner.config.compose import compose
from runner.config.mappings import unsteady_samples
from runner.config.schema import DataConfig
from runner.data.cursor import SampleStream
from runner.data.dataset import Dataset
from runner.data.draws import read_sample
from runner.data.feed import Feed, MicroBatch, RankShare
from runner.data.mixture import mix
from runner.data.packing import Packed, prepare_packs
from runner.data.user_dataset import adapt
from runner.policy.decision.skip_ledger import Ledger
from runner.system.error import DataError
from tests.guests import Augmented, Images, Keeping, Remembering

SIZE, STEPS = 12, 60  # two epochs and more of 300 samples
Row = dict[str, Any]


def states() -> tuple[Any, ...]:
    numpy = np.random.get_state()
    return torch.get_rng_state().tolist(), *map(str, (*numpy, numpy[1].tolist())), random.getstate()


def feed(dataset: Dataset, *, rank: int = 0, world_size: int = 1, workers: int = 0) -> Feed:
    order = SampleStream.of_one(
        num_samples=len(dataset), seed=1, held_out_share=0.0, global_size=SIZE
    )
    return Feed(
        dataset,
        order,
        settings=DataConfig(seq_len=8, workers=workers),
        share=RankShare(global_size=SIZE, micro_size=2, rank=rank, world_size=world_size),
        seed=7,
    )


def rows_of(batches: Iterator[MicroBatch] | tuple[MicroBatch, ...]) -> dict[int, bytes]:
    """The bytes of each sample by position."""
    return {
        position: b"".join(tensor[row].numpy().tobytes() for tensor in batch.inputs().values())
        for batch in batches
        for row, position in enumerate(batch.positions)
        if position is not None
    }


def read(dataset: Dataset, *, world_size: int = 1, workers: int = 0, begin: int = 0) -> Row:
    """All samples of the steps by position, as the ranks get them."""
    rows: dict[int, bytes] = {}
    for rank in range(world_size):
        own = feed(dataset, rank=rank, world_size=world_size, workers=workers)
        order = own._stream
        for step in range(begin, STEPS):
            plan = order.plan(step * SIZE, Ledger())
            rows |= rows_of(own.fetch(plan, Ledger()).micro_batches)
        own.close()
    return rows


def tokens(text: str) -> list[int]:
    return [ord(letter) - 97 for letter in text]


class Words(list[list[int]]):
    """Of which letters are left out at random, so that their lengths are drawn too."""

    vocab_size = 26

    def __getitem__(self, i: Any) -> list[int]:
        word = super().__getitem__(i)
        return word[: random.randint(2, len(word))]


class Noisy(Images):
    """A collate that draws, for each sample, from all three."""

    def collate(self, samples: list[Row]) -> Row:
        noise = torch.rand(len(samples)) + float(np.random.rand()) + random.random()
        images = torch.stack([torch.from_numpy(sample["image"]) for sample in samples])
        return {"image": images + noise[:, None, None, None],
                "kind": torch.tensor([sample["kind"] for sample in samples])}  # fmt: skip


def one_source() -> Dataset:
    return adapt(Augmented(), vocab_size=None, seq_len=8)


def two_sources() -> Dataset:
    return mix({name: one_source() for name in ("one", "two")})


@pytest.mark.parametrize("make", [one_source, two_sources])
def test_a_position_has_one_sample_on_any_ranks_with_any_workers_from_any_start(
    make: Callable[[], Dataset],
) -> None:
    before = states()
    whole = read(make())
    assert states() == before, "the model's own randomness was touched"
    assert len(whole) == STEPS * SIZE
    assert read(make(), world_size=3) == whole
    assert read(make(), world_size=2, workers=2) == whole
    late = read(make(), workers=1, begin=23)
    assert late == {position: whole[position] for position in late}
    # The same image in another epoch is drawn anew.
    indices = feed(make())._stream.indices(np.arange(STEPS * SIZE))
    by_index: dict[int, set[bytes]] = {}
    for position, index in enumerate(indices.tolist()):
        by_index.setdefault(index, set()).add(whole[position])
    assert all(len(drawn) > 1 for index, drawn in by_index.items() if (indices == index).sum() > 1)


def test_a_sample_read_again_and_outside_of_the_stream_is_the_same() -> None:
    dataset = adapt(Augmented(), vocab_size=None, seq_len=8)
    one = feed(dataset)
    plan = one._stream.plan(36, Ledger())
    fetched = rows_of(one.fetch(plan, Ledger()).micro_batches)
    before = states()
    assert rows_of(one.read_again(plan, 0)) == fetched
    position, index = int(plan.positions[5]), int(plan.indices[5])
    sample = read_sample(dataset, index, (7, position))
    assert b"".join(t.numpy().tobytes() for t in sample.item.values()) == fetched[position]  # type: ignore[union-attr]
    held_out = np.arange(20, 32)
    fixed = [
        rows_of(tuple(feed(dataset, rank=rank, world_size=3).fixed(held_out))) for rank in range(3)
    ]
    together = rows_of(tuple(one.fixed(held_out)))
    assert {place: row for rank in fixed for place, row in rank.items()} == together
    assert read_digests(dataset) == read_digests(adapt(Augmented(), vocab_size=None, seq_len=8))
    assert states() == before


def test_a_collate_that_draws_repeats_itself() -> None:
    dataset = adapt(Noisy(), vocab_size=None, seq_len=8)
    whole = read(dataset)
    assert read(dataset, workers=2) == whole
    late = read(dataset, begin=31)
    assert late == {position: whole[position] for position in late}


def test_packs_hold_samples_whose_length_is_drawn(tmp_path: Path) -> None:
    words = Words(tokens(word) for word in ["abcdefgh", "ijklm", "nopqrstu", "vwxyz"] * 20)
    dataset = adapt(words, vocab_size=None, seq_len=16)

    def packed(cache: str) -> Packed:
        place, notice = prepare_packs(
            dataset, seq_len=16, cache=tmp_path / cache, progress=lambda *_: None, retry_seconds=0
        )  # type: ignore[arg-type]
        assert notice == ""
        return Packed(dataset, place, seq_len=16)  # type: ignore[arg-type]

    before = states()
    one, other = packed("a"), packed("b")
    assert states() == before
    assert one.fingerprint() == other.fingerprint()
    assert one._starts.tolist() == other._starts.tolist()
    for index in range(len(one)):
        for position in range(20):  # those that are too long are read as they were measured
            drawn = read_sample(one, index, (7, position))
            again = read_sample(other, index, (7, position))
            assert drawn.tokens.tolist() == again.tokens.tolist()  # type: ignore[union-attr]
    drawn_lengths = {
        int((read_sample(one, 0, (7, position)).labels != -100).sum())  # type: ignore[union-attr]
        for position in range(20)
    }
    assert len(drawn_lengths) > 1


def test_a_generator_that_the_data_set_keeps_is_found_at_the_start() -> None:
    with pytest.raises(DataError) as caught:
        adapt(Remembering(), vocab_size=None, seq_len=8, name="mine").fingerprint()
    for words in ("mine sample", "differs when it is read again", "self.rng", "make it in [i]"):
        assert words in str(caught.value)


class Printed(Remembering):
    def fingerprint(self) -> str:
        return "the owner's own"


class LateOpening(Augmented):
    """Draws a name for itself at its first reading."""

    name = ""

    def __getitem__(self, i: int) -> Row:
        self.name = self.name or str(random.random())
        return super().__getitem__(i)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Printed, "differs when it is read again"),
        (Keeping, "draws random numbers when it is first read and not when it is read again"),
    ],
)
def test_what_a_data_set_keeps_is_found(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        adapt(make(), vocab_size=None, seq_len=8).fingerprint()


def test_a_data_set_that_opens_late_is_not_refused() -> None:
    adapt(LateOpening(), vocab_size=None, seq_len=8).fingerprint()


def test_what_does_not_draw_is_not_seeded() -> None:
    class Plain(Images):
        seen: list[Any] = []  # noqa: RUF012

        def __getitem__(self, i: int) -> Row:
            self.seen.append(torch.initial_seed())
            return super().__getitem__(i)

    random.seed(3)
    torch.manual_seed(3)
    dataset = adapt(Plain(), vocab_size=None, seq_len=8, may_draw=False)
    Plain.seen.clear()
    rows_of(feed(dataset).read_again(feed(dataset)._stream.plan(0, Ledger()), 0))
    assert set(Plain.seen) == {3}


def test_what_makes_a_fingerprint_change_is_said_of_own_data_alone() -> None:
    def words(*overrides: str) -> str:
        return unsteady_samples(compose([*overrides]).data)

    assert words("data=synthetic") == ""
    own = words("data._target_=tests.guests.Hashed")
    assert "tests.guests.Hashed gives other samples" in own and "holdfast check-model" in own
    mixed = "data.sources=[{name: a, path: a.txt}, {name: b, _target_: tests.guests.Hashed}]"
    assert words(mixed) == own
