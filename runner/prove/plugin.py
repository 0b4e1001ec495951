"""A fixture for the tests of other projects; pytest finds it by its entry point.

def test_it_resumes(prove_resume):
    prove_resume("python train.py --out runs/a", out_arg="out", steps=40)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from runner.prove.verdict import Verdict


@pytest.fixture
def prove_resume() -> Callable[..., Verdict]:
    """:func:`runner.prove_resume`, which fails the test with the verdict unless it is equal."""
    from runner.prove.drive import prove_resume as prove  # not in every session of pytest's

    def proved(command: str | Sequence[str], **settings: Any) -> Verdict:
        verdict = prove(command, **settings)
        if not verdict.is_equal:
            pytest.fail(verdict.text(), pytrace=False)
        return verdict

    return proved
