"""Recorded curves of other programs and tokenizer files: damaged, only our own errors come out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from runner.command.read import curve_of
from runner.config.schema import DataConfig
from runner.system.parsing import json_text
from runner.tools.backtest.recording import read_columns, read_curve
from runner.tools.reading import read
from runner.tools.reading.curve import FURTHER
from tests.fuzz.mutate import as_json, changed, damaged
from tests.fuzz.test_parsers import often, slowly, try_all, watched
from tests.stored import open_text

__all__ = ["watched"]  # a fixture

ODD = ["", "nan", "inf", "-inf", "1e999", "-1", "9" * 400, "0x10", "1_0", "²", "null", "-", "True",
       '"', "'", ",", "\0", "\r", "1;2", "\t", "=1+1", "1" * 200_000]  # fmt: skip


def sound_csv() -> bytes:
    rows = "".join(f"{step},{3 - step / 100},{1.5}\n" for step in range(40))
    return f"step,loss,grad_norm\n{rows}".encode()


def reads(path: Path) -> Callable[[bytes], None]:
    def work(data: bytes) -> None:
        path.write_bytes(data)
        curve = read_curve(str(path)).curve
        assert len(curve.losses) == len(curve.steps) == len(curve.grad_norms)
        columns = curve_of(read_columns(str(path), dict.fromkeys(FURTHER))[0])
        json_text([finding.to_json(columns) for finding in read(columns)])

    return work


@often
def test_csv(num: int, tmp_path: Path) -> None:
    work = reads(tmp_path / "curve.csv")
    work(sound_csv())
    cells = st.sampled_from(ODD) | st.floats().map(str) | st.text(max_size=5)
    rows = st.lists(st.lists(cells, min_size=1, max_size=4).map(",".join), max_size=6)
    heads = st.sampled_from(
        ["step,loss,grad_norm", "loss", "step;loss", "loss,loss", "", "a\tloss"]
    )
    made = st.builds(lambda h, r: "\n".join([h, *r]).encode(errors="replace"), heads, rows)
    try_all(num, damaged(sound_csv()) | made, work)


@often
def test_jsonl(num: int, tmp_path: Path) -> None:
    work = reads(tmp_path / "curve.jsonl")
    lines = [{"step": step, "loss": 3.0 - step / 100, "grad_norm": 1.0} for step in range(30)]
    sound = b"".join(as_json(line) + b"\n" for line in lines)
    work(sound)
    odd = st.lists(changed(lines[0]).map(as_json), min_size=1, max_size=5).map(b"\n".join)
    deep = st.sampled_from(
        [b"[" * 100_000, b'{"loss":' * 100_000, b'{"loss": 1' + b"0" * 5000 + b"}"]
    )
    try_all(num, damaged(sound) | odd.map(lambda data: sound + data) | odd | deep, work)


@slowly
def test_events(num: int, tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path / "events"))
    for step in range(12):
        writer.add_scalar("train/loss", 3.0 - step / 100, step)
        writer.add_scalar("train/grad_norm", 1.0, step)
    writer.close()
    [path] = (tmp_path / "events").iterdir()
    sound = path.read_bytes()
    work = reads(path)
    work(sound)
    try_all(num, damaged(sound), work)


@pytest.fixture
def words(tmp_path: Path) -> bytes:
    """A small tokenizer's file."""
    vocabulary = {"[UNK]": 0, "a": 1, "b": 2, "ab": 3, "</s>": 4}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made.to_str().encode()


@slowly
def test_tokenizer(num: int, tmp_path: Path, words: bytes) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text("a b ab x " * 40)
    path = tmp_path / "tokenizer.json"
    tries = iter(range(10**9))

    def work(data: bytes) -> None:
        path.write_bytes(data)
        cache = str(tmp_path / f"cache{next(tries)}")
        made = open_text(
            DataConfig(path=[str(corpus)], tokenizer=str(path), cache=cache, seq_len=4)
        )
        top = max(int(made[index].tokens.max()) for index in range(len(made)))
        assert top < made.vocab_size

    work(words)
    tree = json.loads(words)
    try_all(num, damaged(words) | changed(tree).map(as_json), work)
