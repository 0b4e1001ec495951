"""Rows through Hugging Face datasets, chats, and short samples in one window."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.config.compose import compose
from runner.config.schema import DataKind, RunConfig
from runner.config.validate import check
from runner.data.cursor import SampleStream
from runner.data.dataset import NOT_COUNTED, Sample
from runner.data.packing import pack
from runner.policy.decision.skip_ledger import Ledger
from runner.session import parts
from runner.session.corpus import open_dataset
from runner.system.error import ConfigError, DataError
from tests.mechanism.test_feed import made_feed

datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")

TEXTS = [f"document number {number} " + "x" * (number % 5) for number in range(12)]
MARKED = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}</s>{% endgeneration %}"
    "{% else %}{{ m['content'] }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
BASE = compose(["data=hf", "data.seq_len=32", "data.held_out=0"])


def config(tmp_path: Path, path: str, **changes: Any) -> RunConfig:
    BASE.data.path = [path]
    BASE.data.cache = str(tmp_path / "cache")
    usual: dict[str, Any] = {"field": "text", "messages": None, "tokenizer": None, "pack": None,
                             "vocab_size": None, "seq_len": 32, "kind": DataKind.hf}  # fmt: skip
    for name, value in (usual | changes).items():
        setattr(BASE.data, name, value)
    check(BASE, world_size=1)
    return BASE


def write(tmp_path: Path, kind: str, rows: dict[str, list[Any]]) -> str:
    """The same rows in a file of each kind; what to name in data.path."""
    table = datasets.Dataset.from_dict(rows)
    if kind == "parquet":
        table.shard(2, 0, contiguous=True).to_parquet(tmp_path / "rows-0.parquet")
        table.shard(2, 1, contiguous=True).to_parquet(tmp_path / "rows-1.parquet")
        return str(tmp_path / "rows-*.parquet")
    if kind == "saved":
        table.save_to_disk(tmp_path / "saved")
        return str(tmp_path / "saved")
    if kind == "arrow":
        table.save_to_disk(tmp_path / "saved")
        [file] = (tmp_path / "saved").glob("*.arrow")
        return str(file)
    lines = "".join(json.dumps(dict(zip(rows, row, strict=True))) + "\n"
                    for row in zip(*rows.values(), strict=True))  # fmt: skip
    if kind == "jsonl.gz":
        (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
        return str(tmp_path / "rows.jsonl.gz")
    (tmp_path / "rows.jsonl").write_text(lines)
    return str(tmp_path)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str | None], Path]:
    """A folder of a tokenizer of single characters, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    characters = ["</s>", *("abcdefghijklmnopqrstuvwxyz<>/!?. 0123456789X:")]
    own = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="X"))
    own.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    own.decoder = decoders.Fuse()
    own.add_special_tokens(["</s>"])

    def made(template: str | None) -> Path:
        folder = tmp_path_factory.mktemp("tokenizer")
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=own, eos_token="</s>")
        fast.chat_template = template
        fast.save_pretrained(folder)
        return folder

    return made


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "jsonl.gz", "arrow", "saved"])
def test_rows_of_text_are_samples_in_order(tmp_path: Path, kind: str) -> None:
    named = write(tmp_path, kind, {"text": TEXTS, "other": list(range(12))})
    settings = config(tmp_path, named)
    dataset = open_dataset(settings)
    assert len(dataset) == 12 and dataset.vocab_size == 257
    for index, text in enumerate(TEXTS):
        sample = dataset[index]
        assert isinstance(sample, Sample) and sample.labels is not None
        ids = [*text.encode(), 256][:33]
        assert sample.tokens[: len(ids)].tolist() == ids
        assert sample.labels[: len(ids)].tolist() == ids
        assert (sample.labels[len(ids) :] == NOT_COUNTED).all()
        assert dataset.describe(index).endswith(f"row {index}")
    assert open_dataset(settings).fingerprint() == dataset.fingerprint()


def test_rows_of_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    rows = {"input_ids": [[1, 2, 3], [4, 5, 6, 0]], "labels": [[-100, 2, 3], [4, 5, 6, -100]],
            "attention_mask": [[1, 1, 1], [1, 1, 1, 0]]}  # fmt: skip
    named = write(tmp_path, "parquet", rows)
    dataset = open_dataset(config(tmp_path, named, vocab_size=9, seq_len=4))
    found = [dataset[index] for index in range(2)]
    assert [s.tokens.tolist() for s in found] == [[1, 2, 3, 0, 0], [4, 5, 6, 0, 0]]  # type: ignore[union-attr]
    none = NOT_COUNTED
    assert found[0].labels.tolist() == [none, 2, 3, none, none]  # type: ignore[union-attr]
    with pytest.raises(DataError, match=r"data\.vocab_size"):
        open_dataset(config(tmp_path, named, seq_len=4))


def chats(number: int = 3) -> dict[str, list[Any]]:
    said = [
        [
            {"role": "user", "content": f"what is {n}?"},
            {"role": "assistant", "content": f"it is {n}."},
            {"role": "user", "content": "so?"},
            {"role": "assistant", "content": "yes"},
        ]
        for n in range(number)
    ]
    return {"messages": said}


