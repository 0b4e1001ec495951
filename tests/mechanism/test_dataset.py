"""Corpora: what a sample is, where it comes from, and what each bad file is told."""

from __future__ import annotations

import json
import multiprocessing
import os
import struct
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from runner.data.dataset import Dataset, Sample, adapt, fingerprint_files, spread
from runner.data.megatron import open_megatron
from runner.data.synthetic import SyntheticLanguage
from runner.data.text import open_text
from runner.data.tokens import open_tokens
from runner.error import DataError

SUFFIXES = (".py", ".txt")


def text(tmp_path: Path, *paths: Path, **changes: Any) -> Dataset:
    settings: dict[str, Any] = {
        "paths": [str(path) for path in paths],
        "suffixes": SUFFIXES,
        "tokenizer": None,
        "seq_len": 4,
        "isolate_documents": False,
        "cache": tmp_path / "cache",
    }
    return open_text(**settings | changes)


def tokens(*paths: Path | str, **changes: Any) -> Dataset:
    settings: dict[str, Any] = {
        "paths": [str(path) for path in paths],
        "token_dtype": "uint16",
        "vocab_size": 100,
        "seq_len": 4,
        "end_token": None,
        "isolate_documents": False,
    }
    return open_tokens(**settings | changes)


def folder(tmp_path: Path, **files: str) -> Path:
    """A directory of files; ``a__b`` is the file ``a/b.py``."""
    root = tmp_path / "corpus"
    for name, contents in files.items():
        path = root / (name.replace("__", "/") + ".py")
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

    @pytest.mark.parametrize(("count", "samples"), [(5, 1), (8, 1), (9, 2), (13, 3)])
    def test_number_of_samples(self, tmp_path: Path, count: int, samples: int) -> None:
        assert len(tokens(raw(tmp_path / "a.bin", range(count)))) == samples

    @pytest.mark.parametrize("index", [-1, 3])
    def test_no_such_sample(self, tmp_path: Path, index: int) -> None:
        dataset = tokens(raw(tmp_path / "a.bin", range(14)))
        with pytest.raises(IndexError):
            dataset[index]
        with pytest.raises(IndexError):
            dataset.describe(index)

    @pytest.mark.parametrize("count", [0, 1, 4])
    def test_too_short_for_one_sample(self, tmp_path: Path, count: int) -> None:
        path = raw(tmp_path / "a.bin", range(count))
        refused(lambda: tokens(path), "data.seq_len=4", f"has {count}")

    def test_zero_seq_len(self, tmp_path: Path) -> None:
        refused(lambda: tokens(raw(tmp_path / "a.bin", range(9)), seq_len=0), "data.seq_len=0")

    def test_can_be_sent_to_a_loader_process(self, tmp_path: Path) -> None:
        dataset = tokens(raw(tmp_path / "a.bin", range(99)))
        sent = bytes(ForkingPickler.dumps(dataset))
        assert len(sent) < 2000
        assert ForkingPickler.loads(sent)[2].tokens.tolist() == dataset[2].tokens.tolist()


