"""Amounts as a person reads them."""

from __future__ import annotations

import pytest

from runner.system.units import format_bytes


@pytest.mark.parametrize(
    ("amount", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1023.7, "0.9997 KiB"),
        (1536, "1.5 KiB"),
        (3 << 30, "3 GiB"),
        (5 << 40, "5.0 TiB"),
    ],
)
def test_the_unit_suits(amount: float, words: str) -> None:
    assert format_bytes(amount) == words
