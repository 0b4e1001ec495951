"""Data sets of a user's own: what they may be, what is asked of them, what each fault is told."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from runner.config.compose import compose
from runner.config.schema import DataConfig
from runner.config.validate import check
from runner.data.cursor import SampleStream
from runner.data.dataset import NOT_COUNTED, RecordDataset, Sample
from runner.data.feed import Feed, MicroBatch, RankShare
from runner.data.mixture import Mixed
from runner.data.user_dataset import adapt, contents
from runner.policy.decision.skip_ledger import Ledger
from runner.session import parts
from runner.session.corpus import open_dataset, open_validation, prepare_data, sample_stream
from runner.startup import checks
from runner.system.error import ConfigError, DataError

SEQ_LEN = 4


@dataclass
class Scan:
    """A sample that only the data set's own collate understands."""

    pixels: Any


def refused(call: Callable[[], Any], *words: str) -> None:
    with pytest.raises(DataError) as caught:
        call()
    for word in words:
        assert word in str(caught.value), str(caught.value)


def batches(dataset: Any, *, size: int = 4, world_size: int = 1, rank: int = 0) -> list[MicroBatch]:
    """The first global batch of the data set, as one rank gets it."""
    stream = SampleStream.of_one(
        num_samples=len(dataset), seed=1, held_out_share=0.0, global_size=size
    )
    feed = Feed(
        dataset,
        stream,
        settings=DataConfig(seq_len=SEQ_LEN, workers=0),
        share=RankShare(global_size=size, micro_size=4, rank=rank, world_size=world_size),
    )
    fetched = feed.fetch(stream.plan(0, Ledger()), Ledger())
    assert fetched.failure is None, fetched.failure
    return list(fetched.micro_batches)


# Token ids


class Described(list[Any]):
    def describe(self, index: int) -> str:
        return f"row {index} of the table"

    def fingerprint(self) -> str:
        return "the owner's own"


@pytest.mark.parametrize(
    "item",
    [
        [1, 2, 3],
        np.array([1, 2, 3], dtype=np.uint8),
        torch.tensor([1, 2, 3]),
        {"input_ids": [1, 2, 3]},
        Sample(tokens=np.array([1, 2, 3]), segments=None),
    ],
    ids=["list", "array", "tensor", "mapping", "sample"],
)
def test_token_ids_of_each_kind(item: Any) -> None:
    dataset = adapt([item], vocab_size=9, seq_len=2, name="mine")
    sample = dataset[0]
    assert isinstance(sample, Sample)
    assert sample.tokens.tolist() == [1, 2, 3]
    assert sample.tokens.dtype == np.int64
    assert dataset.vocab_size == 9
    assert dataset.describe(0) == "mine sample 0"
    with pytest.raises(IndexError):
        dataset[1]


def test_its_own_words_are_used() -> None:
    dataset = adapt(Described([[1, 2, 3]]), vocab_size=9, seq_len=2)
    assert dataset.describe(0) == "row 0 of the table"
    same = adapt(Described([[4, 5, 6]]), vocab_size=9, seq_len=2)
    assert dataset.fingerprint() == same.fingerprint()


def test_the_default_fingerprint_sees_contents_and_length() -> None:
    rows = [[[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 7]], [[1, 2, 3]], [[0, 2, 3], [4, 5, 6]]]
    found = {adapt(each, vocab_size=9, seq_len=2).fingerprint() for each in rows}
    assert len(found) == 4


def test_the_contents_of_a_dataclass_count() -> None:
    assert contents(Scan(pixels=np.ones(2))) == contents(Scan(pixels=np.ones(2)))
    assert contents(Scan(pixels=np.ones(2))) != contents(Scan(pixels=np.zeros(2)))


def test_short_samples_are_padded_and_labels_say_what_counts() -> None:
    rows = [
        {"input_ids": [1, 2, 3, 4, 5]},
        {"input_ids": [1, 2, 3], "labels": [-100, -100, 3]},
        {"input_ids": [1, 2, 3, 0, 0], "attention_mask": [1, 1, 1, 0, 0]},
        {"input_ids": [1, 2, 3, 4, 5], "labels": [1, 2, -100, 4, 5]},
    ]
    [batch] = batches(adapt(rows, vocab_size=9, seq_len=SEQ_LEN))
    assert batch.fields is None and batch.shape == [4, SEQ_LEN]
    found = {tuple(t): tuple(y) for t, y in zip(batch.tokens.tolist(), batch.targets.tolist())}  # noqa: B905
    assert set(found) == {(1, 2, 3, 4), (1, 2, 3, 0)}
    targets = sorted(map(tuple, batch.targets.tolist()))
    none = NOT_COUNTED
    assert targets == sorted(
        [(2, 3, 4, 5), (none, 3, none, none), (2, 3, none, none), (2, none, 4, 5)]
    )
    assert sum(batch.counts()) == 4 + 1 + 2 + 3
    assert set(batch.inputs()) == {"input_ids", "labels"}


