"""The faults put into the code on purpose (tests/mutants.py) can still be put in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import mutants

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_the_code_has_what_each_fault_replaces(mutant: mutants.Mutant) -> None:
    text = (ROOT / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    assert mutant.old != mutant.new


def test_each_names_tests_that_are_there() -> None:
    paths = {path for mutant in mutants.MUTANTS for path in mutant.tests.split()}
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_each_has_a_name_of_its_own() -> None:
    assert len(set(mutants.NAMES)) == len(mutants.NAMES)
