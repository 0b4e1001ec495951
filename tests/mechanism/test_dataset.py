"""Corpora: what a sample is, where it comes from, and what each bad file is told."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import multiprocessing
import os
import shutil
import struct
import sys
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from runner.config.compose import compose
from runner.config.schema import DataConfig, TokenDtype
from runner.data.dataset import Dataset, contents_of, fingerprint_files, spread
from runner.data.documents import PYTHON_LIBRARY
from runner.data.synthetic import SyntheticLanguage
from runner.data.text import prepare_text
from runner.data.tokens import open_tokens
from runner.session.corpus import data_words, open_dataset
from runner.system.error import DataError, MissingPackage
from runner.system.units import format_bytes
from tests.stored import open_text


def text(tmp_path: Path, *paths: Path, **changes: Any) -> Dataset:
    return open_text(source(tmp_path, *paths, **changes))


def source(tmp_path: Path, *paths: Path, **changes: Any) -> DataConfig:
    settings: dict[str, Any] = {
        "path": [str(path) for path in paths],
        "suffixes": [".py", ".txt"],
        "cache": tmp_path / "cache",
        "seq_len": 4,
    }
    return DataConfig(**settings | changes)


def tokens(*paths: Path | str, **changes: Any) -> Dataset:
    settings: dict[str, Any] = {"vocab_size": 100, "seq_len": 4, "token_dtype": "uint16"}
    options = (
        {"scan_all_bytes": changes.pop("scan_all_bytes")} if "scan_all_bytes" in changes else {}
    )
    settings |= {"path": [str(path) for path in paths]} | changes
    settings["token_dtype"] = TokenDtype(settings["token_dtype"])
    return open_tokens(DataConfig(**settings), **options)


def folder(tmp_path: Path, **files: str) -> Path:
    """A directory of files; ``a`` is the file ``a.py``."""
    root = tmp_path / "corpus"
    for name, contents in files.items():
        path = root / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(contents)
    return root


def raw(path: Path, ids: Sequence[int], dtype: str = "<u2") -> Path:
    np.array(ids, dtype=dtype).tofile(path)
    return path


def write_megatron(
    prefix: Path,
    sequences: Sequence[Sequence[int]],
    documents: Sequence[int],
    *,
    code: int = 8,
    pointers: Sequence[int] | None = None,
) -> Path:
    """NAME.bin and NAME.idx by the layout that Megatron-LM writes."""
    dtype = np.dtype({1: "u1", 4: "<i4", 8: "<u2"}.get(code, "<u2"))
    lengths = [len(sequence) for sequence in sequences]
    if pointers is None:
        pointers = [sum(lengths[:number]) * dtype.itemsize for number in range(len(lengths))]
    index = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, len(lengths), len(documents))
    index += np.array(lengths, "<i4").tobytes() + np.array(pointers, "<i8").tobytes()
    index += np.array(documents, "<i8").tobytes()
    prefix.with_name(prefix.name + ".idx").write_bytes(index)
    flat = [token for sequence in sequences for token in sequence]
    np.array(flat, dtype).tofile(prefix.with_name(prefix.name + ".bin"))
    return prefix


def refused(open_it: Callable[[], Any], *fragments: str) -> None:
    with pytest.raises(DataError) as caught:
        open_it()
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert caught.value.exit_code == 2


class TestWindows:
    def test_neighbours_share_one_token(self, tmp_path: Path) -> None:
        dataset = tokens(raw(tmp_path / "a.bin", range(14)))
        assert len(dataset) == 3
        assert [dataset[index].tokens.tolist() for index in range(3)] == [
            [0, 1, 2, 3, 4],
            [4, 5, 6, 7, 8],
            [8, 9, 10, 11, 12],
        ]
        assert dataset[0].tokens.dtype == np.int64
        assert dataset[0].segments is None
        for index in (-1, 3):
            with pytest.raises(IndexError):
                dataset[index]
            with pytest.raises(IndexError):
                dataset.describe(index)

    @pytest.mark.parametrize(("count", "samples"), [(0, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
    def test_number_of_samples(self, tmp_path: Path, count: int, samples: int) -> None:
        path = raw(tmp_path / "a.bin", range(count))
        if samples:
            assert len(tokens(path)) == samples
        else:
            refused(lambda: tokens(path), "data.seq_len=4", f"has {count}")

    def test_can_be_sent_to_a_loader_process(self, tmp_path: Path) -> None:
        dataset = tokens(raw(tmp_path / "a.bin", range(99)))
        sent = bytes(ForkingPickler.dumps(dataset))
        assert len(sent) < 2000
        assert ForkingPickler.loads(sent)[2].tokens.tolist() == dataset[2].tokens.tolist()


class TestText:
    def test_bytes_and_an_end_mark_after_each_file(self, tmp_path: Path) -> None:
        dataset = text(tmp_path, folder(tmp_path, a="hello", **{"b/c": "xyz"}), seq_len=9)
        assert dataset.vocab_size == 257
        assert len(dataset) == 1
        assert dataset[0].tokens.tolist() == [*b"hello", 256, *b"xyz", 256]

    def test_which_files_are_read(self, tmp_path: Path) -> None:
        root = folder(tmp_path, a="aaaa", **{"__pycache__/b": "bbbb", ".git/c": "cccc"})
        (root / ".hidden.py").write_text("dddd")
        (root / "e.bin").write_text("eeee")
        assert text(tmp_path, root)[0].tokens.tolist() == [*b"aaaa", 256]
        named = tmp_path / "notes.weird"
        named.write_text("12345")
        dataset = text(tmp_path, named)
        assert dataset[0].tokens.tolist() == [*b"12345"]
        assert dataset.describe(0) == "notes.weird bytes 0-5"

    def test_describe_gives_file_and_exact_bytes(self, tmp_path: Path) -> None:
        root = folder(tmp_path, a="0123456789", **{"b/c": "abcdef"})
        dataset = text(tmp_path, root)
        assert dataset.describe(1) == "a.py bytes 4-9"
        assert (root / "a.py").read_bytes()[4:9] == bytes(dataset[1].tokens.tolist())
        assert dataset.describe(2) == "a.py bytes 8-10, b/c.py bytes 0-2"

    def test_describe_shortens_a_long_list(self, tmp_path: Path) -> None:
        root = folder(tmp_path, a="1", b="2", c="3", d="4", e="5")
        described = text(tmp_path, root, seq_len=9).describe(0)
        assert described == "a.py bytes 0-1, b.py bytes 0-1, c.py bytes 0-1 and 2 more files"

    def test_several_directories_are_told_apart(self, tmp_path: Path) -> None:
        first = folder(tmp_path / "x", a="1234")
        second = tmp_path / "other"
        second.mkdir()
        (second / "a.py").write_text("5678")
        dataset = text(tmp_path, first, second)
        assert dataset.describe(0) == "corpus/a.py bytes 0-4"
        assert dataset.describe(1) == "corpus/a.py bytes 4-4, other/a.py bytes 0-4"

    def test_segments_number_the_documents_in_a_window(self, tmp_path: Path) -> None:
        root = folder(tmp_path, a="123", b="", c="4567", d="890")
        dataset = text(tmp_path, root, seq_len=6, isolate_documents=True)
        found = [dataset[index].segments for index in range(2)]
        # 1 2 3 end | end | 4 5      then   5 6 7 end | 8 9 0
        assert [None if s is None else s.tolist() for s in found] == [
            [0, 0, 0, 0, 1, 2, 2],
            [0, 0, 0, 0, 1, 1, 1],
        ]
        assert found[0] is not None
        assert found[0].dtype == np.int32

    def test_the_standard_library_has_a_name(self, tmp_path: Path) -> None:
        refused(lambda: text(tmp_path), "data.path is not set", "data.path=DIR", "data=python")
        dataset = text(tmp_path, path=[PYTHON_LIBRARY], seq_len=256, suffixes=(".nothing",))
        assert len(dataset) > 10_000
        starts = {dataset.describe(index).split(" ")[0] for index in range(0, len(dataset), 50)}
        assert any(name.startswith("asyncio/") for name in starts)
        assert not any("site-packages" in name or name.startswith("test/") for name in starts)

    def test_long_files_are_read_in_pieces(self, tmp_path: Path) -> None:
        contents = "\n".join(f"line {number} é" for number in range(120_000))
        root = folder(tmp_path, a=contents)
        dataset = text(tmp_path, root, seq_len=len(contents.encode()))
        assert bytes(dataset[0].tokens[:-1].tolist()) == contents.encode()

    def test_what_is_no_corpus(self, tmp_path: Path) -> None:
        refused(lambda: text(tmp_path, tmp_path / "gone"), str(tmp_path / "gone"), "data.path")
        root = folder(tmp_path, a="", b="")
        refused(lambda: text(tmp_path, root), "2 files are empty")
        (root / "a.py").write_text("12345")
        refused(lambda: text(tmp_path, root, suffixes=[".rs"]), str(root), ".rs", "data.suffixes")
        blocked = tmp_path / "file"
        blocked.write_text("")
        refused(lambda: text(tmp_path, root, cache=blocked / "cache"), "data.cache")
        (root / "c.py").symlink_to(root / "gone.py")
        refused(lambda: text(tmp_path, root), "c.py", "cannot be read")


class TestTokenizer:
    @staticmethod
    def tokenizer(tmp_path: Path, vocab: dict[str, int]) -> str:
        contents: dict[str, Any] = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": {"type": "Whitespace"},
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "?"},
        }
        path = tmp_path / f"tokenizer-{len(vocab)}-{max(vocab.values())}.json"
        path.write_text(json.dumps(contents))
        return str(path)

    @pytest.mark.parametrize(
        ("vocab", "vocab_size", "end"),
        [
            ({"?": 0, "one": 1, "two": 2, "</s>": 3}, 4, 3),
            ({"?": 0, "one": 1, "two": 2, "[SEP]": 3, "<|endoftext|>": 4}, 5, 4),
            ({"?": 0, "one": 1, "two": 2, "</s>": 70_000}, 70_001, 70_000),
        ],
    )
    def test_ids_and_end_token(
        self, tmp_path: Path, vocab: dict[str, int], vocab_size: int, end: int
    ) -> None:
        root = folder(tmp_path, a="one two", b="two three one")
        dataset = text(
            tmp_path,
            root,
            tokenizer=self.tokenizer(tmp_path, vocab),
            seq_len=6,
            isolate_documents=True,
        )
        assert dataset.vocab_size == vocab_size
        sample = dataset[0]
        assert sample.tokens.tolist() == [1, 2, end, 2, 0, 1, end]
        assert sample.segments.tolist() == [0, 0, 0, 1, 1, 1, 1]
        assert dataset.describe(0) == "a.py tokens 0-2, b.py tokens 0-3"

    def test_another_tokenizer_is_another_corpus(self, tmp_path: Path) -> None:
        root = folder(tmp_path, a="one two one two")
        first, second = (
            text(tmp_path, root, tokenizer=self.tokenizer(tmp_path, vocab), end_token=size)
            for size, vocab in (
                (3, {"?": 0, "one": 1, "two": 2}),
                (4, {"?": 0, "one": 1, "two": 3}),
            )
        )
        assert first[0].tokens.tolist() == [1, 2, 1, 2, 3]
        assert second[0].tokens.tolist() == [1, 3, 1, 3, 4]
        assert first.fingerprint() != second.fingerprint()

    def test_long_files_are_not_cut_inside_a_word(self, tmp_path: Path) -> None:
        root = folder(tmp_path, a="one three\n" * 110_000)  # 1 MiB ends inside "three"
        name = self.tokenizer(tmp_path, {"?": 0, "one": 1, "three": 2})
        found = text(tmp_path, root, tokenizer=name, seq_len=220_000, end_token=3)[0].tokens
        assert np.bincount(found).tolist() == [0, 110_000, 110_000, 1]

    @pytest.mark.parametrize("contents", [None, "", "{}", "[1", '{"model": {}}'])
    def test_no_tokenizer_file(self, tmp_path: Path, contents: str | None) -> None:
        path = tmp_path / "tokenizer.json"
        if contents is not None:
            path.write_text(contents)
        root = folder(tmp_path, a="12345")
        refused(lambda: text(tmp_path, root, tokenizer=str(path)), f"data.tokenizer={path}")

    def test_a_sentencepiece_model_is_told_what_makes_a_tokenizer_of_it(
        self, tmp_path: Path
    ) -> None:
        path = tmp_path / "spm.model"
        path.write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
        root = folder(tmp_path, a="12345")
        refused(lambda: text(tmp_path, root, tokenizer=str(path)), "LlamaTokenizer.from_pretrained")


class TestMarks:
    """Which token ends a document, and which begins it."""

    VOCAB: ClassVar[dict[str, int]] = {"?": 0, "one": 1, "two": 2, "<eod>": 3, "<go>": 4, "</s>": 5}

    def make(self, tmp_path: Path, vocab: dict[str, int] | None = None, **beside: Any) -> Path:
        """A tokenizer's folder; ``beside``: NAME of NAME.json and what it holds."""
        root = tmp_path / "tokenizer"
        root.mkdir()
        made = Path(TestTokenizer.tokenizer(tmp_path, vocab or self.VOCAB))
        made.rename(root / "tokenizer.json")
        for name, tree in beside.items():
            (root / f"{name}.json").write_text(tree if isinstance(tree, str) else json.dumps(tree))
        return root

    def opened(self, tmp_path: Path, tokenizer: Path, **changes: Any) -> Dataset:
        root = folder(tmp_path, a="one two", b="two one")
        return text(tmp_path, root, tokenizer=str(tokenizer), **{"seq_len": 5} | changes)

    @pytest.mark.parametrize(
        "beside",
        [
            {"tokenizer_config": {"eos_token": "<eod>"}},
            {"tokenizer_config": {"eos_token": {"content": "<eod>", "lstrip": False}}},
            {"special_tokens_map": {"eos_token": "<eod>"}},
            {
                "tokenizer_config": {"eos_token": None},
                "special_tokens_map": {"eos_token": {"content": "<eod>"}},
            },
            {
                "tokenizer_config": {"eos_token": "<eod>"},
                "special_tokens_map": {"eos_token": "</s>"},
            },
        ],
    )
    @pytest.mark.parametrize("as_folder", [True, False])
    def test_the_files_beside_say_it(
        self, tmp_path: Path, beside: dict[str, Any], as_folder: bool
    ) -> None:
        root = self.make(tmp_path, **beside)
        dataset = self.opened(tmp_path, root if as_folder else root / "tokenizer.json")
        assert dataset.vocab_size == 6
        assert dataset[0].tokens.tolist() == [1, 2, 3, 2, 1, 3]

    @pytest.mark.parametrize("asked", ["<eod>", 3])
    def test_the_setting_goes_before_the_files(self, tmp_path: Path, asked: Any) -> None:
        root = self.make(tmp_path, tokenizer_config={"eos_token": "</s>"})
        dataset = self.opened(tmp_path, root, end_token=asked)
        assert dataset[0].tokens.tolist() == [1, 2, 3, 2, 1, 3]

    def test_an_unknown_end_is_asked_for_and_none_is_made_up(self, tmp_path: Path) -> None:
        root = self.make(tmp_path, {"?": 0, "one": 1, "two": 2, "<eod>": 3})
        words = (
            "does not say which token ends a document",
            "tokenizer_config.json",
            "data.end_token",
        )
        refused(lambda: self.opened(tmp_path, root), *words, "data.end_token=4 adds an id")
        as_before = self.opened(tmp_path, root, end_token=4)
        assert as_before.vocab_size == 5
        assert as_before[0].tokens.tolist() == [1, 2, 4, 2, 1, 4]

    @pytest.mark.parametrize("asked", ["<go>", 4])
    def test_a_begin_token(self, tmp_path: Path, asked: Any) -> None:
        root = self.make(tmp_path)
        dataset = self.opened(tmp_path, root, begin_token=asked, seq_len=7, isolate_documents=True)
        sample = dataset[0]
        assert sample.tokens.tolist() == [4, 1, 2, 5, 4, 2, 1, 5]
        assert sample.segments is not None and sample.segments.tolist() == [0] * 4 + [1] * 4
        assert dataset.describe(0) == "a.py tokens 0-2, b.py tokens 0-2"

    @pytest.mark.parametrize(
        ("told", "begins"),
        [
            ({"bos_token": "<go>", "add_bos_token": True}, True),
            ({"bos_token": "<go>", "add_bos_token": False}, False),
            ({"bos_token": "<go>"}, False),
            ({"bos_token": None}, False),
        ],
    )
    def test_the_files_say_whether_there_is_a_begin(
        self, tmp_path: Path, told: dict[str, Any], begins: bool
    ) -> None:
        root = self.make(tmp_path, tokenizer_config=told)
        first = self.opened(tmp_path, root)[0].tokens.tolist()
        assert first == ([4, 1, 2, 5, 4, 2] if begins else [1, 2, 5, 2, 1, 5])
        without = self.opened(tmp_path, root, begin_token="")
        assert without[0].tokens.tolist() == [1, 2, 5, 2, 1, 5]

    def test_a_tokenizer_that_begins_texts_itself_is_taken_at_its_word(
        self, tmp_path: Path
    ) -> None:
        tokenizers = pytest.importorskip("tokenizers")
        root = self.make(tmp_path, tokenizer_config={"bos_token": "<go>", "eos_token": "<eod>"})
        made = tokenizers.Tokenizer.from_file(str(root / "tokenizer.json"))
        made.add_special_tokens(["<go>", "<eod>"])
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="<go> $A", special_tokens=[("<go>", 4)]
        )
        made.save(str(root / "tokenizer.json"))
        assert self.opened(tmp_path, root)[0].tokens.tolist() == [4, 1, 2, 3, 4, 2]

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"end_token": "<eos>"}, ["data.end_token=<eos>", "no token", "<eod>"]),
            ({"end_token": 7}, ["data.end_token=7", "0 to 5"]),
            ({"end_token": -1}, ["data.end_token=-1", "0 to 5"]),
            ({"begin_token": 6}, ["data.begin_token=6", "0 to 5"]),
            ({"tokenizer": None, "end_token": 9}, ["without data.tokenizer", "256"]),
        ],
    )
    def test_marks_that_are_none(
        self, tmp_path: Path, changes: dict[str, Any], words: list[str]
    ) -> None:
        root = self.make(tmp_path)
        corpus = folder(tmp_path, a="one two")
        refused(lambda: text(tmp_path, corpus, **{"tokenizer": str(root)} | changes), *words)

    @pytest.mark.parametrize(
        ("told", "words"),
        [
            ({"eos_token": "<none>"}, ["names '<none>'", "data.end_token"]),
            ({"eos_token": 3}, ["eos_token is 3"]),
            ({"eos_token": {"id": 3}}, ["eos_token"]),
            ("[1", ["cannot be read as JSON"]),
            ("[1]", ["no JSON object"]),
        ],
    )
    def test_files_beside_that_make_no_sense(
        self, tmp_path: Path, told: Any, words: list[str]
    ) -> None:
        root = self.make(tmp_path, tokenizer_config=told)
        refused(lambda: self.opened(tmp_path, root), "tokenizer_config.json", *words)

    def test_a_folder_without_a_tokenizer(self, tmp_path: Path) -> None:
        root = self.make(tmp_path)
        (root / "tokenizer.json").rename(root / "vocab.json")
        refused(lambda: self.opened(tmp_path, root), f"data.tokenizer={root}", "tokenizer.json")

    def test_a_trained_tokenizer_in_batches_gives_what_it_gives_one_by_one(
        self, tmp_path: Path
    ) -> None:
        tokenizers = pytest.importorskip("tokenizers")
        words = [f"word{number % 97} and {number}" for number in range(3000)]
        made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<unk>", "<eod>"], show_progress=False
        )
        made.train_from_iterator(words, trainer)
        made.save(str(tmp_path / "tokenizer.json"))
        lines = [json.dumps({"text": line}) for line in words]
        path = tmp_path / "a.jsonl"
        path.write_text("\n".join(lines))
        expected = [
            token
            for line in words
            for token in [*made.encode(line, add_special_tokens=False).ids, 1]
        ]
        dataset = text(
            tmp_path,
            path,
            tokenizer=str(tmp_path),
            end_token="<eod>",
            seq_len=len(expected) - 1,
            isolate_documents=True,
        )
        assert dataset[0].tokens.tolist() == expected
        assert dataset[0].segments is not None and dataset[0].segments[-1] == len(words) - 1