def test_windows_of_full_length_make_the_batch_that_token_files_make() -> None:
    """Nothing of today's path is changed by going through a data set of one's own."""
    language = open_dataset(compose(["data=synthetic", f"data.seq_len={SEQ_LEN}"]))
    rows = [{"input_ids": language[i].tokens} for i in range(16)]  # type: ignore[union-attr]
    few = [language[i] for i in range(16)]
    [own] = batches(adapt(rows, vocab_size=64, seq_len=SEQ_LEN))
    [theirs] = batches(adapt(few, vocab_size=64, seq_len=SEQ_LEN))
    assert torch.equal(own.tokens, theirs.tokens) and torch.equal(own.targets, theirs.targets)
    assert torch.equal(own.tokens[:, 1:], own.targets[:, :-1])


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([1], ["sample 1 has 1 tokens", "data.seq_len=4"]),
        ([1, 2, 3, 4, 5, 6], ["sample 1 has 6 tokens", "data.seq_len=4"]),
        ([1, 9, 3], ["sample 1", "id 9"]),
        ([[1, 2], [3, 4]], ["sample 1", "[2, 2]"]),
        ([0.5, 1.5], ["sample 1", "whole numbers"]),
        ({"input_ids": [1, 2], "labels": [1, 2, 3]}, ["labels has 3 entries, input_ids 2"]),
        ({"input_ids": [1, 2], "labels": [1, 9]}, ["label 1 of it is 9", "-100"]),
        ({"input_ids": [0, 1], "attention_mask": [0, 1]}, ["pad at the end"]),
        ({"image": [0, 1]}, ["holds ['image']", "first sample input_ids"]),
    ],
)
def test_a_sample_that_is_not_like_the_first_is_told_why(row: Any, words: list[str]) -> None:
    refused(lambda: adapt([[1, 2, 3], row], vocab_size=9, seq_len=SEQ_LEN)[1], *words)


# Anything else


class Images:
    """With one that cannot be read."""

    bad: ClassVar[frozenset[int]] = frozenset({5})

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.bad:
            raise ValueError(f"image {index} is torn")
        return {"pixels": torch.full((3, 2), float(index)), "label": index, "w": np.float32(0.5)}


def test_anything_else_is_stacked_and_padding_is_flagged() -> None:
    dataset = adapt(Images(), vocab_size=None, seq_len=SEQ_LEN)
    assert isinstance(dataset, RecordDataset)
    [batch] = batches(dataset, size=7, world_size=2, rank=1)
    assert batch.positions[-1] is None and batch.shape == [4]
    assert batch.fields is not None and batch.real is not None
    assert {name: list(t.shape) for name, t in batch.inputs().items()} == {
        "pixels": [4, 3, 2], "label": [4], "w": [4],
    }  # fmt: skip
    [other] = batches(dataset, size=7, world_size=2, rank=0)
    assert other.fields is not None and other.real is not None
    both = [
        *batch.fields["label"][batch.real].tolist(),
        *other.fields["label"][other.real].tolist(),
    ]
    assert sorted(both) == [0, 1, 2, 3, 4, 6]
    assert sum(batch.counts()) + sum(other.counts()) == 6
    [gone] = [*batch.unreadable, *other.unreadable]
    assert (gone.index, gone.error) == (5, "ValueError: image 5 is torn")
    moved = batch.to(torch.device("cpu"))
    assert moved.fields is not None and moved.fields["pixels"].dtype == torch.float32
    first, *_ = (p for p, real in zip(batch.positions, batch.real.tolist(), strict=True) if real)
    assert first is not None
    left = batch.without([first])
    assert left.real is not None and left.fields is not None and first not in left.positions
    assert left.real.sum() == batch.real.sum() - 1, "a copy of one that stays is in its place"
    assert set(left.fields["label"].tolist()) <= set(batch.fields["label"].tolist())


class Ragged(list[Any]):
    """Texts of several lengths, padded by a collate."""

    def collate(self, rows: list[str]) -> dict[str, torch.Tensor]:
        width = max(map(len, rows))
        padded = [[ord(c) for c in row.ljust(width, "\0")] for row in rows]
        return {"chars": torch.tensor(padded), "length": torch.tensor([len(row) for row in rows])}


def test_a_collate_of_its_own_takes_samples_of_any_kind() -> None:
    [batch] = batches(adapt(Ragged(["a", "bcd", "ef", "g"]), vocab_size=None, seq_len=SEQ_LEN))
    assert batch.fields is not None and list(batch.fields["chars"].shape) == [4, 3]
    assert sorted(batch.fields["length"].tolist()) == [1, 1, 2, 3]