class TestText:
    def test_bytes_and_an_end_mark_after_each_file(self, tmp_path: Path) -> None:
        dataset = text(tmp_path, folder(tmp_path, b__c="xyz", a="hello"), seq_len=9)
        assert dataset.vocab_size == 257
        assert len(dataset) == 1
        assert dataset[0].tokens.tolist() == [*b"hello", 256, *b"xyz", 256]

    def test_which_files_are_read(self, tmp_path: Path) -> None:
        root = folder(tmp_path, a="aaaa", __pycache____b="bbbb", **{".git__c": "cccc"})
        (root / ".hidden.py").write_text("dddd")
        (root / "e.bin").write_text("eeee")
        assert text(tmp_path, root)[0].tokens.tolist() == [*b"aaaa", 256]

    def test_a_named_file_is_read_whatever_its_ending(self, tmp_path: Path) -> None:
        named = tmp_path / "notes.weird"
        named.write_text("12345")
        dataset = text(tmp_path, named)
        assert dataset[0].tokens.tolist() == [*b"12345"]
        assert dataset.describe(0) == "notes.weird bytes 0-5"

    def test_describe_gives_file_and_exact_bytes(self, tmp_path: Path) -> None:
        root = folder(tmp_path, a="0123456789", b__c="abcdef")
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

    def test_the_standard_library_is_the_default(self, tmp_path: Path) -> None:
        dataset = text(tmp_path, seq_len=256, suffixes=(".nothing",))
        assert len(dataset) > 10_000
        starts = {dataset.describe(index).split(" ")[0] for index in range(0, len(dataset), 50)}
        assert any(name.startswith("asyncio/") for name in starts)
        assert not any("site-packages" in name or name.startswith("test/") for name in starts)

    def test_long_files_are_read_in_pieces(self, tmp_path: Path) -> None:
        contents = "\n".join(f"line {number} é" for number in range(120_000))
        root = folder(tmp_path, a=contents)
        dataset = text(tmp_path, root, seq_len=len(contents.encode()))
        assert bytes(dataset[0].tokens[:-1].tolist()) == contents.encode()

    def test_missing_path(self, tmp_path: Path) -> None:
        refused(lambda: text(tmp_path, tmp_path / "gone"), str(tmp_path / "gone"), "data.path")

    def test_dangling_link(self, tmp_path: Path) -> None:
        root = folder(tmp_path, a="12345")
        (root / "b.py").symlink_to(root / "gone.py")
        refused(lambda: text(tmp_path, root), "b.py", "cannot be read")

    def test_no_matching_file(self, tmp_path: Path) -> None:
        root = folder(tmp_path, a="12345")
        refused(lambda: text(tmp_path, root, suffixes=(".rs",)), str(root), ".rs", "data.suffixes")

    def test_only_empty_files(self, tmp_path: Path) -> None:
        refused(lambda: text(tmp_path, folder(tmp_path, a="", b="")), "2 files are empty")

    def test_cache_that_cannot_be_made(self, tmp_path: Path) -> None:
        blocked = tmp_path / "file"
        blocked.write_text("")
        root = folder(tmp_path, a="12345")
        refused(lambda: text(tmp_path, root, cache=blocked / "cache"), "data.cache")


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
            ({"?": 0, "one": 1, "two": 2}, 4, 3),
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
        assert sample.segments is not None
        assert sample.segments.tolist() == [0, 0, 0, 1, 1, 1, 1]
        assert dataset.describe(0) == "a.py tokens 0-3, b.py tokens 0-4"

    def test_another_tokenizer_is_another_corpus(self, tmp_path: Path) -> None:
        root = folder(tmp_path, a="one two one two")
        first, second = (
            text(tmp_path, root, tokenizer=self.tokenizer(tmp_path, vocab))
            for vocab in ({"?": 0, "one": 1, "two": 2}, {"?": 0, "one": 1, "two": 3})
        )
        assert first[0].tokens.tolist() == [1, 2, 1, 2, 3]
        assert second[0].tokens.tolist() == [1, 3, 1, 3, 4]
        assert first.fingerprint() != second.fingerprint()

    def test_long_files_are_not_cut_inside_a_word(self, tmp_path: Path) -> None:
        root = folder(tmp_path, a="one three\n" * 110_000)  # 1 MiB ends inside "three"
        name = self.tokenizer(tmp_path, {"?": 0, "one": 1, "three": 2})
        found = text(tmp_path, root, tokenizer=name, seq_len=220_000)[0].tokens
        assert np.bincount(found).tolist() == [0, 110_000, 110_000, 1]

    @pytest.mark.parametrize("contents", [None, "", "{}", "[1", '{"model": {}}'])
    def test_no_tokenizer_file(self, tmp_path: Path, contents: str | None) -> None:
        path = tmp_path / "tokenizer.json"
        if contents is not None:
            path.write_text(contents)
        root = folder(tmp_path, a="12345")
        refused(lambda: text(tmp_path, root, tokenizer=str(path)), f"data.tokenizer={path}")