WORDS = "".join(f"some words, number {number}\n" for number in range(3000))


def streams(ending: str, data: bytes) -> list[bytes]:
    """Two of them, as tools that append or that work in parallel leave them."""
    known = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    if ending == ".zst":
        library = pytest.importorskip("zstandard")
        known[ending] = library.ZstdCompressor(write_checksum=True).compress
    return [known[ending](data[: len(data) // 2]), known[ending](data[len(data) // 2 :])]


def compressed(ending: str, data: bytes) -> bytes:
    return b"".join(streams(ending, data))


def utf16(text: str) -> bytes:
    return text.encode("utf-16")


def array(values: list[int]) -> bytes:
    out = io.BytesIO()
    np.save(out, np.array(values))
    return out.getvalue()


def archive(kind: str) -> bytes:
    out = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(out, "w") as packed:
            packed.writestr("a.txt", WORDS)
    else:
        with tarfile.open(fileobj=out, mode="w:gz" if kind == "tgz" else "w") as tar:
            entry = tarfile.TarInfo("a.txt")
            entry.size = len(WORDS)
            tar.addfile(entry, io.BytesIO(WORDS.encode()))
    return out.getvalue()


class TestWhatAFileIs:
    @pytest.mark.parametrize("ending", [".gz", ".zst", ".bz2", ".xz"])
    @pytest.mark.parametrize("named", [True, False])
    def test_compressed_text_is_the_text(self, tmp_path: Path, ending: str, named: bool) -> None:
        (tmp_path / "plain.txt").write_text(WORDS)
        expected = text(tmp_path, tmp_path / "plain.txt", seq_len=len(WORDS))[0]
        path = tmp_path / (f"a.txt{ending}" if named else "b.txt")
        path.write_bytes(compressed(ending, WORDS.encode()))
        found = text(tmp_path, path, seq_len=len(WORDS))
        assert found[0].tokens.tolist() == expected.tokens.tolist()
        filled = tmp_path / "c.txt"
        filled.write_bytes(path.read_bytes() + b"\0" * 512)
        assert len(text(tmp_path, filled, seq_len=len(WORDS))) == 1, "a tape's blocks"
        assert found.contents == contents_of(1, path.stat().st_size)  # type: ignore[attr-defined]
        lines = tmp_path / f"a.jsonl{ending}"
        lines.write_bytes(compressed(ending, b'{"text": "one"}\n{"text": "two"}\n'))
        assert bytes(text(tmp_path, lines, seq_len=2)[0].tokens.tolist()) == b"one"

    @pytest.mark.parametrize("ending", [".gz", ".zst", ".bz2", ".xz"])
    @pytest.mark.parametrize("damage", ["cut", "flipped", "second", "not compressed"])
    def test_damaged_compressed_text(self, tmp_path: Path, ending: str, damage: str) -> None:
        first, second = streams(ending, os.urandom(30_000).hex().encode())
        data = bytearray(first + second)
        path = tmp_path / f"a.txt{ending}"
        if damage in ("flipped", "second"):
            data[len(first) // 2 if damage == "flipped" else len(first)] ^= 0xFF
        path.write_bytes({"cut": data[:-20], "not compressed": b"plain words"}.get(damage, data))
        refused(lambda: text(tmp_path, path), str(path), "cannot be decompressed", "write it again")
        assert not list((tmp_path / "cache").iterdir()), "nothing is left of it"

    @pytest.mark.parametrize(
        ("name", "data", "words"),
        [
            ("a.txt", archive("zip"), ["a zip archive", "unpack it"]),
            ("a.tar", archive("tar"), ["a tar archive", "unpack it"]),
            ("a.tar.gz", archive("tgz"), ["a tar archive", "unpack it"]),
            ("ids.npy", array(list(range(300))), ["a NumPy array", "data=tokens"]),
            ("ids.npy.gz", gzip.compress(array([1] * 300)), ["a NumPy array"]),
            ("ids.bin", np.arange(300, dtype="<u2").tobytes(), ["NUL", "data=tokens"]),
            ("a.pdf", b"%PDF-1.7\n%words", ["a PDF"]),
            ("a.txt", b"PAR1 and more", ["a Parquet table", "end with .parquet"]),
            ("a.txt", utf16(WORDS), ["UTF-16", "iconv -f UTF-16 -t UTF-8"]),
            ("a.jsonl", utf16('{"text": "a"}'), ["UTF-16"]),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_what_is_no_text_is_named(
        self, tmp_path: Path, name: str, data: bytes, words: list[str]
    ) -> None:
        path = tmp_path / name
        path.write_bytes(data)
        refused(lambda: text(tmp_path, path), f"{path}: is no text", *words)

    def test_letters_that_begin_as_a_format_does_are_text(self, tmp_path: Path) -> None:
        for words in (b"BZh is what bzip2 files begin with", b"PK and QK", b"\xef\xbb\xbfwords"):
            (tmp_path / "a.txt").write_bytes(words)
            assert bytes(text(tmp_path, tmp_path / "a.txt")[0].tokens.tolist()) == words[:5]

    def test_bytes_that_are_not_utf8_are_told_above_a_thousandth(self, tmp_path: Path) -> None:
        path = tmp_path / "a.txt"

        def notice(text: bytes) -> str:
            path.write_bytes(text)
            data = source(tmp_path, path)
            return prepare_text(data, tmp_path / "cache", progress=lambda *_: None).notice

        assert notice(b"x" * 9999 + "é".encode() + b"\xe9" * 10) == ""
        words = notice(b"x" * 990 + "é".encode("latin-1") * 10)
        assert words.startswith("data.path: 1.0% of the text is not UTF-8, first in")
        assert notice(path.read_bytes()) == words, "from the cache too"

    def test_the_corpus_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text(WORDS)
        (tmp_path / "b.txt").write_text(WORDS)
        np.save(tmp_path / "c.npy", np.arange(4000, dtype=np.uint16))

        def words(*settings: str) -> str:
            config = compose([*settings, "data.seq_len=8", f"data.cache={tmp_path}/cache"])
            return data_words(config.data, open_dataset(config))

        size = format_bytes(2 * len(WORDS))
        assert words(f"data.path={tmp_path}") == f"{tmp_path} (2 files, {size})"
        tokens = ["data=tokens", f"data.path={tmp_path}/c.npy", "data.vocab_size=4000"]
        assert words(*tokens) == f"{tmp_path}/c.npy (1 file, 7.812 KiB)"
        assert words("data=synthetic") == "a synthetic language"
        assert words("data._target_=tests.guests.Images") == "tests.guests.Images"
        mixed = f"[{{name: b, path: {tmp_path}/b.txt}}, {{name: a, kind: synthetic}}]"
        half = format_bytes(len(WORDS))
        assert words(f"data.sources={mixed}") == (
            f"a = a synthetic language; b = {tmp_path}/b.txt (1 file, {half})"
        )

    def test_a_wrong_width_of_token_files_is_told(self, tmp_path: Path) -> None:
        ids = np.random.default_rng(0).integers(1, 600, size=4000)
        wide, narrow = tmp_path / "wide.bin", tmp_path / "narrow.bin"
        wide.write_bytes(ids.astype("<u4").tobytes())
        narrow.write_bytes(ids.astype("<u2").tobytes())
        told = "set data.token_dtype="
        refused(lambda: tokens(wide, vocab_size=600), str(wide), f"{told}uint32")
        refused(lambda: tokens(narrow, vocab_size=600, token_dtype="uint32"), f"{told}uint16")
        both = (tokens(wide, vocab_size=600, token_dtype="uint32"), tokens(narrow, vocab_size=600))
        assert [one[7].tokens.tolist() for one in both] == [ids[28:33].tolist()] * 2

    def test_a_folder_that_holds_none_says_what_it_holds(self, tmp_path: Path) -> None:
        root = tmp_path / "x"
        root.mkdir()
        for name in ("a.txt.zst", "b.txt.zst", "c.1.parquet"):
            (root / name).write_bytes(b"")
        refused(
            lambda: text(tmp_path, root),
            "it holds 2 .txt.zst, 1 .parquet",
            "'data.suffixes=[.txt.zst]'",
        )

    def test_a_table_is_a_document_a_row(self, tmp_path: Path) -> None:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        documents = [f"document {number} " + "long " * (number % 300) for number in range(1000)]
        path = tmp_path / "x" / "a.parquet"
        path.parent.mkdir()
        parquet.write_table(
            pyarrow.table({"id": list(range(1000)), "body": documents}), path, row_group_size=170
        )
        (tmp_path / "a.jsonl").write_text(
            "".join(json.dumps({"body": one}) + "\n" for one in documents)
        )
        opened = {"field": "body", "isolate_documents": True, "seq_len": 64}
        table = text(tmp_path, path.parent, suffixes=(".parquet",), **opened)
        lines = text(tmp_path, tmp_path / "a.jsonl", **opened)
        assert len(table) == len(lines)
        for index in (0, 1, 500, len(table) - 1):
            assert table[index].tokens.tolist() == lines[index].tokens.tolist()
            assert table[index].segments.tolist() == lines[index].segments.tolist()  # type: ignore[union-attr]
        assert table.describe(0).startswith("a.parquet rows 0-3 (from")
        refused(lambda: text(tmp_path, path), "has no column 'text' (data.field), but id, body")
        refused(lambda: text(tmp_path, path, field="id"), f"{path} row 0", "int, no string")
        refused(lambda: text(tmp_path, path, field=None), f"{path}: set data.field")
        path.write_bytes(path.read_bytes()[:-9] + b"x" * 9)
        refused(lambda: text(tmp_path, path, field="body"), str(path), "cannot be read")

    @pytest.mark.parametrize("separator", [",", "\t", ";"])
    def test_a_csv_file_is_a_document_a_row(self, tmp_path: Path, separator: str) -> None:
        documents = [f'"{n}", she said;\tand\n' * (n % 5) + f"é {n}" for n in range(100)]
        path, lines = tmp_path / "x" / "a.csv.gz", tmp_path / "a.jsonl"
        path.parent.mkdir()
        with gzip.open(path, "wt", newline="", encoding="utf-8-sig") as file:
            writer = csv.writer(file, delimiter=separator)
            writer.writerows([["id", "text"], *enumerate(documents)])
            file.write("\r\n")
        lines.write_text("".join(json.dumps({"text": one}) + "\n" for one in documents))
        opened = {"isolate_documents": True, "seq_len": 64}
        table = text(tmp_path, path.parent, suffixes=(".csv",), **opened)
        same = text(tmp_path, lines, **opened)
        assert len(table) == len(same) > 50
        for index in range(len(table)):
            assert table[index].tokens.tolist() == same[index].tokens.tolist()
            assert table[index].segments.tolist() == same[index].segments.tolist()  # type: ignore[union-attr]
        assert table.describe(0).startswith("a.csv.gz rows 0-")
        assert len(text(tmp_path, path, field=None, seq_len=64)) > len(table), "plain text"

    def test_what_is_wrong_with_a_csv_file_is_said(self, tmp_path: Path) -> None:
        path = tmp_path / "a.csv"
        for content, *words in (
            (b"id,body\n1,a\n", "has no column 'text' (data.field), but id, body"),
            (b"id,text\n1,a\n2,b,c\n", "row 1: has 3 cells, and the header 2"),
            (b'id,text\n1,"a\n2,b', "row 0: cannot be read", "unexpected end of data"),
            (b"id,text\n1,a\n2,\xff\n", "row 1: cannot be read", "'utf-8' codec"),
        ):
            path.write_bytes(content)
            refused(lambda: text(tmp_path, path), str(path), *words)

    def test_only_ids_that_occur_need_a_row_of_the_table(self, tmp_path: Path) -> None:
        path = tmp_path / "a.txt"
        path.write_text("a" * 64 + "é" + "a" * 100)
        fits = text(tmp_path, path, vocab_size=128, seq_len=16)
        assert fits.vocab_size == 128 and len(fits[0].tokens) == 17
        refused(lambda: fits[4], "has id 195, allowed are 0..127")
        assert text(tmp_path, path, vocab_size=1000).vocab_size == 257, "the tokenizer has no more"


class TestJsonLines:
    @staticmethod
    def lines(path: Path, *values: Any) -> Path:
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(value) + "\n" for value in values))
        return path

    def test_a_document_a_line(self, tmp_path: Path) -> None:
        path = self.lines(
            tmp_path / "a.jsonl", {"text": "hel"}, {"id": 1, "text": "é"}, {"text": ""}
        )
        dataset = text(tmp_path, path, seq_len=7, isolate_documents=True)
        sample = dataset[0]
        assert sample.tokens.tolist() == [*b"hel", 256, *"é".encode(), 256, 256]
        assert sample.segments.tolist() == [0, 0, 0, 0, 1, 1, 1, 2]

    def test_another_field_and_none(self, tmp_path: Path) -> None:
        path = self.lines(tmp_path / "a.jsonl", {"text": "no", "content": "yes!"})
        assert text(tmp_path, path, field="content")[0].tokens.tolist() == [*b"yes!", 256]
        assert text(tmp_path, path, seq_len=2)[0].tokens.tolist() == [*b"no", 256]
        path = self.lines(tmp_path / "a.jsonl", {"text": "x"})
        assert bytes(text(tmp_path, path, field=None)[0].tokens.tolist()) == b'{"tex'

    def test_a_compressed_file_is_known_by_what_is_in_it(self, tmp_path: Path) -> None:
        root = tmp_path / "x"
        root.mkdir()
        (root / "a.jsonl.gz").write_bytes(compressed(".gz", b'{"text": "one"}\n' * 9))
        (root / "b.txt.gz").write_text("not read")
        found = text(tmp_path, root, suffixes=(".jsonl",))
        assert (
            found.describe(0) == "a.jsonl.gz lines 1-2 (from bytes 0 of the first to 1 of the last)"
        )

    def test_the_missing_library_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "zstandard", None)
        path = tmp_path / "a.jsonl.zst"
        path.write_bytes(b"x")
        with pytest.raises(MissingPackage, match="needs the package zstandard"):
            text(tmp_path, path)

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ('{"tex": "a"}', ["has no 'text'", "'tex'", "data.field"]),
            ('{"text": 5}', ["is int, no string"]),
            ('{"text": null}', ["is NoneType, no string"]),
            ('["text"]', ["no JSON object but list"]),
            ('{"text": "a"', ["is not JSON"]),
            ("plain words", ["is not JSON"]),
            ("", ["is empty"]),
            ("[" * 100_000, ["is not JSON"]),
            ('{"text": "\xff\xfe"}', ["is not JSON"]),
        ],
    )
    def test_a_line_without_a_document(self, tmp_path: Path, line: str, words: list[str]) -> None:
        path = self.lines(tmp_path / "a.jsonl", *[{"text": "fine"}] * 2)
        path.write_bytes(path.read_bytes() + line.encode("latin-1") + b'\n{"text": "fine"}\n')
        refused(lambda: text(tmp_path, path), f"{path} line 3", *words)
        assert not list((tmp_path / "cache").iterdir()), "nothing is left of it"

    def test_half_a_character_in_an_escape(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        path.write_text('{"text": "ab\\ud800cd"}\n')
        assert text(tmp_path, path)[0].tokens.tolist() == [*b"ab?cd"]

    def test_describe_gives_file_and_lines(self, tmp_path: Path) -> None:
        root = tmp_path / "x"
        self.lines(root / "a.jsonl", {"text": "abc"}, {"text": "defghij"}, {"text": "k"})
        (root / "b.txt").write_text("lmn")
        dataset = text(tmp_path, root, suffixes=(".jsonl", ".txt"))
        # a b c end | d e f g | h i j end | k end l m
        assert [dataset.describe(index) for index in range(len(dataset))] == [
            "a.jsonl lines 1-2 (from bytes 0 of the first to 1 of the last)",
            "a.jsonl line 2 bytes 0-5",
            "a.jsonl lines 2-3 (from bytes 4 of the first to 1 of the last)",
            "a.jsonl line 3 bytes 0-1, b.txt bytes 0-3",
        ]

    def test_thousands_of_documents_are_found_by_their_table(self, tmp_path: Path) -> None:
        lengths = [number % 5 for number in range(5000)]
        path = self.lines(tmp_path / "a.jsonl", *[{"text": "x" * length} for length in lengths])
        dataset = text(tmp_path, path, seq_len=3, isolate_documents=True)
        owner = np.repeat(np.arange(5000), np.array(lengths) + 1)
        for index in [0, 1, 1023, 1024, 1025, 2048, 3000, len(dataset) - 1]:
            window = owner[index * 3 : index * 3 + 4]
            segments = dataset[index].segments
            assert segments.tolist() == (window - window[0]).tolist()
            lines = (
                f"{window[0] + 1}"
                if window[0] == window[-1]
                else f"{window[0] + 1}-{window[-1] + 1}"
            )
            assert dataset.describe(index).split(" ")[2] == lines
        assert len(bytes(ForkingPickler.dumps(dataset))) < 4000

    def test_a_long_document_is_read_in_pieces_and_stays_one(self, tmp_path: Path) -> None:
        long = "some words\n" * 300_000
        path = self.lines(tmp_path / "a.jsonl", {"text": long}, {"text": "short"})
        dataset = text(tmp_path, path, seq_len=len(long) + 6, isolate_documents=True)
        tokens, segments = dataset[0].tokens, dataset[0].segments
        assert bytes(tokens[: len(long)].tolist()) == long.encode()
        assert segments is not None and int(segments.sum()) == 6

    def test_memory_is_bounded(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        with path.open("w") as out:
            for _ in range(300):
                out.write(json.dumps({"text": "0123456789abcdef" * 16_384}) + "\n")  # 256 KiB each
        tracemalloc.start()
        dataset = text(tmp_path, path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        # One batch of 16 MiB of text, its tokens in two bytes, and their copies on the way.
        assert path.stat().st_size > 75 << 20 and peak < 140 << 20, peak
        assert len(dataset) == (300 * (262_144 + 1) - 1) // 4


def build_and_report(root: str, cache: str, go: Any, report: Any) -> None:
    go.wait()
    dataset = open_text(DataConfig(path=[root], cache=cache, seq_len=4))
    report.put((dataset.fingerprint(), [dataset[i].tokens.tolist() for i in range(len(dataset))]))


class TestCache:
    @staticmethod
    def place(tmp_path: Path) -> Path:
        (found,) = (tmp_path / "cache").iterdir()  # no draft is left beside it
        return found

    def test_is_used_the_second_time(self, tmp_path: Path) -> None:
        root = folder(tmp_path, a="12345")
        text(tmp_path, root)
        before = {path: path.stat().st_ino for path in self.place(tmp_path).iterdir()}
        text(tmp_path, root)
        assert {path: path.stat().st_ino for path in self.place(tmp_path).iterdir()} == before

    def test_processes_that_mend_at_once_agree(self, tmp_path: Path) -> None:
        root = folder(tmp_path, **{f"file{number}": "some text\n" * 40 for number in range(40)})
        text(tmp_path, root)
        (self.place(tmp_path) / "tokens.bin").write_bytes(b"")
        context = multiprocessing.get_context("fork")
        go, report = context.Event(), context.Queue()
        processes = [
            context.Process(
                target=build_and_report, args=(str(root), str(tmp_path / "cache"), go, report)
            )
            for _ in range(3)
        ]
        for process in processes:
            process.start()
        go.set()
        answers = [report.get(timeout=30) for _ in processes]
        for process in processes:
            process.join(timeout=30)
            assert process.exitcode == 0
        assert answers[0] == answers[1] == answers[2]
        self.place(tmp_path)

    def test_the_loser_uses_what_the_winner_made(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        root = folder(tmp_path, a="12345")
        rename = os.rename

        def after_another(draft: Path, target: Path) -> None:
            shutil.copytree(draft, target)  # as one that had no claim, or lost it, would publish
            rename(draft, target)

        monkeypatch.setattr(os, "rename", after_another)
        assert text(tmp_path, root)[0].tokens.tolist() == [*b"12345"]
        self.place(tmp_path)

    @pytest.mark.parametrize("name", ["tokens.bin", "index.json"])
    @pytest.mark.parametrize(
        "damage", ["truncated", "extended", "flipped", "empty", "gone", "other words"]
    )
    def test_damage_is_noticed_and_mended(self, tmp_path: Path, name: str, damage: str) -> None:
        root = folder(tmp_path, a="123456789")
        sound = text(tmp_path, root)
        expected = [sound[index].tokens.tolist() for index in range(2)]
        path = self.place(tmp_path) / name
        contents = path.read_bytes()
        if damage == "gone":
            path.unlink()
        else:
            flipped = contents[:9] + bytes([contents[9] ^ 1]) + contents[10:]
            choices = {
                "truncated": contents[:-2],
                "extended": contents + b"\0\0",
                "flipped": flipped,
                "empty": b"",
                "other words": contents.replace(b"a.py", b"z.py").replace(b"1", b"2"),
            }
            path.write_bytes(choices[damage])
        mended = text(tmp_path, root)
        assert [mended[index].tokens.tolist() for index in range(2)] == expected
        assert mended.fingerprint() == sound.fingerprint()
        assert path.read_bytes() == contents

    def test_a_build_cut_short_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        root = folder(tmp_path, a="12345")
        monkeypatch.setattr(os, "fsync", full)
        refused(lambda: text(tmp_path, root), "data.cache", "No space left")
        assert list((tmp_path / "cache").iterdir()) == []

    def test_a_file_that_grows_meanwhile_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        root = folder(tmp_path, a="12345")

        def grow(draft: Path, **options: Any) -> None:
            os.makedirs(draft)
            (root / "a.py").write_text("123456")

        monkeypatch.setattr(Path, "mkdir", grow)
        refused(lambda: text(tmp_path, root), "a.py", "from 5 to 6 bytes")


class TestFingerprint:
    def test_does_not_depend_on_where_the_files_lie(self, tmp_path: Path) -> None:
        first = text(tmp_path, folder(tmp_path / "x", a="123456"))
        second = text(tmp_path, folder(tmp_path / "y", a="123456"), cache=tmp_path / "other")
        assert first.fingerprint() == second.fingerprint()
        assert len(bytes.fromhex(first.fingerprint())) == 32

    def test_contents_count(self, tmp_path: Path) -> None:
        seen = [text(tmp_path, folder(tmp_path, a="123456")).fingerprint()]
        for contents in ("123457", "12345", "1234567"):  # changed, truncated, extended
            after = text(tmp_path, folder(tmp_path, a=contents))
            assert after[0].tokens.tolist()[:5] == [*contents.encode()][:5]
            seen.append(after.fingerprint())
        for ids in ([*range(13), 99], range(13), range(15), range(14), range(14)):
            seen.append(tokens(raw(tmp_path / "a.bin", ids)).fingerprint())
        assert len({*seen}) == len(seen) - 1
        assert seen[-1] == seen[-2]

    @pytest.mark.parametrize(
        "changes",
        [
            {"seq_len": 5},
            {"vocab_size": 101},
            {"isolate_documents": True, "end_token": 3},
            {"token_dtype": "uint8"},
        ],
    )
    def test_windowing_counts(self, tmp_path: Path, changes: dict[str, Any]) -> None:
        path = raw(tmp_path / "a.bin", range(14))
        assert tokens(path).fingerprint() != tokens(path, **changes).fingerprint()

    @pytest.mark.parametrize("at", [0, 1_999_999])
    def test_large_corpora_are_sampled_with_head_and_tail(self, tmp_path: Path, at: int) -> None:
        path = tmp_path / "large.bin"
        contents = bytearray(2_000_000)
        path.write_bytes(contents)
        before = fingerprint_files([("large", path)], whole_bytes=1000)
        contents[at] = 1
        path.write_bytes(contents)
        assert fingerprint_files([("large", path)], whole_bytes=1000) != before
        path.write_bytes(bytes(2_000_001))
        assert fingerprint_files([("large", path)], whole_bytes=1000) != before

    def test_small_corpora_are_read_in_full(self, tmp_path: Path) -> None:
        path = tmp_path / "small.bin"
        seen = set()
        for at in range(0, 2_000_000, 100_001):
            contents = bytearray(2_000_000)
            contents[at] = 1
            path.write_bytes(contents)
            seen.add(fingerprint_files([("small", path)]))
        assert len(seen) == 20


@pytest.mark.parametrize("total", [0, 1, 63, 64, 640, 641, 10**9])
@pytest.mark.parametrize("whole", [False, True])
def test_spread_covers_or_samples(total: int, whole: bool) -> None:
    if whole and total > 1000:
        return
    found = spread(total, block=10, whole=whole)
    assert all(0 <= start < stop <= total for start, stop in found)
    if total:
        assert found[0][0] == 0
        assert found[-1][1] == total
    if whole or total <= 640:
        assert sum(stop - start for start, stop in found) == total
    else:
        assert len(found) == 64


class TestTokens:
    @pytest.mark.parametrize("dtype", ["u1", "i1", "<u2", ">u2", "<i4", "<i8", "<u8"])
    def test_npy_of_each_type(self, tmp_path: Path, dtype: str) -> None:
        np.save(tmp_path / "a.npy", np.arange(9, dtype=dtype))
        dataset = tokens(tmp_path / "a.npy", token_dtype="auto")
        assert dataset[1].tokens.tolist() == [4, 5, 6, 7, 8]

    def test_several_files_are_one_stream(self, tmp_path: Path) -> None:
        np.save(tmp_path / "b.npy", np.arange(6, 9))
        dataset = tokens(raw(tmp_path / "a.bin", range(6)), tmp_path / "b.npy")
        assert dataset[1].tokens.tolist() == [4, 5, 6, 7, 8]
        assert dataset.describe(0) == "a.bin tokens 0-5"
        assert dataset.describe(1) == "a.bin tokens 4-6, b.npy tokens 0-3"

    def test_a_directory_stands_for_its_files(self, tmp_path: Path) -> None:
        raw(tmp_path / "b.bin", range(6, 9))
        raw(tmp_path / "a.bin", range(6))
        (tmp_path / "README.md").write_text("not tokens")
        assert tokens(tmp_path)[1].tokens.tolist() == [4, 5, 6, 7, 8]

    def test_segments_follow_end_tokens(self, tmp_path: Path) -> None:
        path = raw(tmp_path / "a.bin", [1, 9, 2, 3, 9, 9, 4, 5, 6])
        dataset = tokens(path, end_token=9, isolate_documents=True)
        found = [dataset[index].segments for index in range(2)]
        assert [None if s is None else s.tolist() for s in found] == [
            [0, 0, 1, 1, 1],
            [0, 1, 2, 2, 2],
        ]
        path = raw(tmp_path / "a.bin", [1, 9, 2, 3, 9])
        assert tokens(path, end_token=9)[0].segments is None

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"isolate_documents": True}, ["data.end_token", "a.bin"]),
            ({"end_token": 100}, ["data.end_token=100", "0..99"]),
            ({"token_dtype": "auto"}, ["a.bin", "data.token_dtype"]),
            ({"vocab_size": None}, ["data.vocab_size", "at least 42"]),
            ({"token_dtype": "uint64"}, ["a.bin", "84 bytes", "uint64"]),
        ],
    )
    def test_settings_that_do_not_fit(
        self, tmp_path: Path, changes: dict[str, Any], words: list[str]
    ) -> None:
        path = raw(tmp_path / "a.bin", range(42))
        refused(lambda: tokens(path, **changes), *words)

    @pytest.mark.parametrize("bad", [100, 60_000, -3])
    def test_id_outside_the_vocabulary(self, tmp_path: Path, bad: int) -> None:
        path = tmp_path / "a.npy"
        np.save(path, np.array([*range(70), bad, *range(9)], dtype=np.int32))
        refused(lambda: tokens(path), f"{path}: token 70 has id {bad}", "0..99", "data.vocab_size")

    def test_large_corpora_are_scanned_in_blocks_and_checked_when_read(
        self, tmp_path: Path
    ) -> None:
        ids = np.zeros(5_000_000, dtype="u1")
        ids[66_000] = 200  # between the first and the second block of 65536
        ids.tofile(tmp_path / "a.bin")
        choice: dict[str, Any] = {"token_dtype": "uint8", "scan_all_bytes": 1000, "seq_len": 1000}
        dataset = tokens(tmp_path / "a.bin", **choice)
        assert dataset[64].tokens.max() == 0
        refused(lambda: dataset[66], "a.bin tokens 66000-67001, token 0 of it has id 200")
        ids[-1] = 201
        ids.tofile(tmp_path / "a.bin")
        refused(lambda: tokens(tmp_path / "a.bin", **choice), "token 4999999 has id 201")

    def test_a_file_cut_while_training_is_an_error_with_a_name(self, tmp_path: Path) -> None:
        path = raw(tmp_path / "a.bin", range(14))
        dataset = tokens(path)
        os.truncate(path, 20)
        assert dataset[1].tokens.tolist() == [4, 5, 6, 7, 8]
        refused(lambda: dataset[2], str(path), "tokens 8-13")

    def test_no_file(self, tmp_path: Path) -> None:
        for name in ("gone.bin", "gone.npy", "gone.idx", "gone"):
            refused(lambda name=name: tokens(tmp_path / name), str(tmp_path / name))
        refused(tokens, "data.path=[]")
        refused(lambda: tokens(tmp_path), f"data.path={tmp_path}")

    @pytest.mark.parametrize(
        "array", [np.zeros((3, 3, 3), dtype="u2"), np.zeros(9), np.array(["a"] * 9)]
    )
    def test_npy_that_holds_no_ids(self, tmp_path: Path, array: Any) -> None:
        np.save(tmp_path / "a.npy", array)
        refused(lambda: tokens(tmp_path / "a.npy"), "a.npy", "integers of one dimension")

    @pytest.mark.parametrize("change", [-1, 1])
    def test_npy_of_another_length(self, tmp_path: Path, change: int) -> None:
        path = tmp_path / "a.npy"
        np.save(path, np.arange(9))
        contents = path.read_bytes()
        path.write_bytes(contents[:change] if change < 0 else contents + b"\0")
        refused(lambda: tokens(path), "declares 9 tokens")


class TestMegatron:
    @pytest.mark.parametrize("ending", ["", ".idx", ".bin"])
    def test_every_way_to_name_it(self, tmp_path: Path, ending: str) -> None:
        prefix = write_megatron(tmp_path / "corpus.v2", [range(5), range(5, 9)], [0, 2])
        dataset = tokens(f"{prefix}{ending}", token_dtype="auto")
        assert [dataset[index].tokens.tolist() for index in range(2)] == [
            [0, 1, 2, 3, 4],
            [4, 5, 6, 7, 8],
        ]
        assert dataset.describe(1) == "corpus.v2.bin tokens 4-9"

    @pytest.mark.parametrize("code", [1, 4, 8])
    def test_each_integer_type(self, tmp_path: Path, code: int) -> None:
        prefix = write_megatron(tmp_path / "c", [range(5)], [0, 1], code=code)
        assert tokens(prefix)[0].tokens.tolist() == [0, 1, 2, 3, 4]

    def test_documents_are_its_own(self, tmp_path: Path) -> None:
        # Document 0 is two sequences, document 1 none, document 2 one; 9 is no end token here.
        prefix = write_megatron(tmp_path / "c", [[1, 9], [2], [9, 4]], [0, 2, 2, 3])
        sample = tokens(prefix, isolate_documents=True, end_token=9)[0]
        assert sample.segments.tolist() == [0, 0, 0, 1, 1]
        prefix = write_megatron(tmp_path / "c", [[1, 2], [3]], [0, 1, 2])
        plain = raw(tmp_path / "r.bin", [4, 9, 5, 6])
        refused(lambda: tokens(prefix, plain, isolate_documents=True), "data.end_token", "r.bin")
        sample = tokens(prefix, plain, isolate_documents=True, end_token=9, seq_len=6)[0]
        assert sample.segments.tolist() == [0, 0, 1, 2, 2, 3, 3]

    def test_the_index_counts_in_the_fingerprint(self, tmp_path: Path) -> None:
        first = tokens(write_megatron(tmp_path / "c", [[1, 2], [3, 4, 5]], [0, 2]))
        before = first.fingerprint()
        second = tokens(write_megatron(tmp_path / "c", [[1, 2], [3, 4, 5]], [0, 1, 2]))
        assert second.fingerprint() != before

    @pytest.mark.parametrize("size", [8, 12])
    def test_bin_of_another_length(self, tmp_path: Path, size: int) -> None:
        prefix = write_megatron(tmp_path / "c", [range(5)], [0, 1])
        os.truncate(f"{prefix}.bin", size)
        refused(lambda: tokens(prefix), "c.bin", f"has {size} bytes", "10")

    @pytest.mark.parametrize(
        ("written", "words"),
        [
            ({"pointers": [6]}, ["contiguous"]),
            *(
                ({"code": code}, [f"dtype code {code}", word])
                for code, word in ((6, "float64"), (7, "float32"), (99, "unknown"))
            ),
            *(
                ({"documents": documents}, ["document indices"])
                for documents in ([], [0], [1, 1], [0, 2], [0, -1, 1], [0, 5, 1])
            ),
        ],
    )
    def test_an_index_that_makes_no_sense(
        self, tmp_path: Path, written: dict[str, Any], words: list[str]
    ) -> None:
        prefix = write_megatron(tmp_path / "c", [range(5)], **{"documents": [0, 1]} | written)
        refused(lambda: tokens(prefix), "c.idx", *words)

    @pytest.mark.parametrize(
        ("offset", "field", "word"),
        [
            (0, b"X", "Megatron's"),
            (9, struct.pack("<Q", 2), "version 2"),
            (18, struct.pack("<Q", 2**64 - 1), "truncated"),
            (26, struct.pack("<Q", 2**61), "truncated"),
            (34, struct.pack("<i", -1), "length -1"),
        ],
    )
    def test_hostile_fields(self, tmp_path: Path, offset: int, field: bytes, word: str) -> None:
        prefix = write_megatron(tmp_path / "c", [range(5)], [0, 1])
        index = Path(f"{prefix}.idx")
        contents = index.read_bytes()
        index.write_bytes(contents[:offset] + field + contents[offset + len(field) :])
        refused(lambda: tokens(prefix), str(index), word)

    def test_modes_of_multimodal_corpora_are_allowed(self, tmp_path: Path) -> None:
        prefix = write_megatron(tmp_path / "c", [range(2), range(3)], [0, 2])
        with Path(f"{prefix}.idx").open("ab") as handle:
            handle.write(b"\0\0")
        assert len(tokens(prefix)) == 1


class TestSynthetic:
    @staticmethod
    def language(**changes: int) -> SyntheticLanguage:
        return SyntheticLanguage(
            **{"vocab_size": 64, "samples": 500, "seq_len": 128, "seed": 3} | changes
        )

    def test_samples_are_the_same_every_time_and_everywhere(self) -> None:
        assert self.language()[17].tokens.tolist() == self.language()[17].tokens.tolist()
        assert self.language(samples=900)[17].tokens.tolist() == self.language()[17].tokens.tolist()
        assert self.language()[17].tokens[:8].tolist() == [55, 18, 30, 12, 56, 40, 55, 18]
        dataset = self.language()
        assert len({tuple(dataset[index].tokens.tolist()) for index in range(100)}) == 100
        assert self.language(seed=4)[17].tokens.tolist() != dataset[17].tokens.tolist()
        sample = dataset[499]
        assert (len(dataset), sample.tokens.shape, sample.segments) == (500, (129,), None)
        assert sample.tokens.dtype == np.int64
        assert dataset.describe(17) == "synthetic sample 17"
        with pytest.raises(IndexError):
            dataset[500]

    def test_it_can_be_learnt(self) -> None:
        dataset = self.language()
        counts = np.zeros((64, 64))
        for index in range(500):
            ids = dataset[index].tokens
            np.add.at(counts, (ids[:-1], ids[1:]), 1)
        joint = counts / counts.sum()
        before = joint.sum(axis=1)
        conditional = joint / before[:, None]
        seen = joint > 0
        entropy = -float((joint[seen] * np.log(conditional[seen])).sum())
        unigram = -float((before * np.log(before)).sum())
        assert (counts > 0).sum(axis=1).max() <= 4
        assert 0.8 < entropy < 1.0
        assert unigram > 0.98 * np.log(64)

    def test_fingerprint_names_every_setting(self) -> None:
        found = {
            self.language(**changes).fingerprint()
            for changes in ({}, {"vocab_size": 65}, {"samples": 9}, {"seq_len": 9}, {"seed": 9})
        }
        assert len(found) == 5
        assert self.language().fingerprint() in found


class TestTables:
    """Two-dimensional .npy: rows are the samples."""

    def test_rows_are_samples(self, tmp_path: Path) -> None:
        rows = np.arange(60, dtype=np.uint16).reshape(12, 5)
        np.save(tmp_path / "a.npy", rows[:7])
        np.save(tmp_path / "b.npy", rows[7:].astype(np.int32))
        dataset = tokens(tmp_path / "a.npy", tmp_path / "b.npy", seq_len=4)
        assert len(dataset) == 12
        assert [dataset[i].tokens.tolist() for i in range(12)] == rows.tolist()
        assert dataset.describe(8) == "b.npy row 1"
        with pytest.raises(IndexError):
            dataset[12]
        wider = tokens(tmp_path / "a.npy", seq_len=6)
        assert wider[1].tokens.tolist() == [5, 6, 7, 8, 9, 0, 0]
        assert wider[1].labels.tolist() == [5, 6, 7, 8, 9, -100, -100]
        prints = {each.fingerprint() for each in (dataset, wider, tokens(tmp_path / "b.npy"))}
        assert len(prints) == 3

    def test_what_is_no_table(self, tmp_path: Path) -> None:
        np.save(tmp_path / "a.npy", np.zeros((3, 9), dtype=np.uint16))
        np.save(tmp_path / "b.npy", np.zeros(9, dtype=np.uint16))
        np.save(tmp_path / "c.npy", np.asfortranarray(np.zeros((3, 5), dtype=np.uint16)))
        np.save(tmp_path / "d.npy", np.zeros((0, 5), dtype=np.uint16))
        np.save(tmp_path / "e.npy", np.full((3, 5), 100, dtype=np.uint16))
        refused(lambda: tokens(tmp_path / "a.npy"), "rows have 9 tokens", "data.seq_len=8")
        refused(lambda: tokens(tmp_path / "a.npy", tmp_path / "b.npy"), "must be alike")
        refused(lambda: tokens(tmp_path / "c.npy"), "by columns")
        refused(lambda: tokens(tmp_path / "d.npy"), "no rows")
        refused(lambda: tokens(tmp_path / "e.npy"), "id 100")

    @pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "uint64"])
    def test_raw_files_of_each_type(self, tmp_path: Path, dtype: str) -> None:
        np.arange(41).astype(dtype).tofile(tmp_path / "a.bin")
        dataset = tokens(tmp_path / "a.bin", token_dtype=dtype)
        assert dataset[9].tokens.tolist() == [36, 37, 38, 39, 40]
        np.array([1, 2, 200, 3, 4]).astype(dtype).tofile(tmp_path / "bad.bin")
        refused(lambda: tokens(tmp_path / "bad.bin", token_dtype=dtype), "bad.bin: token 2")