class Chars(Ragged):
    def collate(self, rows: list[str]) -> dict[str, torch.Tensor]:
        return {"input_ids": super().collate(rows)["chars"]}


def test_a_collate_that_makes_token_ids_makes_an_ordinary_batch() -> None:
    dataset = adapt(Chars(["ab", "cde", "fghij", "kl"]), vocab_size=256, seq_len=SEQ_LEN)
    [batch] = batches(dataset)
    assert batch.fields is None and batch.shape == [4, SEQ_LEN]
    assert sum(batch.counts()) == 1 + 2 + 4 + 1


class Rows(list[Any]):
    def collate(self, rows: list[Any]) -> Any:
        return self.made(rows)  # type: ignore[attr-defined]


def with_collate(made: Callable[[list[Any]], Any]) -> Rows:
    rows = Rows([{"x": 1}, {"x": 2}])
    rows.made = made  # type: ignore[attr-defined]
    return rows


class Noise(list[Any]):
    def __getitem__(self, index: Any) -> Mapping[str, Any]:
        return {"x": np.random.default_rng().random(3)}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], ["0 samples"]),
        (iter([1, 2]), ["is int"]),
        ([("image", 3)], ["'0' is str", "collate"]),
        ([{"text": object()}], ["'text' is object", "collate"]),
        ([{"x": [1]}, {"x": [1, 2]}], ["sample 1 holds x int64[2], the first sample x int64[1]"]),
        (with_collate(lambda rows: rows), ["'0' is dict", "collate"]),
        (with_collate(lambda rows: {"x": torch.zeros(5)}), ["[5]", "number of samples"]),
        (Noise([0]), ["sample 0 differs when it is read again", "self.rng"]),
        ([[1, 2, 3]], ["data.vocab_size is not set"]),
    ],
    ids=["empty", "iterator", "tuple", "object", "ragged", "list", "first", "noise", "vocabulary"],
)  # fmt: skip
def test_what_cannot_be_trained_on_is_told_why(rows: Any, words: list[str]) -> None:
    def read_all() -> None:
        dataset = adapt(rows, vocab_size=None, seq_len=4)
        for index in range(len(dataset)):
            dataset[index]

    refused(read_all, *words)


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        for label in range(6):
            yield torch.rand(2), label


def test_streams_tuples_and_loaders_are_taken_and_read_by_number() -> None:
    loader = torch.utils.data.DataLoader(Stream(), batch_size=3)
    read = [adapt(one, vocab_size=None, seq_len=4) for one in (Stream(), loader, iter(Stream()))]
    assert len({one.fingerprint() for one in read[:2]}) == 1, "what it draws is seeded"
    [batch, *_] = batches(read[0])
    assert batch.fields is not None and set(batch.fields["1"].tolist()) < set(range(6))
    assert batch.fields["0"].shape == (4, 2)

    def joined(rows: list[Any]) -> dict[str, torch.Tensor]:
        return {"x": torch.stack([x for x, _ in rows]), "y": torch.tensor([y for _, y in rows])}

    pairs: Any = [(torch.ones(2), 5)] * 4
    loader = torch.utils.data.DataLoader(pairs, collate_fn=joined)
    [collated, *_] = batches(adapt(loader, vocab_size=None, seq_len=4))
    assert collated.fields is not None and collated.fields["y"].tolist() == [5, 5, 5, 5]


def test_a_stream_without_an_end_is_told_where_it_can_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("runner.data.user_dataset._MOST_LISTED", 9)
    endless = itertools.cycle([(torch.ones(1), 0)])
    words = ("more than 9 samples", "runner.Guard", "guard.over(loader)", "docs/loop.md")
    refused(lambda: adapt(endless, vocab_size=None, seq_len=4), *words)
    refused(lambda: adapt(object(), vocab_size=None, seq_len=4), "runner.Guard", "map-style")


def test_when_nothing_can_be_read_the_first_reason_is_told() -> None:
    broken = Images()
    broken.bad = frozenset(range(7))  # type: ignore[misc]
    refused(lambda: adapt(broken, vocab_size=None, seq_len=4), "first 7 samples", "image 0 is torn")


# Named in the settings

