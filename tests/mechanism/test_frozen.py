"""Which parameters ``compute.frozen`` leaves alone, and that one rank's engine does."""

from __future__ import annotations

import pytest

from runner.model.blueprint import frozen_names
from runner.system.error import ConfigError

NAMES = ["embedding.weight", "blocks.0.ffn.up.weight", "blocks.1.ffn.up.weight", "norm.weight"]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ([], set()),
        (["embedding"], {"embedding.weight"}),
        ([r"blocks\.0\."], {"blocks.0.ffn.up.weight"}),
        (["^norm", "up"], {"norm.weight", "blocks.0.ffn.up.weight", "blocks.1.ffn.up.weight"}),
    ],
)
def test_a_pattern_names_what_it_is_found_in(patterns: list[str], expected: set[str]) -> None:
    assert frozen_names(NAMES, patterns) == expected


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (["embedding", "head"], "'head' is found in no parameter's name. There are: blocks.0.ffn"),
        (["("], "'(' is no regular expression"),
        (["weight"], "freezes all 4 parameters"),
        (["embedding|norm", "blocks"], "freezes all 4 parameters"),
    ],
)
def test_a_pattern_that_cannot_be_meant_is_refused(patterns: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        frozen_names(NAMES, patterns)
    assert "compute.frozen" in str(error.value) and words in str(error.value)