@pytest.mark.parametrize("template", [MARKED, UNMARKED], ids=["marked", "by prefixes"])
def test_only_what_the_assistant_says_is_counted(
    tmp_path: Path, tokenizer: Callable[[str | None], Path], template: str
) -> None:
    folder = tokenizer(template)
    named = write(tmp_path, "jsonl", chats())
    settings = config(tmp_path, named, messages="messages", tokenizer=str(folder), seq_len=100)
    dataset = open_dataset(settings)
    own = transformers.AutoTokenizer.from_pretrained(folder)
    for index in range(3):
        sample = dataset[index]
        assert isinstance(sample, Sample) and sample.labels is not None
        whole = f"<user>what is {index}?</s><assistant>it is {index}.</s>"
        whole += "<user>so?</s><assistant>yes</s>"
        assert own.decode(sample.tokens).startswith(whole)
        counted = sample.labels != NOT_COUNTED
        assert own.decode(sample.labels[counted]) == f"it is {index}.</s>yes</s>"
        assert (sample.labels[counted] == sample.tokens[counted]).all()


def test_chats_that_cannot_be_learnt_from_are_told_why(
    tmp_path: Path, tokenizer: Callable[[str | None], Path]
) -> None:
    folder = str(tokenizer(UNMARKED))
    named = write(tmp_path, "jsonl", {"messages": [[{"role": "user", "content": "so?"}]] * 2})

    def refused(words: str, **changes: Any) -> None:
        with pytest.raises(DataError, match=words):
            open_dataset(config(tmp_path, named, **changes))

    refused("the assistant says nothing", messages="messages", tokenizer=folder)
    refused(r"no such column in rows\.jsonl, but messages\.", messages="chat", tokenizer=folder)
    refused("set data.tokenizer", messages="messages")
    refused("no chat template", messages="messages", tokenizer=str(tokenizer(None)))
    refused(
        r"data\.field=text: no such column .* or data\.messages to that of a chat", tokenizer=None
    )


def test_short_samples_share_a_window_and_nothing_else(tmp_path: Path) -> None:
    texts = ["ab", "cdef", "g", "hijklmnop", "qr", "stuvwxyz" * 9]
    named = write(tmp_path, "jsonl", {"text": texts})
    settings = config(tmp_path, named, pack=True, seq_len=16)
    dataset = open_dataset(settings)
    assert len(dataset) == 3, "[ab cdef g] [hijklmnop qr] [the long one, cut]"
    sample = dataset[0]
    assert isinstance(sample, Sample) and sample.segments is not None and sample.labels is not None
    assert sample.tokens[:10].tolist() == [*b"ab", 256, *b"cdef", 256, *b"g", 256][:10]
    assert sample.segments.tolist() == [0] * 3 + [1] * 5 + [2] * 2 + [3] * 7
    assert (sample.labels[10:] == NOT_COUNTED).all()
    assert dataset.describe(0) == "rows.jsonl row 0, rows.jsonl row 1, rows.jsonl row 2"
    assert [p.suffix for p in (tmp_path / "cache" / "packs").iterdir()] == [".npy"]

    # The same losses as one by one: what stands before in the window is not seen.
    from runner.model.decoder import Decoder
    from runner.model.loss import sequence_losses

    shape = parts.model_shape(compose(["model=tiny", "data.seq_len=16"]), dataset)
    torch.manual_seed(0)
    model = Decoder(shape)

    def total(packed: bool) -> float:
        opened = open_dataset(config(tmp_path, named, pack=packed, seq_len=16))
        size = len(opened)
        stream = SampleStream.of_one(num_samples=size, seed=0, held_out_share=0.0, global_size=size)
        feed = made_feed(opened, stream, seq_len=16, global_size=size, micro_size=size)
        [batch] = feed.fetch(stream.plan(0, Ledger()), Ledger()).micro_batches
        with torch.no_grad():
            losses, _ = sequence_losses(
                model(batch.tokens, batch.segments), batch.targets, fp32=True, z_loss=0.0
            )
        assert sum(batch.counts()) == sum(min(len(text) + 1, 17) - 1 for text in texts)
        return float(losses.double().sum())

    assert total(True) == pytest.approx(total(False), rel=1e-5)


@pytest.mark.parametrize(
    ("lengths", "starts"),
    [([3, 3, 3], [0, 2, 3]), ([9], [0, 1]), ([7, 1, 7], [0, 2, 3]), ([2] * 8, [0, 4, 8])],
)
def test_packs_hold_as_many_as_fit_in_order(lengths: list[int], starts: list[int]) -> None:
    assert pack(lengths, 8).tolist() == starts


def test_what_cannot_be_read_is_told_by_name(tmp_path: Path) -> None:
    def refused(path: str, words: str) -> None:
        with pytest.raises(DataError, match=words):
            open_dataset(config(tmp_path, path))

    refused(str(tmp_path / "none-*.parquet"), "names no file")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and no more")
    refused(str(tmp_path / "torn.parquet"), "cannot be read as rows")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    refused(str(tmp_path), "all must be of one kind")
    with pytest.raises(ConfigError, match=r"data\.pack=true"):
        config(tmp_path, "x", kind=DataKind.tokens, pack=True)
    with pytest.raises(ConfigError, match=r"data\.messages=m"):
        config(tmp_path, "x", kind=DataKind.text, messages="m")
