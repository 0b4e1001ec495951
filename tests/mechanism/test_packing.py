"""Packs are stored only if every length is known: a storage may refuse for a moment, or longer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from runner.data.packing import Packed, prepare_packs
from runner.data.user_dataset import adapt
from runner.system.error import ReadError

LENGTHS = np.random.default_rng(0).integers(10, 30, size=400).tolist()
SEQ_LEN = 99


class Refusing(list[int]):
    """Samples of these lengths; each is refused ``times`` times, at most ``in_all`` of them."""

    vocab_size = 9
    times = in_all = 0
    error: type[Exception] = OSError

    def __getitem__(self, i: int) -> list[int]:  # type: ignore[override]
        if i % 2 and self.asked.setdefault(i, 0) < self.times and self.in_all:
            self.asked[i] += 1
            self.in_all -= self.asked[i] == self.times
            raise self.error(5, f"no answer for {i}")
        return [1] * super().__getitem__(i)

    def fingerprint(self) -> str:
        return "lengths"

    @property
    def asked(self) -> dict[int, int]:
        return self.__dict__.setdefault("asked_", {})


def packed(cache: Path, source: Refusing, retry_seconds: float = 0.0) -> tuple[Packed, str]:
    dataset = adapt(source, vocab_size=None, seq_len=SEQ_LEN, may_draw=False)
    place, notice = prepare_packs(
        dataset, seq_len=SEQ_LEN, cache=cache, progress=lambda *_: None, retry_seconds=retry_seconds
    )  # type: ignore[arg-type]
    return Packed(dataset, place, seq_len=SEQ_LEN), notice  # type: ignore[arg-type]


def test_a_storage_that_refuses_for_a_moment_changes_no_pack(tmp_path: Path) -> None:
    sound, notice = packed(tmp_path / "sound", Refusing(LENGTHS))
    assert notice == ""
    source = Refusing(LENGTHS)
    source.times, source.in_all = 1, 3
    again, notice = packed(tmp_path / "hiccup", source, retry_seconds=5)
    assert source.in_all == 0 and notice == ""
    assert again._starts.tolist() == sound._starts.tolist()
    assert again.fingerprint() == sound.fingerprint()


def test_while_a_storage_refuses_nothing_is_stored(tmp_path: Path) -> None:
    sound, _ = packed(tmp_path / "sound", Refusing(LENGTHS))
    source = Refusing(LENGTHS)
    source.times = source.in_all = 1 << 20
    cache = tmp_path / "cache"
    with pytest.raises(ReadError, match=r"refused 200 of 400 samples .*first dataset sample 1: "):
        packed(cache, source)
    assert not list(cache.rglob("*.npy"))
    later, notice = packed(cache, Refusing(LENGTHS))
    assert len(later) == len(sound) and notice == ""


def test_how_many_cannot_be_read_is_told(tmp_path: Path) -> None:
    source = Refusing(LENGTHS)
    source.times, source.in_all, source.error = 1 << 20, 1 << 20, ValueError
    dataset, notice = packed(tmp_path, source)
    assert "200 of 400 samples cannot be read" in notice and "sample 1: ValueError" in notice
    assert len(dataset) > 200