def build_and_report(root: str, cache: str, go: Any, report: Any) -> None:
    go.wait()
    dataset = open_text(
        paths=[root],
        suffixes=SUFFIXES,
        tokenizer=None,
        seq_len=4,
        isolate_documents=False,
        cache=Path(cache),
    )
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

    @pytest.mark.parametrize("damaged", [False, True])
    def test_processes_that_build_at_once_agree(self, tmp_path: Path, damaged: bool) -> None:
        root = folder(tmp_path, **{f"file{number}": "some text\n" * 40 for number in range(40)})
        if damaged:
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

        def after_another(source: Path, target: Path) -> None:
            monkeypatch.setattr(os, "rename", rename)
            text(tmp_path, root)
            rename(source, target)

        monkeypatch.setattr(os, "rename", after_another)
        assert text(tmp_path, root)[0].tokens.tolist() == [*b"12345"]
        self.place(tmp_path)

    @pytest.mark.parametrize("name", ["tokens.bin", "index.json"])
    @pytest.mark.parametrize("damage", ["truncated", "extended", "flipped", "empty", "gone"])
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
            }
            path.write_bytes(choices[damage])
        mended = text(tmp_path, root)
        assert [mended[index].tokens.tolist() for index in range(2)] == expected
        assert mended.fingerprint() == sound.fingerprint()
        assert path.read_bytes() == contents

    def test_an_index_that_still_parses_is_held_against_its_digest(self, tmp_path: Path) -> None:
        root = folder(tmp_path, a="123456789")
        text(tmp_path, root)
        path = self.place(tmp_path) / "index.json"
        path.write_bytes(path.read_bytes().replace(b"a.py", b"z.py"))
        assert text(tmp_path, root).describe(0) == "a.py bytes 0-5"

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

    @pytest.mark.parametrize(
        "contents", ["123457", "12345", "1234567"], ids=["changed", "truncated", "extended"]
    )
    def test_text(self, tmp_path: Path, contents: str) -> None:
        before = text(tmp_path, folder(tmp_path, a="123456")).fingerprint()
        after = text(tmp_path, folder(tmp_path, a=contents))
        assert after.fingerprint() != before
        assert after[0].tokens.tolist()[:5] == [*contents.encode()][:5]

    @pytest.mark.parametrize(
        "ids", [[*range(13), 99], [*range(13)], [*range(15)]], ids=["changed", "cut", "longer"]
    )
    def test_tokens(self, tmp_path: Path, ids: list[int]) -> None:
        path = raw(tmp_path / "a.bin", range(14))
        before = tokens(path).fingerprint()
        assert tokens(path).fingerprint() == before
        assert tokens(raw(path, ids)).fingerprint() != before

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
    @pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
    def test_raw_files_of_each_type(self, tmp_path: Path, dtype: str) -> None:
        path = raw(tmp_path / "a.bin", range(9), np.dtype(dtype).newbyteorder("<").str)
        assert tokens(path, token_dtype=dtype)[1].tokens.tolist() == [4, 5, 6, 7, 8]

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

    def test_segments_are_only_given_when_asked_for(self, tmp_path: Path) -> None:
        path = raw(tmp_path / "a.bin", [1, 9, 2, 3, 9])
        assert tokens(path, end_token=9)[0].segments is None

    def test_segments_need_an_end_token(self, tmp_path: Path) -> None:
        path = raw(tmp_path / "a.bin", range(9))
        refused(lambda: tokens(path, isolate_documents=True), "data.end_token", str(path))

    def test_end_token_outside_the_vocabulary(self, tmp_path: Path) -> None:
        path = raw(tmp_path / "a.bin", range(9))
        refused(lambda: tokens(path, end_token=100), "data.end_token=100", "0..99")

    def test_raw_needs_a_type(self, tmp_path: Path) -> None:
        path = raw(tmp_path / "a.bin", range(9))
        refused(lambda: tokens(path, token_dtype="auto"), str(path), "data.token_dtype")

    def test_vocab_size_is_required_and_suggested(self, tmp_path: Path) -> None:
        path = raw(tmp_path / "a.bin", range(42))
        refused(lambda: tokens(path, vocab_size=None), "data.vocab_size", "at least 42")

    @pytest.mark.parametrize(("dtype", "size"), [("uint16", 19), ("uint32", 18)])
    def test_truncated_raw_file(self, tmp_path: Path, dtype: str, size: int) -> None:
        path = tmp_path / "a.bin"
        path.write_bytes(bytes(size))
        refused(lambda: tokens(path, token_dtype=dtype), str(path), f"{size} bytes", dtype)

    @pytest.mark.parametrize("bad", [100, 60_000])
    def test_id_outside_the_vocabulary(self, tmp_path: Path, bad: int) -> None:
        path = raw(tmp_path / "a.bin", [*range(70), bad, *range(9)])
        refused(lambda: tokens(path), f"{path}: token 70 has id {bad}", "0..99", "data.vocab_size")

    def test_negative_id(self, tmp_path: Path) -> None:
        np.save(tmp_path / "a.npy", np.array([1, 2, -3, 4, 5], dtype=np.int32))
        refused(lambda: tokens(tmp_path / "a.npy"), "token 2 has id -3")

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

    @pytest.mark.parametrize("name", ["gone.bin", "gone.npy", "gone.idx", "gone"])
    def test_missing_file(self, tmp_path: Path, name: str) -> None:
        refused(lambda: tokens(tmp_path / name), str(tmp_path / name))

    def test_no_path_and_empty_directory(self, tmp_path: Path) -> None:
        refused(tokens, "data.path=[]")
        refused(lambda: tokens(tmp_path), f"data.path={tmp_path}")

    @pytest.mark.parametrize(
        "array", [np.zeros((3, 3), dtype="u2"), np.zeros(9), np.array(["a"] * 9)]
    )
    def test_npy_that_holds_no_ids(self, tmp_path: Path, array: Any) -> None:
        np.save(tmp_path / "a.npy", array)
        refused(lambda: tokens(tmp_path / "a.npy"), "a.npy", "one dimension of integers")

    @pytest.mark.parametrize("change", [-1, 1])
    def test_npy_of_another_length(self, tmp_path: Path, change: int) -> None:
        path = tmp_path / "a.npy"
        np.save(path, np.arange(9))
        contents = path.read_bytes()
        path.write_bytes(contents[:change] if change < 0 else contents + b"\0")
        refused(lambda: tokens(path), "declares 9 tokens")

    @example(contents=b"\0\0[", keep=125)  # tokenize.TokenError from inside numpy
    @given(contents=st.binary(max_size=200), keep=st.integers(0, 128))
    @settings(
        max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    def test_hostile_npy(self, tmp_path: Path, contents: bytes, keep: int) -> None:
        path = tmp_path / "a.npy"
        np.save(path, np.arange(9))
        path.write_bytes(path.read_bytes()[:keep] + contents)
        with pytest.raises(DataError):
            tokens(path, vocab_size=None)


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
        assert sample.segments is not None
        assert sample.segments.tolist() == [0, 0, 0, 1, 1]

    def test_documents_beside_a_raw_file(self, tmp_path: Path) -> None:
        prefix = write_megatron(tmp_path / "c", [[1, 2], [3]], [0, 1, 2])
        plain = raw(tmp_path / "r.bin", [4, 9, 5, 6])
        refused(lambda: tokens(prefix, plain, isolate_documents=True), "data.end_token", "r.bin")
        sample = tokens(prefix, plain, isolate_documents=True, end_token=9, seq_len=6)[0]
        assert sample.segments is not None
        assert sample.segments.tolist() == [0, 0, 1, 2, 2, 3, 3]

    def test_the_index_counts_in_the_fingerprint(self, tmp_path: Path) -> None:
        first = tokens(write_megatron(tmp_path / "c", [[1, 2], [3, 4, 5]], [0, 2]))
        before = first.fingerprint()
        second = tokens(write_megatron(tmp_path / "c", [[1, 2], [3, 4, 5]], [0, 1, 2]))
        assert second.fingerprint() != before

    def test_gaps_are_refused(self, tmp_path: Path) -> None:
        prefix = write_megatron(tmp_path / "c", [[1, 2], [3, 4, 5]], [0, 2], pointers=[6, 0])
        refused(lambda: tokens(prefix), "c.idx", "contiguous")

    @pytest.mark.parametrize("size", [8, 12])
    def test_bin_of_another_length(self, tmp_path: Path, size: int) -> None:
        prefix = write_megatron(tmp_path / "c", [range(5)], [0, 1])
        os.truncate(f"{prefix}.bin", size)
        refused(lambda: tokens(prefix), "c.bin", f"has {size} bytes", "10")

    @pytest.mark.parametrize(("code", "word"), [(6, "float64"), (7, "float32"), (99, "unknown")])
    def test_no_integers(self, tmp_path: Path, code: int, word: str) -> None:
        prefix = write_megatron(tmp_path / "c", [range(5)], [0, 1], code=code)
        refused(lambda: tokens(prefix), "c.idx", f"dtype code {code}", word)

    @pytest.mark.parametrize("documents", [[], [0], [1, 1], [0, 2], [0, -1, 1], [0, 5, 1]])
    def test_document_indices_that_make_no_sense(
        self, tmp_path: Path, documents: list[int]
    ) -> None:
        prefix = write_megatron(tmp_path / "c", [range(5)], documents)
        refused(lambda: tokens(prefix), "c.idx", "document indices")

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

    @given(
        start=st.integers(0, 90),
        removed=st.integers(0, 20),
        added=st.binary(max_size=20),
        whole=st.booleans(),
    )
    @settings(
        max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    def test_hostile_index_gives_only_data_errors(
        self, tmp_path: Path, start: int, removed: int, added: bytes, whole: bool
    ) -> None:
        prefix = write_megatron(tmp_path / "c", [range(5), range(4)], [0, 1, 2])
        index = Path(f"{prefix}.idx")
        sound = index.read_bytes()
        index.write_bytes(added if whole else sound[:start] + added + sound[start + removed :])
        try:
            corpus = open_megatron(index)
        except DataError:
            return
        assert corpus.tokens.num_bytes == 18
        assert corpus.document_starts[0] == 0


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

    def test_samples_differ(self) -> None:
        dataset = self.language()
        assert len({tuple(dataset[index].tokens.tolist()) for index in range(100)}) == 100
        assert self.language(seed=4)[17].tokens.tolist() != dataset[17].tokens.tolist()

    def test_shape(self) -> None:
        dataset = self.language()
        sample = dataset[499]
        assert len(dataset) == 500
        assert sample.tokens.shape == (129,)
        assert sample.tokens.dtype == np.int64
        assert sample.segments is None
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

    @pytest.mark.parametrize(
        "changes", [{"vocab_size": 1}, {"samples": 0}, {"seq_len": 0}], ids=lambda c: next(iter(c))
    )
    def test_sizes_that_are_too_small(self, changes: dict[str, int]) -> None:
        ((key, value),) = changes.items()
        refused(lambda: self.language(**changes), f"data.{key}={value}")


class TestAdapt:
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
            {"input_ids": [1, 2, 3]},
            Sample(tokens=np.array([1, 2, 3]), segments=None),
        ],
        ids=["list", "array", "mapping", "sample"],
    )
    def test_items_of_each_kind(self, item: Any) -> None:
        dataset = adapt([item], vocab_size=9, seq_len=2, name="mine")
        assert dataset[0].tokens.tolist() == [1, 2, 3]
        assert dataset[0].tokens.dtype == np.int64
        assert dataset.vocab_size == 9
        assert dataset.describe(0) == "mine sample 0"
        with pytest.raises(IndexError):
            dataset[1]

    def test_its_own_words_are_used(self) -> None:
        dataset = adapt(self.Described([[1, 2, 3]]), vocab_size=9, seq_len=2)
        assert dataset.describe(0) == "row 0 of the table"
        same = adapt(self.Described([[4, 5, 6]]), vocab_size=9, seq_len=2)
        assert dataset.fingerprint() == same.fingerprint()

    def test_default_fingerprint_sees_contents_and_length(self) -> None:
        rows = [[[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 7]], [[1, 2, 3]], [[0, 2, 3], [4, 5, 6]]]
        found = {adapt(each, vocab_size=9, seq_len=2).fingerprint() for each in rows}
        assert len(found) == 4

    def test_bad_items(self) -> None:
        refused(lambda: adapt([], vocab_size=9, seq_len=2), "0 samples")
        refused(lambda: adapt([[1, 2]], vocab_size=9, seq_len=2)[0], "sample 0", "data.seq_len=2")
        refused(lambda: adapt([[1, 9, 3]], vocab_size=9, seq_len=2)[0], "sample 0", "id 9")