MODULE = """
class Rows:
    def __init__(self, root, seq_len, samples=3, scale=1):
        self.root, self.seq_len, self.samples, self.scale = root, seq_len, samples, scale
    def __len__(self): return self.samples
    def __getitem__(self, i): return [(i * self.scale + t) % 11 for t in range(self.seq_len + 1)]
    def describe(self, i): return f"{self.root}/{i}"
class Pixels(Rows):
    def __getitem__(self, i): return {"pixels": [float(i)], "label": i}
def fails(): raise RuntimeError("no such table")
broken = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    name = f"own_{abs(hash(request.node.name)):x}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_code_named_in_the_settings_is_called_with_the_other_keys(module: str) -> None:
    told = [f"data._target_={module}.Rows", "data.root=/x", "data.scale=2", "data.vocab_size=11"]
    dataset = open_dataset(compose([*told, "data.seq_len=6"]))
    assert len(dataset) == 3, "its own default is kept"
    assert dataset[1].tokens.tolist() == [2, 3, 4, 5, 6, 7, 8]  # type: ignore[union-attr]
    assert dataset.describe(2) == "/x/2"
    assert len(open_dataset(compose([*told, "data.samples=5"]))) == 5, "as told"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("Rows", ["must be module.name"]),
        ("nowhere_at_all.Rows", ["no module 'nowhere_at_all'"]),
        ("{module}.Rose", ["has no 'Rose'"]),
        ("{module}.broken", ["is int, nothing to call"]),
        ("{module}.fails", ["RuntimeError: no such table"]),
        ("{module}.Rows", ["root", "it takes (root, seq_len, samples, scale)"]),
    ],
)
def test_code_that_cannot_be_called_is_told_why(module: str, target: str, words: list[str]) -> None:
    config = compose(["data._target_=x.y"])
    config.data._target_ = target.format(module=module)
    with pytest.raises(ConfigError) as caught:
        open_dataset(config)
    for word in ["data._target_=", *words]:
        assert word in str(caught.value), str(caught.value)


def test_a_decoder_cannot_read_pixels(module: str) -> None:
    config = compose([f"data._target_={module}.Pixels", "data.root=/x"])
    with pytest.raises(ConfigError, match=r"model\._target_"):
        parts.model_shape(config, open_dataset(config))


# Files for the held-out loss


def test_held_out_files_are_opened_beside_the_others(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(100, dtype=np.uint16) % 9)
    np.save(tmp_path / "b.npy", np.zeros(30, dtype=np.uint16))
    config = compose(
        ["data=tokens", f"data.path={tmp_path}/a.npy", f"data.val_path={tmp_path}/b.npy",
         "data.vocab_size=9", "data.seq_len=4", "data.held_out=0.5"]
    )  # fmt: skip
    check(config, world_size=1)
    prepared = ["" if one is None else str(one.place) for one in prepare_data(config, tell)]
    dataset = open_dataset(config, prepared)
    validation = open_validation(config, prepared)
    assert validation is not None and (len(dataset), len(validation)) == (24, 7)
    stream = sample_stream(config, dataset)
    assert sorted(stream.indices(np.arange(24)).tolist()) == list(range(24))
    assert not len(stream.held_out_indices(4)), "nothing of path is held out"
    config.data.sources = [{"name": "a", "path": "a.npy"}]
    config.data.path = []
    with pytest.raises(ConfigError, match=r"data\.val_path"):
        check(config, world_size=1)


def test_several_held_out_sets_are_one_with_names(tmp_path: Path) -> None:
    for name, tokens in (("a", 100), ("wiki", 30), ("code", 50)):
        np.save(tmp_path / f"{name}.npy", np.arange(tokens, dtype=np.uint16) % 9)
    config = compose(
        ["data=tokens", f"data.path={tmp_path}/a.npy",
         f"data.val_path={{wiki: {tmp_path}/wiki.npy, code: [{tmp_path}/code.npy]}}",
         "data.vocab_size=9", "data.seq_len=4"]
    )  # fmt: skip
    check(config, world_size=1)
    prepared = ["" if one is None else str(one.place) for one in prepare_data(config, tell)]
    assert len(open_dataset(config, prepared)) == 24
    validation = open_validation(config, prepared)
    assert isinstance(validation, Mixed) and validation.lengths == {"code": 12, "wiki": 7}


@pytest.mark.parametrize(
    "wanted", ["{}", "{a: 3}", "{a: []}", "{'a/b': x.npy}", "{'': x.npy}", "3"]
)
def test_held_out_sets_that_are_none(wanted: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.val_path"):
        check(compose(["data=tokens", "data.path=a.npy", f"data.val_path={wanted}"]), world_size=1)


def tell(*_: object) -> None:
    pass


def test_a_name_that_the_batch_lacks_is_answered_with_those_it_has() -> None:
    batch: Any = SimpleNamespace(inputs=lambda: {"0": None, "1": None})
    words = "KeyError: 'image'; the batch holds 0, 1"
    with pytest.raises(ConfigError, match=words), checks._in_words("a step", batch):
        raise KeyError("image")
